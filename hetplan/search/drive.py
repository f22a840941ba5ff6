"""In which order solvers work: plans first, then proofs.

1. `improve` by estimate, likeliest first, until several in a row have brought nothing better;
   then `sharpen` all that are open, and `improve` by bound, lowest first, in the same way: bounds
   know what boundaries cost, estimates do not (each kind of solver for itself);
2. `prove` by bound, lowest first, as long as a solver's bound is below the target. A solver that
   stays open is improved, if that has not been done, and proven once more. What is open then is
   proven again with more effort: so no family that is hard to close keeps the others waiting.
   Who has no estimate (several pipelines) is improved in the second round.

A step is one `improve` or `prove`. What comes next depends on the bounds and the best plan alone,
so a search that resumes takes the steps on record and goes on (`hetplan.search.journal`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetplan.search.journal import Journal
from hetplan.search.solver import MOST_EFFORT, Best, Solver

_PATIENCE = 5
"""Improvements in a row that bring nothing before the proofs begin."""

_FAR = 1.25
"""Estimates this much above the best step are not improved before the proofs."""

_FIRST = 8
"""Solvers that are tried for a first plan."""

_UNKNOWN = float("inf")
"""Estimate of a solver that has none."""


@dataclass(slots=True)
class Drive:
    """The two phases over solvers that may have plans."""

    best: Best
    journal: Journal
    solvers: Sequence[Solver] = ()
    improved: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Both phases; OutOfTimeError at the deadline."""
        self._plans([at for _, at in self._likeliest(self.solvers)], _FAR)
        self._sharpen()
        lowest = self._lowest()
        # Bounds of one kind of solver are comparable, so each has its own patience.
        for kind in dict.fromkeys(type(self.solvers[at]) for at in lowest):
            self._plans([at for at in lowest if type(self.solvers[at]) is kind], float("inf"))
        self._proofs()
        self.best.report()

    def first_plan(self, solvers: Sequence[Solver]) -> None:
        """Improve the likeliest of a few solvers until there is a plan: for little time."""
        for _, at in self._likeliest(solvers)[:_FIRST]:
            if self.best.chosen is not None:
                return
            self._improve(solvers[at])

    def prove_again(self) -> None:
        """The proofs once more, for a target that has moved up."""
        self._proofs()

    def _likeliest(self, solvers: Sequence[Solver]) -> list[tuple[float, int]]:
        found = [(s.rough.estimate_seconds, s.index, at) for at, s in enumerate(solvers)]
        return [(estimate, at) for estimate, _, at in sorted(found) if estimate < _UNKNOWN]

    def _lowest(self) -> list[int]:
        """Solvers that are open, by bound."""
        found = [
            (self.best.bounds[s.index], s.index, at)
            for at, s in enumerate(self.solvers)
            if self.best.open(s.index) and s.rough.estimate_seconds < _UNKNOWN
        ]
        return [at for _, _, at in sorted(found)]

    def _sharpen(self) -> None:
        best = self.best
        for solver in self.solvers:
            if best.open(solver.index):
                best.check_time()
                solver.sharpen(best)

    def _plans(self, order: Sequence[int], far: float) -> None:
        best, patience = self.best, _PATIENCE
        for at in order:
            solver = self.solvers[at]
            if not best.open(solver.index) or solver.index in self.improved:
                continue
            if patience == 0 or solver.rough.estimate_seconds > far * best.seconds:
                break
            before = best.seconds
            self._improve(solver)
            if best.seconds < float("inf"):
                patience = _PATIENCE if best.seconds < before else patience - 1

    def _proofs(self) -> None:
        best = self.best
        for best.effort in range(MOST_EFFORT + 1):
            # Bounds only rise: an entry of the heap is at most as high as its solver's bound.
            heap = [
                (best.bounds[s.index], s.index, at)
                for at, s in enumerate(self.solvers)
                if best.open(s.index)
            ]
            heapq.heapify(heap)
            while heap and heap[0][0] < best.target:
                known, index, at = heapq.heappop(heap)
                if best.bounds[index] > known:
                    heapq.heappush(heap, (best.bounds[index], index, at))
                    continue
                self._prove(self.solvers[at])

    def _prove(self, solver: Solver) -> None:
        self._step("prove", solver)
        self.proven.add(solver.index)
        known = solver.rough.estimate_seconds < _UNKNOWN or self.best.effort > 0
        if known and self.best.open(solver.index) and solver.index not in self.improved:
            self._improve(solver)
            if self.best.open(solver.index):
                self._step("prove", solver)

    def _improve(self, solver: Solver) -> None:
        self._step("improve", solver)
        self.improved.add(solver.index)

    def _step(self, what: str, solver: Solver) -> None:
        if not self.journal.on_record(what, solver.index):
            self.best.check_time()
            if what == "improve":
                solver.improve(self.best)
            else:
                solver.prove(self.best)
            self.journal.done(what, solver.index)
        self.best.report_now_and_then()
