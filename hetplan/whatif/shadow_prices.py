"""What would a change be worth? The search is asked again with it.

With S the step of the plan in hand, and S1 and L1 step and lower bound of the search with the
change, replanning makes

    at least   S / S1 - 1     more tokens per second: that plan was found
    at most    S / L1 - 1     and no plan of the changed question makes more

Steps are of one batch; where the change is another batch, tokens per second stand for them. Worths
of two changes do not add up. Only what exists can be changed: links that join two islands of the
cluster, islands with usable nodes, pins and forbids that the job has.

Half of a link's bandwidth makes no plan faster, so where the plan does not feel it, nothing is
asked: its own proof holds.

**One search for many changes.** Wider links, shorter round trips, more memory and more nodes make
no plan slower and none impossible. So if the search finds nothing better with all of a group made
at once, its bound holds for each of them alone. Changes of islands that the plan leaves out, and of
links among these, are such a group: most are worth nothing. Where the search does find something,
changes under which a plan that is known by now beats today's are asked alone, the others again as a
group, in the end by halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from hetplan.deadline import check_time
from hetplan.errors import OutOfTimeError
from hetplan.job.spec import Forbids
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import islands_in_use
from hetplan.plans.plan import Plan
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.result import ChangeKind, Question, SearchResult, ShadowPrice
from hetplan.search.solver import RESOLUTION
from hetplan.search.space.forwarding_predictor import CachingPredictor
from hetplan.units import format_bytes, format_rate, format_seconds
from hetplan.whatif.ask import (
    NO_ANSWER,
    Change,
    ask,
    carried,
    first_line,
    gap_beside,
    nearer,
    other_value,
    pairs_between,
    pins_in_words,
    rate_of,
    step_seconds,
    widened,
    wider,
    with_nodes,
)

_MORE_NODES = 0.1
"""Part of an island's nodes that is added beside one node."""
_MORE_MEMORY = 1.25
"""Times as much memory per device: a quarter more."""
_LONG_SECONDS = 0.5e-3
"""Round trips from here on are of links between places; halving a shorter one is no offer."""


def changes(question: Question) -> Iterator[Change]:
    """Links twice and half as wide, round trips half as long, more nodes, more memory, fewer
    demands.
    """
    yield from _links(question)
    yield from _islands(question)
    yield from _demands(question)


def _helping(
    kind: ChangeKind, words: str, question: Question, change: Callable[[Question], Question]
) -> Change:
    return Change(kind=kind, words=words, question=change(question), helping=change)


def _narrower(words: str, question: Question) -> Change:
    return Change(kind=ChangeKind.NARROWER, words=f"half the bandwidth {words}", question=question)


def _links(question: Question) -> Iterator[Change]:
    cluster = question.cluster
    usable = [island for island in cluster.islands if island.usable_nodes]
    done: list[tuple[str, str]] = []
    for at, one in enumerate(usable):
        for two in usable[at + 1 :]:
            places = (one.region, two.region)
            across = one.region != two.region and not cluster.lists_link(one.name, two.name)
            if across and (places in done or places[::-1] in done):
                continue
            done.append(places)
            named, pairs = (one.name, two.name), [(one.name, two.name)]
            if across:
                named = places
                pairs = [p for p in pairs_between(cluster, places) if not cluster.lists_link(*p)]
            link = cluster.link_between(one.name, two.name)
            between = f"between {named[0]} and {named[1]}"
            more = format_rate(8 * rate_of(link), "bit/s")
            yield _helping(
                ChangeKind.WIDER,
                f"twice the bandwidth {between} (+{more})",
                question,
                partial(wider, pairs=pairs, factor=2.0),
            )
            if link.samples is None:
                yield _narrower(between, wider(question, pairs, 0.5))
            if link.round_trip_seconds >= _LONG_SECONDS:
                less = format_seconds(link.round_trip_seconds / 2)
                yield _helping(
                    ChangeKind.NEARER,
                    f"half the round trip {between} (-{less})",
                    question,
                    partial(nearer, pairs=pairs, factor=0.5),
                )


def _islands(question: Question) -> Iterator[Change]:
    islands = [
        island
        for island in question.cluster.islands
        if island.usable_nodes and island.name not in question.job.forbid.islands
    ]
    for island in islands:
        name, own = island.name, island.inter_node.bandwidth_bytes_per_second
        if island.nodes > 1:
            more = format_rate(8 * own, "bit/s")
            between = f"between the nodes of {name}"
            yield _helping(
                ChangeKind.WIDER,
                f"twice the bandwidth {between} (+{more} per device)",
                question,
                partial(_with_wider_nodes, name, 2.0),
            )
            if island.inter_node.samples is None:
                yield _narrower(between, _with_wider_nodes(name, 0.5, question))
        more = format_bytes((_MORE_MEMORY - 1) * island.memory_bytes)
        yield _helping(
            ChangeKind.MEMORY,
            f"a quarter more memory on {name} (+{more} per device)",
            question,
            partial(_with_more_memory, name),
        )
        # Stages that lie on two islands are tried in proportion to their nodes.
        proportional = target(question.job.target).mixed_stages or any(
            each.device.kind == island.device.kind for each in islands if each is not island
        )
        for nodes in sorted({1, max(1, round(_MORE_NODES * len(island.usable_nodes)))}):
            change = partial(_with_more_nodes, name, nodes)
            yield Change(
                kind=ChangeKind.NODE if nodes == 1 else ChangeKind.NODES,
                words=f"{nodes} more node{'s' * (nodes > 1)} of {name}",
                question=change(question),
                helping=None if proportional else change,
            )


def _with_wider_nodes(name: str, factor: float, question: Question) -> Question:
    island = question.cluster.island(name)
    nics, link = island.nics, island.inter_node
    if nics is not None:
        rate = factor * nics.bandwidth_bytes_per_second
        nics = replace(nics, bandwidth_bytes_per_second=rate)
    return question.with_island(replace(island, inter_node=widened(link, factor), nics=nics))


def _with_more_memory(name: str, question: Question) -> Question:
    island = question.cluster.island(name)
    return question.with_island(replace(island, memory_bytes=_MORE_MEMORY * island.memory_bytes))


def _with_more_nodes(name: str, nodes: int, question: Question) -> Question:
    island = question.cluster.island(name)
    return with_nodes(question, island, island.nodes + nodes)


def _demands(question: Question) -> Iterator[Change]:
    job = question.job
    for name, words in pins_in_words(job):
        yield Change(words=f"without pin {words}", question=question.with_pins(**{name: None}))
    if job.forbid != Forbids():
        yield Change(
            words="with the forbidden islands and nodes",
            question=question.with_job(forbid=Forbids()),
        )
    if job.memory_reserve_fraction > 0:
        yield replace(
            other_value(question, "memory_reserve_fraction", 0.0),
            helping=lambda asked: asked.with_job(memory_reserve_fraction=0.0),
        )
    yield other_value(question, "global_batch_size", 2 * job.global_batch_size)


def shadow_prices(
    result: SearchResult,
    predictor: Predictor,
    *,
    asked: Iterable[Change] | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[ShadowPrice, ...]:
    """Every change's worth, the largest first; of fewer where time is over (`hetplan.deadline`).

    `progress` is told how many have a price, and what is asked next.
    """
    every = tuple(changes(result.inputs) if asked is None else asked)
    pricing = _Pricing(
        result=result,
        predictor=CachingPredictor(predictor),
        progress=progress,
    )
    with suppress(OutOfTimeError):
        far = [change for change in every if change.helping is not None and pricing.is_far(change)]
        pricing.together(far)
        for change in every:
            if change not in far and not pricing.unfelt(change):
                pricing.alone(change)
    return tuple(sorted(pricing.found, key=lambda each: (-each.least_gain, -most_of(each))))


def most_of(price: ShadowPrice) -> float:
    """What no plan with the change exceeds; infinite where nothing was shown."""
    return math.inf if price.most_gain is None else price.most_gain


@dataclass(slots=True)
class _Pricing:
    """Prices changes, and keeps the plans that were found."""

    result: SearchResult
    predictor: Predictor
    progress: Callable[[int, str], None] | None
    found: list[ShadowPrice] = field(default_factory=list)
    known: list[Plan] = field(default_factory=list)

    def is_far(self, change: Change) -> bool:
        """Whether it changes nothing of the plan's islands, nor a link to one of them."""
        now, then = self.result.inputs, change.question
        if then.job != now.job:
            return False
        return not any(
            then.cluster.island(name) != now.cluster.island(name)
            or any(
                then.cluster.link_between(name, each.name)
                != now.cluster.link_between(name, each.name)
                for each in now.cluster.islands
                if each.name != name
            )
            for name in islands_in_use(self.result.plan, now.cluster)
        )

    def unfelt(self, change: Change) -> bool:
        """Price half the bandwidth of a link that the plan does not feel, without a search.

        It makes no plan faster, and today's no slower: today's proof holds.
        """
        same = self._same(change)
        if change.kind is not ChangeKind.NARROWER or same is None or same < -RESOLUTION:
            return False
        self.found.append(
            ShadowPrice(
                kind=change.kind,
                words=change.words,
                least_gain=0.0,
                most_gain=self._most(self.result),
                same_plan_gain=same,
                changed=False,
            )
        )
        return True

    def together(self, group: Sequence[Change]) -> None:
        """Price changes that only help."""
        rest = []
        for change in group:
            if self._known_gain(change) > RESOLUTION:
                self.alone(change)
            else:
                rest.append(change)
        if len(rest) < 2:
            for change in rest:
                self.alone(change)
            return
        question: Question = self.result.inputs
        for change in rest:
            assert change.helping is not None
            question = change.helping(question)
        self._tell(f"{len(rest)} changes at once")
        try:
            answer = self._ask(question)
        except NO_ANSWER:
            answer = None
        if answer is not None and self._gain(answer.estimate.tokens_per_second) <= RESOLUTION:
            self.found += [
                ShadowPrice(
                    kind=change.kind,
                    words=change.words,
                    least_gain=0.0,
                    most_gain=self._most(answer),
                    same_plan_gain=self._same(change),
                    changed=False,
                )
                for change in rest
            ]
        elif answer is not None and any(self._known_gain(each) > RESOLUTION for each in rest):
            self.together(rest)
        else:
            self.together(rest[: len(rest) // 2])
            self.together(rest[len(rest) // 2 :])

    def alone(self, change: Change) -> None:
        """Price one change."""
        self._tell(change.words)
        row = ShadowPrice(
            kind=change.kind,
            words=change.words,
            least_gain=0.0,
            most_gain=None,
            same_plan_gain=self._same(change),
            changed=False,
        )
        try:
            answer = self._ask(change.question)
        except NO_ANSWER as error:
            check_time()  # time that was over says nothing of the change
            self.found.append(replace(row, note=first_line(error)))
            return
        today = _same_layout(self.result, change.question)
        self.found.append(
            replace(
                row,
                least_gain=self._gain(answer.estimate.tokens_per_second),
                most_gain=self._most(answer),
                changed=today is None or answer.plan.pipelines != today.pipelines,
            )
        )

    def _ask(self, question: Question) -> SearchResult:
        today = _same_layout(self.result, question)
        known = (*(() if today is None else (today,)), *self.known)
        looser = question.looser(gap_beside(self.result, question))
        check_time()
        answer = ask(looser, self.predictor, known_plans=known)
        own_devices = self.result.inputs.cluster.num_devices
        if answer.plan not in known and question.cluster.num_devices == own_devices:
            self.known.append(answer.plan)  # others number their devices otherwise
        return answer

    def _gain(self, tokens_per_second: float) -> float:
        return tokens_per_second / self.result.estimate.tokens_per_second - 1.0

    def _most(self, answer: SearchResult) -> float | None:
        if answer.certificate is None or answer.certificate.lower_bound_seconds == 0.0:
            return None
        estimate = answer.estimate
        tokens = estimate.tokens_per_second * estimate.step_seconds
        return self._gain(tokens / answer.certificate.lower_bound_seconds)

    def _same(self, change: Change) -> float | None:
        """The gain of today's layout under the change."""
        today = _same_layout(self.result, change.question)
        return None if today is None else self._priced(change.question, today)

    def _known_gain(self, change: Change) -> float:
        """The largest gain of a known plan under the change."""
        gains = [self._same(change) or 0.0]
        for plan in self.known:
            question = change.question
            if not check_plan(plan, question.model, question.cluster, question.job):
                gains.append(self._priced(question, plan))
        return max(gains)

    def _priced(self, question: Question, plan: Plan) -> float:
        """The gain of a plan of today's batch."""
        seconds = step_seconds(plan, question, self.predictor)
        return self.result.estimate.step_seconds / seconds - 1.0

    def _tell(self, words: str) -> None:
        if self.progress is not None:
            self.progress(len(self.found), words)


def _same_layout(result: SearchResult, question: Question) -> Plan | None:
    """Today's layout on the changed cluster; None where it is not legal there, or not the same."""
    job = question.job
    if job.global_batch_size != result.inputs.job.global_batch_size:
        return None
    plan = carried(result, question)
    if plan is None or check_plan(plan, question.model, question.cluster, job):
        return None
    return plan
