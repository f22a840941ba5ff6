"""The next plan of a run whose cluster changes, the cost of getting there included.

    seconds of a plan = stand still + steps again x step + steps of the horizon x step
    stand still       = start + move (`hetplan.cost.moving`)

The plan of the least seconds wins: a slower one with a cheap move over a short horizon. Ranked are

    the search     its best plan, and the best that each of its solvers has found
    the old plan   where it still runs: no start and no move
    near the old   the old layout as it is, with other data-parallel degrees that divide the batch,
                   and without the pipelines that lost a device, whose microbatches the others take

and nothing else: the search's certificate is about the step time, none goes with the seconds. The
global batch stays as the job has it. Where devices keep their state each plan lies on those nodes
that have most of what it needs (`laid_near`).

Steps again: a device that is lost takes its state with it. Where all of it has a copy elsewhere and
devices keep theirs, none is repeated; otherwise the run goes back to its last checkpoint, half an
interval ago on average: the job's, or the best one for the days of the old plan. Before changes
that are announced a checkpoint is saved, or those that leave send what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress, islice

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate_with
from hetplan.cost.goodput.parts import used_islands
from hetplan.cost.goodput.run import goodput, start_up_of
from hetplan.cost.goodput.storage import storage_of
from hetplan.cost.moving import (
    GONE,
    Held,
    Moving,
    Transfer,
    cells,
    laid_near,
    moving,
    on_devices,
    same_devices,
    transfers,
    used,
)
from hetplan.cost.step_model.pricer import StepCost
from hetplan.deadline import moment_in
from hetplan.errors import Fault, InfeasibleError, InputError, LimitError
from hetplan.files.quantities import NonNegative, Positive, check_limits
from hetplan.job.spec import Job
from hetplan.kernels import clock
from hetplan.plans.build import chosen_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage
from hetplan.plans.pieces import own_depth, stage_array
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.journal import JournalFile
from hetplan.search.result import Inputs, Question, SearchResult, certificate_beside
from hetplan.search.search import search_with_rivals
from hetplan.search.solver import Progress
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.plan_evaluator import PlanEvaluator, fits
from hetplan.units import Dimension, parse_count, parse_quantity
from hetplan.whatif.ask import is_interrupted
from hetplan.whatif.no_plan import with_reasons
from hetplan.whatif.objectives import by_objective, has_other_aim
from hetplan.whatif.within_limits import OverLimitsError, keeps_limits, may_break, within_limits

SEARCH_SECONDS = 60.0
"""Of the search, as a drafted job has; most end in some 2 CPU s for 1,000 devices."""
DAY_SECONDS = 86400.0

_MOST_NEAR = 8
"""Layouts near the old one, of each kind; the largest first."""
_MOST_RIVALS = 8
"""Plans of the search."""
_MOST_PRICED = 6
"""Plans whose move is priced although their steps alone take longer than the best one."""


class Source(StrEnum):
    """Where the new plan's devices get their state from."""

    CHECKPOINT = "checkpoint"
    """What trainers do that start their processes again."""
    PEERS = "peers"
    """Devices, or their hosts, keep what they hold and send it to each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a change of plans costs, and how long the next plan is to last."""

    horizon_tokens: Positive | None = None
    horizon_seconds: Positive | None = None
    """The work that the plan of the shortest step does in this time. Neither: all tokens of the
    job, or a day where it does not say them."""
    start_seconds: NonNegative | None = None
    """From the end of the old processes to the first step, without the move; None: as the days of
    the run have it (`hetplan.cost.goodput.run`)."""
    source: Source = Source.CHECKPOINT
    storage_bytes_per_second: Positive | None = None
    """What all readers of a checkpoint get together; None: as the days of the run have it."""
    search_seconds: NonNegative = SEARCH_SECONDS
    """Until the next plan is found and priced; the job's own limit counts where it is shorter."""
    may_stay: bool = True
    """Whether the old plan may go on without a start, where it can."""

    def __post_init__(self) -> None:
        check_limits(self)


def source_named(name: object, field: str) -> Source:
    """The source of this name; `field` is where it was said."""
    if name not in tuple(Source):
        message = f"{str(name)[:40]!a}; it is one of {', '.join(Source)}"
        raise InputError(Fault(field=field, message=message))
    return Source(str(name))


def with_horizon(terms: Terms, text: str | None) -> Terms:
    """The terms for a horizon as in `6h`, or as in `500B` tokens."""
    if text is None:
        return terms
    try:
        return replace(terms, horizon_seconds=parse_quantity(text, Dimension.TIME))
    except InputError:
        pass
    try:
        return replace(terms, horizon_tokens=float(parse_count(text)))
    except InputError as error:
        message = f"found {text[:40]!a}; write tokens as in 500B, or a time as in 6h"
        raise InputError(Fault(field="horizon", message=message)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One plan that the run could go on with."""

    words: str
    """Where it comes from."""
    plan: Plan
    step_seconds: float
    start_seconds: float
    """0 where nothing is started again."""
    moving: Moving
    steps_again: float | None
    """Since the checkpoint that it starts from; None: not known, and not counted."""

    @property
    def still_seconds(self) -> float:
        """For which nothing new is trained."""
        again = (self.steps_again or 0.0) * self.step_seconds
        return self.start_seconds + self.moving.seconds + again

    def seconds(self, steps: float) -> float:
        """Until so many new steps are done."""
        return self.still_seconds + steps * self.step_seconds

    def steps_in(self, seconds: float) -> float:
        """New steps in so much time; negative where the run still stands."""
        return (seconds - self.still_seconds) / self.step_seconds

    def pays_after_seconds(self, other: Option) -> float | None:
        """When this plan, from then on ahead, has done as many steps as the other; 0 where it never
        is behind, None where it never gets ahead.
        """
        if self.still_seconds <= other.still_seconds:
            return 0.0 if self.step_seconds <= other.step_seconds else None
        if self.step_seconds >= other.step_seconds:
            return None
        mine, its = 1 / self.step_seconds, 1 / other.step_seconds
        return (self.still_seconds * mine - other.still_seconds * its) / (mine - its)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The next plan, what it costs to get there, and what else was ranked."""

    result: SearchResult
    """The next plan as a plan file has it; its certificate is about the step time."""
    before: SearchResult
    best: Option
    others: tuple[Option, ...]
    """The next best ones; plans whose steps alone take longer than the best are not priced."""
    ranked: int
    """Plans in all."""
    steps: float
    """Of the horizon: those of its tokens, or as many as the best plan makes in its time."""
    lost_devices: int
    """Of the old plan, that are no longer there."""
    state_is_lost: bool
    """Some of the state had no copy on a device that is left."""
    transfers: tuple[Transfer, ...]
    """Who gets how much of the state from whom, by the devices' new numbers."""


def replan(
    before: SearchResult,
    cluster: Cluster,
    predictor: Predictor,
    terms: Terms,
    *,
    sudden: bool = False,
    job: Job | None = None,
    sha256: tuple[tuple[str, str], ...] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Replanned:
    """The best next plan of the run on this cluster.

    sudden: devices were lost before anything could be saved. job: another one than before, as of
    another global batch. sha256: of the inputs where they are others than before. `progress` is
    told as by a search. InfeasibleError and LimitError as of a search; InputError where no node is
    left.
    """
    old = before.inputs
    asked = replace(old, cluster=cluster, job=job or old.job)
    if sha256 is not None:
        asked = replace(asked, sha256=sha256)
    if not any(island.usable_nodes for island in allowed_cluster(cluster, asked.job).islands):
        raise InputError("no node is left that the job may use; name other nodes, or gain some")
    own = asked.job.time_limit_seconds
    end = moment_in(terms.search_seconds if own is None else min(own, terms.search_seconds))
    left = same_devices(old.cluster, cluster)
    now = left if sudden else same_devices(old.cluster, cluster, leaving=True)
    ranking = _Ranking(
        before=before,
        asked=asked,
        held=Held(plan=before.plan, now=now),
        left=left,
        evaluator=PlanEvaluator(
            asked.model, allowed_cluster(cluster, asked.job), asked.job, predictor
        ),
        terms=terms,
        end=end,
        sudden=sudden and GONE in {left[each] for each in used(before.plan).tolist()},
    )
    try:
        with with_reasons(asked, predictor, end):
            found, plans = _candidates(ranking, predictor, progress)
    except InputError as error:
        # The job was right for the old cluster: its pins are not for this one.
        raise InfeasibleError([str(error)]) from error
    return ranking.best_of(found, plans)


def _candidates(
    ranking: _Ranking,
    predictor: Predictor,
    progress: Callable[[Progress], None] | None,
) -> tuple[SearchResult, dict[Plan, str]]:
    """What the search ends with, and every plan that is ranked with where it comes from."""
    asked, evaluator = ranking.asked, ranking.evaluator
    limited = may_break(asked)

    def kept(plan: Plan) -> bool:
        return not limited or keeps_limits(plan, estimate_with(evaluator.pricer, plan), asked)

    near: dict[Plan, str] = {}
    for words, plan in ranking.near():
        if kept(plan):
            near.setdefault(plan, words)
    left = max(0.0, ranking.end - clock())
    question = replace(asked, job=replace(asked.job, time_limit_seconds=left))
    answers: list[SearchResult] = []
    rivals: list[ChosenPlan] = []

    def searched(each: Question, journal: JournalFile | None) -> SearchResult:
        found, others = search_with_rivals(
            each, predictor, start=tuple(near), progress=progress, journal=journal
        )
        answers.append(found)
        rivals.extend(others)
        return found

    try:
        found = within_limits(question, searched)
    except (OverLimitsError, LimitError):
        if not (near and answers):
            raise
        first = next(iter(near))  # all are ranked below
        estimate = estimate_with(evaluator.pricer, first)
        bound = certificate_beside(answers[0], estimate.step_seconds)
        found = replace(answers[0], plan=first, estimate=estimate, certificate=bound)
    if is_interrupted(found):
        raise KeyboardInterrupt
    found = replace(found, inputs=asked)
    if has_other_aim(asked.job):
        # Another aim than the time ranks its plans by itself.
        best = by_objective(found, predictor, end=ranking.end)
        return best, {best.plan: "the search"}
    plans = {found.plan: near.get(found.plan, "the search")}
    for chosen in rivals[: _MOST_RIVALS * len(answers)]:
        rival = evaluator.legal(chosen)
        if rival is not None and kept(rival):
            plans.setdefault(rival, near.get(rival, "the search"))
    for plan, words in near.items():
        plans.setdefault(plan, words)
    return found, plans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    """Plans by what they cost until the horizon."""

    before: SearchResult
    asked: Inputs
    held: Held
    left: tuple[int, ...]
    """New number of every old device, or `GONE` where the next plan cannot use it."""
    evaluator: PlanEvaluator
    terms: Terms
    end: float
    """A moment from which on what is not priced is left out."""
    sudden: bool

    def best_of(self, found: SearchResult, plans: dict[Plan, str]) -> Replanned:
        """The best of these, priced and told."""
        prices: dict[Plan, StepCost] = {}
        for plan in plans:
            if not prices or clock() < self.end:
                prices[plan] = self.evaluator.pricer.step(plan)
        steps = {plan: step.step_seconds for plan, step in prices.items() if fits(step)}
        stays = self._staying() if self.terms.may_stay else None
        options: list[Option] = []
        lost = self._state_is_lost(found.plan)
        own = self.terms.source is Source.PEERS and not lost
        for plan, seconds in sorted(steps.items(), key=lambda each: each[1]):
            horizon = self._horizon_steps(options)
            least = min((each.seconds(horizon) for each in options), default=math.inf)
            far = len(options) >= _MOST_PRICED and seconds * horizon >= least
            far = far or (bool(options) and clock() > self.end)
            if plan == stays or not far:
                option = self._option(plan, plans[plan], seconds, own=own, stays=plan == stays)
                options.append(option)
        horizon = self._horizon_steps(options)
        options.sort(key=lambda each: each.seconds(horizon))
        best = options[0]
        estimate = found.estimate
        if best.plan != found.plan:
            estimate = estimate_with(self.evaluator.pricer, best.plan)
        return Replanned(
            result=replace(
                found,
                plan=best.plan,
                estimate=estimate,
                certificate=certificate_beside(found, estimate.step_seconds),
            ),
            before=self.before,
            best=replace(best, step_seconds=estimate.step_seconds),
            others=tuple(options[1:]),
            ranked=len(steps),
            steps=horizon,
            lost_devices=sum(self.left[each] == GONE for each in used(self.before.plan).tolist()),
            state_is_lost=lost,
            transfers=self._transfers(best.plan, keeps=own or best.plan == stays),
        )

    def _horizon_steps(self, options: Sequence[Option]) -> float:
        """Of the tokens that are left, or as many as the best of these makes in the time."""
        terms, job = self.terms, self.asked.job
        tokens = terms.horizon_tokens
        if tokens is None and terms.horizon_seconds is None:
            tokens = job.total_tokens
        if tokens is not None:
            return tokens / (job.global_batch_size * job.sequence_length)
        seconds = terms.horizon_seconds or DAY_SECONDS
        return max([0.0, *(each.steps_in(seconds) for each in options)])

    def _option(self, plan: Plan, words: str, seconds: float, *, own: bool, stays: bool) -> Option:
        """The plan with its move; own: devices keep their state, all of which is there."""
        inputs, terms, cluster = self.asked, self.terms, self.evaluator.cluster
        if own and not stays:
            needed = [*cells(self.held, plan, inputs.model, inputs.job)]
            plan = laid_near(needed, plan, cluster)
        given = self._transfers(plan, keeps=own or stays)
        storage = terms.storage_bytes_per_second
        if storage is None:
            rates, _ = storage_of(used_islands(plan, cluster), cluster, inputs.job)
            storage = rates.read_bytes_per_second
        moves = moving(given, cluster, storage_bytes_per_second=storage)
        return Option(
            words=words,
            plan=plan,
            step_seconds=seconds,
            start_seconds=0.0 if stays else self._start_seconds(plan, moves.seconds),
            moving=moves,
            steps_again=self._steps_again() if self.sudden and not own else 0.0,
        )

    def _start_seconds(self, plan: Plan, move_seconds: float) -> float:
        """Without the move, which loads the weights too."""
        if self.terms.start_seconds is not None:
            return self.terms.start_seconds
        start = start_up_of(plan, self.asked.model, self.asked.job)
        return start.seconds - min(start.loaded_seconds, move_seconds)

    def _steps_again(self) -> float | None:
        """Half of the interval between checkpoints: the job's, or the best for the old plan."""
        before, inputs = self.before, self.before.inputs
        job = replace(inputs.job, run=replace(inputs.job.run, peer_recovery=False))
        interval = job.checkpoint_interval_steps
        if interval is None and job.total_tokens is not None:
            run = goodput(before.plan, before.estimate, inputs.model, inputs.cluster, job)
            interval = run.interval_steps
        return None if interval is None else interval / 2

    def _transfers(self, plan: Plan, *, keeps: bool) -> tuple[Transfer, ...]:
        """Of the plan's state, from devices that keep it or from the checkpoint."""
        inputs, held = self.asked, self.held if keeps else None
        found = [*cells(held, plan, inputs.model, inputs.job)]
        return transfers(found, self.evaluator.cluster)

    def _state_is_lost(self, plan: Plan) -> bool:
        """Whether some of the state has no copy on a device that can send, whatever the plan."""
        inputs = self.asked
        return any(not each.holders for each in cells(self.held, plan, inputs.model, inputs.job))

    def _staying(self) -> Plan | None:
        """The old plan, on its devices; None where it has lost one or is no longer legal."""
        now, inputs = self.left, self.asked
        cluster = self.evaluator.cluster
        if any(now[device] == GONE for device in used(self.held.plan).tolist()):
            return None
        plan = on_devices(self.held.plan, now, cluster.num_devices)
        return None if check_plan(plan, inputs.model, cluster, inputs.job) else plan

    def near(self) -> Iterator[tuple[str, Plan]]:
        """Plans near the old one that are legal and fit, and in words what they are."""
        stays = self._staying()
        if stays is not None:
            yield "the old plan goes on", stays
        inputs = self.before.inputs
        try:
            chosen = chosen_of(self.before.plan, inputs.cluster, inputs.job, inputs.model)
        except InputError:
            return  # a layout that no choices can say
        most = sum(island.num_usable_devices for island in self.evaluator.cluster.islands)
        batch = self.asked.job.global_batch_size
        for way in (self._fewer_pipelines(chosen, batch), _other_degrees(chosen, batch, most)):
            yield from islice(self._legal(way), _MOST_NEAR)

    def _legal(self, way: Iterator[tuple[str, ChosenPlan]]) -> Iterator[tuple[str, Plan]]:
        for words, chosen in way:
            plan = self.evaluator.legal(chosen)
            if plan is not None and fits(self.evaluator.pricer.step(plan)):
                yield words, plan

    def _fewer_pipelines(self, chosen: ChosenPlan, batch: int) -> Iterator[tuple[str, ChosenPlan]]:
        """Without those that have lost a device."""
        now = self.left
        whole = [
            all(
                now[device] != GONE
                for stage in pipeline.stages
                for device in stage_array(stage).tolist()
            )
            for pipeline in self.held.plan.pipelines
        ]
        if any(whole) and not all(whole):
            kept = [*compress(chosen.pipelines, whole)]
            dealt = _dealt(kept, batch)
            if dealt is not None:
                words = f"the old layout with {len(kept)} of {len(whole)} pipelines"
                yield words, replace(chosen, pipelines=dealt)


def _other_degrees(chosen: ChosenPlan, batch: int, most: int) -> Iterator[tuple[str, ChosenPlan]]:
    """The layout, and with all of its data-parallel degrees multiplied by one ratio."""
    parts = [p for each in chosen.pipelines for stage in each.stages for p in stage.parts]
    shared = math.gcd(*(part.shape.dp for part in parts))
    devices = sum(part.shape.num_devices for part in parts)
    for times in range(most * shared // devices, 0, -1):
        pipelines = [_wider(each, times, shared) for each in chosen.pipelines]
        dealt = _dealt(pipelines, batch)
        if dealt is not None:
            same = times == shared
            words = "the old layout" if same else f"the old layout, dp x {times}/{shared}"
            yield words, replace(chosen, pipelines=dealt)


def _wider(pipeline: ChosenPipeline, times: int, shared: int) -> ChosenPipeline:
    """With `times / shared` as many data-parallel ranks."""
    stages = tuple(
        replace(
            stage,
            parts=tuple(
                replace(part, shape=replace(part.shape, dp=part.shape.dp * times // shared))
                for part in stage.parts
            ),
        )
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)


def _dealt(pipelines: Sequence[ChosenPipeline], batch: int) -> tuple[ChosenPipeline, ...] | None:
    """The pipelines with the microbatches of the batch, in the proportion that they had; None where
    they do not divide it.
    """
    samples = {sum(part.shape.samples for part in each.stages[0].parts) for each in pipelines}
    size = samples.pop()
    if samples or batch % size or batch // size < len(pipelines):
        return None
    count, had = batch // size, [each.num_microbatches for each in pipelines]
    shares = [max(1, count * each // sum(had)) for each in had]
    # What is left over goes to those that had most.
    order = sorted(range(len(had)), key=lambda at: -had[at])
    for at in range(abs(count - sum(shares))):
        shares[order[at % len(order)]] += 1 if sum(shares) < count else -1
    if min(shares) < 1 or sum(shares) != count:
        return None
    return tuple(map(_with_microbatches, pipelines, shares))


def _with_microbatches(pipeline: ChosenPipeline, count: int) -> ChosenPipeline:
    """With so many microbatches, and as deep beyond its schedule's own warm-up as before."""
    schedule, stages = pipeline.schedule, len(pipeline.stages)

    def deep(number: int, stage: ChosenStage) -> ChosenStage:
        was, own = (
            own_depth(schedule.name, number, stages, each, schedule.virtual_stages)
            for each in (pipeline.num_microbatches, count)
        )
        extra = stage.warmup_depth - was
        return replace(stage, warmup_depth=min(own + extra, count) if extra else own)

    return replace(
        pipeline,
        num_microbatches=count,
        stages=tuple(deep(number, stage) for number, stage in enumerate(pipeline.stages)),
    )
