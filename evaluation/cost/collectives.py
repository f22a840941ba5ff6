"""Collectives from figures alone against measured ones, and the laws of links without samples.

Three publications, read from the folder of reference data (unit/collectives.csv):

    vTrain, A100     nccl-tests all_reduce of 2 to 8 devices in one node, 1 MiB to 1 GiB, against
                     the datasheet's NVLink
    Galvatron, 2x8   all_reduce in two nodes of 8 with two NICs (NCCL_IB_HCA of its
                     scripts), one rank in each, two, four or all: bus bandwidths, against what
                     sends between two devices of the same machines reach
    SimAI, rings     bus bandwidth over NIC bandwidth of rings over 2 to 128 nodes of 8, 16 MiB to
                     16 GiB; the NIC is not labelled, and is taken to be that of the cluster that
                     its authors describe elsewhere

`figures` rows have a ring with the figures' latency and bandwidth in every step, which nobody
reaches; `ring` ones force the algorithm that was measured, `library` ones take the cheapest of what
the communication library has, which is what estimates price. SimAI's rows are of rings alone: there
`ring` is the comparison, and the last is called `trees too`, because a library takes trees for
short messages from three nodes on. The laws behind all but the first were learned from these tables
(not from Galvatron's two nodes): `left_out_rows` gives the error elsewhere.

The constants of `predict.link.prior` are the coefficients of one fit to the published all_reduce
times inside nodes and to the ratios between nodes together (the latency of a step inside a node is
common to both), of one to all_to_all and of one to sends. `left_out_rows` leaves out one source, or
one number of nodes, at a time: that is the error to be expected of a link that nobody measured.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pandas

from evaluation.accuracy.clusters import (
    HDR_BYTES_PER_SECOND,
    NIC_LATENCY_SECONDS,
    NVLINK_LATENCY_SECONDS,
)
from evaluation.accuracy.unit_links import (
    AVERAGED_BYTES,
    averaged_group,
    failure_of,
    nic_ratio,
    operation_of,
    published,
    ranks_of,
    seconds_of,
)
from evaluation.output import WORDS, Section, frame_of
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.collectives import Algorithm, collective, group_shape
from hetplan.cost.network.paths import ring_share
from hetplan.lint.rows import CollectiveRow
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.link.shapes import ring_shape, shape_columns
from hetplan.predict.regression import conformal_halfwidth, fit_nonnegative, log_ratio, predict
from hetplan.profiling.samples import LinkOperation

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
    """What a law's time is the sum of, with a coefficient each that the fit finds."""

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


NVLINK_BYTES_PER_SECOND = 300e9  # A100 datasheet: third-generation NVLink, 600 GB/s both ways

RINGS_ONLY = "SimAI, rings only"


@dataclass(frozen=True, slots=True)
class _Case:
    source: str
    group: str
    ranks: tuple[int, ...]
    """Devices of the group, in nodes of 8."""
    inside: Link
    between: Link
    nics: Nics | None
    message_bytes: float
    seconds: float


def collective_errors(reference: Path) -> pandas.DataFrame:
    """One row per kind of measurement and algorithm; an InputError where the file is not there.

    `mean_error` is of |predicted / measured - 1|; a `median_ratio` below 1: hetplan is too fast.
    """
    rows = published(reference)
    cases = [*_one_node(rows), *_two_nodes(rows), *_many_nodes(rows)]
    frame = pandas.DataFrame(
        {
            "source": case.source,
            "group": case.group,
            "algorithm": _label(case.source, choice),
            "ratio": _predicted(case, choice) / case.seconds,
        }
        for choice in ("figures", "ring", "library")
        for case in cases
    )
    frame["error"] = (frame["ratio"] - 1.0).abs()
    return (
        frame.groupby(["algorithm", "source", "group"], sort=False)
        .agg(rows=("error", "size"), mean_error=("error", "mean"), median_ratio=("ratio", "median"))
        .reset_index()
    )


def collective_section(reference: Path) -> Section:
    """The table of `collective_errors`."""
    return Section(
        name="collectives",
        title="Collectives from figures alone against published measurements",
        frame=collective_errors(reference),
        columns={
            "source": ("source", WORDS),
            "group": ("group", WORDS),
            "algorithm": ("algorithm", WORDS),
            "rows": ("rows", "{:d}"),
            "mean error": ("mean_error", "{:.1%}"),
            "predicted over measured": ("median_ratio", "{:.3f}"),
        },
    )


def law_section(reference: Path) -> Section:
    """Errors of the laws on what they did not see; an InputError likewise."""
    return Section(
        name="collective_laws",
        title="Laws of links without samples, one source or number of nodes left out in turn",
        frame=frame_of(left_out_rows(published(reference))),
        columns={
            "law": ("law", WORDS),
            "left out": ("left_out", WORDS),
            "rows": ("rows", "{:d}"),
            "mean error": ("mean_error", "{:.1%}"),
            "median": ("median_error", "{:.1%}"),
            "largest": ("worst_error", "{:.0%}"),
        },
    )


def _label(source: str, choice: str) -> str:
    """Where rings alone were measured, a choice that may take something else says so."""
    others = choice == "library" and source == RINGS_ONLY
    return f"{choice}, trees too" if others else choice


def _predicted(case: _Case, choice: str) -> float:
    nodes = max(case.ranks) // DEVICES_PER_NODE + 1
    if choice == "figures":
        return _by_figures(case, nodes)
    island = _island(nodes, case.inside, case.between, case.nics)
    cluster = Cluster(name="reference", islands=(island,))
    return collective(
        cluster,
        group_shape(cluster, case.ranks),
        LinkOperation.ALL_REDUCE,
        case.message_bytes,
        FittedPredictor.datasheet_only(),
        algorithm=Algorithm.RING if choice == "ring" else None,
        share=ring_share(cluster, (case.ranks,)),
    ).seconds


def _by_figures(case: _Case, nodes: int) -> float:
    """2 (n - 1) steps of latency and of 1 / n of the message, over the slower link of each."""
    ranks = len(case.ranks)
    steps, share = ring_shape(LinkOperation.ALL_REDUCE, ranks)
    links = [(case.inside, 1.0)] if nodes == 1 else [(case.between, ranks / nodes)]
    if nodes > 1 and ranks > nodes:
        links.append((case.inside, 1.0))
    return max(
        steps
        * (
            link.latency_seconds
            + share * case.message_bytes / lanes / link.bandwidth_bytes_per_second
        )
        for link, lanes in links
    )


def _one_node(rows: Sequence[CollectiveRow]) -> Iterator[_Case]:
    sizes = {float(1 << 20 << doubling) for doubling in range(11)}
    for row in rows:
        size, seconds = row.size_bytes, seconds_of(row, row.size_bytes)
        ours = row.source.startswith("vTrain") and row.device == "A100" and not failure_of(row)
        if ours and size in sizes and size is not None and seconds is not None:
            yield _Case(
                source="vTrain, A100",
                group=f"{row.ranks} in one node",
                ranks=tuple(range(ranks_of(row))),
                inside=_link(NVLINK_BYTES_PER_SECOND, NVLINK_LATENCY_SECONDS),
                between=_link(NIC_BYTES_PER_SECOND, NIC_LATENCY_SECONDS),
                nics=None,
                message_bytes=size,
                seconds=seconds,
            )


def _two_nodes(rows: Sequence[CollectiveRow]) -> Iterator[_Case]:
    own = [row for row in rows if row.source.startswith("Galvatron") and row.scope == "2x8"]
    ranks = 2 * DEVICES_PER_NODE
    # All 16 devices in pairs across the nodes.
    sends = [row for row in own if operation_of(row) == LinkOperation.SEND_RECV]
    pairs = [row.bus_bytes_per_second for row in sends if ranks_of(row) == ranks]
    for row in own:
        group, count = averaged_group(row), ranks_of(row)
        seconds = seconds_of(row, AVERAGED_BYTES)
        inside = group is not None and group.consecutive and count <= DEVICES_PER_NODE
        if group is None or inside or seconds is None or not pairs or not pairs[0]:
            continue
        yield _Case(
            source="Galvatron, 2x8",
            group=f"{count // 2} in each of two nodes",
            # Neighbours in a group are as far apart as there are groups.
            ranks=tuple(range(0, ranks, ranks // count)),
            inside=_link(NVLINK_BYTES_PER_SECOND, NVLINK_LATENCY_SECONDS),
            between=_link(pairs[0], NIC_LATENCY_SECONDS),
            nics=Nics(
                per_node=2,
                bandwidth_bytes_per_second=HDR_BYTES_PER_SECOND,
                rings=RingNics.FIRST_DEVICE,
            ),
            message_bytes=float(AVERAGED_BYTES),
            seconds=seconds,
        )


def _many_nodes(rows: Sequence[CollectiveRow]) -> Iterator[_Case]:
    for row in rows:
        ring = nic_ratio(row)
        if ring is None:
            continue
        yield _Case(
            source=RINGS_ONLY,
            group=f"{ring.nodes} nodes of 8",
            ranks=tuple(range(ring.ranks)),
            # So fast inside that the NICs rule, as in the rows.
            inside=_link(2 * NIC_BYTES_PER_SECOND * DEVICES_PER_NODE, NVLINK_LATENCY_SECONDS),
            between=_link(NIC_BYTES_PER_SECOND, NIC_LATENCY_SECONDS),
            nics=None,
            message_bytes=ring.message_bytes,
            seconds=ring.seconds(NIC_BYTES_PER_SECOND, DEVICES_PER_NODE),
        )


def _link(bandwidth: float, latency: float) -> Link:
    return Link(
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=latency,
        transport=Transport.DEVICE_DIRECT,
    )


def _island(nodes: int, inside: Link, between: Link, nics: Nics | None) -> Island:
    return Island(
        name="measured",
        region="one",
        device=DeviceKind(
            kind="any",
            vendor="any",
            peak_flops_per_second=(),
            memory_bytes=1.0,
            memory_bandwidth_bytes_per_second=1.0,
            provenance="datasheet",
            source="collectives ask nothing of a device",
        ),
        nodes=nodes,
        devices_per_node=DEVICES_PER_NODE,
        intra_node=inside,
        inter_node=between,
        nics=nics,
        memory_bytes=1.0,
    )
