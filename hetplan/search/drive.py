"""In which order solvers work: plans first, then proofs.

1. `improve` by estimate, likeliest first, until several in a row have brought nothing better;
2. `prove` by bound, lowest first, as long as a solver's bound is below the target. A solver that
   has not been improved is improved before it is proven.

A step is one `improve` or `prove`. What comes next depends on the bounds and the best plan alone,
so a search that resumes takes the steps on record and goes on (`hetplan.search.journal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetplan.search.journal import Journal
from hetplan.search.solver import Best, Solver

_PATIENCE = 6
"""Improvements in a row that bring nothing before the proofs begin."""

_MOST_IMPROVED = 40

_FAR = 1.25
"""Estimates this much above the best step are not improved before the proofs."""


@dataclass(slots=True)
class Drive:
    """The two phases over some solvers."""

    solvers: Sequence[Solver]
    best: Best
    journal: Journal
    improved: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Both phases; OutOfTimeError at the deadline."""
        self._plans()
        self._proofs()

    def _plans(self) -> None:
        best, patience = self.best, _PATIENCE
        order = sorted(
            self.solvers, key=lambda solver: (solver.rough.estimate_seconds, solver.index)
        )
        for solver in order:
            if not best.open(solver.index):
                continue
            far = solver.rough.estimate_seconds > _FAR * best.seconds
            if patience == 0 or far or len(self.improved) >= _MOST_IMPROVED:
                break
            before = best.seconds
            self._step("improve", solver)
            self.improved.add(solver.index)
            patience = _PATIENCE if best.seconds < before else patience - 1

    def _proofs(self) -> None:
        best = self.best
        while True:
            left = [
                solver
                for solver in self.solvers
                if solver.index not in self.proven and best.open(solver.index)
            ]
            if not left:
                return
            solver = min(left, key=lambda each: (best.bounds[each.index], each.index))
            if solver.index not in self.improved:
                self._step("improve", solver)
                self.improved.add(solver.index)
                continue
            self._step("prove", solver)
            self.proven.add(solver.index)

    def _step(self, what: str, solver: Solver) -> None:
        if not self.journal.on_record(what, solver.index):
            self.best.check_time()
            if what == "improve":
                solver.improve(self.best)
            else:
                solver.prove(self.best)
            self.journal.done(what, solver.index)
        self.best.report()
