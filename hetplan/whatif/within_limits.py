"""The best plan that breaks no limit of its sites (`hetplan.plans.limits`).

A search knows neither limits over several islands nor watts, which are a plan's own. Where its plan
breaks one, the question is asked again with fewer nodes, in every way to deal those that are left
over the limit's islands, as many as the plan's own use of the limit allows. A plan that draws less
than that is followed by one on more nodes. The bound stays that of the search without these limits.

Claim: a plan within one limit on nodes is one of a question that is asked, where the limit is on
one island, on two with up to 15 nodes of the first, or on three with up to 3 of the first two; for
several limits while their ways multiply to `_MOST_ASKED` at most; if time does not end before.
Proof: each node adds 1 whatever the plan, so its counts lie within one way of any broken limit.
Nodes are left out whole: a plan on some devices of a node may keep a limit and is not asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from hetplan.cost.energy.energy import most_node_watts, power_use
from hetplan.cost.estimate_values import Estimate
from hetplan.deadline import moment_in
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.kernels import clock
from hetplan.plans.limits import Limit, LimitKind, limits_of, node_use
from hetplan.plans.plan import Plan
from hetplan.search.result import LIMITS_LEFT_OUT, Question, SearchResult, certificate_beside
from hetplan.search.space.allowed import allowed_cluster

_MOST_SPLITS = 16
"""Ways to deal nodes over islands that are asked."""
_SPLIT = 4
"""Islands that are dealt to in several ways."""
_MOST_ASKED = 48
"""Searches of one question: three rounds of `_MOST_SPLITS`."""
_ROUNDING = 1e-9
"""A limit that is a whole number of nodes has room for all of them."""


class OverLimitsError(InfeasibleError):
    """Every plan that was found breaks a limit."""

    def __init__(self, least: Sequence[Limit]) -> None:
        self.least = tuple(least)
        """Of every limit the one that was broken by least."""
        super().__init__([f"no plan was found within {each.words()}" for each in least])


def limit_use(plan: Plan, estimate: Estimate, question: Question) -> tuple[Limit, ...]:
    """What a priced plan takes of every limit of the question."""
    cluster, job = question.cluster, question.job
    return (*node_use(plan, cluster, job), *power_use(plan, estimate, cluster, job))


def keeps_limits(plan: Plan, estimate: Estimate, question: Question) -> bool:
    """Whether a priced plan breaks no limit of the question: what every plan that is given must."""
    return not any(each.is_broken for each in limit_use(plan, estimate, question))


def full_limits(result: SearchResult, island: str) -> list[str]:
    """Limits that have no room for one more node of an island beside the result's plan."""
    return [
        each.name
        for each in limit_use(result.plan, result.estimate, result.inputs)
        for name, node in zip(each.islands, each.per_node, strict=True)
        if name == island and each.used + node > each.most
    ]


def may_break(question: Question) -> bool:
    """Whether a plan on all nodes at their highest draw would break a limit; InputError where the
    power of a node under a power limit is not known.
    """
    cluster, job = allowed_cluster(question.cluster, question.job), question.job
    for limit in limits_of(cluster, job):
        most = 0.0
        for island in map(cluster.island, limit.islands):
            power = limit.kind is LimitKind.POWER
            node = most_node_watts(cluster, island) if power else 1
            if island.usable_nodes and node == math.inf:
                raise InputError(replace(limit, unknown=island.name).words())
            most += len(island.usable_nodes) * node if island.usable_nodes else 0
        if limit.kind is LimitKind.CORES:
            most = island.devices_per_node * (job.cpu_cores_per_device or 0)
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
    islands = allowed_cluster(question.cluster, question.job).islands
    every = {each.name: len(each.usable_nodes) for each in islands}
    waiting, tried = deque([(every, whole)]), [every]
    least: dict[str, Limit] = {}
    best: SearchResult | None = None
    stopped = False
    while waiting:
        caps, found = waiting.popleft()
        stopped |= found.certificate is not None and found.certificate.status == "interrupted"
        use = limit_use(found.plan, found.estimate, question)
        broken = [each for each in use if each.is_broken]
        for each in broken:
            least[each.name] = min(least.get(each.name, each), each, key=lambda one: one.used)
        if not broken:
            best = min(best or found, found, key=lambda one: one.estimate.step_seconds)
        next_ = _fewer(caps, broken[0]) if broken else _more(caps, found, question, every)
        for counts in next_:
            if counts in tried or len(tried) > _MOST_ASKED or stopped or clock() > end:
                continue
            tried.append(counts)
            left = None if end == math.inf else max(0.0, end - clock())
            fewer = with_node_counts(question, counts).with_job(time_limit_seconds=left)
            try:
                waiting.append((counts, ask(fewer, False)))
            except (InfeasibleError, InputError, LimitError):
                continue
    if best is None and stopped:
        raise KeyboardInterrupt
    if best is None and clock() > end:
        raise LimitError("the time limit was reached before any plan within the sites' limits")
    if best is None:
        raise OverLimitsError([*least.values()])
    if best is whole:
        return whole
    bound = certificate_beside(whole, best.estimate.step_seconds)
    if bound is not None:
        status = "interrupted" if stopped else bound.status
        bound = replace(bound, space=f"{bound.space}; {LIMITS_LEFT_OUT}", status=status)
    return replace(best, inputs=whole.inputs, certificate=bound)


def with_node_counts(question: Question, counts: Mapping[str, int]) -> Question:
    """The question with so many nodes of these islands; the last ones are forbidden, so that device
    numbers stay.
    """
    out = [
        f"{island.name}/{node}"
        for island in allowed_cluster(question.cluster, question.job).islands
        for node in island.usable_nodes[counts.get(island.name, island.nodes) :]
    ]
    forbid = question.job.forbid
    return question.with_job(forbid=replace(forbid, nodes=(*forbid.nodes, *out)))


def _fewer(caps: Mapping[str, int], broken: Limit) -> Iterator[dict[str, int]]:
    """Counts of nodes within `caps` that would keep the limit if nodes drew what they do now."""
    names = broken.islands
    for counts in splits([caps[name] for name in names], broken.per_node, broken.most):
        yield {**caps, **dict(zip(names, counts, strict=True))}


def _more(
    caps: Mapping[str, int], found: SearchResult, question: Question, every: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Counts beyond `caps` that would keep the power limits if nodes drew what they do now."""
    for use in power_use(found.plan, found.estimate, question.cluster, question.job):
        for more in _fewer({**caps, **{name: every[name] for name in use.islands}}, use):
            if _above([*more.values()], [*caps.values()]):
                yield more


def _above(one: Sequence[int], two: Sequence[int]) -> bool:
    return one != two and all(a >= b for a, b in zip(one, two, strict=True))


def splits(most: Sequence[int], weights: Sequence[float], limit: float) -> list[tuple[int, ...]]:
    """Counts up to `most` whose weighted sum is within the limit, and none of which could be
    larger: up to `_SPLIT` islands take every count, in steps where these are many, and the others
    what is left, in order.
    """
    free = min(len(most) - 1, _SPLIT)
    parts = max(1, int(_MOST_SPLITS ** (1.0 / max(1, free)) + _ROUNDING) - 1)
    limit *= 1.0 + _ROUNDING
    tops = [min(n, int(limit // w)) if w else n for n, w in zip(most, weights, strict=True)]
    found = set()
    for given in product(*(range(0, top + 1, -(-top // parts) or 1) for top in tops[:free])):
        counts, left = [*given], limit
        left -= sum(w * n for w, n in zip(weights, given, strict=False) if n)
        if left < 0.0:
            continue
        for top, weight in zip(tops[free:], weights[free:], strict=True):
            counts.append(min(top, int(left // weight)) if weight else top)
            left -= weight * counts[-1] if counts[-1] else 0.0
        found.add(tuple(counts))
    best = (one for one in found if not any(_above(two, one) for two in found))
    return sorted(best, reverse=True)
