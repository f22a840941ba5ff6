"""Stages of any sizes get devices of their own, inside one node or in whole ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans_of_many import small_cluster, small_island, small_job, small_model

from hetplan.errors import InputError
from hetplan.plans.assemble import device_ranges, positions
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Schedule,
    Sharding,
    expand,
)


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24]), max_size=12), st.integers(1, 8))
def test_sizes_that_divide_each_other_fit_whenever_they_are_no_more_than_there_are(
    sizes: list[int], nodes: int
) -> None:
    # Of 24 and 16 each is whole nodes; all others divide 8.
    found = positions(sizes, 8, nodes)
    assert (found is not None) == (sum(sizes) <= 8 * nodes)
    check_positions(sizes, found, 8, nodes)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12, 24]), max_size=9), st.integers(1, 4))
def test_other_sizes_stay_in_their_nodes(sizes: list[int], nodes: int) -> None:
    check_positions(sizes, positions(sizes, 12, nodes), 12, nodes)


def check_positions(
    sizes: list[int], found: tuple[int, ...] | None, per_node: int, nodes: int
) -> None:
    if found is None:
        return
    taken = [
        at for start, size in zip(found, sizes, strict=True) for at in range(start, start + size)
    ]
    assert len(set(taken)) == len(taken)
    assert all(0 <= at < per_node * nodes for at in taken)
    for start, size in zip(found, sizes, strict=True):
        one_node = start // per_node == (start + size - 1) // per_node
        assert one_node or (start % per_node == 0 and size % per_node == 0)


def test_stages_stand_in_the_order_in_which_they_are_given_where_that_fits() -> None:
    assert positions([2, 2, 4, 1, 8], 8, 3) == (0, 2, 4, 8, 16)
    # In order the 8 would need a third node.
    assert positions([1, 8, 4], 8, 2) == (12, 0, 8)
    assert positions([5, 5], 10, 1) == (0, 5)
    assert positions([3, 4, 3, 2], 12, 1) == (4, 0, 7, 10)


def test_devices_of_nodes_that_are_out_are_passed_over() -> None:
    island = small_island("a", 4, 2, out=(1,))
    cluster = small_cluster(small_island("z", 1, 2), island)
    assert expand(device_ranges(cluster, island, 1, 3)) == (3, 6, 7)
    whole = small_island("a", 4, 2)
    assert expand(device_ranges(small_cluster(whole), whole, 1, 3)) == (1, 2, 3)


def several(*rows: list[tuple[str, Shape, tuple[int, ...]]], counts: tuple[int, ...]) -> ChosenPlan:
    return ChosenPlan(
        pipelines=tuple(
            ChosenPipeline(
                stages=tuple(
                    ChosenStage(
                        parts=(Part(island=island, shape=shape),),
                        layers=layers,
                        warmup_depth=own_depth("1f1b", s, len(row), count),
                        recompute=FULL_RECOMPUTE if s else NO_RECOMPUTE,
                    )
                    for s, (island, shape, layers) in enumerate(row)
                ),
                num_microbatches=count,
                schedule=Schedule(name="1f1b"),
            )
            for row, count in zip(rows, counts, strict=True)
        ),
        sharding=Sharding.OPTIMIZER,
    )


def test_pipelines_share_an_island_by_whole_stages() -> None:
    """Three pipelines: two halves of a node and a pair of nodes, one node over two islands."""
    model = small_model(8)
    cluster = small_cluster(small_island("a", 4, 4), small_island("b", 1, 4))
    small, large = Shape(tp=2, dp=1, microbatch_size=1), Shape(tp=2, dp=4, microbatch_size=1)
    chosen = several(
        [("a", small, (3,)), ("a", small, (5,))],
        [("a", large, (8,))],
        [("a", small, (4,)), ("b", small, (4,))],
        counts=(3, 1, 2),
    )
    job = small_job(3 + 4 + 2, "native")
    plan = plan_of(model, cluster, job, chosen)
    assert check_plan(plan, model, cluster, job) == ()
    assert chosen_of(plan, cluster, job) == chosen
    devices = [
        [expand(stage.replicas[0].devices) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    assert devices[0] == [(0, 1), (2, 3)]
    assert devices[1] == [tuple(range(4, 12))]
    assert devices[2] == [(12, 13), (16, 17)]


def test_more_pipelines_than_an_island_holds_are_refused() -> None:
    cluster, model, job = (
        small_cluster(small_island("a", 1, 4)),
        small_model(4),
        small_job(3, "any"),
    )
    half = Shape(tp=2, dp=1, microbatch_size=1)
    chosen = several(
        [("a", half, (4,))], [("a", half, (4,))], [("a", half, (4,))], counts=(1, 1, 1)
    )
    with pytest.raises(InputError, match="no room for stage 3 of tp 2 x dp 1"):
        plan_of(model, cluster, job, chosen)


@pytest.mark.parametrize(
    ("shape", "layers", "virtual", "words"),
    [
        (Shape(tp=3, dp=1, microbatch_size=1), (4,), 1, "no room for stage 1 of tp 3"),
        (Shape(tp=1, cp=3, dp=1, microbatch_size=1), (4,), 1, "x cp 3 x dp 1"),
        (Shape(tp=0, dp=1, microbatch_size=1), (4,), 1, "at least 1"),
        (Shape(tp=1, dp=1, microbatch_size=1), (3,), 1, "3 transformer layers, small has 4"),
        (Shape(tp=1, dp=1, microbatch_size=1), (4, 0), 2, "has no transformer layer"),
        (Shape(tp=1, dp=1, microbatch_size=1), (4,), 2, "1 numbers of layers for 2"),
    ],
)
def test_choices_without_a_plan_are_refused(
    shape: Shape, layers: tuple[int, ...], virtual: int, words: str
) -> None:
    cluster, model, job = (
        small_cluster(small_island("a", 1, 4)),
        small_model(4),
        small_job(2, "any"),
    )
    stage = ChosenStage(parts=(Part(island="a", shape=shape),), layers=layers, warmup_depth=1)
    schedule = Schedule(name="interleaved-1f1b" if virtual > 1 else "1f1b", virtual_stages=virtual)
    pipeline = ChosenPipeline(stages=(stage,), num_microbatches=2, schedule=schedule)
    with pytest.raises(InputError, match=words):
        plan_of(model, cluster, job, ChosenPlan(pipelines=(pipeline,)))
    with pytest.raises(InputError, match="at least one pipeline"):
        plan_of(model, cluster, job, ChosenPlan(pipelines=()))
