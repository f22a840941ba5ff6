"""Which choices make a plan: the inverse of `hetplan.plans.build.plan_of`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import stage_copies, stage_shards
from hetplan.plans.plan import OverlapSettings, Plan, RecomputeModule, Sharding, Stage

SELECTIVE_MODULES = (RecomputeModule.CORE_ATTENTION,)
"""What a chosen stage that recomputes selectively runs again."""


def chosen_of(plan: Plan, cluster: Cluster, model: ModelSpec | None = None) -> ChosenPlan:
    """The choices that make this plan, but for the numbers of its devices.

    Without a model the only layer behind the transformer layers is the head. An InputError names
    what no choices can say: recomputation of other parts than attention, shards that are not all
    ranks of every stage, offloading, overlap.
    """
    faults = tuple(_beyond_choices(plan))
    if faults:
        raise InputError(*faults)
    total = max(c.stop for each in plan.pipelines for s in each.stages for c in s.chunks)
    end = total - 1 if model is None else 1 + model.num_layers
    return ChosenPlan(
        pipelines=tuple(
            ChosenPipeline(
                stages=tuple(_chosen_stage(cluster, stage, end) for stage in pipeline.stages),
                num_microbatches=pipeline.num_microbatches,
                schedule=pipeline.schedule,
            )
            for pipeline in plan.pipelines
        ),
        sharding=plan.sharding,
        early_sends=plan.overlap.send,
    )


def _chosen_stage(cluster: Cluster, stage: Stage, end: int) -> ChosenStage:
    return ChosenStage(
        parts=tuple(
            Part(
                island=cluster.island_of_device(replica.devices[0].start).name,
                shape=Shape(
                    tp=replica.tp,
                    cp=replica.cp,
                    dp=replica.dp,
                    microbatch_size=replica.microbatch_size,
                    ep=replica.ep,
                    etp=replica.etp,
                    sequence_parallel=replica.sequence_parallel,
                ),
            )
            for replica in stage.replicas
        ),
        # Position 0 is the embedding; what stands behind the transformer layers is not counted.
        layers=tuple(min(chunk.stop, end) - max(chunk.start, 1) for chunk in stage.chunks),
        recompute=stage.recompute.granularity,
        warmup_depth=stage.warmup_depth,
    )


def _beyond_choices(plan: Plan) -> Iterator[Fault]:
    stages = [
        (f"pipelines[{p}].stages[{s}]", stage)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    ]
    for field, stage in stages:
        asks = stage.recompute
        if asks.layers is not None:
            message = f"{asks.layers}; searched plans recompute all layers of a stage or none"
            yield Fault(field=f"{field}.recompute.layers", message=message)
        if asks.modules not in ((), SELECTIVE_MODULES):
            message = f"{', '.join(asks.modules)}; searched plans recompute core_attn alone"
            yield Fault(field=f"{field}.recompute.modules", message=message)
    shards = plan.optimizer_shards
    if plan.sharding not in (Sharding.NONE, Sharding.OPTIMIZER):
        message = f"{plan.sharding}; searched plans shard the optimizer state or nothing"
        yield Fault(field="sharding", message=message)
    elif plan.sharding is Sharding.OPTIMIZER and any(
        stage_shards(shards, stage) != stage_copies(stage) for _, stage in stages
    ):
        message = f"{shards}; searched plans shard over all ranks of a stage"
        yield Fault(field="optimizer_shards", message=message)
    if plan.optimizer_offload:
        message = f"{plan.optimizer_offload}; searched plans keep optimizer state on the device"
        yield Fault(field="optimizer_offload", message=message)
    if replace(plan.overlap, send=False) != OverlapSettings():
        message = "searched plans overlap what a plan does by default, and sends"
        yield Fault(field="overlap", message=message)
