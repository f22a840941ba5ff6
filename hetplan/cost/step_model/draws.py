"""The spread of a plan's step: the predictor's errors carried through the replay.

One common log-factor is drawn per source of errors (`terms.sources_of`; normal, the predictor's
90 % interval), and per stage the slowest of its ranks where the spread of the island's devices is
known: the largest of n draws of a normal variable is the normal quantile of the n-th root of a
uniform one. Every draw is replayed. Stages that wait for others before they reduce are taken to
wait for nothing beyond the slowest of all; the draws are scaled by what that changes in the
central step.

What the step is made of, by source, comes from the same replays (`step_sources`): a step is
homogeneous of degree one in the times that it is made of, so the derivatives of its logarithm by
theirs add up to one (Euler), and derivative times step is the source's part of it, waits included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import Component
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import StageTimes, beyond_transient, ends_of_draws
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, StageWork, sends_wait
from hetplan.cost.step_model.pricer import StepCost
from hetplan.cost.step_model.step import norm_parts, step_of_stages
from hetplan.cost.step_model.uneven_work import straggler_factor
from hetplan.cost.step_model.units import Unit
from hetplan.cost.terms import Part, Source, Term, seconds_of_parts, sources_of
from hetplan.plans.plan import SPLIT_SCHEDULES, Plan
from hetplan.predict.predictor import Prediction
from hetplan.predict.regression import NORMAL_90

DRAWS = 200
"""They put the 10 % quantile within about 0.02 of its rank (sqrt(0.1 * 0.9 / 200))."""

_FEWEST_DRAWS = 20
"""However long a replay is: within 0.07 of that rank."""

MOST_PASSES = 20_000_000
"""Of all draws together, where these are more than the fewest: 0.1 to 0.3 CPU s."""

WHOLE_PASSES = MOST_PASSES // DRAWS
"""Of a pipeline that is replayed whole, not extrapolated."""

# Of a time, to see how the step follows: small against the distance of stages that take turns to be
# the slowest, large against rounding.
_NUDGE = 1e-4


@lru_cache(maxsize=8)
def normal_quantiles(count: int) -> Floats:
    """So many evenly spaced quantiles of the standard normal law; their sum is 0."""
    law = NormalDist()
    return np.array([law.inv_cdf((k + 0.5) / count) for k in range(count)])


class Draws:
    """Common log-factors, one per source of errors, `count` draws from a fixed seed.

    A Latin hypercube (McKay, Beckman and Conover 1979): every source takes `count` evenly spaced
    quantiles of its law, each once, in an order of its own. So no source has a mean other than 0,
    or a wrong width, by chance, and where one source dominates a step the step's quantiles are
    exact.
    """

    def __init__(self, sources: Sequence[Source], count: int, seed: int) -> None:
        order = np.random.default_rng(seed)
        quantiles = normal_quantiles(count) / NORMAL_90
        self._normal = [order.permutation(quantiles) for _ in sources]
        self._row = {source: index for index, source in enumerate(sources)}
        self._known: dict[tuple[Source, float], Floats] = {}
        self._relatives: dict[tuple[Prediction, str, str], Floats] = {}
        self.count = count

    def factor(self, source: Source, log_halfwidth: float) -> Floats:
        """Factor of a prediction of this source in each draw."""
        found = self._known.get((source, log_halfwidth))
        if found is None:
            found = np.exp(self._normal[self._row[source]] * log_halfwidth)
            self._known[source, log_halfwidth] = found
        return found

    def sample(self, terms: Iterable[Term]) -> Floats:
        """Sum of the terms in each draw."""
        total = np.zeros(self.count)
        for term in terms:
            if term.prediction.log_halfwidth == 0:
                total += term.seconds
            elif term.seconds:
                total += term.seconds * self._relative(term)
        return total

    def _relative(self, term: Term) -> Floats:
        """A term in each draw over its central value; kept by prediction, which terms share."""
        key = term.prediction, term.cause, term.what
        relative = self._relatives.get(key)
        if relative is None:
            relative = self._relatives[key] = np.zeros(self.count)
            for source, seconds, log_halfwidth in sources_of(term):
                relative += (seconds / term.seconds) * self.factor(source, log_halfwidth)
        return relative


def _draws_of(step: StepCost) -> int:
    """How many draws a step gets: fewer where a replay has many passes."""
    together = _go_together(step.work)
    passes = sum(
        _row(work) * (work.pipeline.num_microbatches if together else sum(_lengths(work)))
        for work in step.work
    )
    return max(_FEWEST_DRAWS, min(DRAWS, MOST_PASSES // passes))


def _go_together(work: Sequence[PipelineWork]) -> bool:
    """Whether several pipelines share wires."""
    return len(work) > 1 and any(pipeline.hops.shares for pipeline in work)


def drawn_steps(plan: Plan, costs: PlanCosts, step: StepCost) -> Floats:
    """A step that was priced, in every draw; all alike where every prediction is certain."""
    parts = _end_parts(step)
    seed = costs.settings.job.seed
    draws = Draws(_sources(costs, step, parts), _draws_of(step), seed)
    return _steps(plan, costs, step, parts, _Samples(draws, seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """The part of a step that one source of errors says."""

    source: Source
    seconds: float
    log_halfwidth: float


def step_sources(plan: Plan, costs: PlanCosts, step: StepCost) -> tuple[SourcePart, ...]:
    """What a step that was priced is made of; all parts add up to it, data loading left out."""
    parts = _end_parts(step)
    sources = _sources(costs, step, parts)
    steps = _steps(plan, costs, step, parts, _Samples(_Nudged(sources), None))
    fixed = costs.settings.job.data_loading_seconds
    moved = (steps - steps[-1]) / _NUDGE
    shares, errors = moved[: len(sources)], moved[len(sources) : -1]
    whole = float(shares.sum())
    if whole <= 0:
        return ()
    scale = (step.step_seconds - fixed) / whole
    return tuple(
        SourcePart(
            source=source,
            seconds=max(float(share), 0.0) * scale,
            log_halfwidth=max(float(error) / float(share), 0.0) if share > 0 else 0.0,
        )
        for source, share, error in zip(sources, shares, errors, strict=True)
    )


def straggler_wait(plan: Plan, costs: PlanCosts, step: StepCost) -> float:
    """Seconds that a step takes longer in the mean than one in which every stage's slowest rank
    takes its mean time.

    The mean of the slowest of several stages is above the slowest of their means. By the draws of
    `interval` with every prediction at its central value; 0 where no spread is known.
    """
    if not any(
        stage.unit.island.speed_spread for pipeline in step.work for stage in pipeline.stages
    ):
        return 0.0
    seed = costs.settings.job.seed
    draws = _Certain((), _draws_of(step), seed)
    steps = _steps(plan, costs, step, _end_parts(step), _Samples(draws, seed))
    return max(0.0, float(np.mean(steps)) - step.step_seconds)


_EndParts = Sequence[tuple[tuple[Part, ...], tuple[Part, ...]]]
"""Of every stage, before and after the norm of all gradients."""


def _end_parts(step: StepCost) -> _EndParts:
    return [stage.parts for row in step.composed.stages for stage in row]


def _steps(
    plan: Plan, costs: PlanCosts, step: StepCost, parts: _EndParts, samples: _Samples
) -> Floats:
    """The step in every draw."""
    barrier = step.composed.barrier
    norm = norm_parts(costs, step.work) if barrier else ()
    finished = _replays(plan, step.work, samples)
    before, after = (
        np.stack([samples.of(each[side]) for each in parts], axis=1) for side in (0, 1)
    )
    central_before, central_after = (
        np.array([seconds_of_parts(each[side]) for each in parts]) for side in (0, 1)
    )
    arrive = np.concatenate(step.ends) + central_before
    whole = step_of_stages(arrive, central_after, 0.0, barrier=barrier)
    fixed = costs.settings.job.data_loading_seconds
    steps = step_of_stages(finished + before, after, samples.of(norm), barrier=barrier)
    exact = step.step_seconds - fixed
    found: Floats = steps * (exact / (whole + step.composed.norm_seconds)) + fixed
    return found


class _Certain(Draws):
    """Draws in which every prediction has its central value."""

    def factor(self, source: Source, log_halfwidth: float) -> Floats:
        """1 for any source."""
        del source, log_halfwidth
        return np.ones(self.count)


class _Nudged(Draws):
    """Per source one draw in which all of its times are a little longer, then one in which they are
    by their half-widths times as much; the last draw is the centre.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__(sources, 2 * len(sources) + 1, 0)
        self._place = {source: place for place, source in enumerate(sources)}

    def factor(self, source: Source, log_halfwidth: float) -> Floats:
        """Factor of a prediction of this source in each draw."""
        found = np.ones(self.count)
        place = self._place[source]
        found[place] += _NUDGE
        found[place + len(self._place)] += _NUDGE * log_halfwidth
        return found

    def sample(self, terms: Iterable[Term]) -> Floats:
        """Sum of the terms in each draw; what is certain is nudged as well."""
        total = np.zeros(self.count)
        for term in terms:
            total += term.seconds
            for source, seconds, log_halfwidth in sources_of(term):
                place = self._place[source]
                total[place] += _NUDGE * seconds
                total[place + len(self._place)] += _NUDGE * seconds * log_halfwidth
        return total


def _sources(costs: PlanCosts, step: StepCost, parts: _EndParts) -> tuple[Source, ...]:
    """Everything whose errors move the step, once."""
    norm = norm_parts(costs, step.work) if step.composed.barrier else ()
    found: dict[Source, None] = {}
    for part in _every_part(step.work, parts, norm):
        found.update(dict.fromkeys(source for source, _, _ in sources_of(part.term)))
    for pipeline in step.work:
        found.update(dict.fromkeys((hop.link, "") for hop in pipeline.hops.hops))
    return tuple(found)


def _every_part(
    work: Sequence[PipelineWork], parts: _EndParts, norm: Sequence[Part]
) -> Iterator[Part]:
    for pipeline in work:
        for stage in pipeline.stages:
            for cost in stage.unit.costs:
                yield from (*cost.forward, *cost.backward, *cost.again)
    for before, after in parts:
        yield from (*before, *after)
    yield from norm


class _Samples:
    """Draws of parts, those of one unit's layers kept.

    `seed`: of how slow the slowest of each stage's ranks is; None: its mean in every draw.
    """

    def __init__(self, draws: Draws, seed: int | None) -> None:
        self.draws = draws
        self._random = None if seed is None else np.random.default_rng((seed, 1))
        self._known: dict[Unit, list[tuple[Floats, ...]]] = {}

    def of(self, parts: Sequence[Part]) -> Floats:
        """Their sum in each draw."""
        return self.draws.sample(part.term for part in parts)

    def chunk(
        self, unit: Unit, start: int, stop: int, slow: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """(forward, backward, gradients of the weights) of a chunk in each draw."""
        kinds = self._kinds(unit)
        begin, end = unit.repeated_range(start, stop)
        found = [np.zeros(self.draws.count) for _ in range(3)]
        for kind, samples in enumerate(kinds):
            count = unit.kind_at[start:stop].count(kind)
            again = unit.kind_at[begin:end].count(kind)
            if not count:
                continue
            forward, forward_beside, backward, backward_beside, more, more_beside, weight = samples
            found[0] += count * (forward * slow + forward_beside)
            found[1] += count * (backward * slow + backward_beside)
            found[1] += again * (more * slow + more_beside)
            found[2] += count * weight * slow
        return found[0], found[1], found[2]

    def _kinds(self, unit: Unit) -> list[tuple[Floats, ...]]:
        if unit not in self._known:
            self._known[unit] = [
                (
                    *self._split(cost.forward),
                    *self._split(cost.backward),
                    *self._split(cost.again),
                    self._weight(cost.backward, cost.weight_seconds),
                )
                for cost in unit.costs
            ]
        return self._known[unit]

    def _split(self, parts: Sequence[Part]) -> tuple[Floats, Floats]:
        """(what the device computes, without stragglers; everything else)."""
        computed = [
            part for part in parts if part.computes and part.component is not Component.STRAGGLERS
        ]
        return self.of(computed), self.of([part for part in parts if not part.computes])

    def _weight(self, backward: Sequence[Part], weight_seconds: float) -> Floats:
        computed = self._split(backward)[0]
        whole = sum(part.seconds for part in backward if part.computes)
        return computed * (weight_seconds / whole if whole else 0.0)

    def slowest(self, stage: StageWork) -> Floats:
        """Time of the slowest of a stage's ranks over a typical one, in each draw."""
        spread = stage.unit.island.speed_spread
        if not spread:
            return np.ones(self.draws.count)
        ranks = stage.unit.replica.num_devices
        mean = straggler_factor(spread, ranks)
        if self._random is None:
            return np.full(self.draws.count, mean)
        # Never 0 or 1, whose quantiles are infinite.
        even = np.clip(self._random.random(self.draws.count), 1e-12, 1 - 1e-12) ** (1.0 / ranks)
        even = np.minimum(even, 1 - 1e-16)
        drawn = np.exp(spread * np.array([NormalDist().inv_cdf(float(each)) for each in even]))
        # The mean of 200 draws errs; what the central step says is exact.
        scaled: Floats = drawn * (mean / float(np.mean(drawn)))
        return scaled


def _replays(plan: Plan, work: Sequence[PipelineWork], samples: _Samples) -> Floats:
    """When every stage leaves its pipeline, [draws, stages of all pipelines]."""
    drawn = [_drawn(pipeline, samples) for pipeline in work]
    rendezvous = sends_wait(plan)
    if _go_together(work):
        return _one_by_one(work, drawn, rendezvous)
    each_alone = [_extrapolated(*one, rendezvous) for one in zip(work, drawn, strict=True)]
    return np.concatenate(each_alone, axis=1)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One pipeline in every draw."""

    passes: Floats
    """Forward, backward and weight gradients: [3, draws, stages, chunks]."""
    factors: Floats
    """On hops: [draws, hops]."""


def _drawn(pipeline: PipelineWork, samples: _Samples) -> _Drawn:
    count = samples.draws.count
    splits = pipeline.pipeline.schedule.name in SPLIT_SCHEDULES
    rows = []
    for stage in pipeline.stages:
        slow = samples.slowest(stage)
        row = []
        delays = stage.delays or ((0.0, 0.0),) * len(stage.ranges)
        for (start, stop), delay in zip(stage.ranges, delays, strict=True):
            forward, backward, weight = samples.chunk(stage.unit, start, stop, slow)
            forward, backward = forward + delay[0], backward + delay[1]
            late = weight if splits else np.zeros(count)
            row.append((forward, backward - late, late))
        rows.append(row)
    factors = np.ones((count, len(pipeline.hops.row)))
    for number, hop in enumerate(pipeline.hops.row):
        if hop is not None:
            factors[:, number] = samples.draws.factor((hop.link, ""), hop.law.log_halfwidth)
    return _Drawn(
        passes=np.ascontiguousarray(np.moveaxis(np.array(rows), (2, 3), (0, 1))),
        factors=factors,
    )


def _row(work: PipelineWork) -> int:
    """Passes of a microbatch, one way."""
    stages = work.pipeline.stages
    return len(stages) * len(stages[0].chunks)


def _lengths(work: PipelineWork) -> tuple[int, ...]:
    """Microbatches of the replays of a pipeline that goes alone: all of them or, where that is
    long, those of two shorter ones, the second twice as long.
    """
    whole, stages = work.pipeline.num_microbatches, work.pipeline.stages
    deepest = max(len(stages), *(stage.warmup_depth for stage in stages))
    few = beyond_transient(len(stages), deepest, WHOLE_PASSES // (4 * _row(work)))
    return (whole,) if whole * _row(work) <= WHOLE_PASSES or whole <= 2 * few else (few, 2 * few)


def _extrapolated(pipeline: PipelineWork, drawn: _Drawn, rendezvous: bool) -> Floats:
    """When every stage leaves a pipeline that goes alone.

    After its transient a pipeline is periodic (a max-plus system): its ends grow by the same amount
    with every few microbatches, so a line through two replays behind it goes on as they do.
    """
    lengths = _lengths(pipeline)
    ends = [_alone(pipeline, drawn, rendezvous, count) for count in lengths]
    if len(ends) == 1:
        return ends[0]
    more = (pipeline.pipeline.num_microbatches - lengths[1]) / lengths[0]
    found: Floats = ends[1] + (ends[1] - ends[0]) * more
    return found


def _alone(
    pipeline: PipelineWork, drawn: _Drawn, rendezvous: bool, num_microbatches: int
) -> Floats:
    """A pipeline of so many microbatches, by the kernel where that can order it."""
    hops = pipeline.hops
    if pipeline.is_plain and not hops.shares:
        times = StageTimes(
            np.ascontiguousarray(drawn.passes[0, :, :, 0]),
            np.ascontiguousarray(drawn.passes[1, :, :, 0]),
            hops.send_forward * drawn.factors,
            hops.send_backward * drawn.factors,
            hops.wire_latency * drawn.factors,
            hops.rendezvous_extra * drawn.factors,
            np.array([stage.warmup_depth for stage in pipeline.pipeline.stages]),
            num_microbatches,
        )
        found: Floats = ends_of_draws(times, rendezvous)
        if np.isfinite(found).all():
            return found
    return _one_by_one((pipeline,), (drawn,), rendezvous, num_microbatches)


def _one_by_one(
    work: Sequence[PipelineWork],
    drawn: Sequence[_Drawn],
    rendezvous: bool,
    num_microbatches: int | None = None,
) -> Floats:
    """Pipelines that go together, each draw by itself; of their own numbers of microbatches, or of
    this one.
    """
    found = []
    for d in range(len(drawn[0].factors)):
        times = [
            replace(
                pipeline.with_seconds(
                    each.passes[0, d],
                    each.passes[1, d],
                    each.passes[2, d],
                    each.factors[d],
                ),
                num_microbatches=num_microbatches or pipeline.pipeline.num_microbatches,
            )
            for pipeline, each in zip(work, drawn, strict=True)
        ]
        found.append(np.concatenate(step_ends(times, rendezvous=rendezvous)))
    return np.stack(found)
