"""Link samples to laws: what a message of any size costs, between measured sizes and beyond.

Between two measured sizes time is linear in bytes; measured sizes are met exactly (where times do
not rise with size they are first made to, which averages neighbours). Beyond the largest size the
last segment goes on: alpha + bytes * beta of the largest messages. Other group sizes follow from
the algorithm: a ring of n ranks takes steps(n) steps that each carry 1 / n of the message, so the
time of a step of x bytes, read off a table measured at n0 ranks, gives

    T(n, S) = steps(n) / steps(n0) * T(n0, S * n0 / n)

Everything that was not measured as asked says so.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence

from hetplan.errors import Fault, InputError
from hetplan.predict.datasheet import LINK_LOG_HALFWIDTH, ring_shape
from hetplan.predict.laws import OWN_ROWS, LinkLaw, MeasuredRange, SizeTable, outside, validation_of
from hetplan.predict.predictor import Prediction, SendLaw
from hetplan.predict.regression import (
    MIN_CALIBRATION_ROWS,
    conformal_halfwidth,
    log_ratio,
)
from hetplan.profiling.samples import LinkOperation, LinkSample

SOURCE = "measured"

# all_reduce among 2, 4 and 8 devices, each carried to the other two, 1 MiB to 1 GiB: 90 % of
# |log(measured / predicted)| per doubling are below 0.6 on A100 with an NVLink switch. Without a
# switch the number of links itself changes with the group (V100 hybrid mesh: 1.3): there the
# group sizes that plans use must be measured.
CARRY_LOG_PER_DOUBLING = 0.6
"""Growth of the half-width per doubling between the group size asked and the one measured."""

# Other operations from which one can be derived when it was not measured, best first: an
# all_reduce is a reduce_scatter and an all_gather of the same message, which mirror each other.
_RELATIVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (LinkOperation.ALL_REDUCE, (LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_GATHER)),
    (LinkOperation.REDUCE_SCATTER, (LinkOperation.ALL_GATHER, LinkOperation.ALL_REDUCE)),
    (LinkOperation.ALL_GATHER, (LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_REDUCE)),
    (LinkOperation.ALL_TO_ALL, ()),
    (LinkOperation.BROADCAST, ()),
)


def fit_link_laws(samples: Sequence[LinkSample]) -> tuple[LinkLaw, ...]:
    """One law per link name; an InputError names every sample that cannot be used."""
    _check(samples)
    by_link: dict[str, dict[tuple[str, str, int], list[LinkSample]]] = {}
    for sample in samples:
        # A message between two does not depend on a group: all point-to-point rows go together.
        point = sample.operation in (LinkOperation.SEND_RECV, LinkOperation.SEND_RECV_LATE)
        key = (sample.operation, sample.backend, 2 if point else sample.group_size)
        by_link.setdefault(sample.link, {}).setdefault(key, []).append(sample)
    laws = []
    for link in sorted(by_link):
        groups = by_link[link]
        points = {key: _points(groups[key]) for key in sorted(groups)}
        errors = {key: _left_out_errors(*points[key]) for key in points}
        tables = tuple(_table(key, len(groups[key]), points[key], errors) for key in points)
        laws.append(LinkLaw(link=link, tables=tables))
    return tuple(laws)


def _check(samples: Sequence[LinkSample]) -> None:
    faults = []
    for number, sample in enumerate(samples, start=1):
        if sample.operation not in tuple(LinkOperation):
            problem = f"operation is {sample.operation!r}; it is one of {', '.join(LinkOperation)}"
        elif not (math.isfinite(sample.median_seconds) and sample.median_seconds > 0):
            problem = f"median_seconds is {sample.median_seconds}; a time is more than 0"
        elif sample.message_bytes < 1:
            problem = f"message_bytes is {sample.message_bytes}; a message has at least 1 byte"
        elif sample.group_size < 2:
            problem = f"group_size is {sample.group_size}; at least 2 ranks communicate"
        else:
            continue
        faults.append(
            Fault(
                message=f"{problem}; measure it again or remove the row",
                field=f"link sample {number} of {sample.link}",
            )
        )
    if faults:
        raise InputError(*faults)


def _points(samples: Sequence[LinkSample]) -> tuple[list[float], list[float]]:
    """Rising sizes and non-decreasing times: the least-squares isotonic fit of log time.

    Pool adjacent violators (Barlow et al., Statistical Inference under Order Restrictions, 1972).
    """
    by_size: dict[int, list[float]] = {}
    for sample in samples:
        by_size.setdefault(sample.message_bytes, []).append(sample.median_seconds)
    pools: list[tuple[float, list[int]]] = []
    for size in sorted(by_size):
        seconds, sizes = _geometric_mean(by_size[size]), [size]
        while pools and pools[-1][0] > seconds:
            other, others = pools.pop()
            weights = (len(others), len(sizes))
            seconds = math.exp(
                (math.log(other) * weights[0] + math.log(seconds) * weights[1]) / sum(weights)
            )
            sizes = others + sizes
        pools.append((seconds, sizes))
    return (
        [float(size) for _, sizes in pools for size in sizes],
        [seconds for seconds, sizes in pools for _ in sizes],
    )


def _geometric_mean(values: Sequence[float]) -> float:
    """A single value as it is, without the rounding of exp and log."""
    if len(values) == 1:
        return values[0]
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _left_out_errors(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, ...]:
    """log(measured / predicted) of every inner size by the table without it."""
    errors = []
    for index in range(1, len(sizes) - 1):
        rest = (*sizes[:index], *sizes[index + 1 :])
        times = (*seconds[:index], *seconds[index + 1 :])
        errors.append(log_ratio(seconds[index], _interpolate(rest, times, sizes[index])))
    return tuple(errors)


def _table(
    key: tuple[str, str, int],
    rows: int,
    points: tuple[list[float], list[float]],
    errors: dict[tuple[str, str, int], tuple[float, ...]],
) -> SizeTable:
    operation, backend, group_size = key
    own = errors[key]
    halfwidth = conformal_halfwidth(own)
    calibration = OWN_ROWS
    if halfwidth is None:
        pooled = [error for each in errors.values() for error in each]
        largest = max((abs(error) for error in own), default=0.0)
        together = conformal_halfwidth(pooled)
        if together is not None:
            halfwidth = max(together, largest)
            calibration = f"{len(pooled)} left-out sizes of all operations of the link"
        else:
            halfwidth = max(largest, LINK_LOG_HALFWIDTH)
            calibration = (
                f"{len(pooled)} left-out sizes are too few ({MIN_CALIBRATION_ROWS} needed); "
                f"at least the datasheet's {LINK_LOG_HALFWIDTH:g}"
            )
    return SizeTable(
        operation=operation,
        backend=backend,
        group_size=group_size,
        message_bytes=tuple(points[0]),
        seconds=tuple(points[1]),
        log_halfwidth=halfwidth,
        calibration=calibration,
        rows=rows,
        validation=validation_of("message" if own else "", len(own), own),
    )


def _segment(sizes: Sequence[float], seconds: Sequence[float], size: float) -> int:
    """Index of the right end of the segment that holds the size, or of the nearest one."""
    return min(max(bisect_left(sizes, size), 1), len(sizes) - 1)


def _slope(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Seconds per further byte at this size."""
    if len(sizes) == 1:
        # Latency and bandwidth cannot be told apart: all of it is taken to grow with size.
        return seconds[0] / sizes[0]
    right = _segment(sizes, seconds, size)
    slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
    if size > sizes[-1] and slope == 0.0:
        # A flat end is noise: bytes cost what they cost over the whole table.
        slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]) or seconds[-1] / sizes[-1]
    return slope


def _interpolate(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Time of a message, linear in bytes between sizes; non-decreasing and never negative."""
    if size > sizes[-1]:
        return seconds[-1] + (size - sizes[-1]) * _slope(sizes, seconds, size)
    if size <= sizes[0]:
        if len(sizes) == 1:
            # Down from the only size nothing is known about the bytes' part: an upper bound.
            return seconds[0]
        # The first segment's line, unless that would make an empty message take less than nothing.
        slope = min(_slope(sizes, seconds, size), seconds[0] / sizes[0])
        return seconds[0] - (sizes[0] - size) * slope
    right = bisect_left(sizes, size)
    if sizes[right] == size:
        return seconds[right]
    part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return seconds[right - 1] + part * (seconds[right] - seconds[right - 1])


def table_seconds(table: SizeTable, message_bytes: float) -> float:
    """Time of a message of this size by the table."""
    return _interpolate(table.message_bytes, table.seconds, message_bytes)


def _outside(
    table: SizeTable, operation: str, message_bytes: float
) -> tuple[float, tuple[str, ...]]:
    """Half-width at this size, and a warning where it was not measured."""
    measured = MeasuredRange(
        quantity=f"{operation} message", least=table.message_bytes[0], most=table.message_bytes[-1]
    )
    return outside((measured,), (max(message_bytes, 1.0),), table.log_halfwidth)


def collective_law(
    tables: Sequence[SizeTable], operation: str, group_size: int, message_bytes: float
) -> Prediction | None:
    """Time of a collective by a link's tables; None where none of them says anything about it."""
    own = [table for table in tables if table.operation == operation]
    if own:
        return _carried(_nearest(own, group_size), operation, group_size, message_bytes, 1.0, ())
    for relative in dict(_RELATIVES).get(operation, ()):
        kin = [table for table in tables if table.operation == relative]
        if kin:
            twice = 2.0 if operation == LinkOperation.ALL_REDUCE else 1.0
            half = 0.5 if relative == LinkOperation.ALL_REDUCE else 1.0
            note = (f"{operation} not measured: from {relative}",)
            table = _nearest(kin, group_size)
            return _carried(table, relative, group_size, message_bytes, twice * half, note)
    sends = [table for table in tables if table.operation == LinkOperation.SEND_RECV]
    if sends:
        return _from_sends(sends[0], operation, group_size, message_bytes)
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
    """The table's time at another group size, by the algorithm's shape; exact at its own."""
    extra = LINK_LOG_HALFWIDTH if notes else 0.0
    equivalent = message_bytes
    if table.group_size != group_size:
        steps, share = ring_shape(operation, group_size)
        steps_measured, share_measured = ring_shape(operation, table.group_size)
        factor *= steps / steps_measured
        # The message that has, among the ranks measured, steps of as many bytes.
        equivalent = message_bytes * share / share_measured
        doublings = abs(math.log2(group_size / table.group_size))
        extra += CARRY_LOG_PER_DOUBLING * doublings
        notes = (*notes, f"{operation} group {group_size}, {table.group_size} measured")
    halfwidth, warnings = _outside(table, operation, equivalent)
    return Prediction(
        seconds=factor * table_seconds(table, equivalent),
        log_halfwidth=halfwidth + extra,
        source=SOURCE,
        extrapolating=(*notes, *warnings),
    )


def _from_sends(
    table: SizeTable, operation: str, group_size: int, message_bytes: float
) -> Prediction:
    """A collective as so many sends in a row."""
    steps, share = ring_shape(operation, group_size)
    halfwidth, warnings = _outside(table, LinkOperation.SEND_RECV, share * message_bytes)
    return Prediction(
        seconds=steps * table_seconds(table, share * message_bytes),
        log_halfwidth=halfwidth + LINK_LOG_HALFWIDTH,
        source=SOURCE,
        extrapolating=(f"{operation} not measured: {steps} sends", *warnings),
    )


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
    rate = _slope(table.message_bytes, table.seconds, message_bytes)
    if message_bytes > 0:
        # Superlinear tables have steep segments; no part of the law may become negative.
        rate = min(rate, total / message_bytes)
    latency = total - rate * message_bytes
    halfwidth, warnings = _outside(table, table.operation, message_bytes)
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
        source=SOURCE,
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
