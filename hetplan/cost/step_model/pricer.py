"""Prices of many plans of one job: what plans have in common is priced once and kept.

    pricer = Pricer(model, cluster, job, predictor)
    pricer.step(plan).step_seconds

Kept are the costs of single layers per placement, the transfers per pair of stages, collectives
per number of parameters, and memory per place in the pipeline and layers: everything that two plans
can have in common. Adding up, replay and composition are done for every plan anew.
`hetplan.cost.estimate` says the same of the plan, with break-down and interval; that takes some
hundred replays more.

Figures that pass the checks of their files one by one, as a link of 1e-300 bytes per second, can
make a time overflow, and draws around it even if it does not: then the longest part is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.local_steps import host_bytes
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MemoryLayout
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, StageWork, sends_wait
from hetplan.cost.step_model.step import Composed, compose, norm_parts, tied_parts
from hetplan.cost.step_model.units import Unit, settings_of
from hetplan.cost.terms import Part
from hetplan.errors import InputError
from hetplan.job.kernels import job_on
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.formats import reduction_formats
from hetplan.plans.pieces import experts_as_the_rest, stage_shards
from hetplan.plans.plan import OverlapSettings, Plan, Sharding
from hetplan.predict.predictor import Predictor

MAX_SECONDS = 1e30
"""No step takes longer; far below where sums of squares overflow."""


def check_finite(step_seconds: float, costs: PlanCosts, work: Sequence[PipelineWork]) -> None:
    """InputError where a step takes no possible time; names the part that takes longest."""
    if step_seconds <= MAX_SECONDS:
        return
    seconds, what, where = longest_part(costs, work)
    raise InputError(
        f"the step takes {step_seconds:g} s: {what} ({where}) takes {seconds:g} s; correct the "
        "bandwidth, latency, clock or throughput behind it in the cluster or devices"
    )


def longest_part(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[float, str, str]:
    """(seconds, what it is and of what, where) of the longest part; no number counts as longest."""
    found: list[tuple[float, str, str]] = []
    for p, pipeline in enumerate(work):
        for s, stage in enumerate(pipeline.stages):
            island = stage.unit.island
            where = f"pipeline {p}, stage {s} on island {island.name}"
            if island.clock_ratio != 1:
                where += f", whose clock_ratio is {island.clock_ratio:g}"
            for part in _parts(stage):
                found.append((part.seconds, f"{part.term.what} of {part.term.cause}", where))
        for number, hop in enumerate(pipeline.hops.row):
            if hop is not None:
                seconds = hop.send_forward_seconds + hop.send_backward_seconds
                seconds += hop.law.rendezvous_latency_seconds
                found.append((seconds, f"send of {hop.link}", f"pipeline {p}, hop {number}"))
        for part in (*tied_parts(costs.settings, pipeline), *norm_parts(costs, work)):
            found.append((part.seconds, f"{part.term.what} of {part.term.cause}", "end of step"))
    return max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0])


def _parts(stage: StageWork) -> Iterator[Part]:
    unit = stage.unit
    kinds = {unit.kind_at[at] for start, stop in stage.ranges for at in range(start, stop)}
    for kind in sorted(kinds):
        cost = unit.costs[kind]
        yield from (*cost.forward, *cost.backward, *cost.again)
    held = (stage.parameters, stage.expert_parameters)
    yield from unit.end.update(*held)
    yield from unit.end.reduction(*held)
    yield from unit.end.gathering(*held)


def stage_memory(costs: PlanCosts, plan: Plan, pipeline: PipelineWork, s: int) -> MemoryUse:
    """Of the fullest device of a stage; of several replica entries that which needs most; kept."""
    stage, described = pipeline.stages[s], pipeline.pipeline
    place = described.schedule.name, described.num_microbatches, len(described.stages), s
    averaged = None if plan.outer is None else plan.outer.settings
    key = (*stage.units, described.stages[s].warmup_depth, place, stage.ranges, averaged)
    fullest = costs.memory.get(key)
    if fullest is None:
        settings = costs.settings
        uses = [
            device_memory(
                settings.model,
                job_on(unit.island.device, settings.job),
                memory_layout(costs, plan, pipeline, s, unit),
                unit.island.memory_bytes,
                unit.island.host_bytes_per_device,
            )
            for unit in stage.units
        ]
        if plan.outer is not None:
            more = host_bytes(plan.outer, stage.parameters + stage.expert_parameters)
            uses = [replace(use, host_bytes=use.host_bytes + more) for use in uses]
        # Of parts of which one lacks host memory that one is told.
        fullest = max(
            uses, key=lambda use: (not use.host_fits, use.total_bytes - use.available_bytes)
        )
        costs.memory[key] = fullest
    return fullest


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
        shape=unit.pricer.shape,
        num_microbatches=pipeline.pipeline.num_microbatches,
        schedule=schedule.name,
        stage=s,
        num_stages=len(stages),
        warmup=tuple(stage.warmup_depth for stage in stages) if schedule.name == "1f1b" else None,
        early_sends=plan.overlap.send and schedule.name == "1f1b",
        recompute=unit.recompute,
        sharding=costs.settings.sharding,
        shards=shards,
        expert_shards=None
        if experts_as_the_rest(unit.pricer.shape)
        else math.gcd(plan.optimizer_shards, copies),
        offload=plan.optimizer_offload,
    )


_Settings = tuple[int, str, Sharding, int, float, OverlapSettings, tuple[str, ...], str | None]


@dataclass(frozen=True)
class StepCost:
    """One step of a plan."""

    step_seconds: float
    work: tuple[PipelineWork, ...]
    ends: tuple[Floats, ...]
    """When every stage leaves its pipeline."""
    composed: Composed
    memory: tuple[tuple[MemoryUse, ...], ...]
    """Of every stage, by pipeline."""

    @cached_property
    def pipeline_seconds(self) -> float:
        """Until every stage has left its pipeline."""
        return max(float(ends.max()) for ends in self.ends)


@dataclass(frozen=True, slots=True)
class Pricer:
    """Prices plans of one job on one cluster."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor = field(repr=False)
    _known: dict[_Settings, PlanCosts] = field(default_factory=dict, repr=False, compare=False)

    def costs(self, plan: Plan) -> PlanCosts:
        """What is kept for plans with this one's settings."""
        key = (
            plan.padded_vocab_size,
            plan.target,
            plan.sharding,
            plan.optimizer_shards,
            plan.optimizer_offload,
            plan.overlap,
            reduction_formats(plan),
            plan.tied_embedding_precision,
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = PlanCosts(
                settings_of(plan, self.model, self.cluster, self.job, self.predictor)
            )
        return found

    def step(self, plan: Plan) -> StepCost:
        """The step of a legal plan, its stages' times and memory; no interval.

        InputError where warm-up depths make rendezvous sends wait for themselves, and where the
        predictor lacks what the plan needs, and where a figure makes the step infinite.
        """
        costs = self.costs(plan)
        work = costs.work(plan)
        try:
            ends = step_ends([each.times() for each in work], rendezvous=sends_wait(plan))
        except InputError:
            # The replay says only that a time is no number.
            check_finite(longest_part(costs, work)[0], costs, work)
            raise
        composed = compose(plan, costs, work, ends)
        check_finite(composed.step_seconds, costs, work)
        memory = tuple(
            tuple([stage_memory(costs, plan, each, s) for s in range(len(each.stages))])
            for each in work
        )
        return StepCost(composed.step_seconds, tuple(work), ends, composed, memory)
