"""Bytes per link equal those of runs that do every algorithm rank by rank on real numbers."""

from __future__ import annotations

import pytest
from collectives_counted import chained, exchanged, through_trees
from collectives_groups import (
    Populations,
    group,
    per_rank,
    populations,
    traffic,
)
from cost_fakes import Figures
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cost.collectives import Algorithm, collective
from hetplan.cost.collectives.rings import chains, rings
from hetplan.cost.collectives.trees import double_tree
from hetplan.cost.collectives.values import Asking
from hetplan.cost.network.segments import LinkName
from hetplan.profiling.samples import LinkOperation

PREDICTOR = Figures()
ASKING = Asking(predictor=PREDICTOR, share=1.0)
MESSAGE = 720.0
RINGS = (LinkOperation.ALL_REDUCE, LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_GATHER)
FEW = settings(max_examples=12, deadline=None)


def assert_same(counted: dict[LinkName, float], stated: dict[LinkName, float]) -> None:
    assert {name: part * MESSAGE for name, part in counted.items()} == pytest.approx(stated)


@FEW
@given(populations(), st.sampled_from(RINGS), st.integers(0, 99))
def test_rings_in_every_form(found: Populations, operation: LinkOperation, seed: int) -> None:
    own = group(found, seed)
    costs = list(rings(own.cluster, own.shape, operation, MESSAGE, ASKING))
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
@given(populations(most_ranks=2), st.integers(0, 99))
def test_all_to_all(found: Populations, seed: int) -> None:
    own = group(found, seed)
    cost = collective(own.cluster, own.shape, LinkOperation.ALL_TO_ALL, MESSAGE, PREDICTOR)
    assert_same(own.by_link(exchanged(own.ranks)), traffic(cost))
