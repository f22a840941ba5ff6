"""What a target cannot express is refused for it, and legal for a target that can."""

from __future__ import annotations

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
    two_pipelines,
)

from hetplan.cluster.catalogue import load_catalogue
from hetplan.job.spec import Precision, ProductFormat, TrainerOptions
from hetplan.plans.assemble import assemble_plan
from hetplan.plans.check import check_plan
from hetplan.plans.depths import own_depth
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
from hetplan.plans.rules import Rule, rule_of
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
    if what == "interleaved with overlap":
        return replace(interleaved(case), overlap=OverlapSettings(send=True))
    if what in ("gpipe", "zb-h1"):
        depths = [own_depth(what, s, 2, pipeline.num_microbatches) for s in range(2)]
        stages = tuple(
            replace(stage, warmup_depth=depth)
            for stage, depth in zip(pipeline.stages, depths, strict=True)
        )
        order = replace(pipeline.schedule, name=what)
        return with_pipeline(plan, 0, replace(pipeline, stages=stages, schedule=order))
    if what == "deeper":
        return with_stage(plan, 0, 0, replace(first, warmup_depth=3))
    if what in ("full", "selective"):
        asks = Recompute(
            granularity=RecomputeGranularity(what),
            modules=(RecomputeModule.CORE_ATTENTION,) if what == "selective" else (),
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
    if what == "send overlap":
        return replace(plan, overlap=OverlapSettings(send=True))
    if what == "parameters":
        return replace(plan, sharding=Sharding.PARAMETERS, optimizer_shards=2)
    if what == "other format":
        boundary = replace(pipeline.boundaries[0], precision="float16")
        return with_pipeline(plan, 0, replace(pipeline, boundaries=(boundary,)))
    raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "native", "megatron"),
    [
        ("interleaved", "runs 1f1b, not interleaved", "interleaves from 3 stages on"),
        ("interleaved with overlap", "runs 1f1b, not interleaved", ""),
        ("gpipe", "runs 1f1b, not gpipe", "not gpipe"),
        ("zb-h1", "runs 1f1b, not zb-h1", "not zb-h1"),
        ("deeper", "always has [2, 1]", "always has [2, 1]"),
        ("full", "", ""),
        ("selective", "cannot recompute core_attn alone", ""),
        ("unlike recompute", "", "recomputes the same on all stages"),
        ("unlike degrees", "differ between stages", "differ between stages"),
        ("sequence parallel", "does not have it", ""),
        ("offload", "keeps optimizer state on the device", ""),
        ("reduction overlap", "does not overlap it", ""),
        ("send overlap", "does not overlap it", "only with virtual stages"),
        ("parameters", "cannot shard parameters", "cannot shard parameters"),
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
    for name in ("native", "megatron"):
        job = replace(case.job, target=name)
        padded = TARGETS[name].padded_vocab_size(case.model.vocab_size, 2)
        plan = replace(case.plan, target=name, padded_vocab_size=padded)
        faults = check_plan(plan, case.model, case.cluster, job)
        assert {rule_of(fault) for fault in faults} == {Rule.TARGET}
        assert f"2; target {name} runs one" in str(faults[0])


def test_megatron_trains_experts_with_sequence_parallelism() -> None:
    case = plain_case("megatron", experts=True)
    faults = check_plan(case.plan, case.model, case.cluster, case.job)
    assert {rule_of(fault) for fault in faults} == {Rule.TARGET}
    assert check_plan(changed(case, "sequence parallel"), case.model, case.cluster, case.job) == ()


def test_native_has_no_experts() -> None:
    case = plain_case("native", experts=True)
    faults = check_plan(case.plan, case.model, case.cluster, case.job)
    assert any("native cannot train the model" in str(fault) for fault in faults)


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
    assert "4 devices in 2 nodes of 4" in found([range(2, 6), range(8, 10), range(10, 12)])


def test_narrow_products_need_devices_that_have_their_rate() -> None:
    case = plain_case()
    kinds = {kind.kind: kind for kind in load_catalogue()}

    def found(kind: str, asked: ProductFormat) -> list[str]:
        islands = tuple(replace(each, device=kinds[kind]) for each in case.cluster.islands)
        job = replace(
            case.job,
            target="megatron",
            precision=Precision.BFLOAT16,
            trainer=TrainerOptions(product_format=asked),
        )
        plan = replace(case.plan, target="megatron", precision="bfloat16")
        cluster = replace(case.cluster, islands=islands)
        faults = check_plan(plan, case.model, cluster, job)
        return [fault.message for fault in faults if "product_format" in fault.message]

    assert found("nvidia-b200-180gb-sxm", ProductFormat.NVFP4) == []
    assert found("nvidia-h100-80gb-sxm", ProductFormat.FLOAT8) == []
    four = found("nvidia-h100-80gb-sxm", ProductFormat.NVFP4)
    assert len(four) == len(case.plan.pipelines[0].stages)
    assert "nvidia-h100-80gb-sxm has no float4 rate" in four[0]
    assert "has no float8 rate" in found("nvidia-a100-80gb-sxm", ProductFormat.MXFP8)[0]
