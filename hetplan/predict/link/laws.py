"""Link samples to laws: tables by message size, their shape over group sizes, and sends.

A table holds the measured times of one operation among so many ranks in so many nodes. Where times
do not rise with size they are first made to: collectives by the isotonic fit of log time, which
averages neighbours; device-direct sends by what a larger message took, because one cannot take
longer with less to carry (first messages of a benchmark pay for its warm-up). Operations that
were measured among several group sizes get a law in the form of their algorithm (`link.shapes`),
by which `link.carried` goes on to others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from hetplan.predict.law_parts import OWN_ROWS, refuse, validation_of
from hetplan.predict.link.carried import carried, direct_collective, staged_collective
from hetplan.predict.link.prior import LINK_LOG_HALFWIDTH
from hetplan.predict.link.shapes import (
    LinkLaw,
    LinkShape,
    ShapeLaw,
    SizeTable,
    lane_bytes,
    outside_sizes,
    shape_columns,
    table_seconds,
)
from hetplan.predict.predictor import MEASURED, Prediction, SendLaw
from hetplan.predict.regression import (
    MIN_CALIBRATION_ROWS,
    conformal_halfwidth,
    fit_nonnegative,
    interpolate,
    log_ratio,
    slope,
)
from hetplan.profiling.samples import SENDS, LinkOperation, LinkSample


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


HOST_BACKEND = "gloo"
"""Backend of host-staged transfers; every other one moves device memory."""

_ROWS_PER_DOUBLING = 2
"""Sizes of a table that count in the fit of a shape: long tables must not outweigh short ones."""


@dataclass(frozen=True, slots=True, order=True)
class _Key:
    """What one table is of."""

    operation: str
    backend: str
    group_size: int
    nodes: int
    groups: int


def fit_link_laws(samples: Sequence[LinkSample]) -> tuple[LinkLaw, ...]:
    """One law per link name; an InputError names every sample that cannot be used."""
    refuse("link", samples, "link", _problem)
    by_link: dict[str, dict[_Key, list[LinkSample]]] = {}
    for sample in samples:
        by_link.setdefault(sample.link, {}).setdefault(_key(sample), []).append(sample)
    return tuple(_link_law(link, by_link[link]) for link in sorted(by_link))


def of_transport(law: LinkLaw, *, staged: bool) -> LinkLaw | None:
    """The part of a link's law that is of this transport; None where nothing is."""
    tables = tuple(each for each in law.tables if (each.backend == HOST_BACKEND) == staged)
    shapes = tuple(each for each in law.shapes if (each.backend == HOST_BACKEND) == staged)
    return LinkLaw(link=law.link, tables=tables, shapes=shapes) if tables else None


def collective_law(
    law: LinkLaw,
    operation: str,
    group_size: int,
    message_bytes: float,
    *,
    nodes: int = 1,
    groups: int = 1,
    fabric_bytes_per_second: float = 0.0,
) -> Prediction | None:
    """Time of a collective by a law of one transport; None where it says nothing about it.

    `fabric_bytes_per_second`: the figure of one device's links; 0: unknown.
    """
    if law.tables[0].backend == HOST_BACKEND:
        lane = lane_bytes(operation, group_size, nodes, message_bytes)
        return staged_collective(law.tables, operation, group_size, lane)
    return direct_collective(
        law,
        operation,
        group_size,
        message_bytes,
        nodes=nodes,
        groups=groups,
        fabric_bytes_per_second=fabric_bytes_per_second,
    )


def _key(sample: LinkSample) -> _Key:
    # A message between two does not depend on a group: all point-to-point rows go together.
    if sample.operation in SENDS:
        return _Key(sample.operation, sample.backend, 2, 1, 1)
    return _Key(sample.operation, sample.backend, sample.group_size, sample.nodes, sample.groups)


def _link_law(link: str, groups: dict[_Key, list[LinkSample]]) -> LinkLaw:
    points = {key: _points(key, groups[key]) for key in sorted(groups)}
    errors = {key: _left_out_errors(key, groups[key]) for key in points}
    tables = tuple(_table(key, len(groups[key]), points[key], errors) for key in points)
    kinds = dict.fromkeys((each.operation, each.backend) for each in tables)
    shapes = []
    for operation, backend in kinds:
        if backend == HOST_BACKEND or operation in SENDS:
            continue
        own = [t for t in tables if (t.operation, t.backend) == (operation, backend)]
        shape = _shape(own)
        if shape is not None:
            shapes.append(shape)
    return LinkLaw(link=link, tables=tables, shapes=tuple(shapes))


def _shape(tables: Sequence[SizeTable]) -> LinkShape | None:
    """The law over group sizes of one operation; None where only one was measured."""
    law = _shape_law(tables)
    if law is None:
        return None
    errors = [error for table in tables for error in _without(tables, table)]
    return _shape_of(tables, law, errors)


def _without(tables: Sequence[SizeTable], out: SizeTable) -> list[float]:
    """log(measured / predicted) of one table's rows by those of other group sizes."""
    rest = [table for table in tables if table.group_size != out.group_size]
    law = _shape_law(rest)
    shape = None if law is None else _shape_of(rest, law, ())
    return [
        log_ratio(
            seconds, carried(rest, shape, out.operation, out.group_size, size, out.nodes).seconds
        )
        for size, seconds in _rows(out)
    ]


def _shape_of(tables: Sequence[SizeTable], law: ShapeLaw, errors: Sequence[float]) -> LinkShape:
    """The shape with its errors on tables left out."""
    sizes = [table.group_size for table in tables]
    return LinkShape(
        operation=tables[0].operation,
        backend=tables[0].backend,
        law=law,
        least_group=min(sizes),
        most_group=max(sizes),
        log_halfwidth=conformal_halfwidth(errors),
        rows=sum(len(_rows(table)) for table in tables),
        validation=validation_of("group size", len(set(sizes)), errors),
    )


def _shape_law(tables: Sequence[SizeTable]) -> ShapeLaw | None:
    """Coefficients by the tables of at least two group sizes."""
    if len({table.group_size for table in tables}) < 2:
        return None
    rows, seconds = [], []
    for table in tables:
        for size, time in _rows(table):
            rows.append(shape_columns(table.operation, table.group_size, size, table.nodes))
            seconds.append(time)
    if all(table.nodes == table.group_size for table in tables):
        # Every step crosses: one column says it all, and steps inside nodes were not seen.
        rows = [(base, 0.0, crossings, *rest) for base, _, crossings, *rest in rows]
    names = [field.name for field in fields(ShapeLaw)]
    return ShapeLaw(**dict(zip(names, fit_nonnegative(rows, seconds), strict=True)))


def _rows(table: SizeTable) -> list[tuple[float, float]]:
    """Sizes and times of a table, so many per doubling."""
    rows: dict[int, tuple[float, float]] = {}
    for size, seconds in zip(table.message_bytes, table.seconds, strict=True):
        rows.setdefault(round(_ROWS_PER_DOUBLING * math.log2(size)), (size, seconds))
    return list(rows.values())


def _problem(sample: LinkSample) -> str:
    """What is wrong with a sample; empty: nothing."""
    if sample.operation not in tuple(LinkOperation):
        return f"operation is {sample.operation!r}; it is one of {', '.join(LinkOperation)}"
    if not (math.isfinite(sample.median_seconds) and sample.median_seconds > 0):
        return f"median_seconds is {sample.median_seconds}; a time is more than 0"
    if sample.message_bytes < 1:
        return f"message_bytes is {sample.message_bytes}; a message has at least 1 byte"
    if sample.group_size < 2:
        return f"group_size is {sample.group_size}; at least 2 ranks communicate"
    if sample.nodes < 1 or sample.group_size % sample.nodes:
        return f"nodes is {sample.nodes}; equal parts of {sample.group_size} ranks stand in each"
    if sample.groups < 1:
        return f"groups is {sample.groups}; at least the one that was measured"
    return ""


def _points(key: _Key, samples: Sequence[LinkSample]) -> tuple[list[float], list[float]]:
    """Rising sizes and non-decreasing times: the least-squares isotonic fit of log time.

    (Barlow et al., Statistical Inference under Order Restrictions, 1972.)
    """
    by_size: dict[int, list[float]] = {}
    for sample in samples:
        by_size.setdefault(sample.message_bytes, []).append(sample.median_seconds)
    sizes = [float(size) for size in sorted(by_size)]
    means = [_geometric_mean(by_size[size]) for size in sorted(by_size)]
    if key.operation in SENDS and key.backend != HOST_BACKEND:
        return sizes, list(accumulate(reversed(means), min))[::-1]
    from scipy.optimize import isotonic_regression

    blocks = isotonic_regression([math.log(seconds) for seconds in means]).blocks
    return sizes, [
        pooled
        for start, stop in pairwise(blocks)
        for pooled in [_geometric_mean(means[start:stop])] * (stop - start)
    ]


def _geometric_mean(values: Sequence[float]) -> float:
    """A single value as it is, without the rounding of exp and log."""
    if len(values) == 1:
        return values[0]
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _left_out_errors(key: _Key, samples: Sequence[LinkSample]) -> tuple[float, ...]:
    """log(measured / predicted) of every octave of sizes, each by a table without it.

    Measured as it stands, noise and all. The first and the last octave are beyond the rest: they
    count where they hold several sizes, so that a table's noise is not only that of its middle.
    """
    sizes: dict[int, set[int]] = {}
    for sample in samples:
        sizes.setdefault(_octave(sample), set()).add(sample.message_bytes)
    octaves = sorted(sizes)
    inner = octaves[1:-1]
    errors = []
    for octave in octaves if len(octaves) > 2 else ():
        if octave not in inner and len(sizes[octave]) == 1:
            continue
        rest = _points(key, [each for each in samples if _octave(each) != octave])
        out: dict[int, list[float]] = {}
        for sample in samples:
            if _octave(sample) == octave:
                out.setdefault(sample.message_bytes, []).append(sample.median_seconds)
        errors += [
            log_ratio(_geometric_mean(times), interpolate(*rest, size))
            for size, times in out.items()
        ]
    return tuple(errors)


def _octave(sample: LinkSample) -> int:
    return sample.message_bytes.bit_length()


def _table(
    key: _Key,
    rows: int,
    points: tuple[list[float], list[float]],
    errors: dict[_Key, tuple[float, ...]],
) -> SizeTable:
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
        operation=key.operation,
        backend=key.backend,
        group_size=key.group_size,
        nodes=key.nodes,
        groups=key.groups,
        message_bytes=tuple(points[0]),
        seconds=tuple(points[1]),
        log_halfwidth=halfwidth,
        calibration=calibration,
        rows=rows,
        validation=validation_of("message" if own else "", len(own), own),
    )
