"""The best plan that breaks no limit of its sites (`hetplan.plans.limits`).

A search knows neither limits over several islands nor watts, which are a plan's own. Where its plan
breaks one, the question is asked again with fewer nodes, in every way to deal those that are left
over the limit's islands, as many as the plan's own use of the limit allows. Where watts are left
over, or cores of a host, nodes are used in part (`Island.node_parts`): all but the last nodes
whole, or equal parts of all. A plan that draws less than that is followed by one on more.

The bound of a plan on whole nodes is that of the search without limits. A plan on parts of nodes
may be none of that search: its bound is the least of that one and of the searches on parts, and it
is not called optimal where it is faster than all plans of the search without limits.

Claim: a plan within one limit on nodes is one of a question that is asked, where the limit is on
one island, on two with up to 15 nodes of the first, or on three with up to 3 of the first two; for
several limits while their ways multiply to `_MOST_ASKED` at most; if time does not end before.
Proof: each node adds 1 whatever the plan, so its counts lie within one way of any broken limit.
Within limits on cores alone every plan is one of the question with all parts that these allow.
Power is a plan's own: a plan on other parts of nodes may keep its limit and is not asked for.

The search without limits is the first. It has half of the time, the others share what it leaves;
where its plan breaks none it goes on, from its journal, in the other half. That journal is a file
of its own until then: a user's journal holds no plan that breaks a limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from hetplan.cluster.spec import Cluster
from hetplan.cost.energy.energy import most_node_watts, power_use
from hetplan.cost.estimate_values import Estimate
from hetplan.deadline import moment_in
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.kernels import clock
from hetplan.plans.limits import Limit, LimitKind, limits_of, node_use
from hetplan.plans.pieces import used_devices
from hetplan.plans.plan import Plan
from hetplan.search.journal import JournalFile
from hetplan.search.result import (
    LIMITS_LEFT_OUT,
    OTHER_PARTS_LEFT_OUT,
    Certificate,
    Question,
    SearchResult,
    certificate_beside,
)
from hetplan.search.space.allowed import allowed_cluster

_MOST_SPLITS = 16
"""Ways to deal nodes over islands that are asked."""
_SPLIT = 4
"""Islands that are dealt to in several ways."""
_MOST_ASKED = 48
"""Searches of one question: three rounds of `_MOST_SPLITS`."""
_UNITS = (1, 2, 4)
"""Parts of nodes are multiples of these: stages of 6 devices have no room on equal parts of 7."""
_ROUNDING = 1e-9
"""A limit that is a whole number of nodes has room for all of them."""

Ask: TypeAlias = Callable[[Question, JournalFile | None], SearchResult]
"""The search of a question without its limits."""
Parts: TypeAlias = Mapping[str, tuple[int, ...]]
"""By island the devices of its usable nodes that may be used, the largest parts first; nodes beyond
the last are out."""


class OverLimitsError(InfeasibleError):
    """Every plan that was found breaks a limit."""

    def __init__(self, least: Iterable[Limit]) -> None:
        """least: of every limit the one that was broken by least."""
        super().__init__([f"no plan was found within {each.words()}" for each in least])


def limit_use(plan: Plan, estimate: Estimate, question: Question) -> tuple[Limit, ...]:
    """What a priced plan takes of every limit of the question."""
    cluster, job = question.cluster, question.job
    return (*node_use(plan, cluster, job), *power_use(plan, estimate, cluster, job))


def keeps_limits(plan: Plan, estimate: Estimate, question: Question) -> bool:
    """Whether a priced plan breaks no limit of the question: what every plan that is given must."""
    return not any(each.is_broken for each in limit_use(plan, estimate, question))


def full_limits(result: SearchResult, island: str) -> list[str]:
    """Limits that have no room for one more stage on the island like the plan's smallest one there,
    or where it has none for one more device. Cores are of each node: the one with most room counts.
    """
    plan, cluster = result.plan, result.inputs.cluster
    mine = next(mine for each, mine in used_devices(plan, cluster) if each.name == island)
    first, per_node = cluster.first_device(island), cluster.island(island).devices_per_node
    here = range(first, first + mine.size)
    more = min((r.num_devices for r in plan.replicas if r.devices[0].start in here), default=1)
    beside = int((~mine[mine.any(axis=1)]).sum())
    nodes = max(0, -(-(more - beside) // per_node))
    fewest = min(int(mine[node].sum()) for node in cluster.island(island).usable_nodes)

    def with_more(limit: Limit) -> float:
        at = limit.islands.index(island)
        if limit.kind is LimitKind.CORES:
            return (fewest + min(more, per_node)) * limit.per_device[at]
        whole = nodes and nodes * limit.per_node[at]
        return limit.used + whole + more * limit.per_device[at]

    return [
        limit.name
        for limit in limit_use(plan, result.estimate, result.inputs)
        if island in limit.islands and with_more(limit) > limit.most * (1.0 + _ROUNDING)
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


def within_limits(question: Question, ask: Ask, journal: JournalFile | None = None) -> SearchResult:
    """The best plan found within the limits; OverLimitsError where none was.

    A journal is of the search of the whole question. Ctrl-C ends with the best plan so far, if any.
    """
    if not may_break(question):
        return ask(question, journal)
    end = moment_in(question.job.time_limit_seconds)
    with _journal_apart(journal, timed=end < math.inf) as own:
        first, whole = _without_limits(question, ask, own, end)
        best = _best_within(question, ask, first, whole, end)
        if journal is not None and own is not None:
            if best is whole:
                own.path.replace(journal.path)
            elif not (_has_more(whole) or _has_more(best)):
                own.path.unlink()
    return replace(best, inputs=replace(whole.inputs, job=question.job))


@contextmanager
def _journal_apart(journal: JournalFile | None, *, timed: bool) -> Iterator[JournalFile | None]:
    """Where the search without limits writes what it may go on from."""
    if journal is not None:
        yield journal.apart()
    elif timed:
        with TemporaryDirectory(prefix="hetplan-") as folder:
            yield JournalFile(Path(folder) / "journal")
    else:
        yield None


def _without_limits(
    question: Question, ask: Ask, journal: JournalFile | None, end: float
) -> tuple[SearchResult, SearchResult]:
    """The answers of the search without limits after half of the time, and when it has ended: where
    nothing breaks a limit after half of the time, it has the rest too.
    """
    limit = question.job.time_limit_seconds

    def go_on() -> SearchResult:
        rest = question.with_job(time_limit_seconds=max(0.0, end - clock()))
        return ask(rest, journal and replace(journal, resume=True))

    try:
        first = ask(question.with_job(time_limit_seconds=limit and limit / 2), journal)
    except LimitError:
        first = go_on()
        return first, first
    cut = first.certificate is not None and first.certificate.status == "limit"
    if cut and clock() < end and keeps_limits(first.plan, first.estimate, question):
        return first, go_on()
    return first, first


def _has_more(found: SearchResult) -> bool:
    """Whether the search was ended before it was done: --resume goes on from its journal."""
    ended = "" if found.certificate is None else found.certificate.status
    return ended in ("limit", "interrupted")


def _is_stopped(found: SearchResult) -> bool:
    return found.certificate is not None and found.certificate.status == "interrupted"


def _best_within(
    question: Question, ask: Ask, first: SearchResult, whole: SearchResult, end: float
) -> SearchResult:
    """The best plan of the whole question and of those on fewer nodes that breaks no limit."""
    islands = allowed_cluster(question.cluster, question.job).islands
    all_: Parts = {each.name: each.usable_parts for each in islands}
    every = all_
    for limit in limit_use(whole.plan, whole.estimate, question):
        if limit.kind is LimitKind.CORES:
            every = _with_cores(every, limit)
    waiting, tried = deque([(every, whole)]), [all_]
    least: dict[str, Limit] = {}
    kept = first is whole or keeps_limits(whole.plan, whole.estimate, question)
    best: SearchResult | None = None if kept else first
    on_parts: list[SearchResult] = []
    stopped = late = False
    while waiting:
        caps, found = waiting.popleft()
        stopped |= _is_stopped(found)
        use = limit_use(found.plan, found.estimate, question)
        broken = [each for each in use if each.is_broken]
        for each in broken:
            least[each.name] = min(least.get(each.name, each), each, key=lambda one: one.used)
        if not broken:
            best = min(best or found, found, key=lambda one: one.estimate.step_seconds)
        next_ = _fewer(caps, broken[0]) if broken else _more(caps, found, question, every)
        new = [parts for parts in next_ if parts not in tried]
        for at, parts in enumerate(new):
            if parts in tried or len(tried) > _MOST_ASKED or stopped or clock() > end:
                continue
            tried.append(parts)
            # One share is for those that follow.
            share = max(0.0, end - clock()) / (len(new) - at + 1)
            fewer = with_parts(question, parts).with_job(
                time_limit_seconds=None if end == math.inf else share
            )
            try:
                answer = ask(fewer, None)
            except LimitError:
                late = True
                continue
            except (InfeasibleError, InputError):
                continue
            waiting.append((parts, answer))
            if _has_parts(fewer.cluster):
                on_parts.append(answer)
    if best is None and stopped:
        raise KeyboardInterrupt
    if best is None and (late or clock() > end):
        raise LimitError("the time limit was reached before any plan within the sites' limits")
    if best is None:
        raise OverLimitsError(least.values())
    if best is whole:
        return whole
    others = on_parts if any(each is best for each in on_parts) else []
    bound = _bound_beside(whole, others, best.estimate.step_seconds)
    if bound is not None and stopped:
        bound = replace(bound, status="interrupted")
    return replace(best, certificate=bound)


def _has_parts(cluster: Cluster) -> bool:
    """Whether a search may use parts of nodes, with stages that whole nodes have no room for."""
    return any(
        part < island.devices_per_node for island in cluster.islands for part in island.usable_parts
    )


def _bound_beside(
    whole: SearchResult, on_parts: Sequence[SearchResult], step_seconds: float
) -> Certificate | None:
    """The bound beside a plan within limits: of the search without them and of these on parts."""
    bound = certificate_beside(whole, step_seconds)
    if bound is None:
        return None
    space, status = f"{bound.space}; {LIMITS_LEFT_OUT}", bound.status
    if on_parts:
        space = f"{space}; {OTHER_PARTS_LEFT_OUT}"
    known = [bound, *(each.certificate for each in on_parts if each.certificate is not None)]
    least = min(step_seconds, *(each.lower_bound_seconds for each in known))
    gap = 1.0 - least / step_seconds
    if status in ("optimal", "open") and any(each.status == "limit" for each in known):
        status = "limit"
    elif status == "optimal" and gap > whole.inputs.job.gap:
        status = "open"
    return replace(bound, lower_bound_seconds=least, gap=gap, space=space, status=status)


def with_parts(question: Question, parts: Parts) -> Question:
    """The question whose plans lie on these parts of usable nodes; device numbers stay."""
    cluster = question.cluster
    for island in allowed_cluster(cluster, question.job).islands:
        mine = parts[island.name]
        if mine != island.usable_parts:
            of_node = dict(zip(island.usable_nodes, mine, strict=False))
            of_every = tuple(of_node.get(node, 0) for node in range(island.nodes))
            own = replace(cluster.island(island.name), node_parts=of_every)
            cluster = cluster.with_island(own)
    return question.changed(cluster=cluster)


def _with_cores(caps: Parts, limit: Limit, unit: int = 1) -> Parts:
    """The parts of nodes whose devices the host has cores for, as multiples of `unit`."""
    (name,), (each,) = limit.islands, limit.per_device
    most = int(limit.most // each) // unit * unit
    return {**caps, name: tuple(min(most, part) for part in caps[name]) if most else ()}


def _fewer(caps: Parts, broken: Limit) -> Iterator[Parts]:
    """Parts of `caps` that would keep the limit if devices drew what they do now: of all ways to
    deal whole nodes each as it is and with what else there is room for, and equal parts of all.
    """
    if broken.kind is LimitKind.CORES:
        for unit in _UNITS:
            yield _with_cores(caps, broken, unit)
        return
    every = zip(broken.islands, broken.per_node, broken.per_device, strict=True)
    adds = [(name, node, device) for name, node, device in every if caps[name]]
    if not adds:
        return
    whole = [node + device * caps[name][0] for name, node, device in adds]
    most = broken.most * (1.0 + _ROUNDING)
    dealt = splits([len(caps[name]) for name, _, _ in adds], whole, broken.most)
    for counts in dealt:
        kept = {name: caps[name][:n] for (name, _, _), n in zip(adds, counts, strict=True)}
        yield {**caps, **kept}
    if broken.kind is not LimitKind.POWER:
        return
    for counts, unit in product(dealt, _UNITS):
        parts, left = dict(caps), most - sum(w * n for w, n in zip(whole, counts, strict=True))
        for (name, node, device), n in zip(adds, counts, strict=True):
            one_more = caps[name][n] if n < len(caps[name]) else 0
            part = min(one_more, int((left - node) / (device or _ROUNDING))) // unit * unit
            parts[name] = caps[name][:n]
            if part > 0:
                parts[name] += (part,)
                left -= node + part * device
        yield parts
    share = most - sum(len(caps[name]) * node for name, node, _ in adds)
    share /= sum(sum(caps[name]) * device for name, _, device in adds) or _ROUNDING
    for unit in _UNITS if 0.0 < share < 1.0 else ():
        parts = dict(caps)
        for name, _, _ in adds:
            equal = (int(share * part) // unit * unit for part in caps[name])
            parts[name] = tuple(part for part in equal if part)
        yield parts


def _more(caps: Parts, found: SearchResult, question: Question, every: Parts) -> Iterator[Parts]:
    """Parts beyond `caps` that would keep the power limits if devices drew what they do now."""
    for use in power_use(found.plan, found.estimate, question.cluster, question.job):
        for more in _fewer({**caps, **{name: every[name] for name in use.islands}}, use):
            pairs = [zip_longest(more[name], caps[name], fillvalue=0) for name in caps]
            if more != caps and all(a >= b for each in pairs for a, b in each):
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
