"""Local steps beside the synchronous plan: which ends the run first, and from which link on.

Every region is a site with a part of the batch, whose best plan a search of its own finds. Parts
follow the sites' samples per second until the sites end together; then the plans are averaged by
the job's `synchronisation` and priced whole. A run of local steps needs 1 + extra_tokens times the
tokens. Compared is when a run ends: all that it loses counts where the job says its tokens
(`hetplan.cost.goodput`), its steps alone where it does not; at the job's quantile, if it has one.

Proven: no plan of local steps with these parts of the batch has a shorter step than the longest of
the bounds of its sites' searches. Where the links would have to be for the other choice is looked
for between plans that were found: these two, and the best synchronous plan over wide, near links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias

from hetplan.cluster.spec import Island
from hetplan.cost.estimate import estimate_with, step_quantile
from hetplan.cost.goodput.run import goodput
from hetplan.cost.step_model.pricer import Pricer
from hetplan.deadline import check_time, ends_by, seconds_left
from hetplan.errors import OutOfTimeError
from hetplan.job.spec import Objective, Sharding
from hetplan.kernels import clock
from hetplan.plans.check import check_plan
from hetplan.plans.local_steps import local_steps_plan
from hetplan.plans.pieces import islands_in_use
from hetplan.plans.plan import Plan
from hetplan.plans.ranks import limits_of
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question, SearchResult
from hetplan.whatif.ask import NO_ANSWER, ask, nearer, rate_of, wider
from hetplan.whatif.smaller_questions import usable_islands
from hetplan.whatif.within_limits import keeps_limits

_ROUNDS = 3
"""Of parts by the speeds of the sites: the second mends the peaks' error, the third its steps."""
_PARTS = 64
"""Units of the batch that are dealt out: a site waits for the others by 1/64 of it at most."""
_WIDE = 256.0
"""Times as wide, and as near, as the links are, or their inverse: as far as is looked."""
_HALVINGS = 9
"""Of that range's logarithm: to 2 %."""

AIMS = (Objective.STEP_TIME, Objective.DAYS)
"""For which local steps are weighed."""

Crossing: TypeAlias = tuple[float, float | None]
"""Today's figure, and the one at which both runs take as long; None: none is near, or was found in
time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """The best plan of local steps that was found, beside the synchronous one."""

    result: SearchResult
    sites: tuple[tuple[str, int], ...]
    """(region, its samples of the batch)."""
    bound_seconds: float
    """No plan of local steps with these samples has a shorter step."""
    gain: float
    """How much longer the synchronous run takes, as a part of this one; negative: it is shorter."""
    idle: tuple[str, ...]
    """Regions that the synchronous plan leaves idle."""
    bandwidth: Crossing
    """Bytes/s between the sites, of the narrowest pair."""
    round_trip: Crossing
    """Seconds, of the farthest."""

    @property
    def wins(self) -> bool:
        """Whether its run ends first, and no list of synchronous plans was asked for."""
        return self.gain > 0 and not self.result.alternatives


def beside(result: SearchResult, predictor: Predictor, end: float) -> LocalSteps | str:
    """The plan of local steps of the result's job, all searches together by the moment `end`; or
    why there is none: nothing is to be said where the job allows none.
    """
    job = result.inputs.job
    if job.synchronisation is None:
        return ""
    if job.objective not in AIMS:
        return "they are weighed for the aims time and days alone"
    with suppress(OutOfTimeError, *NO_ANSWER), ends_by(end):
        return _beside(result, predictor) or _NONE
    return "no time was left to weigh them; give a longer time_limit" if clock() >= end else _NONE


_NONE = "no plans of single regions go together in a run that ends"


def kept_out(result: SearchResult) -> tuple[float, tuple[str, ...]]:
    """Idle regions that have room for local steps, and the seconds in which gradients cross the
    widest link to one: more than its part of all peaks can take off a step. Where other regions
    have idle devices too it is no matter of links.
    """
    inputs, size, used = result.inputs, result.inputs.model.parameter_count, result.used_islands
    islands, regions = usable_islands(inputs), {each.region for each in used}
    there = sum(each.num_usable_devices for each in islands if each.region in regions)
    job = inputs.job
    able = target(job.target).local_steps and job.objective in AIMS and not job.synchronisation
    peaks, found = _peaks(islands), dict[str, float]()
    full = there == sum(each.num_devices for each in result.plan.replicas)
    for region in [each for each in peaks if each not in regions] if able and full else ():
        own = [each for each in islands if each.region == region]
        links = [inputs.cluster.link_between(a.name, b.name) for a in own for b in used if a != b]
        # 16 bytes of mixed-precision AdamW (ZeRO, arXiv 1910.02054, section 3.1).
        room = sum(each.num_usable_devices * each.device.memory_bytes for each in own) / 16.0
        seconds = size * job.precision.bytes_per_element / max(map(rate_of, links))
        saved = result.estimate.step_seconds * peaks[region] / sum(peaks.values())
        if room > size and seconds > saved:
            found[region] = seconds
    return min(found.values(), default=0.0), tuple(found)


def _peaks(islands: Iterable[Island]) -> dict[str, float]:
    """FLOP/s of each region."""
    found: dict[str, float] = {}
    for each in islands:
        peak = max((rate for _, rate in each.device.peak_flops_per_second), default=1.0)
        found[each.region] = found.get(each.region, 0.0) + peak * each.num_usable_devices
    return found


def _beside(result: SearchResult, predictor: Predictor) -> LocalSteps | None:
    question = result.inputs
    sites = _balanced(question, predictor)
    plan = _composed(question, [*sites.values()], predictor) if len(sites) > 1 else None
    if plan is None:
        sites = {name: _plain(each, predictor, _share(sites)) for name, each in sites.items()}
        plan = _composed(question, [*sites.values()], predictor) if len(sites) > 1 else None
    if plan is None:
        return None
    pricer = Pricer(question.model, question.cluster, question.job, predictor)
    found = replace(
        result,
        plan=plan,
        estimate=estimate_with(pricer, plan),
        certificate=None,
        objective=f"the end of the run: local steps, with {plan.extra_tokens:.1%} more tokens",
    )
    if not keeps_limits(plan, found.estimate, question):
        return None
    used = islands_in_use(result.plan, question.cluster)
    regions = {question.cluster.island(name).region for name in used}
    bandwidth, round_trip = _crossings(question, result.plan, plan, predictor)
    return LocalSteps(
        result=found,
        sites=tuple((name, each.inputs.job.global_batch_size) for name, each in sites.items()),
        bound_seconds=max(
            0.0 if each.certificate is None else each.certificate.lower_bound_seconds
            for each in sites.values()
        ),
        gain=_gain([result.plan], plan, question, predictor),
        idle=tuple(name for name in sites if name not in regions),
        bandwidth=bandwidth,
        round_trip=round_trip,
    )


def _balanced(question: Question, predictor: Predictor) -> dict[str, SearchResult]:
    """The best plan of each region with a part of the batch by the regions' speeds."""
    speeds = _peaks(usable_islands(question))
    while len(speeds) > question.job.global_batch_size:
        del speeds[min(speeds, key=speeds.__getitem__)]  # no sample is left for it
    best, shortest = dict[str, SearchResult](), math.inf
    seen = set[tuple[int, ...]]()
    while len(seen) < _ROUNDS and len(speeds) > 1:
        parts = _dealt(question.job.global_batch_size, [*speeds.values()])
        if parts in seen:
            break
        seen.add(parts)
        sites, share = dict[str, SearchResult](), _share(parts)
        for region, samples in zip([*speeds], parts, strict=True):
            check_time()
            others = [each.name for each in question.cluster.islands if each.region != region]
            own = question.with_job(global_batch_size=samples, synchronisation=None)
            try:
                sites[region] = ask(_within(own.without_islands(*others), share), predictor)
                speeds[region] = samples / sites[region].estimate.step_seconds
            except NO_ANSWER:
                del speeds[region]
        longest = max((each.estimate.step_seconds for each in sites.values()), default=math.inf)
        if len(sites) == len(parts) and longest < shortest:
            best, shortest = sites, longest
    return best


def _dealt(batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The batch in units, each to whom it takes the least time; everybody has one."""
    unit = math.gcd(batch, 1 << max(0, (batch // _PARTS).bit_length() - 1))
    if batch < unit * len(speeds):
        unit = 1
    parts = [1] * len(speeds)
    for _ in range(batch // unit - len(speeds)):
        parts[min(range(len(speeds)), key=lambda at: (parts[at] + 1) / speeds[at])] += 1
    return tuple(unit * part for part in parts)


def _share(sites: Collection[object]) -> float:
    """Seconds for each site's search: together half of what is left, so that a price has some."""
    return seconds_left() / (2 * len(sites))


def _within(question: Question, seconds: float) -> Question:
    """The question with no more time than this."""
    own = question.job.time_limit_seconds
    if math.isinf(seconds):
        return question
    return question.with_job(time_limit_seconds=seconds if own is None else min(own, seconds))


def _plain(found: SearchResult, predictor: Predictor, seconds: float) -> SearchResult:
    """The best plan that the trainer can run with those of any other site; the bound is kept."""
    plain = _within(found.inputs.with_pins(sharded_optimizer=False, depth=0), seconds)
    return replace(ask(plain, predictor), certificate=found.certificate)


def _composed(
    question: Question, sites: Sequence[SearchResult], predictor: Predictor
) -> Plan | None:
    """The fastest of the sites' plans that fits and is run, sharded as one of them is."""
    model, cluster, job = question.model, question.cluster, question.job
    plans = [each.plan for each in sites]
    likes = [*plans, replace(plans[0], sharding=Sharding.NONE, optimizer_shards=1)]
    made = [local_steps_plan(model, cluster, job, plans, like) for like in likes]
    legal = [each for each in made if not check_plan(each, model, cluster, job)]
    if job.target == "native":
        legal = [each for each in legal if next(limits_of(each), None) is None]
    seconds = [_run_seconds(each, question, predictor) for each in legal]
    least = min(seconds, default=math.inf)
    return None if math.isinf(least) else legal[seconds.index(least)]


def _run_seconds(plan: Plan, question: Question, predictor: Predictor) -> float:
    """What is compared: the run of a legal plan; infinite where it does not fit or never ends."""
    model, cluster, job = question.model, question.cluster, question.job
    pricer = Pricer(model, cluster, job, predictor)
    estimate = estimate_with(pricer, plan)
    if not estimate.fits:
        return math.inf
    if job.total_tokens is not None:
        seconds = goodput(plan, estimate, model, cluster, job).seconds
    else:
        seconds = estimate.step_seconds * (1.0 + plan.extra_tokens)
    if job.quantile is not None:
        seconds *= step_quantile(pricer, plan, job.quantile) / estimate.step_seconds
    return seconds


def _gain(rivals: Iterable[Plan], local: Plan, question: Question, predictor: Predictor) -> float:
    """`LocalSteps.gain` over the best of these plans."""
    best = min(_run_seconds(each, question, predictor) for each in rivals)
    return best / _run_seconds(local, question, predictor) - 1.0


def _crossings(
    question: Question, together: Plan, local: Plan, predictor: Predictor
) -> tuple[Crossing, Crossing]:
    """Of bandwidth and round trip between the sites."""
    islands = [question.cluster.island(name) for name in islands_in_use(local, question.cluster)]
    pairs = [(a.name, b.name) for a, b in combinations(islands, 2) if a.region != b.region]
    ideal = nearer(wider(question, pairs, _WIDE), pairs, 1.0 / _WIDE)
    rivals = [together]
    with suppress(*NO_ANSWER):
        ideal = _within(ideal.with_job(synchronisation=None), _share(rivals))
        rivals.append(ask(ideal, predictor).plan)

    def lead(changed: Question) -> float:
        check_time()
        return _gain(rivals, local, changed, predictor)

    links = [question.cluster.link_between(*pair) for pair in pairs]
    wide = near = None
    with suppress(OutOfTimeError):
        wide = _even(lambda factor: lead(wider(question, pairs, factor)))
        near = _even(lambda factor: lead(nearer(question, pairs, 1.0 / factor)))
    rate, trip = min(map(rate_of, links)), max(2.0 * each.latency_seconds for each in links)
    return (rate, wide and rate * wide), (trip, near and trip / near)


def _even(lead: Callable[[float], float]) -> float | None:
    """The factor of better links at which both are as fast; None: none in the range."""
    low, high = sorted((0.0, math.log(_WIDE) if lead(1.0) > 0 else -math.log(_WIDE)))
    if (lead(math.exp(low)) > 0) == (lead(math.exp(high)) > 0):
        return None
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if lead(math.exp(middle)) > 0 else (low, middle)
    return math.exp(0.5 * (low + high))
