"""What a target cannot express is refused for it, and legal for a target that can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from plans_mutations import with_pipeline, with_replica, with_stage
from plans_of_many import (
    Case,
    Want,
    pipeline_of,
    plain_case,
    small_cluster,
    small_island,
    small_job,
    small_model,
    summed_as,
    two_pipelines,
)
from rule_names import rule_of

from hetplan.job.spec import Optimizer
from hetplan.plans.assemble import assemble_plan
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    LayerRange,
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Schedule,
    Sharding,
    expand,
)
from hetplan.plans.rules import Rule
from hetplan.plans.targets import TARGETS


def interleaved(case: Case) -> Plan:
    stages = case.plan.pipelines[0].stages
    cuts = [(0, 3), (3, 5), (5, 7), (7, 10)]
    wants = [
        Want(
            devices=expand(stage.replicas[0].devices),
            chunks=tuple(LayerRange(start=cuts[k][0], stop=cuts[k][1]) for k in (s, s + 2)),
            tp=2,
        )
        for s, stage in enumerate(stages)
    ]
    schedule = Schedule(name="interleaved-1f1b", virtual_stages=2)
    pipeline = pipeline_of(case.cluster, case.job, wants, 4, schedule)
    return with_pipeline(assemble_plan(case.model, case.cluster, case.job, [pipeline]), 0, pipeline)


def changed(case: Case, what: str) -> Plan:
    """The plan of `plain_case` with something that not every target can express."""
    plan = case.plan
    pipeline = plan.pipelines[0]
    first, second = pipeline.stages
    if what == "interleaved":
        return interleaved(case)
    if what == "gpipe":
        depths = [own_depth(what, s, 2, pipeline.num_microbatches) for s in range(2)]
        stages = tuple(
            replace(stage, warmup_depth=depth)
            for stage, depth in zip(pipeline.stages, depths, strict=True)
        )
        order = replace(pipeline.schedule, name=what)
        return with_pipeline(plan, 0, replace(pipeline, stages=stages, schedule=order))
    if what == "selective":
        asks = Recompute(
            granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
        )
        stages = tuple(replace(stage, recompute=asks) for stage in pipeline.stages)
        return with_pipeline(plan, 0, replace(pipeline, stages=stages))
    if what == "unlike recompute":
        asks = Recompute(granularity=RecomputeGranularity.FULL)
        return with_stage(plan, 0, 0, replace(first, recompute=asks))
    if what == "unlike degrees":
        return assemble_plan(
            case.model,
            case.cluster,
            case.job,
            [
                replace(
                    pipeline,
                    stages=(
                        first,
                        replace(
                            second,
                            replicas=(replace(second.replicas[0], tp=4, microbatch_size=2),),
                        ),
                    ),
                )
            ],
        )
    if what == "sequence parallel":
        return with_replica(
            with_replica(plan, 0, 0, sequence_parallel=True), 0, 1, sequence_parallel=True
        )
    if what == "offload":
        return replace(plan, optimizer_offload=0.5)
    if what == "reduction overlap":
        return replace(plan, overlap=OverlapSettings(reduction=True))
    if what == "other format":
        boundary = replace(pipeline.boundaries[0], precision="float16")
        return with_pipeline(plan, 0, replace(pipeline, boundaries=(boundary,)))
    raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "native", "megatron"),
    [
        ("interleaved", "", "interleaves from 3 stages on"),
        ("gpipe", "runs 1f1b, interleaved-1f1b, not gpipe", "not gpipe"),
        ("selective", "cannot recompute core_attn alone", ""),
        ("unlike recompute", "", "recomputes the same on all stages"),
        ("unlike degrees", "", "differ between stages"),
        ("sequence parallel", "does not have it", ""),
        ("offload", "keeps optimizer state on the device", ""),
        ("reduction overlap", "does not overlap it", ""),
        ("other format", "sends what it computes", "sends what it computes"),
    ],
)
def test_what_a_target_cannot_express_is_named(what: str, native: str, megatron: str) -> None:
    for target, words in (("native", native), ("megatron", megatron), ("any", "")):
        case = plain_case(target)
        faults = check_plan(changed(case, what), case.model, case.cluster, case.job)
        assert {rule_of(fault) for fault in faults} == ({Rule.TARGET} if words else set()), target
        assert words in "".join(map(str, faults))


def test_several_pipelines_need_a_target_that_runs_them() -> None:
    case = two_pipelines()
    for name in ("megatron", "flagscale", "torchtitan"):
        job = replace(case.job, target=name)
        padded = TARGETS[name].padded_vocab_size(case.model.vocab_size, 2)
        plan = replace(case.plan, target=name, padded_vocab_size=padded)
        faults = check_plan(plan, case.model, case.cluster, job)
        assert {rule_of(fault) for fault in faults} == {Rule.TARGET}
        assert f"2; target {name} runs one" in str(faults[0])
    job = replace(case.job, target="native")
    plan = summed_as(replace(case.plan, target="native"), job)
    assert check_plan(plan, case.model, case.cluster, job) == ()


def test_megatron_trains_experts_with_sequence_parallelism() -> None:
    case = plain_case("megatron", experts=True)
    faults = check_plan(case.plan, case.model, case.cluster, case.job)
    assert {rule_of(fault) for fault in faults} == {Rule.TARGET}
    assert check_plan(changed(case, "sequence parallel"), case.model, case.cluster, case.job) == ()


def test_megatron_keeps_islands_and_nodes_whole() -> None:
    model, job = small_model(), small_job(4, "megatron")
    cluster = small_cluster(small_island("a", 2, 4), small_island("b", 1, 4))
    cuts = [(0, 4), (4, 7), (7, 10)]

    def found(devices: list[range]) -> str:
        wants = [
            Want(devices=mine, chunks=(LayerRange(start=start, stop=stop),), tp=2)
            for mine, (start, stop) in zip(devices, cuts, strict=True)
        ]
        plan = assemble_plan(model, cluster, job, [pipeline_of(cluster, job, wants, 2)])
        return "\n".join(map(str, check_plan(plan, model, cluster, job)))

    assert found([range(4), range(4, 8), range(8, 12)]) == ""
    assert "island a are not next to each other" in found([range(4), range(8, 12), range(4, 8)])
    assert "4 devices in 2 nodes of 4" in found([range(2, 6), range(6, 8), range(8, 12)])


def shape(**changed: object) -> Shape:
    return replace(Shape(tp=2, dp=2, microbatch_size=1), **changed)


def of_stages(
    target: str,
    *stages: Sequence[Part],
    tied: bool = False,
    sharding: Sharding = Sharding.NONE,
    optimizer: Optimizer = Optimizer.ADAMW,
) -> list[str]:
    """Faults of a pipeline of 4 microbatches of 4 sequences with these parts per stage."""
    twin = replace(small_island("a", 2, 4), name="twin")
    cluster = small_cluster(small_island("a", 2, 4), twin, small_island("b", 2, 4))
    model, job = small_model(8, tied=tied), replace(small_job(16, target), optimizer=optimizer)
    each, more = divmod(8, len(stages))
    pipeline = ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=tuple(parts),
                layers=(each + (s < more),),
                warmup_depth=own_depth("1f1b", s, len(stages), 4),
            )
            for s, parts in enumerate(stages)
        ),
        num_microbatches=4,
        schedule=Schedule(name="1f1b"),
    )
    chosen = ChosenPlan(pipelines=(pipeline,), sharding=sharding)
    plan = plan_of(model, cluster, job, chosen)
    assert chosen_of(plan, cluster, job, model) == chosen
    return [str(fault) for fault in check_plan(plan, model, cluster, job)]


ON_A, ON_TWIN = Part(island="a", shape=shape()), Part(island="twin", shape=shape())
ON_B = Part(island="b", shape=shape(dp=4))


@pytest.mark.parametrize("target", ["native", "megatron", "flagscale", "torchtitan", "any"])
def test_stages_may_lie_on_islands_of_one_kind(target: str) -> None:
    for sharding in (Sharding.NONE, Sharding.OPTIMIZER):
        assert of_stages(target, [ON_A, ON_TWIN], [ON_B], sharding=sharding) == []
    unlike = [ON_A, replace(ON_TWIN, shape=shape(tp=1))]
    faults = of_stages(target, unlike, [ON_B])
    if target in ("native", "any"):
        assert faults == []
    else:
        assert "differ between entries" in "".join(faults)


@pytest.mark.parametrize("target", ["native", "megatron", "flagscale", "torchtitan", "any"])
def test_unlike_kinds_in_a_stage_need_a_target_that_mixes_them(target: str) -> None:
    mixed = [ON_A, replace(ON_B, shape=shape())]
    faults = "".join(of_stages(target, mixed))
    assert ("mixes kind-a, kind-b" in faults) == (target not in ("native", "any"))
    assert bool(faults) == (target not in ("native", "any"))


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (shape(dp=2, microbatch_size=2), shape(dp=4), ""),
        (shape(dp=4), shape(dp=2, microbatch_size=2), "dp 4 and 2 at first and last stage"),
    ],
)
def test_flagscale_ties_ends_of_one_tp_and_dividing_dp(
    first: Shape, last: Shape, words: str
) -> None:
    stages = [Part(island="a", shape=first)], [Part(island="b", shape=last)]
    assert of_stages("flagscale", *stages) == []
    assert of_stages("native", *stages, tied=True) == []
    faults = "".join(of_stages("flagscale", *stages, tied=True))
    assert bool(faults) == bool(words)
    assert words in faults


def test_torchtitan_shards_over_context_parallel_ranks() -> None:
    part = Part(island="a", shape=shape(cp=2, tp=1))
    part = replace(part, shape=replace(part.shape, dp=4))
    faults = of_stages("torchtitan", [part])
    assert "shards over context-parallel ranks" in "".join(faults)
    assert of_stages("torchtitan", [part], sharding=Sharding.OPTIMIZER) == []
    assert of_stages("megatron", [part]) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_torchtitan_ties_ends_in_one_stage_only(target: str, tied: bool) -> None:
    faults = "".join(of_stages(target, [ON_A, ON_TWIN], [ON_B], tied=tied))
    words = "2; small ties embedding and head, which target torchtitan trains in one stage only"
    assert (words in faults) == bool(faults) == (tied and target == "torchtitan")
    assert of_stages(target, [ON_B], tied=tied) == []


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_megatron_shards_the_state_of_adam_only(target: str, optimizer: Optimizer) -> None:
    """megatron/core/optimizer/distrib_optimizer.py asserts it."""
    adam_only = target in ("megatron", "flagscale") and optimizer is Optimizer.SGD
    for sharding in (Sharding.NONE, Sharding.OPTIMIZER):
        faults = of_stages(target, [ON_A, ON_TWIN], [ON_B], sharding=sharding, optimizer=optimizer)
        refused = adam_only and sharding is Sharding.OPTIMIZER
        assert ("shards Adam's state only" in "".join(faults)) == bool(faults) == refused
