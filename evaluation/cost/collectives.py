"""How the constants of `predict.link.prior` are learned, and the laws' errors on what they lack.

From the folder of reference data (unit/collectives.csv): all_reduce, all_to_all and sends inside
nodes with a fabric and on buses, against the datasheet's rate, and SimAI's ratios of rings over 2
to 128 nodes of 8 to the NIC, which is not labelled there: taken to be that of the cluster that its
authors describe elsewhere. One fit to all_reduce inside nodes and between them together (the
latency of a step inside a node is common to both), one to all_to_all and one to sends.

`left_out_rows` leaves out one source, or one number of nodes, at a time: that is the error to be
expected of a link that nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas

from evaluation.accuracy.unit_links import (
    failure_of,
    nic_ratio,
    operation_of,
    published,
    seconds_of,
)
from evaluation.output import WORDS, Section
from hetplan.lint.rows import CollectiveRow
from hetplan.predict.link.shapes import shape_columns
from hetplan.predict.regression import conformal_halfwidth, fit_nonnegative, log_ratio, predict

NIC_BYTES_PER_SECOND = 50e9  # 400 Gbit/s per device: Alibaba HPN, Qian et al., SIGCOMM 2024
DEVICES_PER_NODE = 8

_DOUBLINGS = range(20, 31)  # 1 MiB to 1 GiB
_Rates: TypeAlias = tuple[tuple[str, str, float, tuple[int, ...]], ...]
_NODE_RATES: _Rates = (
    # (source starts with, gpu, one direction of the fabric per device, ranks)
    ("vTrain", "A100", 300e9, (2, 3, 4, 5, 6, 7, 8)),  # A100 datasheet: NVLink 600 GB/s both ways
    ("Sailor Aceso", "A100-40", 300e9, (2, 4)),
    # GH200 datasheet: NVLink 900 GB/s both ways. Two of four use one link of several: left out.
    ("Sailor Aceso", "GH-96", 450e9, (4,)),
    ("Galvatron sp_time", "A100-class (not labelled)", 300e9, (2, 4, 8)),
)
_SEND_RATES: _Rates = (
    ("Sailor Aceso", "A100-40", 300e9, (2,)),
    ("Sailor Aceso", "GH-96", 450e9, (2,)),
    ("Sailor Aceso", "V100-16", 150e9, (2,)),  # V100 datasheet: NVLink 300 GB/s both ways
)
_BUS_RATES: _Rates = (
    # Devices without a fabric; PCI Express Base 3.0 and 4.0, 16 lanes. Two RTX 3090 have a bridge.
    ("Sailor Aceso", "RTX-2080", 15.754e9, (2, 4, 8)),
    ("Sailor Aceso", "Titan-RTX", 15.754e9, (2, 4, 8)),
    ("Sailor Aceso", "RTX-3090", 31.508e9, (4, 8)),
)


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


def inside_nodes(rows: Sequence[CollectiveRow], operation: str) -> list[Measured]:
    """Times of one operation inside nodes with a fabric, one per doubling of the message."""
    return _inside(rows, operation, _SEND_RATES if operation == "send_recv" else _NODE_RATES)


def on_buses(rows: Sequence[CollectiveRow], operation: str) -> list[Measured]:
    """The same inside nodes whose devices have no fabric of their own."""
    return _inside(rows, operation, _BUS_RATES)


def _inside(rows: Sequence[CollectiveRow], operation: str, wanted: _Rates) -> list[Measured]:
    table = pandas.DataFrame(
        {
            "source": row.source,
            "device": row.device,
            "ranks": row.ranks,
            "size": row.size_bytes,
            "seconds": seconds_of(row, row.size_bytes),
        }
        for row in rows
        if row.scope != "inter" and operation_of(row) == operation and not failure_of(row)
    ).query("size > 0 and seconds > 0")
    found = []
    for start, gpu, rate, ranks in wanted:
        of_kind = table[table["source"].str.startswith(start) & (table["device"] == gpu)]
        for count in ranks:
            times = of_kind[of_kind["ranks"] == str(count)].groupby("size")["seconds"].median()
            found += [
                Measured(
                    source=f"{start}, {gpu}",
                    group_size=count,
                    nodes=1,
                    message_bytes=size,
                    seconds=float(times[size]),
                    bytes_per_second=rate,
                )
                for size in _per_doubling(times.index)
            ]
    return found


def _per_doubling(sizes: Iterable[float]) -> list[float]:
    """The sizes nearest to powers of two."""
    able = sorted(size for size in sizes if size >= 2.0 ** _DOUBLINGS[0])
    found = dict[float, None]()
    for exponent in _DOUBLINGS if able else ():
        found[min(able, key=lambda size: abs(math.log2(size) - exponent))] = None
    return [size for size in found if size <= 1.01 * 2.0 ** _DOUBLINGS[-1]]


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


LawForm: TypeAlias = Callable[[Measured], tuple[float, ...]]
"""What a law's time is the sum of, with a coefficient each that the fit finds."""


def coefficients(form: LawForm, points: Sequence[Measured]) -> tuple[float, ...]:
    """Those of the columns: seconds; bytes in parts of the time at the link's rate."""
    return fit_nonnegative([form(each) for each in points], [each.seconds for each in points])


def rings(point: Measured) -> tuple[float, ...]:
    """all_reduce inside nodes and between: base inside, base between, step, crossing, bytes inside,
    bytes over ranks, bytes between.
    """
    _, steps, crossings, carried, over_ranks = point.columns("all_reduce")
    across = float(point.nodes > 1)
    inside = 1.0 - across
    return (
        *(inside, across, steps, crossings),
        *(inside * carried, inside * over_ranks, across * carried),
    )


def _inside_row(point: Measured, operation: str) -> tuple[float, ...]:
    base, steps, _, carried, over_ranks = point.columns(operation)
    return base, steps, carried, over_ranks


bus_rings: LawForm = partial(_inside_row, operation="all_reduce")
"""all_reduce on a bus: base, step, bytes, bytes over ranks."""
exchanges: LawForm = partial(_inside_row, operation="all_to_all")
"""all_to_all inside a node or on a bus: the same."""


def sends(point: Measured) -> tuple[float, ...]:
    """Sends inside a node or on a bus: base, bytes."""
    return 1.0, point.message_bytes / point.bytes_per_second


def left_out_rows(rows: Sequence[CollectiveRow]) -> pandas.DataFrame:
    """One row per law and part of its data, and one with all of these parts together.

    Errors are of |predicted time / measured time - 1|; `log_halfwidth` the 90 % conformal rank of
    |log(measured / predicted)|, None for too few rows.
    """
    inside, between = inside_nodes(rows, "all_reduce"), between_nodes(rows)
    parts: tuple[tuple[str, list[Measured], list[Measured], LawForm], ...] = (
        ("all_reduce inside a node", inside, between, rings),
        ("all_reduce between nodes", between, inside, rings),
        ("all_to_all inside a node", inside_nodes(rows, "all_to_all"), [], exchanges),
        ("send_recv inside a node", inside_nodes(rows, "send_recv"), [], sends),
        ("all_reduce on a bus", on_buses(rows, "all_reduce"), [], bus_rings),
        ("all_to_all on a bus", on_buses(rows, "all_to_all"), [], exchanges),
    )
    found = []
    for law, judged, others, form in parts:
        errors: list[float] = []
        for source in dict.fromkeys(each.source for each in judged):
            seen = [*(each for each in judged if each.source != source), *others]
            fitted = coefficients(form, seen)
            own = [
                log_ratio(each.seconds, predict(fitted, form(each)))
                for each in judged
                if each.source == source
            ]
            found.append(_law_row(law, source, own))
            errors += own
        found.append(_law_row(law, "each in turn", errors))
    return pandas.DataFrame(found)


def _law_row(law: str, left_out: str, errors: Sequence[float]) -> dict[str, Any]:
    relative = np.abs(np.expm1(-np.array(errors)))
    return {
        "law": law,
        "left_out": left_out,
        "rows": len(errors),
        "mean_error": relative.mean(),
        "median_error": np.median(relative),
        "worst_error": relative.max(),
        "log_halfwidth": conformal_halfwidth(errors),
    }


def law_section(reference: Path) -> Section:
    """Errors of the laws on what they did not see; an InputError where the file is not there."""
    return Section(
        name="collective_laws",
        title="Laws of links without samples, one source or number of nodes left out in turn",
        frame=left_out_rows(published(reference)),
        columns={
            "law": ("law", WORDS),
            "left out": ("left_out", WORDS),
            "rows": ("rows", "{:d}"),
            "mean error": ("mean_error", "{:.1%}"),
            "median": ("median_error", "{:.1%}"),
            "largest": ("worst_error", "{:.0%}"),
        },
    )
