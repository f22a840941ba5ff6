"""Why a job has no plan, in the user's words, and what would give it one: the whole answer.

First the smallest set of demands that cannot hold together; then, where memory is among them, what
one layer needs and how many fit; then the changes that help, each with the step time that a search
found with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from hetplan.errors import InfeasibleError, InputError, LimitError
from hetplan.predict.predictor import Predictor
from hetplan.search.reasons.conflict import Conflict, find_conflict
from hetplan.search.reasons.constraints import Question, constraints
from hetplan.search.reasons.relaxations import Relaxation, relaxations
from hetplan.units import format_seconds

_MOST_OFFERED = 6
_LOOSE_GAP = 0.2
"""A relaxation is shown to have a plan; how good that can get is another search."""

_SECONDS = 10.0
"""Longest verification of one relaxation."""


def why_no_plan(
    asked: Question,
    predictor: Predictor,
    feasible: Callable[[Question], bool],
    *,
    details: Callable[[Question], tuple[str, ...]],
    step_seconds: Callable[[Question, Predictor], float],
) -> tuple[str, ...]:
    """At least one line; `details` says how far memory is from enough, `step_seconds` searches."""
    every = constraints(asked)
    conflict = find_conflict(asked, every, feasible)
    lines = [_words(conflict)]
    lines += [f"  {each.words}" for each in conflict.constraints]
    lines += details(asked)
    offers = [
        line
        for line in map(
            lambda each: _verified(each, predictor, step_seconds),
            islice(relaxations(asked, feasible), _MOST_OFFERED),
        )
        if line
    ]
    if offers:
        return (*lines, "each of these alone gives a plan:", *offers)
    return (
        *lines,
        "no single change of a pin, a forbid, the batch, the target, the memory reserve or the "
        "number of nodes gives a plan",
    )


def _words(conflict: Conflict) -> str:
    if not conflict.constraints:
        return "the model fits no such cluster, whatever is free: not one layer can be cut or held"
    if len(conflict.constraints) == 1:
        return "this alone cannot be met:"
    size = "smallest set" if conflict.smallest else "set, of which each part is needed,"
    return f"these cannot hold together ({size} of {len(conflict.constraints)}):"


def _verified(
    relaxation: Relaxation,
    predictor: Predictor,
    step_seconds: Callable[[Question, Predictor], float],
) -> str:
    """The change with its step; empty where the search found none after all."""
    job = relaxation.asked.job
    quick = replace(job, gap=max(job.gap, _LOOSE_GAP), time_limit_seconds=_SECONDS)
    try:
        step = step_seconds(replace(relaxation.asked, job=quick), predictor)
    except (InfeasibleError, InputError, LimitError):
        return ""
    return f"  {relaxation.words}: {format_seconds(step)} per step"


def pinned(asked: Question) -> Iterator[str]:
    """Names and values of the pins that are set."""
    for name in asked.job.pin.__dataclass_fields__:
        value = getattr(asked.job.pin, name)
        if value is not None:
            yield f"{name} {value}"
