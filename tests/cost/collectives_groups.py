"""Groups of ranks anywhere in small clusters: as devices, as counted ranks, as a shape."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from collectives_counted import Rank
from cost_fakes import island, link
from hypothesis import strategies as st

from hetplan.cluster.hosts import place_of
from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import CollectiveCost, GroupShape, group_shape
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link

Populations = tuple[tuple[int, tuple[int, ...]], ...]
"""Per island its region's number and the ranks of its nodes."""

MAX_NODES = 5
DEVICES_PER_NODE = 8


def link_name(cluster: Cluster, left: int, right: int) -> LinkName:
    """Name of the link between two different devices."""
    one, two = place_of(cluster, left), place_of(cluster, right)
    if one.island.name != two.island.name:
        return between_islands(one.island.name, two.island.name)
    scope = LinkScope.NODE if one.node == two.node else LinkScope.ISLAND
    return island_link(one.island.name, scope)


@dataclass(frozen=True)
class Group:
    """One group in a cluster."""

    cluster: Cluster
    device_of: Mapping[Rank, int]
    """In the order in which algorithms take the ranks."""
    shape: GroupShape

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(self.device_of)

    def by_link(self, sent: Mapping[tuple[Rank, Rank], Fraction]) -> dict[LinkName, float]:
        """Parts of the message by link."""
        found: dict[LinkName, Fraction] = defaultdict(Fraction)
        for (source, target), part in sent.items():
            name = link_name(self.cluster, self.device_of[source], self.device_of[target])
            found[name] += part
        return {name: float(part) for name, part in found.items()}


def group(populations: Populations, seed: int = 0, cluster: Cluster | None = None) -> Group:
    """Islands in order of their regions; which nodes and devices they use is up to the seed."""
    draw = random.Random(seed)
    cluster = cluster or plain_cluster(populations)
    device_of: dict[Rank, int] = {}
    for number, (region, nodes) in enumerate(populations):
        first = cluster.first_device(f"i{number:02}")
        places = draw.sample(range(MAX_NODES), len(nodes))
        for node, (place, count) in enumerate(
            zip(places, sorted(nodes, reverse=True), strict=True)
        ):
            for local, own in enumerate(draw.sample(range(DEVICES_PER_NODE), count)):
                rank = Rank(region=region, island=number, node=node, local=local)
                device_of[rank] = first + place * DEVICES_PER_NODE + own
    devices = list(device_of.values())
    draw.shuffle(devices)
    return Group(cluster=cluster, device_of=device_of, shape=group_shape(cluster, devices))


def plain_cluster(populations: Populations) -> Cluster:
    """Islands i0, i1, ... of equal nodes, slower links the farther they reach."""
    return Cluster(
        name="islands",
        islands=tuple(
            replace(
                island(f"i{number:02}", nodes=MAX_NODES, devices_per_node=DEVICES_PER_NODE),
                region=f"r{region}",
            )
            for number, (region, _) in enumerate(populations)
        ),
        within_region=link(5e9, 1e-4),
        across_regions=link(2e9, 5e-3),
    )


def traffic(cost: CollectiveCost) -> dict[LinkName, float]:
    return {each.link: each.bytes for each in cost.traffic}


@st.composite
def populations(draw: st.DrawFn, most_islands: int = 3, most_ranks: int = 3) -> Populations:
    """Unequal nodes in unequal islands in unequal regions; at least two ranks."""
    count = draw(st.integers(1, most_islands))
    regions = sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    nodes = st.lists(st.integers(1, most_ranks), min_size=1, max_size=3).map(tuple)
    found = tuple((region, draw(nodes)) for region in regions)
    if sum(sum(each) for _, each in found) == 1:
        return ((0, (2,)),)
    return found


@st.composite
def equal_halves(draw: st.DrawFn) -> Populations:
    """Powers of two everywhere, 2 to 32 ranks."""
    bits = draw(st.tuples(*[st.integers(0, 2)] * 4).filter(lambda b: 1 <= sum(b) <= 5))
    ranks, nodes, islands, regions = (1 << bit for bit in bits)
    return tuple((region, (ranks,) * nodes) for region in range(regions) for _ in range(islands))


def per_rank(
    sent: Mapping[tuple[Rank, Rank], Fraction], ranks: Sequence[Rank]
) -> tuple[dict[Rank, Fraction], dict[Rank, Fraction]]:
    """Parts of the message that every rank sends, and gets."""
    out, back = dict.fromkeys(ranks, Fraction(0)), dict.fromkeys(ranks, Fraction(0))
    for (source, target), part in sent.items():
        out[source] += part
        back[target] += part
    return out, back
