"""In which order solvers work: plans first, then proofs.

1. `improve` by estimate, likeliest first, until several in a row have brought nothing better;
2. `prove` by bound, lowest first, as long as a solver's bound is below the target. A solver that
   stays open is improved, if that has not been done, and proven once more.

A step is one `improve` or `prove`. What comes next depends on the bounds and the best plan alone,
so a search that resumes takes the steps on record and goes on (`hetplan.search.journal`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetplan.search.journal import Journal
from hetplan.search.solver import Best, Solver

_PATIENCE = 5
"""Improvements in a row that bring nothing before the proofs begin."""

_FAR = 1.25
"""Estimates this much above the best step are not improved before the proofs."""


@dataclass(slots=True)
class Drive:
    """The two phases over solvers that may have plans."""

    solvers: Sequence[Solver]
    best: Best
    journal: Journal
    improved: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Both phases; OutOfTimeError at the deadline."""
        self._plans()
        self._proofs()
        self.best.report()

    def prove_again(self) -> None:
        """The proofs once more, for a target that has moved up."""
        self._proofs()

    def _plans(self) -> None:
        best, patience = self.best, _PATIENCE
        order = sorted(
            ((solver.rough.estimate_seconds, solver.index, at))
            for at, solver in enumerate(self.solvers)
        )
        for estimate, index, at in order:
            if not best.open(index):
                continue
            if patience == 0 or estimate > _FAR * best.seconds:
                break
            before = best.seconds
            self._step("improve", self.solvers[at])
            self.improved.add(index)
            if best.seconds < float("inf"):
                patience = _PATIENCE if best.seconds < before else patience - 1

    def _proofs(self) -> None:
        best = self.best
        # Bounds only rise: an entry of the heap is at most as high as its solver's bound.
        heap = [(best.bounds[s.index], s.index, at) for at, s in enumerate(self.solvers)]
        heapq.heapify(heap)
        while heap and heap[0][0] < best.target:
            known, index, at = heapq.heappop(heap)
            if best.bounds[index] > known:
                heapq.heappush(heap, (best.bounds[index], index, at))
                continue
            self._step("prove", self.solvers[at])
            self.proven.add(index)
            if best.open(index) and index not in self.improved:
                self._step("improve", self.solvers[at])
                self.improved.add(index)
                if best.open(index):
                    self._step("prove", self.solvers[at])

    def _step(self, what: str, solver: Solver) -> None:
        if not self.journal.on_record(what, solver.index):
            self.best.check_time()
            if what == "improve":
                solver.improve(self.best)
            else:
                solver.prove(self.best)
            self.journal.done(what, solver.index)
        self.best.report_now_and_then()
