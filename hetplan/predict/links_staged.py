"""What does a collective over a host-staged link cost, by samples of some group sizes?

gloo's rings are as simple as their formula, so other group sizes follow from the steps alone: a
ring of n ranks takes steps(n) steps that each carry 1 / n of the message, so the time of a step of
x bytes, read off a table measured at n0 ranks, gives

    T(n, S) = steps(n) / steps(n0) * T(n0, S * n0 / n)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetplan.predict.laws import SizeTable
from hetplan.predict.link_shapes import RELATIVES, ring_shape
from hetplan.predict.link_tables import outside_sizes, table_seconds
from hetplan.predict.links_prior import OTHERS_LOG_HALFWIDTH
from hetplan.predict.predictor import MEASURED, Prediction
from hetplan.profiling.samples import LinkOperation

STAGED_LOG_PER_DOUBLING = 0.6
"""Growth of the half-width per doubling between the group size asked and the one measured: 90 %
of |log(measured / predicted)| of an A100 node's all_reduce among 2, 4 and 8, carried like this."""


def staged_collective(
    tables: Sequence[SizeTable], operation: str, group_size: int, message_bytes: float
) -> Prediction | None:
    """Time of a collective by a link's tables; None where none of them says anything about it."""
    own = [table for table in tables if table.operation == operation]
    if own:
        return _carried(_nearest(own, group_size), operation, group_size, message_bytes, 1.0, ())
    for relative in RELATIVES.get(operation, ()):
        kin = [table for table in tables if table.operation == relative]
        if kin:
            twice = 2.0 if operation == LinkOperation.ALL_REDUCE else 1.0
            half = 0.5 if relative == LinkOperation.ALL_REDUCE else 1.0
            note = (f"{operation} not measured: from {relative}",)
            table = _nearest(kin, group_size)
            return _carried(table, relative, group_size, message_bytes, twice * half, note)
    sends = [table for table in tables if table.operation == LinkOperation.SEND_RECV]
    if sends:
        return from_sends(sends[0], operation, group_size, message_bytes)
    return None


def _nearest(tables: Sequence[SizeTable], group_size: int) -> SizeTable:
    """The table whose group size is nearest by ratio; of two, the larger."""
    return min(
        tables,
        key=lambda table: (abs(math.log(table.group_size / group_size)), -table.group_size),
    )


def _carried(
    table: SizeTable,
    operation: str,
    group_size: int,
    message_bytes: float,
    factor: float,
    notes: tuple[str, ...],
) -> Prediction:
    """The table's time at another group size, by the algorithm's steps; exact at its own."""
    extra = OTHERS_LOG_HALFWIDTH if notes else 0.0
    equivalent = message_bytes
    if table.group_size != group_size:
        steps, share = ring_shape(operation, group_size)
        steps_measured, share_measured = ring_shape(operation, table.group_size)
        factor *= steps / steps_measured
        # The message that has, among the ranks measured, steps of as many bytes.
        equivalent = message_bytes * share / share_measured
        doublings = abs(math.log2(group_size / table.group_size))
        extra += STAGED_LOG_PER_DOUBLING * doublings
        notes = (*notes, f"{operation} group {group_size}, {table.group_size} measured")
    halfwidth, warnings = outside_sizes(table, operation, equivalent)
    return Prediction(
        seconds=factor * table_seconds(table, equivalent),
        log_halfwidth=halfwidth + extra,
        source=MEASURED,
        extrapolating=(*notes, *warnings),
    )


def from_sends(
    table: SizeTable, operation: str, group_size: int, message_bytes: float
) -> Prediction:
    """A collective as so many sends in a row."""
    steps, share = ring_shape(operation, group_size)
    halfwidth, warnings = outside_sizes(table, LinkOperation.SEND_RECV, share * message_bytes)
    return Prediction(
        seconds=steps * table_seconds(table, share * message_bytes),
        log_halfwidth=halfwidth + OTHERS_LOG_HALFWIDTH,
        source=MEASURED,
        extrapolating=(f"{operation} not measured: {steps} sends", *warnings),
    )
