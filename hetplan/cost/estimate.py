"""What one step of a plan costs: time with interval and break-down, memory, and what to doubt.

    step = max over stages (end in the pipeline + reduction that is left + update + gathering)

or, where gradients are clipped by their norm, which everybody waits for,

    step = max (end + reduction) + sum of the norms + max (update + gathering)

The ends are those of the replay (`hetplan.cost.replay.ends`) of the plan's schedule, all pipelines
together, with rendezvous sends where the plan's target has them and does not overlap them; the rest
is `hetplan.cost.step_model`. Components add up to the step.

Where the spread of a kind's devices is known the step is the mean over draws of who is how slow
(`step_model.draws.straggler_wait`): what several stages wait for is later than the mean of each.

How wide the interval is. The draws (`step_model.draws`) give its shape and its own width. Where a
predictor has been calibrated with measured runs (`predict.calibration`) the width is theirs: the
logarithm of every draw over the central step is stretched or shrunk until half of the way from p5
to p95 is what conformal prediction asks for. Steps whose predictions are all certain get a normal
law of it. Plans that are priced with one seed share their draws, so that two of them are compared
under the same luck.

A search that adds up what stages and boundaries cost alone (`hetplan.search.space`) gets the same
step, or a shorter one where a plan's parts slow each other (`search.space.plan_evaluator`). So a
bound on what the search adds up is never above an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import CauseSeconds, Component, Estimate, Interval, StageEstimate
from hetplan.cost.model_flops import Use, use_of
from hetplan.cost.step_model.break_down import BreakDown, break_down
from hetplan.cost.step_model.draws import (
    SourcePart,
    drawn_steps,
    normal_quantiles,
    step_sources,
    straggler_wait,
)
from hetplan.cost.step_model.overlap import slowdowns
from hetplan.cost.step_model.plan import PlanCosts
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.cost.step_model.step import norm_parts
from hetplan.cost.step_model.uneven_work import clock, length_factors
from hetplan.cost.step_model.units import Unit
from hetplan.cost.terms import Part, extrapolates, notes, sources_of
from hetplan.errors import Fault, InputError
from hetplan.job.kernels import FUSED_ATTENTION, job_on, kernel_fault
from hetplan.job.spec import Job
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.factors import devices_of, regime_of
from hetplan.predict.calibration.values import COMMUNICATION, COMPUTE, Calibration, CauseFactor
from hetplan.predict.predictor import DATASHEET, Predictor, calibrated_cause, is_link
from hetplan.predict.regression import NORMAL_90
from hetplan.units import format_bytes, format_seconds

_MIDDLE = 0.5
_QUANTILES = (0.05, 0.1, 0.9, 0.95)
"""Hazen's (1914), in which draw k of n stands for (k + 1/2) / n, as the draws were made."""


@runtime_checkable
class Calibrated(Protocol):
    """A predictor that measured runs have something to say about."""

    @property
    def calibration(self) -> Calibration | None:
        """None where no run has."""
        ...


@dataclass(frozen=True, slots=True)
class StepCalibration:
    """What measured runs say about a plan's step."""

    calibration: Calibration | None = None
    devices: tuple[str, ...] = ()
    regime: str = ""
    factors: tuple[CauseFactor, ...] = ()
    """Of the calibration, those that multiply a prediction of this step."""

    def halfwidth(self, own: float) -> tuple[float, str]:
        """(half-width of the 90 % interval, what it stands on)."""
        if self.calibration is not None:
            found = self.calibration.width(self.devices, self.regime, own)
            if found is not None:
                return found.log_halfwidth, found.note
        own_errors = "interval by the predictions' own errors"
        if self.factors:
            return own, f"{own_errors}; measured runs corrected them, and checked no interval"
        return own, f"{own_errors}; no measured run has checked it"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What runs changed in this step, and runs like it that nothing explains."""
        if self.calibration is None:
            return ()
        tail = self.calibration.tail(self.devices, self.regime)
        return (*map(_words, self.factors), *(() if tail is None else (tail.note,)))


def _words(factor: CauseFactor) -> str:
    """As in `cpu compute x 0.97, corrected by 8 measured runs`."""
    runs = "1 measured run" if factor.runs == 1 else f"{factor.runs} measured runs"
    return f"{factor.cause} {factor.name} x {factor.factor:.3g}, corrected by {runs}"


def step_calibration(
    predictor: Predictor, plan: Plan, cluster: Cluster, causes: Iterable[str]
) -> StepCalibration:
    """What the predictor's runs say about this plan's step, which rests on these causes."""
    found = predictor.calibration if isinstance(predictor, Calibrated) else None
    if found is None:
        return StepCalibration()
    corrected = {
        (calibrated_cause(each), COMMUNICATION if is_link(each) else COMPUTE) for each in causes
    }
    return StepCalibration(
        calibration=found,
        devices=devices_of(plan, cluster),
        regime=regime_of(plan, cluster),
        factors=tuple(
            each
            for each in found.factors
            if each.factor != 1.0 and (each.cause, each.name) in corrected
        ),
    )


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step's interval."""

    interval: Interval
    p5_seconds: float
    p95_seconds: float
    own_log_halfwidth: float
    note: str


def span_of(
    steps: Floats, central: float, known: StepCalibration, least_seconds: float = 0.0
) -> StepSpan:
    """The interval of a step of `central` seconds from its draws, cut at the least seconds."""
    logs, own, note = scaled_logs(steps, central, known)
    logs, cut = _cut(logs, central, least_seconds)
    note += cut
    p5, p10, p90, p95 = (central * math.exp(_quantile(logs, each)) for each in _QUANTILES)
    if p10 == central and float(np.quantile(logs, _QUANTILES[1], method="hazen")) > _CERTAIN:
        note += (
            f"; begins at the step itself, above which {float(np.mean(logs > 0)):.0%} of the draws "
            "lie: a step waits for the slowest of its stages, whose errors differ"
        )
    mean = central * float(np.mean(np.exp(logs)))
    return StepSpan(
        interval=Interval(p10_seconds=p10, mean_seconds=mean, p90_seconds=p90),
        p5_seconds=p5,
        p95_seconds=p95,
        own_log_halfwidth=own,
        note=note,
    )


def _quantile(logs: Floats, quantile: float) -> float:
    """A quantile of the draws over the central step; 0 at least above the middle, at most below it.

    A step in which every time is as predicted is shorter than most draws where stages of several
    kinds take turns to be the slowest: the mean of a maximum is above the maximum of the means. An
    interval that leaves its own step out says nothing about it; one that is stretched to the step
    covers no less.
    """
    found = float(np.quantile(logs, quantile, method="hazen"))
    return max(found, 0.0) if quantile > _MIDDLE else min(found, 0.0)


def scaled_logs(steps: Floats, central: float, known: StepCalibration) -> tuple[Floats, float, str]:
    """(logarithms of the draws over `central` as wide as runs say, own half-width, note)."""
    logs = np.log(steps / central)
    low, high = np.quantile(logs, (_QUANTILES[0], _QUANTILES[-1]), method="hazen")
    own = max(0.0, 0.5 * float(high - low))
    wanted, note = known.halfwidth(own)
    if wanted != own:
        even = normal_quantiles(len(logs)) * (wanted / NORMAL_90)
        logs = logs * (wanted / own) if own > _CERTAIN else even
    return logs, own, note


def _cut(logs: Floats, central: float, least_seconds: float) -> tuple[Floats, str]:
    """No draw before `least_seconds`, nor is the central step moved; the note where one was."""
    if least_seconds <= 0:
        return logs, ""
    lowest = min(0.0, math.log(least_seconds / central))
    if float(logs.min()) >= lowest:
        return logs, ""
    return np.maximum(logs, lowest), "; cut at the best rate that anybody sustained on the devices"


_CERTAIN = 1e-6
"""Half-widths below it are rounding; they have no shape to keep."""


def causes_of(parts: Sequence[SourcePart], step_seconds: float) -> tuple[CauseSeconds, ...]:
    """What the step is made of, largest first; scaled so that all add up to `step_seconds`."""
    whole = math.fsum(part.seconds for part in parts)
    if whole <= 0:
        return ()
    found = [
        CauseSeconds(
            cause=part.source[0],
            part=part.source[1],
            seconds=part.seconds * step_seconds / whole,
            log_halfwidth=part.log_halfwidth,
        )
        for part in parts
        if part.seconds > 0
    ]
    return tuple(sorted(found, key=lambda each: (-each.seconds, each.cause, each.part)))


def estimate(
    plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> Estimate:
    """Cost of one step of a legal plan (`hetplan.plans.check`).

    InputError where warm-up depths make rendezvous sends wait for themselves, and where predictor
    or cluster lack a figure that the plan needs.
    """
    return estimate_with(Pricer(model, cluster, job, predictor), plan)


def estimate_with(pricer: Pricer, plan: Plan) -> Estimate:
    """`estimate` by a pricer that has priced other plans before."""
    if not plan.pipelines:
        raise InputError(Fault(field="pipelines", message="a plan needs at least one pipeline"))
    step, costs = pricer.step(plan), pricer.costs(plan)
    job = costs.settings.job
    waiting = straggler_wait(plan, costs, step)
    seconds = step.step_seconds + waiting
    parts = break_down(plan, costs, step, waiting)
    stages = tuple(
        _stage(step, parts, (p, s))
        for p, pipeline in enumerate(step.work)
        for s in range(len(pipeline.stages))
    )
    tokens = job.global_batch_size * job.sequence_length * length_factors(job).tokens
    terms = tuple(_parts(costs, step))
    hops = [hop for pipeline in step.work for hop in pipeline.hops.hops]
    sources = {source for part in terms for source in part.term.prediction.sources}
    sources |= {hop.law.source for hop in hops}
    known = step_calibration(pricer.predictor, plan, pricer.cluster, step_causes(costs, step))
    use = use_of(pricer.model, job, step, seconds)
    span = span_of(drawn_steps(plan, costs, step), seconds, known, use.least_seconds)
    return Estimate(
        step_seconds=seconds,
        interval=span.interval,
        pipeline_seconds=step.pipeline_seconds,
        num_microbatches=plan.pipelines[0].num_microbatches,
        tokens_per_second=tokens / seconds,
        stages=stages,
        peak_memory_bytes=max(stage.memory.total_bytes for stage in stages),
        sources=tuple(sorted(sources)),
        warnings=tuple(
            dict.fromkeys(
                (*_warnings(costs, step, terms), *known.warnings, *_too_fast(seconds, use))
            )
        ),
        components=parts.critical,
        p5_seconds=span.p5_seconds,
        p95_seconds=span.p95_seconds,
        own_log_halfwidth=span.own_log_halfwidth,
        interval_note=span.note,
        causes=causes_of(step_sources(plan, costs, step), seconds - job.data_loading_seconds),
        mfu=use.mfu,
        flops_per_second=use.flops_per_second,
        least_seconds=use.least_seconds,
        kinds=use.kinds,
    )


def step_causes(costs: PlanCosts, step: StepCost) -> tuple[str, ...]:
    """Device kinds and links whose predictions a priced step rests on, in order, repeated."""
    hops = [hop for pipeline in step.work for hop in pipeline.hops.hops]
    terms = (part.term.cause for part in _parts(costs, step))
    return (*terms, *(hop.link for hop in hops))


def cause_sources(costs: PlanCosts, step: StepCost) -> dict[tuple[str, str], set[str]]:
    """Where the predictions of each cause and part (`CauseSeconds`) come from."""
    found: dict[tuple[str, str], set[str]] = {}
    for each in _parts(costs, step):
        prediction = each.term.prediction
        own = {part.name: part.source or prediction.source for part in prediction.parts}
        for source, *_ in sources_of(each.term):
            found.setdefault(source, set()).add(own.get(source[1], prediction.source))
    for pipeline in step.work:
        for hop in pipeline.hops.hops:
            found.setdefault((hop.link, ""), set()).add(hop.law.source)
    return found


def misfits(estimate: Estimate) -> tuple[str, ...]:
    """Which stages need more memory than there is, one line each; empty where all fit."""
    several = len({stage.pipeline for stage in estimate.stages}) > 1
    first = {stage.pipeline: s for s, stage in reversed(list(enumerate(estimate.stages)))}
    return tuple(
        (f"pipeline {stage.pipeline}, " if several else "")
        + f"stage {s - first[stage.pipeline]} needs {_shortage(stage)}"
        for s, stage in enumerate(estimate.stages)
        if not stage.memory.fits
    )


def _shortage(stage: StageEstimate) -> str:
    """How much of what, and how much there is."""
    memory, place = stage.memory, f"each {stage.device} of island {stage.island}"
    needed, room, on = memory.total_bytes, memory.available_bytes, "on"
    if memory.host_available_bytes is not None and not memory.host_fits:
        needed, room, on = memory.host_bytes, memory.host_available_bytes, "in host memory for"
    return f"{format_bytes(needed)} {on} {place}, which leaves a job {format_bytes(room)}"


def _stage(step: StepCost, parts: BreakDown, place: tuple[int, int]) -> StageEstimate:
    p, s = place
    pipeline = step.work[p]
    stage, end = pipeline.stages[s], step.composed.stages[p][s]
    unit, m = stage.unit, pipeline.pipeline.num_microbatches
    forward, backward = sum(stage.forward), sum(stage.backward) + sum(stage.weight)
    passes = [
        [part for start, stop in stage.ranges for part in unit.parts(start, stop, backward=back)]
        for back in (False, True)
    ]
    tensor = sum(
        part.seconds
        for part in (*passes[0], *passes[1])
        if part.component in (Component.TENSOR_PARALLEL, Component.COPIED_HEADS)
        and not part.computes
    )
    numbers = (*passes, *end.parts)
    busy = m * (forward + backward)
    wait = step.pipeline_seconds - busy
    kinds = unit.pricer.model.layers
    return StageEstimate(
        pipeline=p,
        island=unit.island.name,
        device=unit.island.device.kind,
        transformer_layers=sum(
            kind in (LayerKind.TRANSFORMER, LayerKind.MULTI_TOKEN_PREDICTION)
            for start, stop in stage.ranges
            for kind in kinds[start:stop]
        ),
        forward_seconds=forward,
        backward_seconds=backward,
        tensor_parallel_seconds=tensor,
        busy_seconds=busy,
        # What a sum in another order leaves is no wait, least of all one below zero.
        wait_seconds=wait if wait > 1e-12 * step.pipeline_seconds else 0.0,
        reduction_seconds=end.reduction.added_seconds + end.embedding,
        optimizer_seconds=end.leaves,
        memory=step.memory[p][s],
        components=parts.stages[p][s],
        extrapolating=tuple(
            name
            for name, made_of in zip(_NUMBERS, numbers, strict=True)
            if extrapolates(part.term for part in made_of)
        ),
    )


_NUMBERS = ("forward", "backward", "reduction", "optimizer")
"""What `StageEstimate.extrapolating` can name: both passes, and the parts of a stage's end."""


def _parts(costs: PlanCosts, step: StepCost) -> Iterator[Part]:
    """Every predicted part, in the order of the pipelines; equal units once."""
    seen: set[tuple[Unit, int]] = set()
    for p, pipeline in enumerate(step.work):
        for s, stage in enumerate(pipeline.stages):
            for unit in stage.units:
                for start, stop in stage.ranges:
                    for kind in dict.fromkeys(unit.kind_at[start:stop]):
                        if (unit, kind) not in seen:
                            seen.add((unit, kind))
                            cost = unit.costs[kind]
                            yield from (*cost.forward, *cost.backward, *cost.again)
            before, after = step.composed.stages[p][s].parts
            yield from (*before, *after)
    if step.composed.barrier:
        yield from norm_parts(costs, step.work)


def _too_fast(seconds: float, use: Use) -> Iterator[str]:
    """A step that nobody's devices would reach."""
    if use.least_seconds > seconds:
        yield (
            f"{format_seconds(seconds)} is less than the {format_seconds(use.least_seconds)} at "
            "the best rate that anybody sustained on these devices"
        )


def _full_bandwidth(step: StepCost) -> Iterator[str]:
    """Links between islands over which several senders are priced at one's figure."""
    for pipeline in step.work:
        pairs = zip(pipeline.hops.row, pairwise(pipeline.stages), strict=False)
        for hop, (left, right) in pairs:
            one, two = left.unit.island.name, right.unit.island.name
            if hop is not None and one != two and hop.senders > 1 and not hop.divided:
                yield (
                    f"{one} to {two}: {hop.senders} devices send at once, each priced at the "
                    "link's whole bandwidth_per_device: right if each gets it while all send"
                )


def _warnings(costs: PlanCosts, step: StepCost, parts: tuple[Part, ...]) -> Iterator[str]:
    """What to doubt, in the order of the pipelines; repeats included."""
    known = {part.term.cause for part in parts if part.term.prediction.source != DATASHEET}
    for part in parts:
        term = part.term
        yield from notes(
            term.what, term.cause, term.prediction, others_measured=term.cause in known
        )
    for pipeline in step.work:
        for hop in pipeline.hops.hops:
            yield from notes("send", hop.link, hop.law)
    yield from _full_bandwidth(step)
    islands = {
        stage.unit.island.name: stage.unit.island
        for pipeline in step.work
        for stage in pipeline.stages
    }
    computed = {part.term.cause for part in parts if part.term.prediction.source == DATASHEET}
    for island in islands.values():
        yield from clock(island).notes
        if island.device.kind in computed and island.device.estimated_note:
            yield island.device.estimated_note
        if job_on(island.device, costs.settings.job) is not costs.settings.job:
            why = kernel_fault(island.device, FUSED_ATTENTION, costs.settings.job.target)
            yield f"{why}; priced so"
    if any(part.hidden_seconds for part in parts) or any(
        end.reduction.hidden_seconds or end.gathering.hidden_seconds
        for row in step.composed.stages
        for end in row
    ):
        for island in islands.values():
            yield from slowdowns(island.device).notes
    if costs.settings.job.sequence_lengths:
        yield length_factors(costs.settings.job).note


def step_quantile(pricer: Pricer, plan: Plan, quantile: float) -> float:
    """Seconds that a step stays below with this probability; `quantile` between 0 and 1."""
    step, costs = pricer.step(plan), pricer.costs(plan)
    central = step.step_seconds + straggler_wait(plan, costs, step)
    known = step_calibration(pricer.predictor, plan, pricer.cluster, step_causes(costs, step))
    logs, _, _ = scaled_logs(drawn_steps(plan, costs, step), central, known)
    use = use_of(pricer.model, costs.settings.job, step, central)
    logs, _ = _cut(logs, central, use.least_seconds)
    return central * math.exp(_quantile(logs, quantile))
