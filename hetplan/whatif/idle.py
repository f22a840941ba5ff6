"""Why does a plan leave an island out, and from where would the island pay?

Of every island with idle devices, or that computes for less than half the time of the busiest one,
the search is asked again with one thing of the island changed:

    library      devices of several libraries may train together
    bandwidth    its links to all other islands `_WIDE` times as wide
    round trip   the same links without any
    memory       twice as much
    batch        a multiple of its devices; where it is one already, twice as large
    degrees      the trainer whose stages may have degrees of their own
    limit        no limits of sites, then all but one: before the others, as bounds leave them out

The first change after which the best plan gives the island more work is the cause. Where the
library is in the way, the others are asked on top of it; bandwidth and round trip are asked
together last. Links and memory only make plans faster or possible, so one search with all of them
changed rules all three out. Each search starts from all plans that those before it have found.

**From where it pays.** Let t(P, v) be the step of plan P where a link's bandwidth, round trip or a
memory has the value v. t never rises as v improves, and a plan that does not use the island does
not feel v. So a plan that was found to be faster has one least value from which it is, found by
bisection on its price, without a search. At the next worse value the search is asked for a better
plan; if there is one, bisection goes on with it, and so to the value at which no search finds any.
There the certificate says how much faster a plan might still be.

**Open searches.** Where the search of the plan has left more than `MOST_OPEN`, all this is asked
among the plans of a target whose searches close (`closed_question`), most of which this target runs
too. What is found and proven there is said of that target's plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from hetplan.cluster.libraries import island_library
from hetplan.cluster.spec import Island
from hetplan.deadline import check_time
from hetplan.errors import OutOfTimeError
from hetplan.job.trainer import mixes_libraries, trainer_faults
from hetplan.plans.check import check_plan
from hetplan.plans.limits import limits_of, unlimited, with_limit
from hetplan.plans.pieces import islands_in_use
from hetplan.plans.plan import Plan
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.result import BreakEven, IdleCause, IdleReason, Question, SearchResult
from hetplan.search.solver import RESOLUTION
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.forwarding_predictor import CachingPredictor
from hetplan.whatif.ask import (
    LEAST_GAP,
    NO_ANSWER,
    ask,
    carried,
    gap_beside,
    mixing,
    nearer,
    rate_of,
    step_seconds,
    wider,
)
from hetplan.whatif.plan_use import idle_islands, work_share
from hetplan.whatif.smaller_questions import usable_islands
from hetplan.whatif.within_limits import full_limits, may_break

_WIDE = 1000.0
"""Times the bandwidth of a link that is in nobody's way: 10 Gbit/s become more than any port."""
_MORE_MEMORY = 2.0
"""Times the memory: more is another device."""
_MOST_BATCH = 2
"""Times the batch, likewise: more is another training run."""
_BATCH_PARTS = 8
"""Batches between today's and the largest that are tried: each is a search from the start."""
_FAIR = 0.5
"""Part of the busiest island's share below which an island is said to have little to do."""
_PRECISION = 0.01
"""Relative resolution of a break-even: links are not known better, and it saves searches."""
_FORCED_GAP = 0.1
"""Of plans that must use an island: what one costs is wanted, no proof that it is the best."""
MOST_OPEN = 0.1
"""Gap of the plan above which nothing is asked: other searches to that gap would end with it."""
_MOST_ASKED = 8
"""Searches of one break-even; every one but the last finds a better plan. 2 or 3 are usual."""

_HARDWARE = (IdleCause.BANDWIDTH, IdleCause.ROUND_TRIP, IdleCause.MEMORY)
_CLOSED = ("flagscale", "megatron")
"""Targets with one pipeline, whose searches close; the larger space first."""
_FREER_TARGET = "flagscale"
"""Runs Megatron-LM's plans, and others whose stages differ in their degrees."""


def little_used(result: SearchResult) -> list[str]:
    """The islands that `idle_reasons` explains."""
    if result.certificate is None or result.objective:
        return []
    cluster = allowed_cluster(result.inputs.cluster, result.inputs.job)
    idle = {island.name for island, _ in idle_islands(result.plan, cluster)}
    shares = busy_shares(result)
    fair = _FAIR * max(shares.values())
    return [name for name, share in shares.items() if name in idle or share < fair]


def idle_reasons(
    result: SearchResult,
    predictor: Predictor,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[IdleReason, ...]:
    """Every island that the result's plan leaves idle, in part or most of the time (`little_used`),
    and why; fewer where time is over (`hetplan.deadline`).

    None of a plan that was given, or chosen by another aim than its step: no search says that
    another one would be worse. `progress` is told (number, of how many, island).
    """
    found: list[IdleReason] = []
    with suppress(OutOfTimeError):
        for reason in _reasons(result, CachingPredictor(predictor), progress):
            found.append(reason)
    return tuple(found)


def _reasons(
    result: SearchResult,
    predictor: Predictor,
    progress: Callable[[int, int, str], None] | None,
) -> Iterator[IdleReason]:
    named = little_used(result)
    if not named:
        return
    cluster = allowed_cluster(result.inputs.cluster, result.inputs.job)
    shares = busy_shares(result)
    idle = {island.name: left for island, left in idle_islands(result.plan, cluster)}
    basis = result if _open(result) <= MOST_OPEN else _closed(result, predictor)
    known = [] if basis is None else [basis.plan]
    for number, name in enumerate(named):
        check_time()
        if progress is not None:
            progress(number, len(named), name)
        island = cluster.island(name)
        reason = IdleReason(
            island=name,
            idle_devices=idle.get(name, 0),
            usable_devices=island.num_usable_devices,
            busy_share=shares[name],
            causes=(),
        )
        if full_limits(result, name):
            yield reason
            continue
        own = _Asker(result=result, predictor=predictor, island=island, known=[result.plan])
        limited = _by_limits(reason, own)
        if limited is not None:
            reason = limited
        elif basis is not None:
            asker = _Asker(result=basis, predictor=predictor, island=island, known=known)
            if basis is not result and asker.share > work_share(result.plan, cluster, name):
                reason = replace(reason, seconds_with_it=basis.estimate.step_seconds)
            else:
                reason = _explained(reason, asker)
        check_time()  # a search that time ended says nothing of what could be
        yield reason


def closed_question(result: SearchResult) -> Question | None:
    """The question for a target whose searches close: for one that has the result's plan, else for
    the first that trains the model; None where the result's target is such a one.
    """
    inputs, may = result.inputs, list[Question]()
    if not target(inputs.job.target).several_pipelines:
        return None
    for name in _CLOSED:
        asked: Question = inputs.with_job(target=name)
        if not mixes_libraries(asked.job):
            asked = mixing(asked)
        if not any(trainer_faults(asked.job)):
            may.append(asked)
    has = (each for each in may if _legal_in(result, each) is not None)
    return next(has, may[0] if may else None)


def _legal_in(result: SearchResult, question: Question) -> Plan | None:
    """The result's plan as one of the question; None where it is none."""
    plan = carried(result, question)
    if plan is None or check_plan(plan, question.model, question.cluster, question.job):
        return None
    return plan


def _closed(result: SearchResult, predictor: Predictor) -> SearchResult | None:
    """The best plan of `closed_question`, from the result's; None where that stays open too."""
    question = closed_question(result)
    if question is None:
        return None
    own = _legal_in(result, question)
    gap = max(question.job.gap, LEAST_GAP)
    try:
        found = ask(
            question.looser(gap, question.job.time_limit_seconds),
            predictor,
            known_plans=() if own is None else (own,),
        )
    except NO_ANSWER:
        return None
    return found if _open(found) <= MOST_OPEN else None


def busy_shares(result: SearchResult) -> dict[str, float]:
    """By island with usable nodes: part of the step in which its usable devices compute."""
    estimate, usable = result.estimate, usable_islands(result.inputs)
    seconds = {island.name: 0.0 for island in usable}
    for stage, cost in zip(result.plan.stages, estimate.stages, strict=True):
        for replica in stage.replicas:
            on = result.inputs.cluster.island_of_device(replica.devices[0].start).name
            seconds[on] += replica.num_devices * cost.busy_seconds
    return {
        island.name: seconds[island.name] / (island.num_usable_devices * estimate.step_seconds)
        for island in usable
    }


@dataclass(slots=True)
class _Asker:
    """Asks about one island, and keeps the plans that were found."""

    result: SearchResult
    predictor: Predictor
    island: Island
    known: list[Plan]
    """Of all searches of the result so far, its own plan first."""
    share: float = field(init=False)
    """Of the work that the island has today."""
    tokens_per_second: float = field(init=False)
    """Of the best plan without a change of the island."""

    def __post_init__(self) -> None:
        self.share = self._share(self.result.plan)
        self.tokens_per_second = self.result.estimate.tokens_per_second

    def ask(self, question: Question, *, gap: float | None = None) -> SearchResult | None:
        """The best plan of a question, to this gap or the result's own; None: there is none in
        time.
        """
        gap = gap_beside(self.result, question) if gap is None else gap
        try:
            found = ask(question.looser(gap), self.predictor, known_plans=self.known)
        except NO_ANSWER:
            return None
        if found.plan not in self.known:
            self.known.append(found.plan)
        return found

    def uses_more(self, plan: Plan) -> bool:
        """Whether the island has more of the work than today."""
        return self._share(plan) > self.share + RESOLUTION

    def _share(self, plan: Plan) -> float:
        return work_share(plan, self.result.inputs.cluster, self.island.name)

    def helps(self, found: SearchResult | None) -> TypeGuard[SearchResult]:
        """Whether the answer's plan gives the island more work and makes more of a second."""
        if found is None or not self.uses_more(found.plan):
            return False
        return _rate(found) > self.tokens_per_second * (1.0 + RESOLUTION)

    def step(self, question: Question, plan: Plan) -> float:
        """Of a legal plan; infinite where it does not fit."""
        return step_seconds(plan, question, self.predictor)

    def known_of(self, question: Question) -> list[Plan]:
        """Known plans that the question's rules allow, the newest first."""
        job, model, cluster = question.job, question.model, question.cluster
        return [
            plan
            for plan in self.known[::-1]
            if plan.target == job.target and not check_plan(plan, model, cluster, job)
        ]


def _rate(found: SearchResult) -> float:
    return found.estimate.tokens_per_second


def _explained(reason: IdleReason, asker: _Asker) -> IdleReason:
    """The reason with its causes: asked until a change helps."""
    result, island = asker.result, asker.island
    base: Question = result.inputs
    first: tuple[IdleCause, ...] = ()
    if _has_other_library(base, result.plan, island):
        first, base = (IdleCause.LIBRARY,), _changed(asker, base, IdleCause.LIBRARY)
        found = asker.ask(base)
        if asker.helps(found):
            return _mended(reason, asker, found, first)
        asker.tokens_per_second = asker.tokens_per_second if found is None else _rate(found)
    for causes in _tried(asker, base):
        found = asker.ask(_all_changed(asker, base, causes))
        if asker.helps(found):
            other = _other(asker, base, causes)
            reason = replace(
                _mended(reason, asker, found, (*first, *causes)),
                other=other,
                break_even=_break_even(asker, base, causes, other),
            )
            break
    return replace(reason, seconds_with_it=_seconds_with_it(asker, base))


def _by_limits(reason: IdleReason, asker: _Asker) -> IdleReason | None:
    """The reason with the limits without which the best plan uses more of the island, one where
    that is enough; None where none are in the way.
    """
    inputs: Question = asker.result.inputs

    def helps(found: SearchResult | None) -> TypeGuard[SearchResult]:
        if found is None or _rate(found) <= asker.tokens_per_second * (1.0 + RESOLUTION):
            return False
        cluster = allowed_cluster(found.inputs.cluster, inputs.job)
        idle = {island.name: left for island, left in idle_islands(found.plan, cluster)}
        return asker.uses_more(found.plan) or idle.get(reason.island, 0) < reason.idle_devices

    if not may_break(inputs):
        return None
    found = asker.ask(_changed(asker, inputs, IdleCause.LIMIT), gap=LEAST_GAP)
    if not helps(found):
        return None
    limits = [*limits_of(inputs.cluster, inputs.job)]
    names = " and ".join(each.name for each in limits)
    for each in limits if len(limits) > 1 else ():
        free = inputs.changed(cluster=with_limit(inputs.cluster, each, None))
        without = asker.ask(free, gap=LEAST_GAP)
        if helps(without):
            found, names = without, each.name
            break
    return replace(_mended(reason, asker, found, (IdleCause.LIMIT,)), other=names)


def _mended(
    reason: IdleReason, asker: _Asker, found: SearchResult, causes: tuple[IdleCause, ...]
) -> IdleReason:
    gain = _rate(found) / asker.tokens_per_second - 1.0
    return replace(reason, causes=causes, gain=gain)


def _tried(asker: _Asker, base: Question) -> Iterator[tuple[IdleCause, ...]]:
    """Sets of changes, likeliest first; the caller stops at the first that helps."""
    yield (IdleCause.BANDWIDTH,)
    hardware = asker.helps(asker.ask(_all_changed(asker, base, _HARDWARE)))
    if hardware:
        yield (IdleCause.ROUND_TRIP,)
        yield (IdleCause.MEMORY,)
        yield (IdleCause.BANDWIDTH, IdleCause.ROUND_TRIP)
    yield (IdleCause.BATCH,)
    if not target(base.job.target).stages_differ:
        yield (IdleCause.DEGREES,)
    if hardware:
        yield _HARDWARE


def _all_changed(
    asker: _Asker, question: Question, causes: Sequence[IdleCause], other: str = ""
) -> Question:
    """The question without these causes; of links those to the other island, where it is named."""
    for cause in causes:
        question = _changed(asker, question, cause, other)
    return question


def _changed(asker: _Asker, question: Question, cause: IdleCause, other: str = "") -> Question:
    island = asker.island
    match cause:
        case IdleCause.LIBRARY:
            return mixing(question)
        case IdleCause.BANDWIDTH:
            return wider(question, _pairs(asker, question, other), _WIDE)
        case IdleCause.ROUND_TRIP:
            return nearer(question, _pairs(asker, question, other), 0.0)
        case IdleCause.MEMORY:
            more = replace(island, memory_bytes=_MORE_MEMORY * island.memory_bytes)
            return question.with_island(more)
        case IdleCause.LIMIT:
            return question.changed(cluster=unlimited(question.cluster, question.job))
        case IdleCause.BATCH:
            return question.with_job(global_batch_size=_better_batch(asker))
        case IdleCause.DEGREES:
            return question.with_job(target=_FREER_TARGET)


def _pairs(asker: _Asker, question: Question, other: str = "") -> list[tuple[str, str]]:
    """The island with every other one that has nodes, or with this one."""
    return [
        (asker.island.name, each.name)
        for each in question.cluster.islands
        if each.usable_nodes and each.name != asker.island.name and other in ("", each.name)
    ]


def _better_batch(asker: _Asker) -> int:
    """The next batch that divides over the island's devices; twice as many where today's does."""
    batch, devices = asker.result.inputs.job.global_batch_size, asker.island.num_usable_devices
    odd = devices // (devices & -devices)
    return -(-batch // odd) * odd if batch % odd else _MOST_BATCH * batch


def _seconds_with_it(asker: _Asker, base: Question) -> float | None:
    """Step of the best known plan that uses more of the island today; where none is known, of one
    that begins or ends on it. None where none was found.
    """
    if asker.share == 0 and not any(map(asker.uses_more, asker.known_of(base))):
        for name in ("embedding_on", "head_on"):
            if getattr(base.job.pin, name) is None:
                asker.ask(base.with_pins(**{name: asker.island.name}), gap=_FORCED_GAP)
    steps = (asker.step(base, plan) for plan in asker.known_of(base) if asker.uses_more(plan))
    least = min(steps, default=math.inf)
    return least if least < math.inf else None


def _has_other_library(question: Question, plan: Plan, island: Island) -> bool:
    """Whether the trainer cannot have the island's devices beside those of the plan."""
    if mixes_libraries(question.job):
        return False
    used = islands_in_use(plan, question.cluster)
    return any(
        island_library(question.cluster.island(name)) != island_library(island) for name in used
    )


def _other(asker: _Asker, base: Question, causes: Sequence[IdleCause]) -> str:
    """The target, or the one other island whose link is all that must change; else empty."""
    if causes == (IdleCause.DEGREES,):
        return _FREER_TARGET
    if not {IdleCause.BANDWIDTH, IdleCause.ROUND_TRIP}.issuperset(causes):
        return ""
    plan, now = asker.known[-1], _reference(asker, base)[1]
    for _, other in _pairs(asker, base):
        changed = _all_changed(asker, base, causes, other)
        if asker.step(changed, plan) < now * (1.0 - RESOLUTION):
            return other
    return ""


def _reference(asker: _Asker, question: Question) -> tuple[Plan, float]:
    """The fastest known plan without more of the island, and its step."""
    legal = asker.known_of(question)
    steps = [(plan, asker.step(question, plan)) for plan in legal if not asker.uses_more(plan)]
    return min(steps, key=lambda each: each[1])


# ---- from where it pays


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """What is changed until the island pays."""

    name: str
    unit: str
    today: float
    best: float
    at: Callable[[float], Question]

    def between(self, one: float, two: float) -> float:
        """Half of the way, in factors; where there are none, in steps."""
        return math.sqrt(one * two) if min(one, two, self.best) > 0 else (one + two) / 2

    def near(self, one: float, two: float) -> bool:
        """Whether they are one value within the resolution."""
        size = min(one, two) if self.best > 0 else self.today
        return abs(one - two) <= _PRECISION * size


def _break_even(
    asker: _Asker, base: Question, causes: Sequence[IdleCause], other: str
) -> BreakEven | None:
    if causes == (IdleCause.BATCH,):
        return _least_batch(asker, base)
    axis = _axis(asker, base, causes, other)
    return None if axis is None else _least_value(asker, axis)


def _axis(asker: _Asker, base: Question, causes: Sequence[IdleCause], other: str) -> _Axis | None:
    island = asker.island
    if causes == (IdleCause.MEMORY,):
        return _Axis(
            name="memory",
            unit="bytes",
            today=island.memory_bytes,
            best=_MORE_MEMORY * island.memory_bytes,
            at=lambda value: base.with_island(replace(island, memory_bytes=value)),
        )
    pairs = _pairs(asker, base, other)
    links = [base.cluster.link_between(*pair) for pair in pairs]
    if causes == (IdleCause.ROUND_TRIP,):
        longest = max(link.round_trip_seconds for link in links)
        return _Axis(
            name="round_trip",
            unit="s",
            today=longest,
            best=0.0,
            at=lambda value: nearer(base, pairs, value / longest),
        )
    if IdleCause.BANDWIDTH not in causes or IdleCause.MEMORY in causes:
        return None
    near = nearer(base, pairs, 0.0) if IdleCause.ROUND_TRIP in causes else base
    narrowest = min(map(rate_of, links))
    return _Axis(
        name="bandwidth",
        unit="bytes/s",
        today=narrowest,
        best=_WIDE * narrowest,
        at=lambda value: wider(near, pairs, value / narrowest),
    )


def _open(found: SearchResult | None) -> float:
    """Gap that a search has left open; 1 where it has shown nothing."""
    return 1.0 if found is None or found.certificate is None else found.certificate.gap


def _least_value(asker: _Asker, axis: _Axis) -> BreakEven | None:
    """The value from which a known plan pays, until no search finds one that does before it."""
    gap, last = 1.0, -1.0
    for _ in range(_MOST_ASKED):
        known = _of_known(asker, axis)
        if known is None:
            return None
        value, below = known
        if below == last or value == axis.today:
            break
        found, last = asker.ask(axis.at(below)), below
        gap = _open(found)
    else:
        gap = 1.0  # the last search may have found a plan that pays sooner
    lower, upper = sorted((value, below))
    return BreakEven(
        name=axis.name, unit=axis.unit, today=axis.today, value=value, lower=lower, upper=upper,
        gap=gap,
    )  # fmt: skip


def _of_known(asker: _Asker, axis: _Axis) -> tuple[float, float] | None:
    """(nearest value to today's at which a known plan pays, the one before it); None: nowhere."""
    today = axis.at(axis.today)
    without, seconds = _reference(asker, today)

    def pays(plan: Plan, value: float) -> bool:
        question = axis.at(value)
        # A plan without the island does not feel the change.
        own = seconds if asker.share == 0 else asker.step(question, without)
        return asker.step(question, plan) < own * (1.0 - RESOLUTION)

    found, good = None, axis.best
    for plan in asker.known_of(today):
        if not asker.uses_more(plan) or not pays(plan, good):
            continue
        low = axis.today
        if pays(plan, low):
            return low, low
        while not axis.near(low, good):
            middle = axis.between(low, good)
            if pays(plan, middle):
                good = middle
            else:
                low = middle
        found = good, low
    return found


def _least_batch(asker: _Asker, base: Question) -> BreakEven:
    """The least batch that makes the best plan use more of the island, of a few."""
    today, best = base.job.global_batch_size, _better_batch(asker)
    step = max(1, today // _BATCH_PARTS) if best == _MOST_BATCH * today else best - today
    low, high, gap = today, best, _open(asker.result)
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        found = asker.ask(base.with_job(global_batch_size=middle))
        if asker.helps(found):
            high = middle
        else:
            low, gap = middle, _open(found)
    return BreakEven(
        name="global_batch_size", unit="sequences", today=today, value=high, lower=low, upper=high,
        gap=gap,
    )  # fmt: skip
