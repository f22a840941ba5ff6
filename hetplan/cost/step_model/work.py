"""What one plan's stages and hops take, and when its stages leave their pipelines, by replay.

Whose rendezvous sends and receives a replay follows is a matter of the target and of the job's
trainer (`exchange_of`). The commonest pipelines (one, 1F1B, one chunk per stage, nothing shared)
have a replay of their own that is much faster, with equal ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.kernel import pipeline_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.cost.step_model.groups import ALL_KEPT
from hetplan.cost.step_model.hops import HopArrays
from hetplan.cost.step_model.units import Unit
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.plans.plan import Pipeline, Plan
from hetplan.plans.targets import target


@dataclass(slots=True)
class StageWork:
    """One stage of a plan: its units and the seconds of its chunks."""

    units: tuple[Unit, ...]
    unit: Unit
    """The slowest of them, which the others wait for."""
    ranges: tuple[tuple[int, int], ...]
    forward: tuple[float, ...]
    """Per chunk, one microbatch."""
    backward: tuple[float, ...]
    """With recomputation; where the schedule delays the gradients of the weights, without them."""
    weight: tuple[float, ...]
    parameters: float
    expert_parameters: float
    delays: tuple[tuple[float, float], ...] = ()
    """Per chunk, what sends beside them make (forward, backward) longer; in those already."""


@dataclass(slots=True)
class PipelineWork:
    """One pipeline of a plan."""

    pipeline: Pipeline
    stages: list[StageWork]
    hops: HopArrays
    exchange: Exchange = Exchange.TORCH
    """Whose order of sends and receives."""

    @property
    def blocking(self) -> bool:
        """Whether sends and receives follow each other."""
        return self.exchange is Exchange.DEEPSPEED

    @property
    def shares(self) -> bool:
        """Whether its groups or transfers slow each other, or those of other pipelines."""
        return self.hops.shares or any(
            unit.kept != ALL_KEPT or unit.pricer.groups.share
            for stage in self.stages
            for unit in stage.units
        )

    def times(self) -> PipelineTimes:
        """For the replay."""
        first = self.pipeline.stages
        return self.with_seconds(
            np.array([stage.forward for stage in self.stages]),
            np.array([stage.backward for stage in self.stages]),
            np.array([stage.weight for stage in self.stages]),
            tuple(stage.warmup_depth for stage in first),
        )

    def with_seconds(
        self,
        forward: Floats,
        backward: Floats,
        weight: Floats,
        warmup: tuple[int, ...],
        factors: Floats | float = 1.0,
    ) -> PipelineTimes:
        """The same schedule with these passes, [stages, chunks], and hops times these factors."""
        pipeline, hops = self.pipeline, self.hops
        return PipelineTimes(
            schedule=pipeline.schedule.name,
            num_microbatches=pipeline.num_microbatches,
            warmup=warmup,
            forward=forward,
            backward=backward,
            weight=weight,
            send_forward=hops.send_forward * factors,
            send_backward=hops.send_backward * factors,
            wire_latency=hops.wire_latency * factors,
            rendezvous_extra=hops.rendezvous_extra * factors,
            link_forward=hops.link_forward,
            link_backward=hops.link_backward,
            shared_forward=hops.shared_forward * factors,
            shared_backward=hops.shared_backward * factors,
            exchange=self.exchange,
        )


def exchange_of(job: Job) -> Exchange:
    """Whose rendezvous sends the job's trainer has."""
    if trainer_settings(job).blocking_sends:
        return Exchange.DEEPSPEED
    return Exchange.MEGATRON if target(job.target).batched_interleaving else Exchange.TORCH


def sends_wait(plan: Plan) -> bool:
    """Whether a send holds its stage until the receiver is there."""
    return target(plan.target).rendezvous_sends and not plan.overlap.send


def replayed_ends(work: Sequence[PipelineWork], plan: Plan) -> tuple[Floats, ...]:
    """When every stage leaves its pipeline."""
    rendezvous = sends_wait(plan)
    if (
        len(work) == 1
        and not work[0].hops.shares
        and not work[0].blocking
        and _plain(work[0].pipeline)
    ):
        one, hops = work[0], work[0].hops
        ends: Floats = pipeline_ends(
            np.array([stage.forward[0] for stage in one.stages]),
            np.array([stage.backward[0] for stage in one.stages]),
            hops.send_forward,
            hops.send_backward,
            hops.wire_latency,
            hops.rendezvous_extra,
            np.array([stage.warmup_depth for stage in one.pipeline.stages], dtype=np.int64),
            one.pipeline.num_microbatches,
            rendezvous,
        )
        if ends[0] < np.inf:
            return (ends,)
    return step_ends([each.times() for each in work], rendezvous=rendezvous)


def _plain(pipeline: Pipeline) -> bool:
    return pipeline.schedule.name == "1f1b" and len(pipeline.stages[0].chunks) == 1
