"""What would a change be worth? The search is asked again with it.

    gain       1 - (tokens/s now / tokens/s of the best plan with the change)
    same plan  the same for today's layout under the change

Both are of the best plans found, each within its own gap: a gain is known no better than
`uncertain`, and a change that helps a plan can never hurt it by more than that. Gains of two
changes do not add up. Only what exists can be changed: links that join two islands of the cluster,
islands with usable nodes, pins and forbids that the job has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Island, Link
from hetplan.cost.estimate import estimate_with
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.job.spec import Forbids
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question, SearchResult
from hetplan.search.space.allowed import allowed_cluster
from hetplan.units import format_bytes, format_rate, format_seconds
from hetplan.whatif.ask import (
    NO_ANSWER,
    Change,
    ask,
    first_line,
    other_value,
    pairs_between,
    pins_in_words,
    relinked,
    with_nodes,
)

_MORE_NODES = 0.1
"""Part of an island's nodes that is added, at least one node."""
_MORE_MEMORY = 1.25
"""Times as much memory per device: a quarter more."""
_LONG_SECONDS = 0.5e-3
"""Round trips from here on are of links between places; halving a shorter one is no offer."""


def changes(question: Question) -> Iterator[Change]:
    """Links twice as wide, round trips half as long, more nodes, more memory, fewer demands."""
    yield from _links(question)
    yield from _islands(question)
    yield from _demands(question)


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
            named = places if across else (one.name, two.name)
            link = cluster.link_between(one.name, two.name)
            yield Change(
                words=f"twice the bandwidth between {named[0]} and {named[1]} (+{_rate(link)})",
                question=_with_links(question, one, two, across, _wider),
            )
            if link.round_trip_seconds >= _LONG_SECONDS:
                yield Change(
                    words=f"half the round trip between {named[0]} and {named[1]} "
                    f"(-{format_seconds(link.round_trip_seconds / 2)})",
                    question=_with_links(question, one, two, across, _nearer),
                )


def _rate(link: Link) -> str:
    shared = link.shared_bandwidth_bytes_per_second
    return format_rate(8 * (link.bandwidth_bytes_per_second if shared is None else shared), "bit/s")


def _wider(link: Link) -> Link:
    shared = link.shared_bandwidth_bytes_per_second
    return replace(
        link,
        bandwidth_bytes_per_second=2 * link.bandwidth_bytes_per_second,
        shared_bandwidth_bytes_per_second=None if shared is None else 2 * shared,
        samples=None,
    )


def _nearer(link: Link) -> Link:
    return replace(link, latency_seconds=link.latency_seconds / 2, samples=None)


def _with_links(
    question: Question, one: Island, two: Island, across: bool, changed: Callable[[Link], Link]
) -> Question:
    """The question with this link, or all links between the two regions, changed."""
    cluster, pairs = question.cluster, [(one.name, two.name)]
    if across:
        every = pairs_between(cluster, (one.region, two.region))
        pairs = [pair for pair in every if not cluster.lists_link(*pair)]
    return question.changed(cluster=relinked(cluster, pairs, changed))


def _islands(question: Question) -> Iterator[Change]:
    for island in question.cluster.islands:
        if not island.usable_nodes or island.name in question.job.forbid.islands:
            continue
        if island.nodes > 1:
            nics = island.nics
            if nics is not None:
                nics = replace(nics, bandwidth_bytes_per_second=2 * nics.bandwidth_bytes_per_second)
            wider = replace(island, inter_node=_wider(island.inter_node), nics=nics)
            yield Change(
                words=f"twice the bandwidth between the nodes of {island.name} "
                f"(+{format_rate(8 * island.inter_node.bandwidth_bytes_per_second, 'bit/s')} "
                "per device)",
                question=question.with_island(wider),
            )
        larger = replace(island, memory_bytes=_MORE_MEMORY * island.memory_bytes)
        yield Change(
            words=f"a quarter more memory on {island.name} "
            f"(+{format_bytes((_MORE_MEMORY - 1) * island.memory_bytes)} per device)",
            question=question.with_island(larger),
        )
        more = max(1, round(_MORE_NODES * len(island.usable_nodes)))
        yield Change(
            words=f"{more} more node{'s' * (more > 1)} of {island.name}",
            question=with_nodes(question, island, island.nodes + more),
        )


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
        yield other_value(question, "memory_reserve_fraction", 0.0)
    yield other_value(question, "global_batch_size", 2 * job.global_batch_size)


_LOOSE_GAP = 0.02
"""Of a search with a change: proofs cost most, and `uncertain` says what is left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrice:
    """One change and what it is worth."""

    words: str
    tokens_per_second: float
    """Of the best plan found with the change; 0 where none was found in time."""
    gain: float
    """Part by which tokens/s grow; below 0 only within `uncertain`."""
    same_plan_gain: float | None
    """The same where the layout stays; None where it is not legal with the change."""
    uncertain: float
    """Sum of the two gaps."""
    changed: bool
    """Whether another layout than today's is best."""
    note: str = ""
    """Why there is no price."""


def shadow_prices(
    result: SearchResult,
    predictor: Predictor,
    *,
    asked: Iterable[Change] | None = None,
    time_limit_seconds: float | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[ShadowPrice, ...]:
    """Every change's worth, the largest gain first; `time_limit_seconds` is for each search."""
    every = tuple(changes(result.inputs) if asked is None else asked)
    found = []
    for number, change in enumerate(every):
        if progress is not None:
            progress(number, change.words)
        found.append(_price(result, change, predictor, time_limit_seconds))
    return tuple(sorted(found, key=lambda each: -each.gain))


def _price(
    result: SearchResult, change: Change, predictor: Predictor, seconds: float | None
) -> ShadowPrice:
    before, question = result.estimate.tokens_per_second, change.question
    moved = _same_layout(result, question)
    same = None
    if moved is not None:
        pricer = Pricer(question.model, question.cluster, question.job, predictor)
        tokens = before * result.estimate.step_seconds
        same = tokens / estimate_with(pricer, moved).step_seconds
    row = ShadowPrice(
        words=change.words,
        tokens_per_second=0.0,
        gain=0.0,
        same_plan_gain=None if same is None else same / before - 1.0,
        uncertain=1.0,
        changed=False,
    )
    known = () if moved is None else (moved,)
    try:
        found = ask(question.looser(_LOOSE_GAP, seconds), predictor, known_plans=known)
    except NO_ANSWER as error:
        return replace(row, note=first_line(error))
    after = found.estimate.tokens_per_second
    gaps = [each.certificate.gap for each in (result, found) if each.certificate is not None]
    return replace(
        row,
        tokens_per_second=after,
        gain=after / before - 1.0,
        uncertain=sum(gaps) if len(gaps) == 2 else 1.0,
        changed=moved is None or found.plan.pipelines != moved.pipelines,
    )


def _same_layout(result: SearchResult, question: Question) -> Plan | None:
    """Today's layout on the changed cluster; None where it is not legal there, or not the same."""
    inputs, job = result.inputs, question.job
    if job.global_batch_size != inputs.job.global_batch_size:
        return None
    try:
        chosen = chosen_of(result.plan, inputs.cluster, inputs.job, inputs.model)
        plan = plan_of(inputs.model, allowed_cluster(question.cluster, job), job, chosen)
    except InputError:
        return None
    return None if check_plan(plan, inputs.model, question.cluster, job) else plan
