"""Rails: what a device sends to another rail of another node crosses its own node first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import pytest
from collectives_counted import Rank, Unit, chained, exchanged, through_trees
from collectives_groups import Group, traffic
from cost_fakes import Figures, island, link
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import Algorithm, CollectiveCost, collective, group_shape
from hetplan.cost.collectives.trees import double_tree
from hetplan.cost.network.segments import LinkName, LinkScope
from hetplan.profiling.samples import LinkOperation

PREDICTOR = Figures()
MESSAGE = 1e6
AR, A2A = LinkOperation.ALL_REDUCE, LinkOperation.ALL_TO_ALL
RAILS = Nics(per_node=8, bandwidth_bytes_per_second=25e9, rails=4)
NODE = LinkName(scope=LinkScope.NODE, left="i", right="i")
BETWEEN = LinkName(scope=LinkScope.ISLAND, left="i", right="i")

Locals = tuple[tuple[int, ...], ...]
"""Devices of the group in each node."""


def railed(places: Locals, nics: Nics | None = RAILS, *, staged: bool = False) -> Group:
    """A group in one island, fullest nodes first, of equal ones those on the first rails."""
    here = replace(
        island("i", nodes=len(places), devices_per_node=8),
        nics=nics,
        inter_node=link(10e9, staged=staged),
    )
    cluster = Cluster(name="railed", islands=(here,))
    devices = [8 * node + own for node, locals_ in enumerate(places) for own in locals_]
    shape = group_shape(cluster, devices)
    populations = sorted(
        (tuple(sorted(locals_)) for locals_ in places),
        key=lambda each: (-len(each), sorted(own % 4 for own in each)),
    )
    device_of = {
        Rank(region=0, island=0, node=node, local=seat): 8 * node + own
        for node, locals_ in enumerate(populations)
        for seat, own in enumerate(locals_)
    }
    return Group(cluster=cluster, device_of=device_of, shape=shape)


def rail_of(cluster: Cluster, device: int) -> int | None:
    island, (local, count) = cluster.islands[0], (device % 8, 8)
    assert island.nics is not None
    return island.nics.rail(island.nics.of(local, count)[0])


def with_detours(own: Group, sent: Mapping[tuple[Rank, Rank], Fraction]) -> dict[LinkName, float]:
    """Bytes by link, and once more inside the node where a message changes rails."""
    found: dict[LinkName, float] = defaultdict(float, own.by_link(sent))
    for (source, target), part in sent.items():
        rails = [rail_of(own.cluster, own.device_of[rank]) for rank in (source, target)]
        if source.node != target.node and rails[0] != rails[1]:
            found[NODE] += float(part)
    return {name: part * MESSAGE for name, part in found.items()}


def cost(
    own: Group, operation: LinkOperation, algorithm: Algorithm | None = None
) -> CollectiveCost:
    return collective(own.cluster, own.shape, operation, MESSAGE, PREDICTOR, algorithm=algorithm)


singles = st.lists(st.integers(0, 7), min_size=2, max_size=6).map(
    lambda found: tuple((own,) for own in found)
)
anywhere = st.lists(
    st.sets(st.integers(0, 7), min_size=1, max_size=4).map(lambda own: tuple(sorted(own))),
    min_size=1,
    max_size=4,
).filter(lambda found: sum(map(len, found)) > 1)


@settings(max_examples=40, deadline=None)
@given(singles)
def test_one_rank_per_node_by_every_algorithm(places: Locals) -> None:
    own = railed(places)
    ranks: Unit = own.ranks
    flat = ((0, 4),)
    world, _ = chained(ranks, flat, operation="all_reduce")
    runs = [
        (AR, Algorithm.RING, world.sent),
        (AR, Algorithm.TREE, through_trees(ranks, double_tree).sent),
        (A2A, Algorithm.DIRECT, exchanged(ranks)),
    ]
    for operation, algorithm, sent in runs:
        found = cost(own, operation, algorithm)
        assert with_detours(own, sent) == pytest.approx(traffic(found)), algorithm


@settings(max_examples=40, deadline=None)
@given(anywhere)
def test_all_to_all_anywhere(places: Locals) -> None:
    own = railed(tuple(places))
    found = cost(own, A2A, Algorithm.DIRECT)
    assert with_detours(own, exchanged(own.ranks)) == pytest.approx(traffic(found))
