"""How close do collectives from figures alone come to measured ones?

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
the communication library has, which is what estimates price, `cheapest` ones of all there are.
SimAI's rows are of rings alone: there `ring` is the comparison, and the last two are called `trees
too`, because a library takes trees for short messages from three nodes on. The laws behind all but
the first were learned from these tables (not from Galvatron's two nodes): `left out` in
`benchmarks.cost_collectives_laws` is the error elsewhere.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.benchmarks.accuracy.clusters import (
    HDR_BYTES_PER_SECOND,
    NIC_LATENCY_SECONDS,
    NVLINK_LATENCY_SECONDS,
)
from hetplan.benchmarks.collective_rows import (
    AVERAGED_BYTES,
    averaged_group,
    failure_of,
    nic_ratio,
    operation_of,
    published,
    ranks_of,
    seconds_of,
)
from hetplan.benchmarks.cost_collectives_laws import (
    DEVICES_PER_NODE,
    NIC_BYTES_PER_SECOND,
    LawRow,
    left_out_rows,
)
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.collectives import ALL, Algorithm, collective, group_shape
from hetplan.cost.network.ring_nics import ring_share
from hetplan.lint.rows import CollectiveRow as PublishedRow
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.link.shapes import ring_shape
from hetplan.profiling.samples import LinkOperation

NVLINK_BYTES_PER_SECOND = 300e9  # A100 datasheet: third-generation NVLink, 600 GB/s both ways

RINGS_ONLY = "SimAI, rings only"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Predictions against the rows of one kind."""

    source: str
    group: str
    algorithm: str
    """`figures`, `ring`, `library` or `cheapest`; where rings alone were measured, the last two say
    that they may take something else."""
    rows: int
    mean_error: float
    """Mean of |predicted time / measured time - 1|."""
    median_ratio: float
    """Predicted over measured time; below 1 hetplan is too fast."""


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


def collective_rows(reference: Path) -> tuple[CollectiveRow, ...]:
    """One row per kind of measurement and algorithm; an InputError where the file is not there."""
    rows = published(reference)
    found = []
    for choice in ("figures", "ring", "library", "cheapest"):
        ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        for case in (*_one_node(rows), *_two_nodes(rows), *_many_nodes(rows)):
            ratios[case.source, case.group].append(_predicted(case, choice) / case.seconds)
        found += [
            CollectiveRow(
                source=source,
                group=group,
                algorithm=_label(source, choice),
                rows=len(each),
                mean_error=statistics.fmean(abs(ratio - 1.0) for ratio in each),
                median_ratio=statistics.median(each),
            )
            for (source, group), each in ratios.items()
        ]
    return tuple(found)


def _label(source: str, choice: str) -> str:
    others = choice in ("library", "cheapest") and source == RINGS_ONLY
    return f"{choice}, trees too" if others else choice


def collective_law_rows(reference: Path) -> tuple[LawRow, ...]:
    """Errors of the laws on what they did not see; an InputError likewise."""
    return left_out_rows(published(reference))


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
        among=ALL if choice == "cheapest" else None,
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


def _one_node(rows: Sequence[PublishedRow]) -> Iterator[_Case]:
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


def _two_nodes(rows: Sequence[PublishedRow]) -> Iterator[_Case]:
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


def _many_nodes(rows: Sequence[PublishedRow]) -> Iterator[_Case]:
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
