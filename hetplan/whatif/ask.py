"""Another question for the search: what every what-if does.

A what-if changes one thing of a question (`Question.changed` and its sisters), asks again with the
plans that it knows, and compares. Its searches end by themselves, at their time limit or with a
KeyboardInterrupt: half of a search is nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.cluster.spec import Cluster, Island, IslandLink, Link
from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.job.spec import Job, Pins
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Inputs, Question, SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Progress

NO_ANSWER = (InfeasibleError, InputError, LimitError)
"""What `ask` raises where a question has no plan, contradicts itself, or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a question, in words, and the question with it."""

    words: str
    question: Question
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


def ask(
    question: Question,
    predictor: Predictor,
    *,
    known_plans: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan of the question; one of `NO_ANSWER` where there is none.

    The search starts from those of `known_plans` that are legal for the question and have what it
    pins. The result of `Inputs` has their digests. KeyboardInterrupt after Ctrl-C, even where there
    is a plan by then.
    """
    found = search(
        question.model,
        question.cluster,
        question.job,
        predictor,
        sha256=question.sha256 if isinstance(question, Inputs) else (),
        start=known_plans,
        progress=progress,
    )
    if is_interrupted(found):
        raise KeyboardInterrupt
    return found


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
