"""From flows of templates to a plan whose pipelines are done together.

Layers, recomputation and shapes come with the templates; how many microbatches each pipeline gets
is decided on the plan's own times (`hetplan.search.several.shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.replay.kernel import pipeline_ends
from hetplan.cost.step_model.plan import PipelineWork, sends_wait
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part
from hetplan.plans.plan import Plan, Schedule, Sharding
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.costs.placed import Placed
from hetplan.search.several.master import Flow
from hetplan.search.several.options import Options, shape_of
from hetplan.search.several.pins import keeps_pins
from hetplan.search.several.shares import Share, balanced


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole plan and what it costs."""

    chosen: ChosenPlan
    seconds: float


def pipeline_of(placed: Placed, options: Options, flow: Flow, microbatches: int) -> ChosenPipeline:
    """The pipeline of a template with so many sequences per tick."""
    template, units = flow.template, placed.units
    last = len(template.options) - 1
    stages = []
    for s, (island, o, n) in enumerate(
        zip(template.islands, template.options, template.layers, strict=True)
    ):
        option = options.options[o]
        shape = shape_of(placed, option, flow.flow // option.microbatch_size)
        stages.append(
            ChosenStage(
                parts=(Part(island=placed.cluster.islands[island].name, shape=shape),),
                layers=(units.layers(n, first=s == 0, last=s == last),),
                recompute=option.recompute,
                warmup_depth=min(last + 1 - s, microbatches),
            )
        )
    return ChosenPipeline(
        stages=tuple(stages), num_microbatches=microbatches, schedule=Schedule(name="1f1b")
    )


@dataclass(slots=True)
class Assembler:
    """Prices whole plans of one job; keeps what plans share."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor
    layers_per_unit: int
    pricer: Pricer = field(init=False)
    replays: int = 0

    def __post_init__(self) -> None:
        self.pricer = Pricer(self.model, self.cluster, self.job, self.predictor)

    def plan(self, chosen: ChosenPlan) -> Plan | None:
        """The plan; None where its devices have no room or a rule is broken."""
        try:
            plan = plan_of(self.model, self.cluster, self.job, chosen)
        except InputError:
            return None
        return None if check_plan(plan, self.model, self.cluster, self.job) else plan

    def priced(self, chosen: ChosenPlan) -> StepCost | None:
        """Its step; None where it is no legal plan, breaks a pin or does not fit."""
        if not keeps_pins(chosen, self.cluster, self.job):
            return None
        plan = self.plan(chosen)
        if plan is None:
            return None
        self.replays += 1
        try:
            cost = self.pricer.step(plan)
        except InputError:
            # Warm-up depths that make rendezvous sends wait for themselves.
            return None
        fits = all(use.total_bytes <= use.available_bytes for row in cost.memory for use in row)
        return cost if fits else None

    def whole(self, chosen: ChosenPlan) -> Whole | None:
        """The plan with its step."""
        cost = self.priced(chosen)
        return None if cost is None else Whole(chosen=chosen, seconds=cost.step_seconds)

    def balanced(self, chosen: ChosenPlan) -> ChosenPlan | None:
        """The same with the microbatches dealt out so that all pipelines end together."""
        try:
            plan = plan_of(self.model, self.cluster, self.job, chosen)
        except InputError:
            return None
        work = self.pricer.costs(plan).work(plan)
        rendezvous = sends_wait(plan)
        enough = not target(self.job.target).fewer_microbatches_than_stages
        shares = [
            Share(
                sequences=sum(part.shape.samples for part in pipeline.stages[0].parts),
                least=len(pipeline.stages) if enough else 1,
                seconds=_ends(each, rendezvous=rendezvous),
            )
            for pipeline, each in zip(chosen.pipelines, work, strict=True)
        ]
        counts = balanced(shares, self.job.global_batch_size)
        if counts is None:
            return None
        return replace(
            chosen,
            pipelines=tuple(
                with_microbatches(pipeline, count)
                for pipeline, count in zip(chosen.pipelines, counts, strict=True)
            ),
        )


def with_microbatches(pipeline: ChosenPipeline, count: int) -> ChosenPipeline:
    """The same with so many microbatches and the schedule's own depths."""
    stages = len(pipeline.stages)
    return replace(
        pipeline,
        num_microbatches=count,
        stages=tuple(
            replace(stage, warmup_depth=min(stages - s, count))
            for s, stage in enumerate(pipeline.stages)
        ),
    )


def _ends(work: PipelineWork, *, rendezvous: bool) -> Callable[[int], float]:
    """Seconds of one pipeline by microbatches, as if it had its links for itself."""
    hops = work.hops
    depths = np.arange(len(work.stages), 0, -1)
    forward = np.array([stage.forward[0] for stage in work.stages])
    backward = np.array([stage.backward[0] for stage in work.stages])

    def seconds(microbatches: int) -> float:
        ends = pipeline_ends(
            forward,
            backward,
            hops.send_forward,
            hops.send_backward,
            hops.wire_latency,
            hops.rendezvous_extra,
            depths,
            microbatches,
            rendezvous,
        )
        return float(ends.max())

    return seconds


def plan_of_flows(
    placed: Placed, options: Options, flows: Sequence[Flow], counts: Sequence[int], *, shard: bool
) -> ChosenPlan:
    """All flows as pipelines."""
    return ChosenPlan(
        pipelines=tuple(
            pipeline_of(placed, options, flow, count)
            for flow, count in zip(flows, counts, strict=True)
        ),
        sharding=Sharding.OPTIMIZER if shard else Sharding.NONE,
    )
