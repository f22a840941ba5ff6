"""Another question for the search: what every what-if does.

A what-if changes one thing of a question (`Question.changed` and its sisters), asks again with the
plans that it knows, and compares. Its searches end by themselves, at their time limit or with a
KeyboardInterrupt: half of a search is nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.job.spec import Job, Pins
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.result import Question, SearchResult
from hetplan.search.search import search
from hetplan.search.solver import Progress

NO_ANSWER = (InfeasibleError, InputError, LimitError)
"""What `ask` raises where a question has no plan, contradicts itself, or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a question, in words, and the question with it."""

    words: str
    question: Question


def ask(
    question: Question,
    predictor: Predictor,
    *,
    known_plans: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan of the question; one of `NO_ANSWER` where there is none.

    The search starts from those of `known_plans` that are legal for the question.
    KeyboardInterrupt after Ctrl-C, even where there is a plan by then.
    """
    found = search(
        question.model,
        question.cluster,
        question.job,
        predictor,
        start=known_plans,
        progress=progress,
    )
    if is_interrupted(found):
        raise KeyboardInterrupt
    return found


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
