"""Where do the laws of links without samples come from, and how far off are they elsewhere?

The constants of `predict.links_prior` are the coefficients of one fit to the published all_reduce
times inside nodes and to the ratios between nodes together (the latency of a step inside a node is
common to both), of one to all_to_all and of one to sends. `left_out_rows` leaves out one source, or
one number of nodes, at a time: that is the error to be expected of a link that nobody measured.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hetplan.benchmarks.collective_rows import failure_of, nic_ratio, operation_of, seconds_of
from hetplan.lint.rows import CollectiveRow
from hetplan.predict.link.shapes import shape_columns
from hetplan.predict.regression import conformal_halfwidth, fit_nonnegative, log_ratio, predict

NIC_BYTES_PER_SECOND = 50e9  # 400 Gbit/s per device: Alibaba HPN, Qian et al., SIGCOMM 2024
DEVICES_PER_NODE = 8

_MIN_DOUBLING, _MAX_DOUBLING = 20, 30  # 1 MiB to 1 GiB
_NODE_RATES = (
    # (source starts with, gpu, one direction of the fabric per device, ranks)
    ("vTrain", "A100", 300e9, (2, 3, 4, 5, 6, 7, 8)),  # A100 datasheet: NVLink 600 GB/s both ways
    ("Sailor Aceso", "A100-40", 300e9, (2, 4)),
    # GH200 datasheet: NVLink 900 GB/s both ways. Two of four use one link of several: left out.
    ("Sailor Aceso", "GH-96", 450e9, (4,)),
    ("Galvatron sp_time", "A100-class (not labelled)", 300e9, (2, 4, 8)),
)
_SEND_RATES = (
    ("Sailor Aceso", "A100-40", 300e9, (2,)),
    ("Sailor Aceso", "GH-96", 450e9, (2,)),
    ("Sailor Aceso", "V100-16", 150e9, (2,)),  # V100 datasheet: NVLink 300 GB/s both ways
)
_BUS_RATES = (
    # Devices without a fabric; PCI Express Base 3.0 and 4.0, 16 lanes. Two RTX 3090 have a bridge.
    ("Sailor Aceso", "RTX-2080", 15.754e9, (2, 4, 8)),
    ("Sailor Aceso", "Titan-RTX", 15.754e9, (2, 4, 8)),
    ("Sailor Aceso", "RTX-3090", 31.508e9, (4, 8)),
)
_Rates: TypeAlias = tuple[tuple[str, str, float, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One published time."""

    source: str
    group_size: int
    nodes: int
    message_bytes: float
    seconds: float
    bytes_per_second: float
    """Of one device's link."""

    def columns(self, operation: str) -> tuple[float, ...]:
        """Of the link's own law, bytes in seconds at the link's rate."""
        *latencies, carried, over_ranks = shape_columns(
            operation, self.group_size, self.message_bytes, self.nodes
        )
        rate = self.bytes_per_second
        return (*latencies, carried / rate, over_ranks / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class LawRow:
    """A law without some of its data, against these."""

    law: str
    left_out: str
    rows: int
    mean_error: float
    """Mean of |predicted time / measured time - 1|."""
    median_error: float
    worst_error: float
    log_halfwidth: float | None
    """90 % conformal rank of |log(measured / predicted)|; None for too few rows."""


def inside_nodes(rows: Sequence[CollectiveRow], operation: str) -> list[Measured]:
    """Times of one operation inside nodes with a fabric, one per doubling of the message."""
    return _inside(rows, operation, _SEND_RATES if operation == "send_recv" else _NODE_RATES)


def on_buses(rows: Sequence[CollectiveRow], operation: str) -> list[Measured]:
    """The same inside nodes whose devices have no fabric of their own."""
    return _inside(rows, operation, _BUS_RATES)


def _inside(rows: Sequence[CollectiveRow], operation: str, wanted: _Rates) -> list[Measured]:
    found = []
    for start, gpu, rate, ranks in wanted:
        for count in ranks:
            times = defaultdict[float, list[float]](list)
            for row in rows:
                size, seconds = row.size_bytes, seconds_of(row, row.size_bytes)
                here = row.source.startswith(start) and row.device == gpu and row.scope != "inter"
                same = row.ranks == str(count) and operation_of(row) == operation
                if here and same and size and seconds and not failure_of(row):
                    times[size].append(seconds)
            found += [
                Measured(
                    source=f"{start}, {gpu}",
                    group_size=count,
                    nodes=1,
                    message_bytes=size,
                    seconds=statistics.median(times[size]),
                    bytes_per_second=rate,
                )
                for size in _per_doubling(times)
            ]
    return found


def between_nodes(rows: Iterable[CollectiveRow]) -> list[Measured]:
    """Rings over nodes of 8: ratios of bus bandwidth to the rate of all NICs of a node."""
    return [
        Measured(
            source=f"SimAI, {ring.nodes} nodes",
            group_size=ring.ranks,
            nodes=ring.nodes,
            message_bytes=ring.message_bytes,
            seconds=ring.seconds(NIC_BYTES_PER_SECOND, DEVICES_PER_NODE),
            bytes_per_second=NIC_BYTES_PER_SECOND,
        )
        for ring in map(nic_ratio, rows)
        if ring is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LawForm:
    """Of what a law's time is the sum, each with a coefficient that the fit finds."""

    columns: Callable[[Measured], tuple[float, ...]]

    def coefficients(self, points: Sequence[Measured]) -> tuple[float, ...]:
        """Those of the columns: seconds; bytes in parts of the time at the link's rate."""
        return fit_nonnegative(
            [self.columns(each) for each in points], [each.seconds for each in points]
        )

    def log_error(self, coefficients: Sequence[float], point: Measured) -> float:
        """log(measured / predicted)."""
        return log_ratio(point.seconds, predict(coefficients, self.columns(point)))


def _ring_row(point: Measured) -> tuple[float, ...]:
    _, steps, crossings, carried, over_ranks = point.columns("all_reduce")
    across = float(point.nodes > 1)
    inside = 1.0 - across
    return (
        inside,
        across,
        steps,
        crossings,
        inside * carried,
        inside * over_ranks,
        across * carried,
    )


def _inside_row(point: Measured, operation: str) -> tuple[float, ...]:
    base, steps, _, carried, over_ranks = point.columns(operation)
    return base, steps, carried, over_ranks


RINGS = LawForm(columns=_ring_row)
"""all_reduce inside nodes and between: base inside, base between, step, crossing, bytes inside,
bytes over ranks, bytes between."""
BUS_RINGS = LawForm(columns=lambda point: _inside_row(point, "all_reduce"))
"""all_reduce on a bus: base, step, bytes, bytes over ranks."""
EXCHANGES = LawForm(columns=lambda point: _inside_row(point, "all_to_all"))
"""all_to_all inside a node or on a bus: the same."""
SENDS = LawForm(columns=lambda point: (1.0, point.message_bytes / point.bytes_per_second))
"""Sends inside a node or on a bus: base, bytes."""


def left_out_rows(rows: Sequence[CollectiveRow]) -> tuple[LawRow, ...]:
    """One row per law and part of its data, and one with all of these parts together."""
    inside, between = inside_nodes(rows, "all_reduce"), between_nodes(rows)
    exchange = inside_nodes(rows, "all_to_all")
    sends = inside_nodes(rows, "send_recv")
    buses = {each: on_buses(rows, each) for each in ("all_reduce", "all_to_all")}
    parts: tuple[tuple[str, list[Measured], list[Measured], LawForm], ...] = (
        ("all_reduce inside a node", inside, between, RINGS),
        ("all_reduce between nodes", between, inside, RINGS),
        ("all_to_all inside a node", exchange, [], EXCHANGES),
        ("send_recv inside a node", sends, [], SENDS),
        ("all_reduce on a bus", buses["all_reduce"], [], BUS_RINGS),
        ("all_to_all on a bus", buses["all_to_all"], [], EXCHANGES),
    )
    found: list[LawRow] = []
    for law, judged, others, form in parts:
        errors: list[float] = []
        for source in dict.fromkeys(each.source for each in judged):
            seen = [*(each for each in judged if each.source != source), *others]
            fitted = form.coefficients(seen)
            own = [form.log_error(fitted, each) for each in judged if each.source == source]
            found.append(_law_row(law, source, own))
            errors += own
        if errors:
            found.append(_law_row(law, "each in turn", errors))
    return tuple(found)


def _law_row(law: str, left_out: str, errors: Sequence[float]) -> LawRow:
    relative = [abs(math.expm1(-error)) for error in errors]
    return LawRow(
        law=law,
        left_out=left_out,
        rows=len(errors),
        mean_error=statistics.fmean(relative),
        median_error=statistics.median(relative),
        worst_error=max(relative),
        log_halfwidth=conformal_halfwidth(errors),
    )


def _per_doubling(times: Iterable[float]) -> list[float]:
    """The sizes nearest to powers of two."""
    sizes = sorted(size for size in times if size >= 2.0**_MIN_DOUBLING)
    found = dict[float, None]()
    for exponent in range(_MIN_DOUBLING, _MAX_DOUBLING + 1):
        if sizes:
            found[min(sizes, key=lambda size: abs(math.log2(size) - exponent))] = None
    return [size for size in found if size <= 1.01 * 2.0**_MAX_DOUBLING]
