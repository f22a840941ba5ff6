"""Where the time of a step goes: the named components of every stage, which add up to the step.

Of the wait in the pipeline, `bubble` is what would be left if transfers took no time, by a second
replay; `pp` is the rest. Taking transfers away never makes a schedule slower, so neither is below
zero. `other stages` is what a stage waits at the end of the step for stages that are not done.

A component that is zero and could have been something says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import Component, ComponentSeconds
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.step import without_transfers
from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, sends_wait
from hetplan.cost.step_model.pricer import StepCost
from hetplan.cost.step_model.step import StageEnd, norm_parts
from hetplan.cost.step_model.uneven_work import expert_load
from hetplan.cost.terms import Part
from hetplan.model.layers import Experts
from hetplan.plans.plan import Plan

_ROUNDING = 1e-12
"""What a sum in another order leaves is no wait."""


@dataclass(slots=True)
class Sums:
    """Seconds by component while they are added up."""

    seconds: dict[Component, float] = field(default_factory=dict)
    hidden: dict[Component, float] = field(default_factory=dict)

    def add(self, component: Component, seconds: float, hidden: float = 0.0) -> None:
        """Add seconds to a component."""
        if seconds:
            self.seconds[component] = self.seconds.get(component, 0.0) + seconds
        if hidden:
            self.hidden[component] = self.hidden.get(component, 0.0) + hidden

    def parts(self, parts: Iterable[Part], times: float = 1.0) -> None:
        """Add every part `times` times."""
        for part in parts:
            self.add(part.component, part.seconds * times, part.hidden_seconds * times)

    def values(self, notes: Sequence[tuple[Component, str]] = ()) -> tuple[ComponentSeconds, ...]:
        """In the order of `Component`; with notes for what is zero."""
        why = dict(notes)
        return tuple(
            ComponentSeconds(
                component=each,
                seconds=self.seconds.get(each, 0.0),
                hidden_seconds=self.hidden.get(each, 0.0),
                note="" if each in self.seconds else why.get(each, ""),
            )
            for each in Component
            if each in self.seconds or each in self.hidden or each in why
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakDown:
    """Components of every stage, by pipeline, and of the critical path."""

    stages: tuple[tuple[tuple[ComponentSeconds, ...], ...], ...]
    critical: tuple[ComponentSeconds, ...]


def break_down(
    plan: Plan, costs: PlanCosts, step: StepCost, straggler_wait: float = 0.0
) -> BreakDown:
    """Of a step that was priced, and takes `straggler_wait` seconds more in the mean."""
    alone = _ends_without_transfers(plan, step.work)
    norm = norm_parts(costs, step.work) if step.composed.barrier else ()
    loading = costs.settings.job.data_loading_seconds
    rows = []
    for p, pipeline in enumerate(step.work):
        row = []
        for s, end in enumerate(step.composed.stages[p]):
            sums = Sums()
            _before(sums, pipeline, end, float(alone[p][s]))
            sums.parts(norm)
            _leaving(sums, end)
            sums.add(Component.DATA_LOADING, loading)
            rest = step.step_seconds + straggler_wait - sum(sums.seconds.values())
            if rest > _ROUNDING * step.step_seconds:
                sums.add(Component.OTHER_STAGES, rest)
            row.append(sums.values())
        rows.append(tuple(row))
    sums = _critical(step, alone, norm, loading)
    sums.add(Component.STRAGGLERS, straggler_wait)
    return BreakDown(stages=tuple(rows), critical=sums.values(tuple(_notes(costs, step))))


def _critical(
    step: StepCost,
    alone: Sequence[Floats],
    norm: Sequence[Part],
    loading: float,
) -> Sums:
    sums = Sums()
    p, s = step.composed.last_to_arrive
    _before(sums, step.work[p], step.composed.stages[p][s], float(alone[p][s]))
    sums.parts(norm)
    q, t = step.composed.last_to_leave
    _leaving(sums, step.composed.stages[q][t])
    sums.add(Component.DATA_LOADING, loading)
    return sums


def _before(sums: Sums, pipeline: PipelineWork, end: StageEnd, alone: float) -> None:
    """Passes, waits and reduction of a stage."""
    stage = end.stage
    m = pipeline.pipeline.num_microbatches
    for start, stop in stage.ranges:
        for backward in (False, True):
            sums.parts(stage.unit.parts(start, stop, backward=backward), m)
    for beside in stage.delays:
        sums.add(Component.SLOWED, m * sum(beside))
    busy = m * (sum(stage.forward) + sum(stage.backward) + sum(stage.weight))
    wait = end.end - busy
    if wait > _ROUNDING * end.end:
        bubble = min(max(0.0, alone - busy), wait)
        if bubble <= _ROUNDING * end.end:
            bubble = 0.0
        sums.add(Component.BUBBLE, bubble)
        sums.add(Component.PIPELINE, wait - bubble)
    sums.add(Component.DATA_PARALLEL, end.reduction.exposed_seconds, end.reduction.hidden_seconds)
    sums.add(Component.SLOWED, end.reduction.compute_delay_seconds)
    sums.add(Component.OTHER_STAGES, end.waits)
    sums.add(Component.EMBEDDING, end.embedding)
    sums.add(Component.OUTER, end.averaging)


def _leaving(sums: Sums, end: StageEnd) -> None:
    sums.parts(end.updates)
    sums.add(Component.GATHERING, end.gathering.exposed_seconds, end.gathering.hidden_seconds)
    sums.add(Component.SLOWED, end.gathering.compute_delay_seconds)


def _ends_without_transfers(plan: Plan, work: Sequence[PipelineWork]) -> tuple[Floats, ...]:
    instant = [without_transfers(pipeline.times()) for pipeline in work]
    return step_ends(instant, rendezvous=sends_wait(plan))


def _notes(costs: PlanCosts, step: StepCost) -> Iterator[tuple[Component, str]]:
    """Why components are zero that need not be."""
    job = costs.settings.job
    if not job.data_loading_seconds:
        yield (
            Component.DATA_LOADING,
            "prefetched beside the step before; data_loading says more",
        )
    if not clips_gradients(job):
        yield (
            Component.NORM,
            "the job does not clip gradients"
            if job.gradient_clipping is False
            else f"target {job.target} does not clip gradients",
        )
    units = [stage.unit for pipeline in step.work for stage in pipeline.stages]
    spreads = {unit.island.speed_spread for unit in units}
    if spreads <= {None, 0.0}:
        yield (
            Component.STRAGGLERS,
            "speed_spread of the islands is not given"
            if None in spreads
            else "all devices are alike, as the cluster file says",
        )
    layers = [run.layer for run in costs.settings.model.layer_runs]
    experts = [layer for layer in layers if isinstance(layer.mlp, Experts)]
    if experts:
        load = expert_load(experts[0], job, units[0].replica.ep)
        if load.factor == 1:
            yield Component.IMBALANCE, load.note
