"""Does a chosen plan keep the job's pins?"""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.search.families.allowed import matches


def keeps_pins(chosen: ChosenPlan, cluster: Cluster, job: Job) -> bool:
    """Whether every choice that the job pins is as it says."""
    pin = job.pin
    if pin.pipelines not in (None, len(chosen.pipelines)):
        return False
    if pin.sharded_optimizer not in (None, chosen.sharding is Sharding.OPTIMIZER):
        return False
    if pin.depth == 0 and chosen.early_sends:
        return False
    shapes = {part.shape for p in chosen.pipelines for s in p.stages for part in s.parts}
    if pin.same_degrees and len(shapes) > 1:
        return False
    return all(_keeps(pipeline, cluster, job) for pipeline in chosen.pipelines)


def _keeps(pipeline: ChosenPipeline, cluster: Cluster, job: Job) -> bool:
    pin, stages = job.pin, pipeline.stages
    if pin.pp not in (None, len(stages)) or pin.virtual_stages not in (None, 1):
        return False
    for stage in stages:
        again = stage.recompute is not RecomputeGranularity.NONE
        if pin.recompute not in (None, again):
            return False
        if pin.dp not in (None, sum(part.shape.dp for part in stage.parts)):
            return False
        for part in stage.parts:
            shape = part.shape
            if pin.tp not in (None, shape.tp) or pin.cp not in (None, shape.cp):
                return False
            if pin.microbatch_size not in (None, shape.microbatch_size):
                return False
    ends = ((stages[0], pin.embedding_on), (stages[-1], pin.head_on))
    return all(
        matches(cluster.island(part.island), place) for stage, place in ends for part in stage.parts
    )
