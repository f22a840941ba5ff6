"""Plans of one 1F1B pipeline whose stages share their degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Plan,
    Schedule,
    Sharding,
)
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """One stage: the island it runs on and how many transformer layers it holds."""

    island: str
    transformer_layers: int


def build_plan(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    choices: Sequence[StageChoice],
    degrees: Shape,
    *,
    full_recompute: bool = False,
) -> Plan:
    """The plan of these stages; an InputError where they cannot be placed."""
    count = job.global_batch_size // (degrees.microbatch_size * degrees.dp)
    shape = Shape(
        tp=degrees.tp,
        dp=degrees.dp,
        microbatch_size=degrees.microbatch_size,
        etp=degrees.tp if experts_of(model, 0, len(model.layers)) else 1,
    )
    full = FULL_RECOMPUTE if full_recompute else NO_RECOMPUTE
    stages = tuple(
        ChosenStage(
            parts=(Part(island=choice.island, shape=shape),),
            layers=(choice.transformer_layers,),
            recompute=full,
            warmup_depth=own_depth("1f1b", at, len(choices), count),
        )
        for at, choice in enumerate(choices)
    )
    pipeline = ChosenPipeline(stages=stages, num_microbatches=count, schedule=Schedule(name="1f1b"))
    sharding = Sharding.OPTIMIZER if target(job.target).optimizer_sharding else Sharding.NONE
    return plan_of(model, cluster, job, ChosenPlan(pipelines=(pipeline,), sharding=sharding))
