"""Which demands cannot hold together: a smallest set of them.

A set of constraints is in conflict where no plan meets them all, whatever else is free. Sets of one
and two are tried, smallest first; beyond that constraints are given up one by one as long as the
rest still has no plan, which leaves a set that is in conflict and of which each part is needed
(a solver's own set of sufficient assumptions is not: it may hold what plays no part).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetplan.search.reasons.constraints import Constraint, Question

_TRIED_BY_SIZE = 2
"""Largest sets that are all tried; their number grows with the power of their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Constraints that cannot hold together; every proper part of them can."""

    constraints: tuple[Constraint, ...]
    """Empty where there is no plan even without any constraint."""
    smallest: bool
    """No smaller set is in conflict; else only: none of these can be left out."""


def find_conflict(
    asked: Question,
    every: Sequence[Constraint],
    feasible: Callable[[Question], bool],
) -> Conflict:
    """A smallest conflict of a question without a plan."""

    def holds(kept: Sequence[Constraint]) -> bool:
        """Whether a plan meets these constraints, all others taken away."""
        question = asked
        for each in every:
            if each not in kept:
                question = each.without(question)
        return feasible(question)

    if not holds(()):
        return Conflict(constraints=(), smallest=True)
    core = _irreducible(every, holds)
    for size in range(1, min(_TRIED_BY_SIZE, len(core) - 1) + 1):
        for kept in combinations(every, size):
            if not holds(kept):
                return Conflict(constraints=kept, smallest=True)
    return Conflict(constraints=core, smallest=len(core) <= _TRIED_BY_SIZE + 1)


def _irreducible(
    every: Sequence[Constraint], holds: Callable[[Sequence[Constraint]], bool]
) -> tuple[Constraint, ...]:
    core = list(every)
    for each in every:
        rest = [other for other in core if other is not each]
        if not holds(rest):
            core = rest
    return tuple(core)
