"""Plans that are built from choices are legal; choices that cannot be placed are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_pipeline import StageChoice, build_plan
from plans_of_many import small_cluster, small_island, small_job, small_model

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import stages_with_room
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import Shape
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.plans.plan import DeviceRange, LayerRange, Plan, Sharding, compress, expand

STEADY = settings(derandomize=True, deadline=None, max_examples=200)


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
        Shape(tp=2, dp=2, microbatch_size=1),
    )
    return plan, shape, machines, task


@STEADY
@given(st.lists(st.integers(0, 300), unique=True, max_size=40))
def test_compressed_devices_expand_to_the_same_devices(devices: list[int]) -> None:
    assert list(expand(compress(devices))) == devices


def test_regular_devices_compress_to_one_range() -> None:
    assert compress(range(5, 400, 7)) == (DeviceRange(start=5, count=57, stride=7),)


@STEADY
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
    degrees = Shape(
        tp=data.draw(st.sampled_from([1, 2, 4, 8])),
        dp=data.draw(st.integers(1, 8)),
        microbatch_size=data.draw(st.integers(1, 3)),
    )
    choices = [
        StageChoice(island=each.name, transformer_layers=data.draw(st.integers(1, 4)))
        for each in islands
        for _ in range(
            data.draw(st.integers(0, stages_with_room(each, degrees.tp, degrees.tp * degrees.dp)))
        )
    ]
    if not choices:
        return
    shape = small_model(sum(choice.transformer_layers for choice in choices))
    machines = small_cluster(*islands)
    microbatches = len(choices) + data.draw(st.integers(0, 3))
    task = small_job(degrees.dp * degrees.microbatch_size * microbatches, "native")
    full = data.draw(st.booleans())
    plan = build_plan(shape, machines, task, choices, degrees, full_recompute=full)
    assert check_plan(plan, shape, machines, task) == ()
    used = [d for stage in plan.pipelines[0].stages for d in expand(stage.devices)]
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
        Shape(tp=2, dp=2, microbatch_size=1),
    )
    assert plan.padded_vocab_size == 256
    assert plan.optimizer_shards == 2
    assert plan.sharding is Sharding.OPTIMIZER


LAYOUTS = (
    ({"layers": (7,)}, "hold 7 transformer layers, small has 8"),
    ({"layers": (8, 0)}, "stage 1 has no transformer layer"),
    ({"pp": 9}, "9 pipeline stages for 8 transformer layers"),
    ({"microbatch_size": 3}, "not a multiple of microbatch size 3 x dp 1"),
    ({"tp": 3}, "tp must divide the devices of a node"),
    ({"layers": (4, 2, 2), "islands": ("b",), "tp": 2}, "no room for stage 3"),
    ({"islands": ("x",)}, "no island is named x"),
    ({"pp": 4, "microbatch_size": 8}, "needs at least one microbatch per stage"),
    ({"layers": (4, 4), "pp": 3}, "layers has 2 stages"),
    ({"layers": (4, 4, 4), "virtual_stages": 2}, "3 entries for 2 virtual stages"),
)


def test_layouts_that_cannot_be_placed_are_refused() -> None:
    cluster = small_cluster(small_island("a", 2, 4), small_island("b", 1, 4))
    for degrees, words in LAYOUTS:
        layout = Layout(**{"dp": 1, **degrees})
        with pytest.raises(InputError, match=words):
            plan_of_layout(layout, small_model(), cluster, small_job(16, "native"))
