"""Does a chosen plan of 1F1B pipelines keep the job's pins?"""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job, Pins
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.search.families.allowed import matches


def keeps_pins(chosen: ChosenPlan, cluster: Cluster, job: Job) -> bool:
    """Whether every choice that the job pins is as it says."""
    pin = job.pin
    if pin.pipelines not in (None, len(chosen.pipelines)):
        return False
    if not _keeps_sharding(chosen, pin) or not _keeps_depth(chosen, pin):
        return False
    stages = [stage for pipeline in chosen.pipelines for stage in pipeline.stages]
    shapes = {part.shape for stage in stages for part in stage.parts}
    if pin.same_degrees and (len(shapes) > 1 or any(len(stage.parts) > 1 for stage in stages)):
        return False
    return all(_keeps(pipeline, cluster, pin) for pipeline in chosen.pipelines)


def _keeps_sharding(chosen: ChosenPlan, pin: Pins) -> bool:
    """Where every stage has one copy of its weights there is nothing to shard, as pinned or not."""
    several = any(
        sum(part.shape.dp * part.shape.cp for part in stage.parts) > 1
        for pipeline in chosen.pipelines
        for stage in pipeline.stages
    )
    shards = chosen.sharding is Sharding.OPTIMIZER
    return pin.sharded_optimizer in (None, shards) or (not several and not shards)


def _keeps_depth(chosen: ChosenPlan, pin: Pins) -> bool:
    if pin.depth is None:
        return True
    if chosen.early_sends != (pin.depth > 0):
        return False
    return all(
        stage.warmup_depth <= min(len(each.stages) - s + pin.depth, each.num_microbatches)
        for each in chosen.pipelines
        for s, stage in enumerate(each.stages)
    )


def _keeps(pipeline: ChosenPipeline, cluster: Cluster, pin: Pins) -> bool:
    stages = pipeline.stages
    if pin.pp not in (None, len(stages)):
        return False
    if pin.virtual_stages not in (None, pipeline.schedule.virtual_stages):
        return False
    ends = ((stages[0], pin.embedding_on), (stages[-1], pin.head_on))
    return all(_keeps_stage(stage, pin) for stage in stages) and all(
        matches(cluster.island(part.island), place) for stage, place in ends for part in stage.parts
    )


_RECOMPUTE = {True: RecomputeGranularity.FULL, False: RecomputeGranularity.NONE}
"""What a pin asks of every stage."""


def _keeps_stage(stage: ChosenStage, pin: Pins) -> bool:
    if pin.recompute is not None and stage.recompute is not _RECOMPUTE[pin.recompute]:
        return False
    if pin.dp not in (None, sum(part.shape.dp for part in stage.parts)):
        return False
    return all(_keeps_shape(part.shape, pin) for part in stage.parts)


def _keeps_shape(shape: Shape, pin: Pins) -> bool:
    if shape.tp > 1 and pin.sequence_parallel not in (None, shape.sequence_parallel):
        return False
    pinned = (
        (pin.tp, shape.tp),
        (pin.cp, shape.cp),
        (pin.ep, shape.ep),
        (pin.microbatch_size, shape.microbatch_size),
    )
    return all(wanted in (None, held) for wanted, held in pinned)
