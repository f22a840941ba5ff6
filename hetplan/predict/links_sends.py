"""What does a message from one device to another cost, by a link's samples?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hetplan.predict.laws import SizeTable
from hetplan.predict.link_tables import outside_sizes, slope, table_seconds
from hetplan.predict.predictor import MEASURED, SendLaw
from hetplan.profiling.samples import LinkOperation


def send_law(tables: Sequence[SizeTable], message_bytes: float) -> SendLaw | None:
    """Point-to-point law of a link's tables, right for messages about this large.

    The rate is that of the segment that holds the size, and `rendezvous + bytes / rate` meets the
    time measured with both sides posting together. `wire` is smaller by what the receiver's notice
    takes to cross, which does not grow with the message: the difference to the time measured with
    the receiver early, at sizes where it is not lost in the noise of a long transfer. Where only
    one of the two was measured the notice is taken to cost as much as the data's latency. None
    where no send was measured.
    """
    together = _first(tables, LinkOperation.SEND_RECV)
    late = _first(tables, LinkOperation.SEND_RECV_LATE)
    table = together or late
    if table is None:
        return None
    total = table_seconds(table, message_bytes)
    rate = slope(table.message_bytes, table.seconds, message_bytes)
    if message_bytes > 0:
        # Superlinear tables have steep segments; no part of the law may become negative.
        rate = min(rate, total / message_bytes)
    latency = max(0.0, total - rate * message_bytes)
    halfwidth, warnings = outside_sizes(table, table.operation, message_bytes)
    if together is None:
        rendezvous, wire = 2.0 * latency, latency
        warnings = (f"{LinkOperation.SEND_RECV.value} not measured: 2 latencies", *warnings)
    elif late is None:
        rendezvous, wire = latency, 0.5 * latency
        warnings = (f"{LinkOperation.SEND_RECV_LATE.value} not measured: half", *warnings)
    else:
        rendezvous, wire = latency, max(0.0, latency - _notice_seconds(together, late))
    return SendLaw(
        rendezvous_latency_seconds=rendezvous,
        wire_latency_seconds=wire,
        seconds_per_byte=rate,
        log_halfwidth=halfwidth,
        source=MEASURED,
        extrapolating=warnings,
    )


def _notice_seconds(together: SizeTable, late: SizeTable) -> float:
    """How much longer a send takes when the receiver posts at the same moment, not before.

    Median over the sizes whose time is at most twice the shortest, where latency rules.
    """
    short = 2.0 * together.seconds[0]
    differences = [
        seconds - table_seconds(late, size)
        for size, seconds in zip(together.message_bytes, together.seconds, strict=True)
        if seconds <= short
    ]
    return max(0.0, statistics.median(differences))


def _first(tables: Sequence[SizeTable], operation: str) -> SizeTable | None:
    return next((table for table in tables if table.operation == operation), None)
