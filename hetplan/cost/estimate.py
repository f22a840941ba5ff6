"""What one step of a plan costs: time with interval and break-down, memory, and what to doubt.

    step = max over stages (end in the pipeline + reduction that is left + update + gathering)

or, where gradients are clipped by their norm, which everybody waits for,

    step = max (end + reduction) + sum of the norms + max (update + gathering)

The ends are those of the replay (`hetplan.cost.replay.step`) of the plan's schedule, all pipelines
together, with rendezvous sends where the plan's target has them and does not overlap them; layers
are priced by `priced.layers`, transfers between stages by `priced.hops`, the end of the step by
`priced.end_of_step` and `priced.step`, memory by `memory`. Components add up to the step
(`priced.break_down`).

Where the spread of a kind's devices is known the step is the mean over draws of who is how slow
(`priced.draws.straggler_wait`): what several stages wait for is later than the mean of each.

A search that adds up what stages and boundaries cost alone (`hetplan.search.costs`) gets the same
step, or a shorter one where a plan's parts slow each other (`hetplan.search.costs.whole`). So a
bound on what the search adds up is never above an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hetplan.cluster.spec import Cluster
from hetplan.cost.components.overlap import slowdowns
from hetplan.cost.components.sequences import length_factors
from hetplan.cost.components.step import clock
from hetplan.cost.estimate_interval import causes_of, span_of, step_calibration
from hetplan.cost.estimate_values import Component, Estimate, StageEstimate
from hetplan.cost.priced.break_down import BreakDown, break_down, end_parts
from hetplan.cost.priced.draws import drawn_steps, step_sources, straggler_wait
from hetplan.cost.priced.norm import norm_parts
from hetplan.cost.priced.plan import PlanCosts
from hetplan.cost.priced.pricer import Pricer, StepCost
from hetplan.cost.priced.step import owned
from hetplan.cost.priced.values import Part
from hetplan.cost.terms import extrapolates, notes
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import DATASHEET, Predictor
from hetplan.units import format_bytes


def estimate(
    plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> Estimate:
    """Cost of one step of a legal plan (`hetplan.plans.check`).

    InputError where warm-up depths make rendezvous sends wait for themselves, and where predictor
    or cluster lack a figure that the plan needs.
    """
    return estimate_with(Pricer(model, cluster, job, predictor), plan)


def estimate_with(pricer: Pricer, plan: Plan) -> Estimate:
    """The same by a pricer that has priced other plans before."""
    if not plan.pipelines:
        raise InputError(Fault(field="pipelines", message="a plan needs at least one pipeline"))
    step, costs = pricer.step(plan), pricer.costs(plan)
    job = costs.settings.job
    waiting = straggler_wait(plan, costs, step)
    seconds = step.step_seconds + waiting
    parts = break_down(plan, costs, step, waiting)
    own = owned(plan, costs, step.work)
    stages = tuple(
        _stage(step, parts, own[p][s], (p, s))
        for p, pipeline in enumerate(step.work)
        for s in range(len(pipeline.stages))
    )
    tokens = job.global_batch_size * job.sequence_length * length_factors(job).tokens
    terms = tuple(_parts(plan, costs, step))
    hops = [hop for pipeline in step.work for hop in pipeline.hops.hops]
    sources = {part.term.prediction.source for part in terms}
    sources |= {hop.law.source for hop in hops}
    known = step_calibration(pricer.predictor, plan, pricer.cluster, step_causes(plan, costs, step))
    span = span_of(drawn_steps(plan, costs, step), seconds, known)
    return Estimate(
        step_seconds=seconds,
        interval=span.interval,
        pipeline_seconds=step.pipeline_seconds,
        num_microbatches=plan.pipelines[0].num_microbatches,
        tokens_per_second=tokens / seconds,
        stages=stages,
        peak_memory_bytes=max(stage.memory.total_bytes for stage in stages),
        sources=tuple(sorted(sources)),
        warnings=tuple(dict.fromkeys((*_warnings(costs, step, terms), *known.warnings))),
        components=parts.critical,
        p5_seconds=span.p5_seconds,
        p95_seconds=span.p95_seconds,
        own_log_halfwidth=span.own_log_halfwidth,
        interval_note=span.note,
        causes=causes_of(step_sources(plan, costs, step), seconds - job.data_loading_seconds),
    )


def step_causes(plan: Plan, costs: PlanCosts, step: StepCost) -> tuple[str, ...]:
    """Device kinds and links whose predictions a priced step rests on, in order, repeated."""
    hops = [hop for pipeline in step.work for hop in pipeline.hops.hops]
    terms = (part.term.cause for part in _parts(plan, costs, step))
    return (*terms, *(hop.link for hop in hops))


def misfits(estimate: Estimate) -> tuple[str, ...]:
    """Which stages need more memory than there is, one line each; empty where all fit."""
    several = len({stage.pipeline for stage in estimate.stages}) > 1
    first = {stage.pipeline: s for s, stage in reversed(list(enumerate(estimate.stages)))}
    return tuple(
        (f"pipeline {stage.pipeline}, " if several else "")
        + f"stage {s - first[stage.pipeline]} needs {format_bytes(stage.memory.total_bytes)} on "
        f"each {stage.device} of island {stage.island}, which leaves a job "
        f"{format_bytes(stage.memory.available_bytes)}"
        for s, stage in enumerate(estimate.stages)
        if not stage.memory.fits
    )


def _stage(step: StepCost, parts: BreakDown, own: float, place: tuple[int, int]) -> StageEstimate:
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
    numbers = (*passes, *end_parts(stage, end, own))
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


def _parts(plan: Plan, costs: PlanCosts, step: StepCost) -> Iterator[Part]:
    """Every predicted part, in the order of the pipelines; equal units once."""
    own = owned(plan, costs, step.work)
    seen: set[int] = set()
    for p, pipeline in enumerate(step.work):
        for s, stage in enumerate(pipeline.stages):
            for unit in stage.units:
                for start, stop in stage.ranges:
                    for kind in dict.fromkeys(unit.kind_at[start:stop]):
                        if id(unit.costs[kind]) not in seen:
                            seen.add(id(unit.costs[kind]))
                            cost = unit.costs[kind]
                            yield from (*cost.forward, *cost.backward, *cost.again)
            before, after = end_parts(stage, step.composed.stages[p][s], own[p][s])
            yield from (*before, *after)
    if step.composed.barrier:
        yield from norm_parts(costs, step.work)


def _full_bandwidth(step: StepCost) -> Iterator[str]:
    """Links between islands over which several senders are priced at one's figure."""
    for pipeline in step.work:
        pairs = zip(pipeline.hops.row, pairwise(pipeline.stages), strict=False)
        for hop, (left, right) in pairs:
            one, two = left.unit.island.name, right.unit.island.name
            if hop is not None and one != two and hop.senders > 1 and not hop.divided:
                yield (
                    f"{one} to {two}: {hop.senders} senders at once, each priced at the link's "
                    "full bandwidth; it must be one sender's share"
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
    for island in islands.values():
        yield from clock(island).notes
    if any(part.hidden_seconds for part in parts) or any(
        end.reduction.hidden_seconds or end.gathering.hidden_seconds
        for row in step.composed.stages
        for end in row
    ):
        for island in islands.values():
            yield from slowdowns(island.device).notes
    if costs.settings.job.sequence_lengths:
        yield length_factors(costs.settings.job).note
