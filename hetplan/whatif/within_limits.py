"""The best plan that breaks no limit of its sites (`hetplan.plans.limits`).

A search knows neither limits over several islands nor watts, which are a plan's own. Where its plan
breaks one, the question is asked again with fewer nodes, as few of them out as the plan's own use
of the limit says: first every way to deal the nodes that are left over the limit's islands, where
these are few. A plan that draws less than that is followed by one on more nodes.

The bound stays that of the search without these limits, which every plan within them meets too; it
may be far below the best of them.

Claim: of limits on nodes alone, every set of counts of nodes within them is part of one that is
asked, where there are at most `_MOST_SPLITS` such ways. Proof: a plan is left out only by a way of
dealing that it breaks itself, as each node adds 1 whatever the plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.energy.energy import most_node_watts, power_overruns, power_use
from hetplan.deadline import moment_in
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.job.spec import Job
from hetplan.kernels import clock
from hetplan.plans.limits import LimitKind, Overrun, limits_of, overruns
from hetplan.search.result import LIMITS_LEFT_OUT, Question, SearchResult, certificate_beside
from hetplan.search.space.allowed import allowed_cluster

_MOST_SPLITS = 16
"""Ways to deal nodes over islands that are all asked; of more, each island filled first in turn."""
_MOST_ASKED = 48
"""Searches of one question: three rounds of `_MOST_SPLITS`."""


class OverLimitsError(InfeasibleError):
    """Every plan that was found breaks a limit."""

    def __init__(self, least: Sequence[Overrun]) -> None:
        self.least = tuple(least)
        """Of every limit the one that was broken by least."""
        super().__init__([f"no plan was found within {each.words}" for each in least])


def broken_limits(result: SearchResult, cluster: Cluster, job: Job) -> tuple[Overrun, ...]:
    """All that the result's plan breaks of this cluster's."""
    watts = power_overruns(result.plan, result.estimate, cluster, job)
    return (*overruns(result.plan, cluster, job), *watts)


def may_break(question: Question) -> bool:
    """Whether a plan on all nodes at their highest draw would break a limit."""
    job, cluster = question.job, allowed_cluster(question.cluster, question.job)
    for limit in limits_of(cluster, job):
        islands = [cluster.island(name) for name in limit.islands]
        if limit.kind is LimitKind.CORES:
            most = islands[0].devices_per_node * (job.cpu_cores_per_device or 0.0)
        else:
            power = limit.kind is LimitKind.POWER
            most = math.fsum(
                len(each.usable_nodes) * (most_node_watts(cluster, each) if power else 1)
                for each in islands
            )
        if most > limit.most:
            return True
    return False


def within_limits(
    question: Question, ask: Callable[[Question, bool], SearchResult]
) -> SearchResult:
    """The best plan found within the limits; OverLimitsError where none was.

    ask: the search of a question without its limits; told whether it is the whole question. Ctrl-C
    ends with the best plan so far, if any.
    """
    if not may_break(question):
        return ask(question, True)
    limit = question.job.time_limit_seconds
    end = moment_in(limit)
    whole = ask(question.with_job(time_limit_seconds=limit and limit / 2), True)
    whole = replace(whole, inputs=replace(whole.inputs, job=question.job))
    every = {each.name: len(each.usable_nodes) for each in _islands(question)}
    waiting, tried = deque([(every, whole)]), [every]
    least: dict[str, Overrun] = {}
    best: SearchResult | None = None
    stopped = False
    while waiting:
        caps, found = waiting.popleft()
        stopped = stopped or _is_stopped(found)
        broken = broken_limits(found, question.cluster, question.job)
        for each in broken:
            known = least.setdefault(each.limit.name, each)
            least[each.limit.name] = min(known, each, key=lambda one: one.used)
        if not broken and (best is None or _step(found) < _step(best)):
            best = found
        for counts in _fewer(caps, broken[0]) if broken else _more(caps, found, question, every):
            if counts in tried or len(tried) > _MOST_ASKED or stopped or clock() > end:
                continue
            tried.append(counts)
            answer = _asked(question, counts, end, ask)
            if answer is not None:
                waiting.append((counts, answer))
    if best is None:
        raise _none_found(least, stopped, clock() > end)
    return best if best is whole else _beside(whole, best, stopped)


def _none_found(least: Mapping[str, Overrun], stopped: bool, late: bool) -> BaseException:
    if stopped:
        return KeyboardInterrupt()
    if late:
        return LimitError("the time limit was reached before any plan within the sites' limits")
    return OverLimitsError([*least.values()])


def _beside(whole: SearchResult, best: SearchResult, stopped: bool) -> SearchResult:
    """The best plan within the limits, with the bound of all plans."""
    known = certificate_beside(whole, _step(best))
    if known is not None:
        space = f"{known.space}; {LIMITS_LEFT_OUT}"
        known = replace(known, space=space, status="interrupted" if stopped else known.status)
    return replace(best, inputs=whole.inputs, certificate=known)


def _is_stopped(found: SearchResult) -> bool:
    return found.certificate is not None and found.certificate.status == "interrupted"


def _step(found: SearchResult) -> float:
    return found.estimate.step_seconds


def _islands(question: Question) -> tuple[Island, ...]:
    return allowed_cluster(question.cluster, question.job).islands


def _asked(
    question: Question,
    counts: Mapping[str, int],
    end: float,
    ask: Callable[[Question, bool], SearchResult],
) -> SearchResult | None:
    left = None if end == math.inf else max(0.0, end - clock())
    try:
        return ask(with_node_counts(question, counts).with_job(time_limit_seconds=left), False)
    except (InfeasibleError, InputError, LimitError):
        return None


def with_node_counts(question: Question, counts: Mapping[str, int]) -> Question:
    """The question with so many nodes of these islands; the last ones are forbidden, so that device
    numbers stay.
    """
    out = [
        f"{island.name}/{node}"
        for island in _islands(question)
        for node in island.usable_nodes[counts.get(island.name, island.nodes) :]
    ]
    if not out:
        return question
    forbid = question.job.forbid
    return question.with_job(forbid=replace(forbid, nodes=(*forbid.nodes, *out)))


def _fewer(caps: Mapping[str, int], broken: Overrun) -> Iterator[dict[str, int]]:
    """Counts of nodes within `caps` that would keep the limit if nodes drew what they do now."""
    limit = broken.limit
    most = [caps[name] for name in limit.islands]
    for counts in splits(most, broken.per_node, limit.most):
        yield {**caps, **dict(zip(limit.islands, counts, strict=True))}


def _more(
    caps: Mapping[str, int], found: SearchResult, question: Question, every: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """More nodes than `caps` that would keep the power limits if nodes drew what they do now."""
    for use in power_use(found.plan, found.estimate, question.cluster, question.job):
        islands = use.limit.islands
        for counts in splits([every[name] for name in islands], use.per_node, use.limit.most):
            more = {**caps, **dict(zip(islands, counts, strict=True))}
            if more != caps and all(more[name] >= caps[name] for name in islands):
                yield more


def splits(most: Sequence[int], weights: Sequence[float], limit: float) -> list[tuple[int, ...]]:
    """Counts up to `most` whose weighted sum is within the limit, and none of which could be
    larger; all of them where they are few.
    """

    def room(left: float, at: int) -> int:
        own = most[at] if weights[at] <= 0 else int((left + _ROUNDING * limit) // weights[at])
        return min(most[at], own)

    def filled(order: Sequence[int], given: Sequence[int] = ()) -> tuple[int, ...]:
        counts, left = [0] * len(most), limit
        for place, at in enumerate(order):
            counts[at] = given[place] if place < len(given) else room(left, at)
            left -= weights[at] * counts[at] if counts[at] else 0.0
        return tuple(counts)

    places = range(len(most))
    found = {filled((at, *(each for each in places if each != at))) for at in places}
    if math.prod(each + 1 for each in most[:-1]) <= _MOST_SPLITS**2:
        within = [
            filled(places, given)
            for given in product(*(range(each + 1) for each in most[:-1]))
            if sum(w * n for w, n in zip(weights, given, strict=False) if n) <= limit
        ]
        every = {one for one in within if not any(_more_than(two, one) for two in within)}
        found = every if len(every) <= _MOST_SPLITS else found
    return sorted(found, reverse=True)


def _more_than(one: Sequence[int], two: Sequence[int]) -> bool:
    return one != two and all(a >= b for a, b in zip(one, two, strict=True))


_ROUNDING = 1e-9
"""A limit that is a whole number of nodes has room for all of them."""
