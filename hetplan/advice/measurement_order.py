"""What should be measured next, so that the interval of the best plans shrinks most a second?

Values in, an order out. A plan's step is a sum of predicted parts; part i has c_i seconds, a 90 %
half-width h_i (log) and a source of errors, whose parts err together (`cost.terms`). To first
order the logarithm of plan p's step has

    h_p^2 = sum over sources s of (sum over parts i of s: c_i / step_p * h_i)^2

and the present best plan b is the wrong choice by, in the mean over draws of the sources,

    regret = E[log step_b - min over p of log step_p]

A measurement leaves smaller half-widths h'_i of what it measures. What it will say is not known;
that part of an error, of half-width sqrt(h_i^2 - h'_i^2), is known after it, the rest is not. So
the regret that it is expected to leave is the regret with nothing known less the same mean over
the known parts alone (expected value of sample information: Raiffa and Schlaifer, Applied
Statistical Decision Theory, 1961, chapter 4).

Measurements are taken by what they take off  sum_p w_p h_p + regret  a second, w_p being the
chance that p is the best plan; or, where that is better, the best single one that the budget has
room for goes first. For a sum of independent gains the better of the two is at least half of the
best choice (the knapsack's greedy bound).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.terms import Draws
from hetplan.errors import InputError

DRAWS = 512  # the chance of 1 in 2 comes out within .022 (sqrt(.25 / 512))
_SEED = 1  # any; fixed, so that equal plans give equal orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a plan's step that one kind of prediction says."""

    asked: str
    """Which prediction; measurements refer to it."""
    source: tuple[str, str]
    """Whose error it shares."""
    seconds: float
    log_halfwidth: float
    """Of its 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParts:
    """A plan and what its step is made of; what is left of the step is certain."""

    name: str
    step_seconds: float
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        whole = sum(part.seconds for part in self.parts)
        if not 0.0 < self.step_seconds < math.inf or whole > self.step_seconds * (1 + 1e-6):
            raise InputError(
                f"plan {self.name}: parts of {whole:g} s do not make a step of "
                f"{self.step_seconds:g} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """What a measurement leaves of a prediction's half-width h: max(least, factor * h)."""

    asked: str
    least_log_halfwidth: float
    factor: float = 0.0

    def of(self, log_halfwidth: float) -> float:
        """The half-width after it; never more than before."""
        return min(log_halfwidth, max(self.least_log_halfwidth, self.factor * log_halfwidth))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Something that can be measured."""

    name: str
    seconds: float
    """Expected."""
    leaves: tuple[Leaves, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How well the best plan is known."""

    best: str
    log_halfwidth: float
    """Of the best plan's step."""
    regret: float
    """Expected loss of taking it, as a part of its step."""
    chances: tuple[tuple[str, float], ...]
    """Every plan, and the chance that it is the best one; likeliest first."""

    def chance(self, name: str) -> float:
        """That this plan is the best of them."""
        return dict(self.chances).get(name, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One measurement of an order, and what is expected to be left after it."""

    measurement: Measurement
    log_halfwidth: float
    """Of the best plan."""
    regret: float
    seconds: float
    """Spent up to its end."""
    gain: float
    """What it takes off the sum of half-widths, by chance of the plan, and the regret."""


def standing(plans: Sequence[PlanParts]) -> Standing:
    """How far the best of these plans is known, and how sure it is that it is the best."""
    best = _best(plans)
    widths = _Widths(plans)
    steps = widths.logs(widths.halfwidths)
    counts = np.bincount(np.argmin(steps, axis=1), minlength=len(plans)) / len(steps)
    chances = sorted(
        ((plan.name, float(count)) for plan, count in zip(plans, counts, strict=True)),
        key=lambda each: -each[1],
    )
    return Standing(
        best=plans[best].name,
        log_halfwidth=float(widths.of_plans(widths.halfwidths)[best]),
        regret=_regret(steps, best),
        chances=tuple(chances),
    )


def near_best(plans: Sequence[PlanParts], *, most: int) -> tuple[PlanParts, ...]:
    """The best plan and those that cannot be told from it, best first, at most so many.

    A plan is told apart where it is slower by more than the interval of the difference reaches.
    """
    first = plans[_best(plans)]
    near = []
    for plan in plans:
        if plan is first:
            continue
        slower = math.log(plan.step_seconds / first.step_seconds)
        if slower <= difference_log_halfwidth(first, plan):
            near.append((slower, plan.name, plan))
    near.sort(key=lambda each: each[:2])
    return (first, *(plan for _, _, plan in near[: most - 1]))


def difference_log_halfwidth(one: PlanParts, two: PlanParts) -> float:
    """90 % half-width of log(step of one / step of two): common errors cancel."""
    sums: dict[tuple[str, str], float] = {}
    for plan, sign in ((one, 1.0), (two, -1.0)):
        for part in plan.parts:
            share = sign * part.seconds / plan.step_seconds * part.log_halfwidth
            sums[part.source] = sums.get(part.source, 0.0) + share
    return math.sqrt(sum(each * each for each in sums.values()))


def order(
    plans: Sequence[PlanParts],
    measurements: Sequence[Measurement],
    *,
    budget_seconds: float = math.inf,
    least_gain: float = 0.0,
) -> tuple[Choice, ...]:
    """The measurements worth their time, in their order, as far as the budget goes.

    `least_gain`: one that takes off less than this part of the best plan's half-width and regret
    is not worth it. Of equals the first goes first. A measurement that needs more than what is
    left of the budget is passed over.
    """
    best = _best(plans)
    widths = _Widths(plans)
    known = standing(plans)
    chances = np.array([known.chance(plan.name) for plan in plans])
    state = _State(widths, best, chances)
    floor = least_gain * state.loss(widths.halfwidths)
    chosen = _greedy(state, measurements, budget_seconds, floor, ())
    single = _best_single(state, measurements, budget_seconds, floor)
    if single is not None and sum(each.gain for each in chosen) < single[1]:
        chosen = _greedy(state, measurements, budget_seconds, floor, (single[0],))
    return chosen


class _Widths:
    """Shares and half-widths of every part of every plan, and the draws of their sources."""

    def __init__(self, plans: Sequence[PlanParts]) -> None:
        self.logs_of_steps = np.log([plan.step_seconds for plan in plans])
        self.plan = np.array([p for p, plan in enumerate(plans) for _ in plan.parts], dtype=int)
        parts = [part for plan in plans for part in plan.parts]
        sources = tuple(sorted({part.source for part in parts}))
        place = {source: index for index, source in enumerate(sources)}
        self.source = np.array([place[part.source] for part in parts], dtype=int)
        self.share = np.array(
            [part.seconds / plan.step_seconds for plan in plans for part in plan.parts]
        )
        self.halfwidths: Floats = np.array([part.log_halfwidth for part in parts], dtype=float)
        self.at: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            self.at.setdefault(part.asked, []).append(index)
        draws = Draws(sources, DRAWS, _SEED)
        # A half-width of 1 makes the factor exp(z / NORMAL_90) of a standard normal z.
        self.normal = np.array([np.log(draws.factor(each, 1.0)) for each in sources])
        self.shape = len(plans), len(sources)

    def sums(self, halfwidths: Floats) -> Floats:
        """Half-width that each source gives each plan."""
        found = np.zeros(self.shape)
        np.add.at(found, (self.plan, self.source), self.share * halfwidths)
        return found

    def of_plans(self, halfwidths: Floats) -> Floats:
        """Half-width of each plan."""
        found: Floats = np.sqrt((self.sums(halfwidths) ** 2).sum(axis=1))
        return found

    def logs(self, halfwidths: Floats) -> Floats:
        """Logarithm of the step of each plan in each draw, [draws, plans]."""
        if not self.shape[1]:
            return np.tile(self.logs_of_steps, (DRAWS, 1))
        moved: Floats = (self.sums(halfwidths) @ self.normal).T + self.logs_of_steps
        return moved

    def after(self, halfwidths: Floats, measurement: Measurement) -> Floats:
        """What a measurement leaves of them."""
        found = halfwidths.copy()
        for each in measurement.leaves:
            for index in self.at.get(each.asked, ()):
                found[index] = each.of(float(halfwidths[index]))
        return found


class _State:
    """What is lost by not knowing, as half-widths fall."""

    def __init__(self, widths: _Widths, best: int, chances: Floats) -> None:
        self.widths, self.best, self.chances = widths, best, chances
        self._all = _regret(widths.logs(widths.halfwidths), best)

    def regret(self, halfwidths: Floats) -> float:
        """That is expected to be left when no more than these are unknown."""
        known = np.sqrt(np.maximum(self.widths.halfwidths**2 - halfwidths**2, 0.0))
        return max(0.0, self._all - _regret(self.widths.logs(known), self.best))

    def loss(self, halfwidths: Floats) -> float:
        """Half-widths by chance of the plan, and regret."""
        width = float(self.chances @ self.widths.of_plans(halfwidths))
        return width + self.regret(halfwidths)


def _greedy(
    state: _State,
    measurements: Sequence[Measurement],
    budget_seconds: float,
    floor: float,
    first: Sequence[Measurement],
) -> tuple[Choice, ...]:
    """Most gain a second next, after what goes first."""
    widths = state.widths
    halfwidths, spent, loss = widths.halfwidths, 0.0, state.loss(widths.halfwidths)
    open_, forced = list(measurements), list(first)
    chosen: list[Choice] = []
    while open_:
        fitting = [each for each in open_ if spent + each.seconds <= budget_seconds]
        tried = []
        for each in forced[:1] or fitting:
            after = widths.after(halfwidths, each)
            if np.array_equal(after, halfwidths):
                continue  # nobody asks for it, or it is known as well already
            left = state.loss(after)
            gain = loss - left
            if gain > floor:
                tried.append((gain / max(each.seconds, 1e-9), each, after, left))
        if not tried:
            break
        # Of equals the one that was named first.
        _, taken, halfwidths, left = max(tried, key=lambda found: found[0])
        forced = forced[1:]
        open_.remove(taken)
        spent += taken.seconds
        chosen.append(
            Choice(
                measurement=taken,
                log_halfwidth=float(widths.of_plans(halfwidths)[state.best]),
                regret=state.regret(halfwidths),
                seconds=spent,
                gain=loss - left,
            )
        )
        loss = left
    return tuple(chosen)


def _best_single(
    state: _State, measurements: Sequence[Measurement], budget_seconds: float, floor: float
) -> tuple[Measurement, float] | None:
    widths = state.widths
    loss = state.loss(widths.halfwidths)
    found = [
        (each, loss - state.loss(widths.after(widths.halfwidths, each)))
        for each in measurements
        if each.seconds <= budget_seconds
    ]
    best = max(found, key=lambda each: each[1], default=None)
    return best if best is not None and best[1] > floor else None


def _best(plans: Sequence[PlanParts]) -> int:
    if not plans:
        raise InputError("there is no plan whose interval could shrink")
    return min(range(len(plans)), key=lambda index: plans[index].step_seconds)


def _regret(logs: Floats, best: int) -> float:
    return float(np.mean(logs[:, best] - logs.min(axis=1)))
