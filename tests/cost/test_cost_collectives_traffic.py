"""Bytes per link equal those of runs that do every algorithm rank by rank on real numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from collectives_counted import (
    chained,
    exchanged,
    halved_and_doubled,
    served,
    spread,
    through_trees,
    units,
)
from collectives_groups import (
    Group,
    Populations,
    equal_halves,
    group,
    per_rank,
    populations,
    traffic,
)
from cost_fakes import Figures
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cost.collectives import Algorithm, ExchangeOrder, collective
from hetplan.cost.collectives.layout import chains
from hetplan.cost.collectives.pairwise import two_level_all_to_all
from hetplan.cost.collectives.rings import parameter_server, rings
from hetplan.cost.collectives.trees import double_tree
from hetplan.cost.collectives.values import Asking
from hetplan.cost.network.segments import LinkName
from hetplan.profiling.samples import LinkOperation

PREDICTOR = Figures()
ASKING = Asking(predictor=PREDICTOR, share=1.0)
MESSAGE = 720.0
RINGS = (LinkOperation.ALL_REDUCE, LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_GATHER)
FEW = settings(max_examples=40, deadline=None)


def assert_same(counted: dict[LinkName, float], stated: dict[LinkName, float]) -> None:
    assert {name: part * MESSAGE for name, part in counted.items()} == pytest.approx(stated)


@FEW
@given(populations(), st.sampled_from(RINGS), st.integers(0, 99))
def test_rings_in_every_form(found: Populations, operation: LinkOperation, seed: int) -> None:
    own = group(found, seed)
    costs = [each.cost() for each in rings(own.cluster, own.shape, operation, MESSAGE, ASKING)]
    forms = list(chains(own.shape))
    assert len(costs) == len(forms)
    for cost, blocks in zip(costs, forms, strict=True):
        world, _ = chained(own.ranks, blocks, operation=operation.value)
        assert_same(own.by_link(world.sent), traffic(cost))
        sent, got = per_rank(world.sent, own.ranks)
        assert sum(sent.values()) == sum(got.values())
        if len(blocks) == 1:
            passes = 2 if operation is LinkOperation.ALL_REDUCE else 1
            assert sum(each.bytes for each in cost.traffic) == pytest.approx(
                passes * (len(own.ranks) - 1) * MESSAGE
            )


@FEW
@given(equal_halves(), st.sampled_from(RINGS), st.sampled_from(ExchangeOrder))
def test_halving_doubling_in_both_orders(
    found: Populations, operation: LinkOperation, order: ExchangeOrder
) -> None:
    own = group(found)
    cost = collective(
        own.cluster,
        own.shape,
        operation,
        MESSAGE,
        PREDICTOR,
        algorithm=Algorithm.HALVING_DOUBLING,
        order=order,
    )
    far_first = order is ExchangeOrder.FAR_FIRST
    world = halved_and_doubled(own.ranks, operation=operation.value, far_first=far_first)
    assert_same(own.by_link(world.sent), traffic(cost))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_the_order_of_exchanges_decides_what_crosses_between_two_regions(ranks: int) -> None:
    """S per direction with the regions' exchange last, n S / 2 with it first, counted."""
    own = (
        group(((0, (ranks // 2,)), (1, (ranks // 2,))))
        if ranks <= 16
        else group(((0, (8, 8)), (1, (8, 8))))
    )
    crossing = {}
    for far_first in (False, True):
        world = halved_and_doubled(own.ranks, operation="all_reduce", far_first=far_first)
        crossing[far_first] = [
            sum(
                (
                    part
                    for (source, target), part in world.sent.items()
                    if (source.region, target.region) == way
                ),
                start=Fraction(0),
            )
            for way in ((0, 1), (1, 0))
        ]
    assert crossing[False] == [1, 1]
    assert crossing[True] == [Fraction(ranks, 2)] * 2


@FEW
@given(populations(), st.integers(0, 99))
def test_two_trees(found: Populations, seed: int) -> None:
    own = group(found, seed)
    world = through_trees(own.ranks, double_tree)
    cost = collective(
        own.cluster,
        own.shape,
        LinkOperation.ALL_REDUCE,
        MESSAGE,
        PREDICTOR,
        algorithm=Algorithm.TREE,
    )
    assert_same(own.by_link(world.sent), traffic(cost))


@pytest.mark.parametrize("members", range(2, 40))
def test_two_trees_share_no_inner_member_and_span_all(members: int) -> None:
    first, second = double_tree(members)
    inner = [{up for _, up in edges} for edges in (first, second)]
    # A tree over two has one inner member and a root that is no leaf of its own.
    assert not inner[0] & inner[1]
    for edges in (first, second):
        assert len({child for child, _ in edges}) == len(edges) == members - 1
        assert {end for edge in edges for end in edge} == set(range(members))


@FEW
@given(populations(), st.booleans(), st.integers(0, 99))
def test_broadcasts(found: Populations, chain: bool, seed: int) -> None:
    own = group(found, seed)
    world = spread(own.ranks, chain=chain)
    cost = collective(
        own.cluster,
        own.shape,
        LinkOperation.BROADCAST,
        MESSAGE,
        PREDICTOR,
        algorithm=Algorithm.RING if chain else Algorithm.TREE,
    )
    assert_same(own.by_link(world.sent), traffic(cost))
    assert sum(each.bytes for each in cost.traffic) == pytest.approx((len(own.ranks) - 1) * MESSAGE)


@FEW
@given(populations(), st.integers(0, 99))
def test_the_parameter_server(found: Populations, seed: int) -> None:
    own = group(found, seed)
    cost = parameter_server(own.cluster, own.shape, MESSAGE, ASKING).cost()
    *_, blocks = chains(own.shape)
    world = served(own.ranks, blocks, _server(own, blocks[-1][0], cost.detail))
    assert_same(own.by_link(world.sent), traffic(cost))


def _server(own: Group, level: int, detail: str) -> int:
    """Which of the outermost units the cost names as the server."""
    name = detail.rsplit(" ", 1)[1]
    members = units(own.ranks, level)
    if level < 2:
        return 0
    names = [f"i{unit[0].island:02}" if level == 2 else f"r{unit[0].region}" for unit in members]
    return names.index(name)


@FEW
@given(populations(most_ranks=2), st.integers(0, 99))
def test_all_to_all(found: Populations, seed: int) -> None:
    own = group(found, seed)
    cost = collective(
        own.cluster,
        own.shape,
        LinkOperation.ALL_TO_ALL,
        MESSAGE,
        PREDICTOR,
        algorithm=Algorithm.DIRECT,
    )
    assert_same(own.by_link(exchanged(own.ranks, 0)), traffic(cost))
    for two_level in two_level_all_to_all(own.cluster, own.shape, MESSAGE, ASKING):
        level = 1 if two_level.detail.startswith("inside nodes") else 2
        assert_same(own.by_link(exchanged(own.ranks, level)), traffic(two_level.cost()))


@FEW
@given(equal_halves())
def test_two_level_all_to_all_of_equal_units(found: Populations) -> None:
    own = group(found)
    for cost in two_level_all_to_all(own.cluster, own.shape, MESSAGE, ASKING):
        level = 1 if cost.detail.startswith("inside nodes") else 2
        assert_same(own.by_link(exchanged(own.ranks, level)), traffic(cost.cost()))
