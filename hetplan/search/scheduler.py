"""In which order solvers work: plans first, then proofs.

1. `improve` by estimate, likeliest first, until several in a row have brought nothing better;
   estimates of one size of tick err alike, so then the likeliest of every size, and more of the
   size that has the best plan; then families near that of the best plan, from one best plan to the
   next: estimates of like shapes err alike;
   then `improve` by bound, lowest first, in the same way: bounds know what boundaries cost once
   they are sharpened, estimates do not (each kind of solver for itself). Only what is lowest is
   sharpened: a better plan closes most of the others before it is their turn;
2. `prove` by bound, lowest first, as long as a sharpened bound is below the target; solvers without
   an estimate (several pipelines) come last, when the target is as low as it gets. A solver that
   stays open is improved, if that has not been done, and proven once more. What is open then is
   proven again with more effort: so no family that is hard to close keeps the others waiting.
   Solvers without an estimate are improved in the second round.

A step is one `improve` or `prove`. What comes next depends on the bounds and the best plan alone,
so a search that resumes takes the steps on record and goes on (`hetplan.search.journal`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetplan.search.journal import Journal
from hetplan.search.solver import MAX_EFFORT, Best, Solver

_PATIENCE = 5
"""Improvements in a row that bring nothing before the proofs begin."""

_FAR = 1.25
"""Estimates this much above the best step are not improved before the proofs."""

_MORE = 16
"""Solvers that are asked for plans which share fewer links than the best one."""

_FIRST = 8
"""Solvers that are tried for a first plan."""

_UNKNOWN = float("inf")
"""Estimate of a solver that has none."""


@dataclass(slots=True)
class Scheduler:
    """The two phases over all solvers."""

    best: Best
    journal: Journal
    solvers: Sequence[Solver]
    estimates: Sequence[float] = ()
    """Per solver, infinite where there is none."""
    ticks: Sequence[int] = ()
    """Samples of a tick of the first solvers, those of families."""
    near: Callable[[int], Sequence[int]] = lambda at: ()
    """Solvers of families like that of this one."""
    improved: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)
    sharpened: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Both phases; OutOfTimeError at the deadline."""
        likeliest = _by(self.estimates, range(len(self.solvers)))
        self.best.note()
        self._plans(likeliest, _FAR)
        self._other_ticks(likeliest)
        self._near_best()
        self._plans_by_bound()
        self._proofs()
        self.best.report()

    def first_plan(self, estimates: Mapping[int, float], most: int = 1) -> None:
        """Improve the likeliest of a few solvers, until there is a plan or `most` of them: for
        little time.
        """
        best = self.best
        best.check_time()
        for number, at in enumerate(_by(estimates, [*estimates])[:_FIRST]):
            if best.chosen is None or number < most:
                self._improve(at)

    def improve_below(self, seconds: float) -> None:
        """Plans of the likeliest solvers that may have some below this price of the best plan.

        The best plan shares links, so that it takes longer than the solvers know; one that they
        have as slower may share less.
        """
        best = self.best
        if seconds * (1.0 - best.gap) <= best.seconds:
            return
        known = best.seconds, best.solver, best.chosen
        best.seconds = seconds
        try:
            open_ones = [at for at in self._open() if at not in best.own and self._known(at)]
            for at in _by(self.estimates, open_ones)[:_MORE]:
                self._improve(at)
        finally:
            best.seconds, best.solver, best.chosen = known

    def prove_again(self) -> None:
        """The proofs once more, for a target that has moved up."""
        self._proofs()

    def _open(self) -> list[int]:
        """Solvers whose bounds are below the target; of no plan, all that may have one."""
        return self.best.open_ones()

    def _known(self, at: int) -> bool:
        return self.estimates[at] < _UNKNOWN

    def _other_ticks(self, likeliest: Sequence[int]) -> None:
        """Improve the likeliest of every size of tick, then more of that of the best plan."""
        first: dict[int, int] = {}
        of_families = [at for at in likeliest if at < len(self.ticks)]
        for at in of_families:
            first.setdefault(self.ticks[at], at)
        before = self.best.seconds
        self._plans(list(first.values()), _FAR, len(first))
        if self.best.seconds < before:
            tick = self.ticks[self.best.solver]
            self._plans([at for at in of_families if self.ticks[at] == tick], _FAR)

    def _near_best(self) -> None:
        """Improve what is near the best plan, as long as that brings something."""
        best, before = self.best, float("inf")
        while best.seconds < before and 0 <= best.solver < len(self.ticks):
            before = best.seconds
            self._plans(_by(self.estimates, self.near(best.solver)), _FAR)

    def _plans_by_bound(self) -> None:
        """Improve solvers of each kind by bound, as long as that brings something."""
        best = self.best
        # Bounds of one kind of solver are comparable, so each has its own patience.
        heaps: dict[type, list[tuple[float, int]]] = {}
        for at in _by(best.bounds, [at for at in self._open() if self._known(at)]):
            heaps.setdefault(type(self.solvers[at]), []).append((best.bounds[at], at))
        for heap in heaps.values():
            patience = _PATIENCE
            while heap and patience:
                _, at = heapq.heappop(heap)
                if at in self.improved or not best.open(at):
                    continue
                if self._sharpens(at):
                    heapq.heappush(heap, (best.bounds[at], at))
                    continue
                before = best.seconds
                self._improve(at)
                if best.seconds < float("inf"):
                    patience = _PATIENCE if best.seconds < before else patience - 1

    def _sharpens(self, at: int) -> bool:
        """Sharpen the solver's bound, if that has not been done since there are plans; whether."""
        best = self.best
        if at in self.sharpened or best.seconds == float("inf"):
            return False
        best.check_time()
        self.sharpened.add(at)
        self.solvers[at].sharpen(best)
        best.report_now_and_then()
        return True

    def _plans(self, order: Sequence[int], far: float, most: int = _PATIENCE) -> None:
        best, patience = self.best, most
        # A sharpened bound can be above the estimate, which knows little of boundaries.
        heap = [(self.estimates[at], number, at) for number, at in enumerate(order)]
        heapq.heapify(heap)
        while heap:
            estimate, number, at = heapq.heappop(heap)
            if not best.open(at) or at in self.improved:
                continue
            if patience == 0 or estimate > far * best.seconds:
                break
            if self._sharpens(at) and best.bounds[at] > estimate:
                heapq.heappush(heap, (best.bounds[at], number, at))
                continue
            before = best.seconds
            self._improve(at)
            if best.seconds < float("inf"):
                patience = most if best.seconds < before else patience - 1

    def _proofs(self) -> None:
        best = self.best
        for best.effort in range(MAX_EFFORT + 1):
            # Bounds only rise: an entry of the heap is at most as high as its solver's bound.
            heap = [(not self._known(at), best.bounds[at], at) for at in self._open()]
            heapq.heapify(heap)
            while heap:
                last, known, at = heapq.heappop(heap)
                if known < best.bounds[at] < best.target:
                    heapq.heappush(heap, (last, best.bounds[at], at))
                elif best.bounds[at] < best.target:
                    if self._sharpens(at):
                        heapq.heappush(heap, (last, best.bounds[at], at))
                    else:
                        self._prove(at)

    def _prove(self, at: int) -> None:
        self._step("prove", at)
        self.proven.add(at)
        known = self._known(at) or self.best.effort > 0
        if known and self.best.open(at) and at not in self.improved:
            self._improve(at)
            if self.best.open(at):
                self._step("prove", at)

    def _improve(self, at: int) -> None:
        self._step("improve", at)
        self.improved.add(at)

    def _step(self, what: str, at: int) -> None:
        if not self.journal.on_record(what, at):
            self.best.check_time()
            if what == "improve":
                self.solvers[at].improve(self.best)
            else:
                self.solvers[at].prove(self.best)
            self.journal.done(what, at)
        self.best.note_step()
        self.best.report_now_and_then()


def _by(seconds: Mapping[int, float] | Sequence[float], solvers: Sequence[int]) -> list[int]:
    """The solvers by these figures; those without one are left out."""
    found = sorted((seconds[at], at) for at in solvers if seconds[at] < _UNKNOWN)
    return [at for _, at in found]
