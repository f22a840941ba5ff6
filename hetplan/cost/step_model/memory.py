"""Memory of a plan's stages: which layout each of them is (`hetplan.cost.memory.device`)."""

from __future__ import annotations

import math

from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MemoryLayout
from hetplan.cost.step_model.plan import PlanCosts
from hetplan.cost.step_model.units import Unit
from hetplan.cost.step_model.work import PipelineWork
from hetplan.plans.pieces import stage_shards
from hetplan.plans.plan import Plan


def stages_memory(costs: PlanCosts, plan: Plan, pipeline: PipelineWork) -> tuple[MemoryUse, ...]:
    """Of every stage of a pipeline; kept per place in it and layers of each kind."""
    described = pipeline.pipeline
    schedule = described.schedule
    place = (schedule.name, described.num_microbatches, len(described.stages))
    found = []
    for s, stage in enumerate(pipeline.stages):
        counts = stage.unit.counts
        depth = described.stages[s].warmup_depth
        key: tuple[object, ...]
        if len(stage.units) == 1 and stage.unit.recompute.layers is None:
            # Where the layers of a kind stand does not matter.
            held = [each[stop] - each[start] for start, stop in stage.ranges for each in counts]
            key = (id(stage.unit), s, depth, place, *held)
        else:
            key = (*map(id, stage.units), s, depth, place, stage.ranges)
        use = costs.memory.get(key)
        if use is None:
            use = costs.memory[key] = stage_memory_use(costs, plan, pipeline, s)
        found.append(use)
    return tuple(found)


def stage_memory_use(costs: PlanCosts, plan: Plan, pipeline: PipelineWork, s: int) -> MemoryUse:
    """Of the fullest device of a stage; of several replica entries that which needs most."""
    uses = [
        device_memory(
            costs.settings.model,
            costs.settings.job,
            memory_layout(costs, plan, pipeline, s, unit),
            unit.island.memory_bytes,
        )
        for unit in pipeline.stages[s].units
    ]
    return max(uses, key=lambda use: use.total_bytes - use.available_bytes)


def memory_layout(
    costs: PlanCosts, plan: Plan, pipeline: PipelineWork, s: int, unit: Unit
) -> MemoryLayout:
    """Everything about the stage that decides its memory."""
    replica, schedule = unit.replica, pipeline.pipeline.schedule
    stages = pipeline.pipeline.stages
    copies = replica.num_devices // (replica.ep * replica.etp)
    shards = stage_shards(plan.optimizer_shards, stages[s])
    return MemoryLayout(
        chunks=stages[s].chunks,
        tp=replica.tp,
        cp=replica.cp,
        ep=replica.ep,
        etp=replica.tp if unit.pricer.shape.experts_like_rest else replica.etp,
        dp=replica.dp,
        microbatch_size=replica.microbatch_size,
        num_microbatches=pipeline.pipeline.num_microbatches,
        schedule=schedule.name,
        stage=s,
        num_stages=len(stages),
        warmup=tuple(stage.warmup_depth for stage in stages) if schedule.name == "1f1b" else None,
        early_sends=plan.overlap.send and schedule.name == "1f1b",
        sequence_parallel=replica.sequence_parallel,
        recompute=unit.recompute,
        sharding=costs.settings.sharding,
        shards=shards,
        expert_shards=None
        if unit.pricer.shape.experts_like_rest
        else math.gcd(plan.optimizer_shards, copies),
        offload=plan.optimizer_offload,
    )
