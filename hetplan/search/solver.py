"""What the driver asks of whoever searches one part of the space, and what they share.

A solver holds one family of plans (`hetplan.search.space`), or all plans of several pipelines.
The driver (`hetplan.search.search`) lets solvers offer plans first, likeliest solver first, and
then lets those prove themselves whose bound is below the target. `Best` is all that they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from hetplan.errors import OutOfTimeError
from hetplan.kernels import clock
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.result import CoursePoint

RESOLUTION = 1e-9
"""Steps closer than this part of each other count as equal: two replays of equal plans differ by
the order of their additions."""

MOST_POINTS = 48
"""Of a search's course: more than a picture of a phone's width shows apart."""

MAX_EFFORT = 2
"""Last effort of a proof (`Best.effort`)."""

_TELL_SECONDS = 0.5
"""Between two reports of a search that has found nothing better: one looks at every bound, 10 ms
for 300,000 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands."""

    best_seconds: float
    """Infinite while there is no plan."""
    lower_bound_seconds: float
    candidates_done: int
    candidates: int
    elapsed_seconds: float

    @property
    def gap(self) -> float:
        """(best - bound) / best; 1 while there is no plan."""
        if self.best_seconds == float("inf"):
            return 1.0
        return max(0.0, 1.0 - self.lower_bound_seconds / self.best_seconds)


class Grounds(StrEnum):
    """What a bound of a solver's plans rests on (`hetplan.proof`)."""

    ORDER_FREE = "order-free"
    """The closed form without an order of islands."""
    BOUNDARIES = "boundaries"
    """The closed form that knows boundaries between islands."""
    PROGRAM = "program"
    """Dynamic programs over orders, stages and cuts."""
    EVERY_PLAN = "every plan"
    """Every plan below it was replayed."""
    PRICES = "prices"
    """Prices of devices (weak duality), for several pipelines."""
    JOURNAL = "journal"
    """A search that was broken off; its journal has the bound alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFreeBound:
    """What is known of a solver's plans before any program runs."""

    bound_seconds: float
    """Valid for every plan of it; infinite where none is feasible."""
    estimate_seconds: float
    """A guess at the best step, to visit the likeliest first."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A plan that a solver has found."""

    solver: int
    seconds: float
    chosen: ChosenPlan


@dataclass(slots=True)
class Best:
    """The best plan so far, the bound of every solver, and what it took to get there."""

    bounds: list[float]
    """Per solver: no plan of it has a shorter step. Starts with the order-free bound."""
    gap: float = 0.0
    deadline: float = float("inf")
    """Of `hetplan.kernels.clock`."""
    deadline_with: Callable[[ChosenPlan], float] | None = None
    """The deadline once this is the best plan: time for its last price is kept back."""
    first_plan_by: float = float("inf")
    """The same while there is no plan: one a little late is better than none."""
    progress: Callable[[Progress], None] | None = None
    started: float = field(default_factory=clock)
    seconds: float = float("inf")
    solver: int = -1
    chosen: ChosenPlan | None = None
    offers: list[Offer] = field(default_factory=list)
    """Every plan that was the best when it was found, oldest first."""
    own: dict[int, Offer] = field(default_factory=dict)
    """The best plan of every solver that has offered one."""
    replays: int = 0
    seed: int = 0
    """Of everything random; the job's."""
    listed: int = 0
    """Families of which every plan below the target was replayed."""
    stalled_at: dict[int, float] = field(default_factory=dict)
    """Per solver whose programs ended below a target: that target. More effort does not help."""
    effort: int = 0
    """How hard a proof may try: 0 first, up to `MAX_EFFORT` for what stays open."""
    explored: int = 0
    """Subproblems that programs solved: bounds on X, sequences of slots, nodes of a tree."""
    on_event: Callable[[Offer | tuple[int, float]], None] | None = None
    """Told of every better plan and every raised bound (solver, bound), for the journal."""

    grounds: dict[int, Grounds] = field(default_factory=dict)
    """Per solver whose bound was raised above the order-free one: what it rests on now."""
    empty: int = 0
    """Solvers without any plan, by the order-free bounds: no candidates."""

    steps: int = 0
    """Improvements and proofs that have ended."""
    course: list[CoursePoint] = field(default_factory=list)
    """Where the best plan or the bound had changed; short, and the same for the same steps."""

    _told: float = 0.0
    _stride: int = 1
    """Steps from one look at the course to the next: the least power of two that keeps it short."""
    _lowest: int = 0
    """A solver that had the least bound when the course was looked at."""

    @property
    def target(self) -> float:
        """A step below this would be worth finding."""
        return self.seconds * (1.0 - max(self.gap, RESOLUTION))

    @property
    def lower_bound(self) -> float:
        """No plan of any solver has a shorter step; 0 before those are listed."""
        return min(self.seconds, min(self.bounds, default=0.0))

    def offer(self, solver: int, chosen: ChosenPlan, seconds: float) -> bool:
        """Keep the plan if it is faster than the best so far, or its solver's; whether the former.

        Wanted are plans below `wanted(solver)`.
        """
        if not seconds < self.wanted(solver) * (1.0 - RESOLUTION):
            return False
        better = seconds < self.seconds * (1.0 - RESOLUTION)
        found = self.own[solver] = Offer(solver=solver, seconds=seconds, chosen=chosen)
        if better:
            self.seconds, self.solver, self.chosen = seconds, solver, chosen
            if self.deadline_with is not None:
                self.deadline = self.deadline_with(chosen)
            self.offers.append(found)
        if self.on_event is not None:
            self.on_event(found)
        if better:
            self.report()
        return better

    def straighten(self) -> None:
        """Make the best plan the least of `own`: a Ctrl-C may have come while one was noted."""
        if self.own:
            found = min(self.own.values(), key=lambda offer: offer.seconds)
            self.seconds, self.solver, self.chosen = found.seconds, found.solver, found.chosen

    def wanted(self, solver: int) -> float:
        """Plans of this solver that are not below it are not kept."""
        found = self.own.get(solver)
        return float("inf") if found is None else found.seconds

    def raise_bound(self, solver: int, bound: float, grounds: Grounds = Grounds.PROGRAM) -> None:
        """Note a bound of a solver and what it rests on; the larger one counts."""
        if bound > self.bounds[solver]:
            self.bounds[solver], self.grounds[solver] = bound, grounds
            if self.on_event is not None:
                self.on_event((solver, bound))

    def open(self, solver: int) -> bool:
        """Whether a plan of this solver could be better than the best by more than the gap."""
        return self.bounds[solver] < self.target

    def open_ones(self) -> list[int]:
        """Every solver that is open."""
        found: list[int] = np.flatnonzero(np.array(self.bounds) < self.target).tolist()
        return found

    def still_open(self, solver: int, crossing: Callable[[float], float]) -> bool:
        """`open` with a bound that takes longer; true where there is nothing to compare with."""
        if self.seconds == float("inf"):
            return True
        if self.open(solver):
            self.raise_bound(solver, crossing(self.target), Grounds.BOUNDARIES)
        return self.open(solver)

    def closed(self) -> int:
        """Solvers that hold no plan better than the best by more than the gap."""
        return int(np.count_nonzero(np.array(self.bounds) >= self.target))

    def note_step(self) -> None:
        """Count a step, and note where the search stands if it has moved."""
        self.steps += 1
        if self.steps % self._stride == 0:
            self.note()

    def note(self) -> None:
        """Add a point to the course where the best plan or the bound has moved."""
        if self.seconds == float("inf") or not self.bounds:
            return
        last = self.course[-1] if self.course else None
        # Bounds only rise: the least one is as it was while this solver's is.
        if last is not None and (
            self.seconds >= last.best_seconds
            and self.bounds[self._lowest] <= last.lower_bound_seconds
        ):
            return
        least = min(self.bounds)
        self._lowest = self.bounds.index(least)
        # While links that plans share are looked at, `seconds` stands for a price above the best.
        best = self.seconds if last is None else min(self.seconds, last.best_seconds)
        bound = min(best, least)
        if last is not None and (best, bound) == (last.best_seconds, last.lower_bound_seconds):
            return
        found = CoursePoint(steps=self.steps, best_seconds=best, lower_bound_seconds=bound)
        self.course = [*(each for each in self.course if each.steps < self.steps), found]
        if len(self.course) > MOST_POINTS:
            self._stride *= 2
            at = {
                min(self.steps, -(-e.steps // self._stride) * self._stride): e for e in self.course
            }
            self.course = [replace(each, steps=steps) for steps, each in at.items()]

    @property
    def late(self) -> bool:
        """Whether the deadline is over: who has something to offer should offer it."""
        return clock() > self.deadline

    def check_time(self) -> None:
        """Raise OutOfTimeError past the deadline, or that of a first plan while there is none."""
        if clock() > (self.first_plan_by if self.chosen is None else self.deadline):
            raise OutOfTimeError

    def report_now_and_then(self) -> None:
        """`report` unless that was a moment ago."""
        if self.progress is not None and clock() - self._told > _TELL_SECONDS:
            self.report()

    def report(self) -> None:
        """Tell the caller where the search stands."""
        self._told = clock()
        if self.progress is not None:
            self.progress(
                Progress(
                    best_seconds=self.seconds,
                    lower_bound_seconds=self.lower_bound,
                    candidates_done=max(0, self.closed() - self.empty),
                    candidates=len(self.bounds) - self.empty,
                    elapsed_seconds=clock() - self.started,
                )
            )


class Solver(Protocol):
    """Searches one part of the space; told its number in `Best.bounds`."""

    index: int

    @property
    def order_free(self) -> OrderFreeBound:
        """Cheap, valid, made before `improve`."""
        ...

    def sharpen(self, best: Best) -> None:
        """Raise the own bound by what takes about a millisecond; nothing before there is a plan."""
        ...

    def improve(self, best: Best) -> None:
        """Offer good plans, fast: a fraction of a second; nothing has to be proven."""
        ...

    def prove(self, best: Best) -> None:
        """Raise the own bound to `best.target` or as far as possible; offer what is met.

        Where the part holds a plan below the target, it is found and offered in the end. How much
        work a proof may take goes by `best.effort`: a solver that stays open is asked again.
        """
        ...
