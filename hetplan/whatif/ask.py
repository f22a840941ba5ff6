"""Another question for the search: what every what-if does.

A what-if changes one thing of a question (`Question.changed` and its sisters), asks again with the
plans that it knows, and compares. Its searches end by themselves, at their time limit or with a
KeyboardInterrupt: half of a search is nothing to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetplan.cluster.spec import Cluster, Island, IslandLink, Link
from hetplan.cost.estimate import estimate_with
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.job.spec import Job, Pins
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.pinned import keeps_pins
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.journal import JournalFile
from hetplan.search.result import (
    OTHER_PARTS_LEFT_OUT,
    ChangeKind,
    Inputs,
    Question,
    SearchResult,
    certificate_beside,
)
from hetplan.search.search import search
from hetplan.search.solver import RESOLUTION, Progress
from hetplan.search.space.allowed import allowed_cluster, apart
from hetplan.search.space.plan_evaluator import fits
from hetplan.whatif.within_limits import keeps_limits, may_break, within_limits

NO_ANSWER = (InfeasibleError, InputError, LimitError)
"""What `ask` raises where a question has no plan, contradicts itself, or took too long."""

LEAST_GAP = 0.01
"""Of a search beside another: proofs cost most, and the two ends say what is left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a question, in words, and the question with it."""

    words: str
    question: Question
    kind: ChangeKind = ChangeKind.DEMAND
    pin: str = ""
    """The pin that it leaves out, where that is all."""
    helping: Callable[[Question], Question] | None = None
    """The change made in another question too, where it can make no plan slower or impossible."""


def other_value(question: Question, name: str, value: Any) -> Change:
    """The question with another value of this field of its job."""
    old = getattr(question.job, name)
    new, now = (f"{each:g}" if isinstance(each, float) else str(each) for each in (value, old))
    return Change(
        words=f"{name} {new} instead of {now}", question=question.with_job(**{name: value})
    )


def searched(
    question: Question,
    predictor: Predictor,
    *,
    start: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
    journal: JournalFile | None = None,
) -> SearchResult:
    """What `search` ends with, within the limits of the cluster's sites; the result of `Inputs` has
    their digests. A journal is of the search of the whole question.
    """
    sha256 = question.sha256 if isinstance(question, Inputs) else ()

    def asked(each: Question, book: JournalFile | None) -> SearchResult:
        return search(
            each.model,
            each.cluster,
            each.job,
            predictor,
            sha256=sha256,
            progress=progress,
            journal=book,
            start=start,
        )

    found = within_limits(question, asked, journal)
    return _or_given(found, [each for each in start if legal_on_parts(each, question)], predictor)


def legal_on_parts(plan: Plan, question: Question) -> bool:
    """Whether a plan on its own devices is one of this question with limits, and has its pins: it
    may lie on parts of nodes, where a search without these parts has no room for it.
    """
    cluster, job = allowed_cluster(question.cluster, question.job), question.job
    try:
        legal = may_break(question) and not check_plan(plan, question.model, cluster, job)
    except InputError:
        return False
    return legal and keeps_pins(plan, cluster, job)


def _or_given(found: SearchResult, given: Sequence[Plan], predictor: Predictor) -> SearchResult:
    """The answer, or a given plan that is faster and within the limits."""
    asked, best = found.inputs, found
    pricer = Pricer(asked.model, asked.cluster, asked.job, predictor)
    for plan in given:
        step = pricer.step(plan)
        least = best.estimate.step_seconds * (1.0 - RESOLUTION)
        if not fits(step) or step.step_seconds >= least:
            continue
        estimate = estimate_with(pricer, plan)
        if estimate.step_seconds < least and keeps_limits(plan, estimate, asked):
            bound = certificate_beside(found, estimate.step_seconds)
            if bound is not None and OTHER_PARTS_LEFT_OUT not in bound.space:
                bound = replace(bound, space=f"{bound.space}; {OTHER_PARTS_LEFT_OUT}")
            best = replace(found, plan=plan, estimate=estimate, certificate=bound)
    return best


def ask(
    question: Question,
    predictor: Predictor,
    *,
    known_plans: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan of the question; one of `NO_ANSWER` where there is none.

    The search starts from those of `known_plans` that are legal for the question and have what it
    pins. KeyboardInterrupt after Ctrl-C, even where there is a plan by then.
    """
    found = searched(question, predictor, start=known_plans, progress=progress)
    if is_interrupted(found):
        raise KeyboardInterrupt
    return found


def gap_beside(result: SearchResult, question: Question) -> float:
    """The gap of a search that is compared with the result; 0 where an exact plan is wanted."""
    if question.job.gap == 0:
        return 0.0
    return max(LEAST_GAP, 0.0 if result.certificate is None else result.certificate.gap)


def carried(result: SearchResult, question: Question) -> Plan | None:
    """The result's plan for another question, on the same islands; None where it has no room. One
    on parts of nodes keeps its devices.
    """
    old = result.inputs
    try:
        chosen = chosen_of(result.plan, old.cluster, old.job, old.model)
        cluster = allowed_cluster(question.cluster, question.job)
        return plan_of(question.model, cluster, question.job, chosen)
    except InputError:
        layouts = [
            [(island.name, island.nodes, island.devices_per_node) for island in each.islands]
            for each in (old.cluster, question.cluster)
        ]
        same = layouts[0] == layouts[1] and legal_on_parts(result.plan, question)
        return result.plan if same else None


def step_seconds(plan: Plan, question: Question, predictor: Predictor) -> float:
    """Step of a legal plan; infinite where it does not fit."""
    step = Pricer(question.model, question.cluster, question.job, predictor).step(plan)
    return step.step_seconds if fits(step) else math.inf


def libraries_apart(question: Question) -> tuple[str, ...]:
    """Libraries of collectives that the job's trainer cannot have in one plan; empty where it can
    have all that its cluster has.
    """
    return apart(allowed_cluster(question.cluster, question.job), question.job)


def mixing(question: Question) -> Question:
    """The question with a trainer that mixes libraries of collectives."""
    return question.with_job(trainer=replace(question.job.trainer, mixed_libraries=True))


def with_nodes(question: Question, island: Island, nodes: int) -> Question:
    """The question with so many nodes of this island; names are kept only where all nodes are."""
    changed = replace(
        island,
        nodes=nodes,
        nodes_out=tuple(node for node in island.nodes_out if node < nodes),
        node_names=island.node_names if nodes == island.nodes else (),
    )
    return question.with_island(changed)


def is_interrupted(result: SearchResult) -> bool:
    """Whether Ctrl-C ended the search of this result."""
    return result.certificate is not None and result.certificate.status == "interrupted"


def first_line(error: Exception) -> str:
    """An error in one line, for a table."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def pins_in_words(job: Job) -> Iterator[tuple[str, str]]:
    """(name, `name: value` as in a job file) of every pin of the job."""
    for name in Pins.__dataclass_fields__:
        value = getattr(job.pin, name)
        if value is not None:
            yield name, f"{name}: {str(value).lower() if isinstance(value, bool) else value}"


def relinked(
    cluster: Cluster, pairs: Sequence[tuple[str, str]], changed: Callable[[Link], Link]
) -> Cluster:
    """The cluster with the links between these pairs of islands changed."""
    named = {frozenset(pair) for pair in pairs}
    kept = tuple(each for each in cluster.links if frozenset(each.between) not in named)
    own = tuple(
        IslandLink(between=pair, link=changed(cluster.link_between(*pair))) for pair in pairs
    )
    return replace(cluster, links=(*kept, *own))


def pairs_between(cluster: Cluster, regions: tuple[str, str]) -> list[tuple[str, str]]:
    """Names of every pair of islands from the first region to the second."""
    return [
        (a.name, b.name)
        for a in cluster.islands
        for b in cluster.islands
        if (a.region, b.region) == regions
    ]


def rate_of(link: Link) -> float:
    """Bytes per second of all devices that share a link; of one device where none do."""
    shared = link.shared_bandwidth_bytes_per_second
    return link.bandwidth_bytes_per_second if shared is None else shared


def wider(question: Question, pairs: Sequence[tuple[str, str]], factor: float) -> Question:
    """The question with so many times the bandwidth of the links between these islands; a device
    still gets no more than its port.
    """
    cluster = question.cluster
    for pair in pairs:
        port = min(cluster.island(n).inter_node.bandwidth_bytes_per_second for n in pair)
        cluster = relinked(cluster, [pair], partial(widened, factor=factor, port=port))
    return question.changed(cluster=cluster)


def widened(link: Link, factor: float, port: float = math.inf) -> Link:
    """The link so many times as wide, of devices that have such a port."""
    shared, own = link.shared_bandwidth_bytes_per_second, link.bandwidth_bytes_per_second
    if shared is not None and own >= min(shared, port):
        own = shared  # all that one device may take was cut to its port
    return replace(
        link,
        bandwidth_bytes_per_second=factor * own,
        shared_bandwidth_bytes_per_second=None if shared is None else factor * shared,
        samples=None,
    )


def nearer(question: Question, pairs: Sequence[tuple[str, str]], factor: float) -> Question:
    """The question with so many times the round trip of the links between these islands."""

    def changed(link: Link) -> Link:
        return replace(link, latency_seconds=factor * link.latency_seconds, samples=None)

    return question.changed(cluster=relinked(question.cluster, pairs, changed))
