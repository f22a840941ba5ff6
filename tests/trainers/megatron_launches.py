"""Plans on hosts with names, and what is emitted of them for Megatron-LM."""

from __future__ import annotations

from dataclasses import replace

from megatron_models import device, llama
from megatron_plans import job_of, result_for
from one_pipeline import StageChoice, build_plan

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees
from hetplan.plans.plan import (
    Recompute,
)
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout, rank_layout
from hetplan.search.result import SearchResult
from hetplan.trainers.megatron.write import TRAINER

NO_OPTIONS = EmissionOptions()
_INSIDE = Link(
    bandwidth_bytes_per_second=3e11, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
_NEAR = replace(_INSIDE, bandwidth_bytes_per_second=2.5e10)
_FAR = replace(_NEAR, latency_seconds=0.05, transport=Transport.HOST_STAGED)


def island(name: str, region: str, kind: str = "nvidia-h100-80gb-sxm", nodes: int = 2) -> Island:
    return Island(
        name=name,
        region=region,
        device=device(kind),
        nodes=nodes,
        devices_per_node=8,
        intra_node=_INSIDE,
        inter_node=_NEAR,
        memory_bytes=8e10,
        node_names=(f"{name}[0-{nodes - 1}]",),
    )


def machines(*islands: Island, fabric: bool = False) -> Cluster:
    domain = LaunchDomain(
        name="d",
        islands=tuple(each.name for each in islands),
        interface="eth0",
        fabric_devices=("mlx5_0", "mlx5_1") if fabric else (),
    )
    return Cluster(
        name="c",
        islands=islands,
        within_region=_NEAR,
        across_regions=_FAR,
        launch_domains=(domain,),
    )


def planned(
    cluster: Cluster,
    *layers: int,
    model: ModelSpec | None = None,
    job: Job | None = None,
    tp: int = 8,
    dp: int = 1,
) -> SearchResult:
    """One stage per island, with so many layers."""
    model = model or llama(sum(layers))
    job = job or job_of(8)
    choices = [
        StageChoice(island=each.name, transformer_layers=count)
        for each, count in zip(cluster.islands, layers, strict=True)
    ]
    plan = build_plan(model, cluster, job, choices, Degrees(tp=tp, dp=dp, microbatch_size=1))
    return result_for(plan, model, cluster, job)


def here(**changes: object) -> SearchResult:
    """Two stages on two islands of one region."""
    result = planned(machines(island("a", "n"), island("b", "n")), 3, 5)
    return replace(result, **changes) if changes else result  # type: ignore[arg-type]


def sheet(result: SearchResult) -> RankLayout:
    return rank_layout(result.plan, result.inputs.cluster, data_outermost=True)


def launched(result: SearchResult, options: EmissionOptions = NO_OPTIONS) -> TrainerLaunch:
    assert TRAINER.faults(result, sheet(result), options) == ()
    return TRAINER.launch(result, sheet(result), options)


def flags(
    result: SearchResult, options: EmissionOptions = NO_OPTIONS
) -> dict[str, tuple[str, ...]]:
    launch = launched(result, options)
    names = [entry[0] for entry in launch.arguments]
    assert len(set(names)) == len(names)
    return {entry[0]: entry[1:] for entry in launch.arguments}


def messages(result: SearchResult, options: EmissionOptions = NO_OPTIONS) -> list[str]:
    return [
        f"{fault.field}: {fault.message}"
        for fault in TRAINER.faults(result, sheet(result), options)
    ]


def with_job(result: SearchResult, **changes: object) -> SearchResult:
    job = replace(result.inputs.job, **changes)  # type: ignore[arg-type]
    return replace(result, inputs=replace(result.inputs, job=job))


def with_plan(result: SearchResult, **changes: object) -> SearchResult:
    return replace(result, plan=replace(result.plan, **changes))  # type: ignore[arg-type]


def with_recompute(result: SearchResult, recompute: Recompute) -> SearchResult:
    (pipeline,) = result.plan.pipelines
    stages = tuple(replace(stage, recompute=recompute) for stage in pipeline.stages)
    return with_plan(result, pipelines=(replace(pipeline, stages=stages),))
