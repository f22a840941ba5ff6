"""Measure what shrinks the interval of the best plans most, look again, until it is not worth it.

The loop knows neither devices nor predictors: a `MeasurementBackend` prices the plans, lists the
candidates and measures. Plans are priced again after each batch, because a measurement also moves
the centre of what it measures; `growth` says where an interval is wider afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from hetplan.advice.candidates import Candidate
from hetplan.advice.measurement_order import (
    Choice,
    Measurement,
    PlanParts,
    Standing,
    order,
    standing,
)
from hetplan.advice.plan_sensitivities import PlanSensitivities
from hetplan.errors import ProfileError

MIN_GAIN = 0.02
"""Part of the interval and regret: what takes off less is not worth measuring."""
_PATIENCE = 3
"""Batches in a row that shrank the interval by less: one that moves a law's centre, or gives it
too few rows to be checked, may widen it first."""
_BATCH_PARTS = 6  # a batch is about this part of the budget, so that it is looked at again often
_MIN_VALUE = 0.02  # relative; what widens by less is not worth a line


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The near-best plans, what could be measured for them, and what sets their intervals."""

    plans: tuple[PlanParts, ...]
    """The near-best ones, best first."""
    log_halfwidth: float
    """Half-width of the best one's 90 % interval, by its estimate."""
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know."""

    @property
    def priced(self) -> tuple[PlanSensitivities, ...]:
        """The plans that have an estimate, for whoever shows them."""
        return tuple(plan for plan in self.plans if isinstance(plan, PlanSensitivities))

    @property
    def standing(self) -> Standing:
        """How well the best plan is known."""
        return standing(self.plans)


class MeasurementBackend(Protocol):
    """What the loop needs of everything else."""

    def look(self) -> View:
        """Fit what is held and price the plans."""
        ...

    def measure(self, candidate: Candidate, seconds_left: float) -> float:
        """Measure it and keep it; the seconds that it took. ProfileError where it is refused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One measurement that was taken."""

    name: str
    expected_seconds: float
    seconds: float
    refused: str = ""
    """What the device said, where it did not do it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a loop did."""

    before: View
    after: View
    done: tuple[Done, ...]
    spent_seconds: float
    ended: str
    """Why it ended."""
    least: str = ""
    """Where only the budget ended it: the shortest measurement that would have been worth it."""
    least_seconds: float | None = None


def measure_for_job(
    backend: MeasurementBackend,
    budget_seconds: float,
    *,
    on_begin: Callable[[Choice[Candidate], float], None] | None = None,
) -> Report:
    """Measure until the budget is spent or nothing is worth it.

    `on_begin` is told each choice before it is measured, and the seconds spent.
    """
    before = view = backend.look()
    done: list[Done] = []
    refused: set[str] = set()
    spent, ratio, stale, ended = 0.0, 1.0, 0, ""
    least: Measurement | None = None
    while not ended:
        choices, ended, least = _batch(view, refused, ratio, budget_seconds, spent)
        for choice in choices:
            if on_begin is not None:
                on_begin(choice, spent)
            each = _measure(backend, view, choice, budget_seconds - spent)
            done.append(each)
            spent += each.seconds
            # Refused or not, it is not tried a second time: what it left is on disk.
            refused.add(each.name)
            if spent >= budget_seconds:
                break
        if choices:
            ratio = _ratio(done) or ratio
            new = backend.look()
            shrunk = view.log_halfwidth - new.log_halfwidth
            stale = 0 if shrunk >= MIN_GAIN * view.log_halfwidth else stale + 1
            view = new
        if not ended and stale >= _PATIENCE:
            ended = (
                f"the last {_PATIENCE} batches each shrank the interval of the best plan by less "
                f"than {MIN_GAIN:.0%}"
            )
    return Report(
        before=before,
        after=view,
        done=tuple(done),
        spent_seconds=spent,
        ended=ended,
        least=least.name if least else "",
        least_seconds=least.seconds if least else None,
    )


def plan_order(
    view: View,
    *,
    budget_seconds: float = float("inf"),
    here: bool = True,
    ratio: float = 1.0,
    passed_over: Collection[str] = (),
) -> tuple[Choice[Candidate], ...]:
    """What this machine (or others) should measure, in the order of its worth."""
    open_ = [
        replace(each, seconds=each.seconds * ratio)
        for each in view.candidates
        if each.here is here and each.name not in passed_over
    ]
    return order(view.plans, open_, budget_seconds=budget_seconds, least_gain=MIN_GAIN)


def _batch(
    view: View, refused: Collection[str], ratio: float, budget_seconds: float, spent: float
) -> tuple[tuple[Choice[Candidate], ...], str, Measurement | None]:
    """What is measured before the next look; without any why, and what the budget was short of."""
    left = budget_seconds - spent
    choices = plan_order(view, budget_seconds=left, ratio=ratio, passed_over=refused)
    if not choices:
        wanted = plan_order(view, ratio=ratio, passed_over=refused)
        if not wanted:
            why = (
                f"nothing more that this machine can measure shrinks the interval by {MIN_GAIN:.0%}"
            )
            return (), why, None
        least = min((each.measurement for each in wanted), key=lambda each: each.seconds)
        return (), "the budget is spent", least
    batch = tuple(each for each in choices if each.seconds <= budget_seconds / _BATCH_PARTS)
    return batch or choices[:1], "", None


def _measure(
    backend: MeasurementBackend, view: View, choice: Choice[Candidate], seconds_left: float
) -> Done:
    name = choice.measurement.name
    # As it was offered: the choice has what measurements took so far over what was expected.
    candidate = next(each for each in view.candidates if each.name == name)
    seconds, refused = 0.0, ""
    try:
        seconds = backend.measure(candidate, seconds_left)
    except ProfileError as error:
        refused = str(error)
    return Done(name=name, expected_seconds=candidate.seconds, seconds=seconds, refused=refused)


def _ratio(done: Collection[Done]) -> float | None:
    """What measurements took over what was expected; None before any was taken."""
    taken = [each for each in done if not each.refused and each.expected_seconds > 0]
    if not taken:
        return None
    return sum(each.seconds for each in taken) / sum(each.expected_seconds for each in taken)


def growth(before: View, after: View) -> str:
    """Which prediction widened the best plan's interval most; empty where it is not wider."""
    if after.log_halfwidth <= before.log_halfwidth * (1 + _MIN_VALUE):
        return ""
    was = {part.asked: part.log_halfwidth for plan in before.plans for part in plan.parts}
    grown = [part for part in after.plans[0].parts if part.log_halfwidth > was.get(part.asked, 1e9)]
    if not grown:
        return "the interval is wider than before: its plan stands on other predictions"
    worst = max(grown, key=lambda part: part.seconds * (part.log_halfwidth - was[part.asked]))
    first, then = math.expm1(was[worst.asked]), math.expm1(worst.log_halfwidth)
    return (
        f"the interval is wider than before: {worst.asked} was taken to be known to +{first:.0%} "
        f"and is known to +{then:.0%}"
    )
