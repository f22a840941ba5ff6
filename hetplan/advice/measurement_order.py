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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.step_model.draws import Draws
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
    """Half-width of its 90 % interval."""


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
    """Half-width of the best plan's step."""
    regret: float
    """Expected loss of taking it, as a part of its step."""
    chances: Mapping[str, float]
    """Chance of each plan, by its name, to be the best of them."""


_Plan = TypeVar("_Plan", bound=PlanParts)
_Measurement = TypeVar("_Measurement", bound=Measurement, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[_Measurement]):
    """One measurement of an order, and what is expected to be left after it."""

    measurement: _Measurement
    log_halfwidth: float
    """Half-width of the best plan."""
    regret: float
    seconds: float
    """Spent up to its end."""
    gain: float
    """What it takes off the sum of half-widths, by chance of the plan, and the regret."""


def standing(plans: Sequence[PlanParts]) -> Standing:
    """How far the best of these plans is known, and how sure it is that it is the best."""
    known = _Known(plans)
    return Standing(
        best=plans[known.best].name,
        log_halfwidth=float(known.of_plans(known.halfwidths)[known.best]),
        regret=known.regret_of_all,
        chances={
            plan.name: float(chance) for plan, chance in zip(plans, known.chances, strict=True)
        },
    )


def near_best(plans: Sequence[_Plan], *, most: int) -> tuple[_Plan, ...]:
    """The best plan and those that cannot be told from it, best first, at most so many.

    A plan is told apart where it is slower by more than the interval of the difference reaches.
    """
    first = plans[_best(plans)]
    near = [
        plan
        for plan in plans
        if plan is not first
        and math.log(plan.step_seconds / first.step_seconds)
        <= difference_log_halfwidth(first, plan)
    ]
    near.sort(key=lambda plan: (plan.step_seconds, plan.name))
    return (first, *near[: most - 1])


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
    measurements: Sequence[_Measurement],
    *,
    budget_seconds: float = math.inf,
    least_gain: float = 0.0,
) -> tuple[Choice[_Measurement], ...]:
    """The measurements worth their time, in their order, as far as the budget goes.

    `least_gain`: one that takes off less than this part of the best plan's half-width and regret
    is not worth it. Of equals the first goes first. A measurement that needs more than what is
    left of the budget is passed over.
    """
    known = _Known(plans)
    loss = known.loss(known.halfwidths)
    floor = least_gain * loss
    chosen = _greedy(known, measurements, budget_seconds, floor)
    gains = [
        (loss - known.loss(known.after(known.halfwidths, each)), each)
        for each in measurements
        if each.seconds <= budget_seconds
    ]
    gain, single = max(gains, key=lambda pair: pair[0], default=(0.0, None))
    if single is not None and gain > max(floor, sum(choice.gain for choice in chosen)):
        return _greedy(known, measurements, budget_seconds, floor, first=single)
    return chosen


class _Known:
    """Shares and half-widths of every part of every plan, and what is lost by not knowing more."""

    def __init__(self, plans: Sequence[PlanParts]) -> None:
        self.best = _best(plans)
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
        steps = self.logs(self.halfwidths)
        self.chances = np.bincount(np.argmin(steps, axis=1), minlength=len(plans)) / len(steps)
        self.regret_of_all = self._regret(steps)

    def sums(self, halfwidths: Floats) -> Floats:
        """Half-width that each source gives each plan."""
        sums = np.zeros(self.shape)
        np.add.at(sums, (self.plan, self.source), self.share * halfwidths)
        return sums

    def of_plans(self, halfwidths: Floats) -> Floats:
        """Half-width of each plan."""
        widths: Floats = np.sqrt((self.sums(halfwidths) ** 2).sum(axis=1))
        return widths

    def logs(self, halfwidths: Floats) -> Floats:
        """Logarithm of the step of each plan in each draw, [draws, plans]."""
        if not self.shape[1]:
            return np.tile(self.logs_of_steps, (DRAWS, 1))
        moved: Floats = (self.sums(halfwidths) @ self.normal).T + self.logs_of_steps
        return moved

    def after(self, halfwidths: Floats, measurement: Measurement) -> Floats:
        """What a measurement leaves of them."""
        left = halfwidths.copy()
        for each in measurement.leaves:
            for index in self.at.get(each.asked, ()):
                left[index] = each.of(float(halfwidths[index]))
        return left

    def _regret(self, logs: Floats) -> float:
        return float(np.mean(logs[:, self.best] - logs.min(axis=1)))

    def regret(self, halfwidths: Floats) -> float:
        """Regret expected to be left when no more than these half-widths are unknown."""
        learned = np.sqrt(np.maximum(self.halfwidths**2 - halfwidths**2, 0.0))
        return max(0.0, self.regret_of_all - self._regret(self.logs(learned)))

    def loss(self, halfwidths: Floats) -> float:
        """Half-widths by chance of the plan, and regret."""
        return float(self.chances @ self.of_plans(halfwidths)) + self.regret(halfwidths)


def _greedy(
    known: _Known,
    measurements: Sequence[_Measurement],
    budget_seconds: float,
    floor: float,
    *,
    first: _Measurement | None = None,
) -> tuple[Choice[_Measurement], ...]:
    """Most gain a second next, after what goes first."""
    halfwidths, spent, loss = known.halfwidths, 0.0, known.loss(known.halfwidths)
    open_ = list(measurements)
    chosen: list[Choice[_Measurement]] = []
    while open_:
        fitting = [each for each in open_ if spent + each.seconds <= budget_seconds]
        if first is not None:
            fitting, first = [first], None
        tried = []
        for each in fitting:
            after = known.after(halfwidths, each)
            if np.array_equal(after, halfwidths):
                continue  # nobody asks for it, or it is known as well already
            left = known.loss(after)
            if loss - left > floor:
                tried.append(((loss - left) / max(each.seconds, 1e-9), each, after, left))
        if not tried:
            break
        # Of equals the one that was named first.
        _, taken, halfwidths, left = max(tried, key=lambda entry: entry[0])
        open_.remove(taken)
        spent += taken.seconds
        chosen.append(
            Choice(
                measurement=taken,
                log_halfwidth=float(known.of_plans(halfwidths)[known.best]),
                regret=known.regret(halfwidths),
                seconds=spent,
                gain=loss - left,
            )
        )
        loss = left
    return tuple(chosen)


def _best(plans: Sequence[PlanParts]) -> int:
    if not plans:
        raise InputError("there is no plan whose interval could shrink")
    return min(range(len(plans)), key=lambda index: plans[index].step_seconds)
