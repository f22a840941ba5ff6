"""Plans that are built from choices are legal; choices that cannot be placed are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_of_many import small_cluster, small_island, small_job, small_model

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import (
    Degrees,
    StageChoice,
    build_plan,
    stage_devices,
    stages_that_fit,
)
from hetplan.plans.check import check_plan
from hetplan.plans.plan import DeviceRange, LayerRange, Plan, Sharding, compress, expand

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)


def two_stage_plan() -> tuple[Plan, ModelSpec, Cluster, Job]:
    shape, machines, task = (
        small_model(),
        small_cluster(small_island("a", 2, 4), small_island("b", 1, 4)),
        small_job(16, "native"),
    )
    plan = build_plan(
        shape,
        machines,
        task,
        [
            StageChoice(island="a", transformer_layers=6),
            StageChoice(island="b", transformer_layers=2),
        ],
        Degrees(tp=2, dp=2, microbatch_size=1),
    )
    return plan, shape, machines, task


@SETTINGS
@given(st.lists(st.integers(0, 300), unique=True, max_size=40))
def test_compressed_devices_expand_to_the_same_devices(devices: list[int]) -> None:
    assert list(expand(compress(devices))) == devices


def test_regular_devices_compress_to_one_range() -> None:
    assert compress(range(5, 400, 7)) == (DeviceRange(start=5, count=57, stride=7),)


@SETTINGS
@given(st.data())
def test_every_plan_that_is_built_is_legal(data: st.DataObject) -> None:
    islands = [
        small_island(
            name,
            nodes := data.draw(st.integers(1, 4)),
            data.draw(st.sampled_from([1, 2, 4, 6, 8])),
            tuple(data.draw(st.sets(st.integers(0, nodes - 1), max_size=nodes - 1))),
        )
        for name in "abc"[: data.draw(st.integers(1, 3))]
    ]
    degrees = Degrees(
        tp=data.draw(st.sampled_from([1, 2, 4, 8])),
        dp=data.draw(st.integers(1, 8)),
        microbatch_size=data.draw(st.integers(1, 3)),
        full_recompute=data.draw(st.booleans()),
    )
    choices = [
        StageChoice(island=each.name, transformer_layers=data.draw(st.integers(1, 4)))
        for each in islands
        for _ in range(data.draw(st.integers(0, stages_that_fit(each, degrees))))
    ]
    if not choices:
        return
    shape = small_model(sum(choice.transformer_layers for choice in choices))
    machines = small_cluster(*islands)
    microbatches = len(choices) + data.draw(st.integers(0, 3))
    task = small_job(degrees.dp * degrees.microbatch_size * microbatches, "native")
    plan = build_plan(shape, machines, task, choices, degrees)
    assert check_plan(plan, shape, machines, task) == ()
    used = [d for stage in plan.pipelines[0].stages for d in stage_devices(stage)]
    assert sorted([*used, *expand(plan.unused_devices)]) == list(range(machines.num_devices))
    assert len(used) == len(choices) * degrees.tp * degrees.dp


def test_embedding_and_head_are_in_the_first_and_last_stage() -> None:
    plan, _, _, _ = two_stage_plan()
    ranges = [stage.chunks[0] for stage in plan.pipelines[0].stages]
    assert ranges == [LayerRange(start=0, stop=7), LayerRange(start=7, stop=10)]


def test_megatron_pads_the_vocabulary_and_shards_the_optimizer() -> None:
    shape, machines = small_model(), small_cluster(small_island("a", 1, 4))
    plan = build_plan(
        shape,
        machines,
        small_job(8, "megatron"),
        [StageChoice(island="a", transformer_layers=8)],
        Degrees(tp=2, dp=2, microbatch_size=1),
    )
    assert plan.padded_vocab_size == 256
    assert plan.optimizer_shards == 2
    assert plan.sharding is Sharding.OPTIMIZER


@pytest.mark.parametrize(
    ("choices", "degrees", "words"),
    [
        ([("a", 7)], (1, 1, 1), "hold 7 transformer layers, small has 8"),
        ([("a", 8), ("a", 0)], (1, 1, 1), "stage 1 has no transformer layer"),
        ([("a", 1)] * 9, (1, 1, 1), "9 pipeline stages for 8 transformer layers"),
        ([("a", 8)], (1, 3, 1), "not a multiple of microbatch size 1 x dp 3"),
        ([("a", 8)], (3, 1, 1), "no room"),
        ([("a", 4), ("b", 2), ("a", 2)], (1, 1, 1), "not next to each other"),
        ([("b", 2)] * 4, (2, 1, 1), "no room for stage 3"),
        ([("x", 8)], (1, 1, 1), "no island is named x"),
        ([("a", 2)] * 4, (1, 1, 8), "2 microbatches for 4 stages"),
    ],
)
def test_choices_that_cannot_be_placed_are_refused(
    choices: list[tuple[str, int]], degrees: tuple[int, int, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        build_plan(
            small_model(),
            small_cluster(small_island("a", 2, 4), small_island("b", 1, 4)),
            small_job(16, "native"),
            [StageChoice(island=name, transformer_layers=count) for name, count in choices],
            Degrees(tp=degrees[0], dp=degrees[1], microbatch_size=degrees[2]),
        )
