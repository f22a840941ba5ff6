"""What every kind of law keeps: terms, measured ranges, errors on left-out sizes, widening."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from hetplan.errors import Fault, InputError
from hetplan.predict.regression import MIN_CALIBRATION_ROWS, conformal_halfwidth
from hetplan.units import format_bytes

_Sample = TypeVar("_Sample")

OWN_ROWS = "own left-out rows"
"""Calibration of a law whose interval its own errors set."""
UNCHECKED = "are too few"
"""In the calibration of a law whose interval is assumed."""

MIN_POINTS = 3
"""Fewest points of different work that a law stands on; with fewer they shift what other kinds lend
(`kinds.related`)."""

# Fits on two hidden sizes, applied 1.3 and 1.5 doublings outside of them (fp16 layers of six NVIDIA
# devices, 90 rows): unwidened intervals held every row but one, so this is on the safe side.
WIDENING_PER_DOUBLING = 0.25
"""Relative growth of the half-width per doubling outside a range of several measured values."""

# Fits on one hidden size, applied to others (the same data, 272 rows): 90 % of |log(measured /
# predicted)| per doubling of distance lie below 0.44.
UNTESTED_LOG_PER_DOUBLING = 0.44
"""Growth of the half-width per doubling away from the only value measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One column of a law and its coefficient."""

    column: str
    """A value of `layer.values.Column`, or of `operator.values.OperatorColumn`."""
    coefficient: float
    """Seconds per unit of the column; never negative."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise InputError(
                f"coefficient of {self.column} is {self.coefficient}; time cannot fall with more "
                "work: fit again"
            )


def check_columns(terms: Sequence[Term], columns: type[StrEnum]) -> None:
    """An InputError where a law has a term of another column than these."""
    for term in terms:
        if term.column not in tuple(columns):
            raise InputError(f"column is {term.column!r}; it is one of {', '.join(columns)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRange:
    """Least and largest measured value of one quantity."""

    quantity: str
    """`hidden`, `sequence`, `microbatch`, `tp`, `vocabulary` or `parameters`."""
    least: float
    most: float

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise InputError(
                f"{self.quantity} was measured from {self.least} to {self.most}; a range rises "
                "and starts above 0: fit again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Relative errors |predicted / measured - 1| on sizes that the fit did not see."""

    left_out: str
    """What was left out, one value at a time: `hidden`, else `microbatch`, `sequence`, `tp` or
    `parameters`; `message` for links. Empty where there was only one value of each: the errors
    are then 0 and mean nothing."""
    folds: int
    mean: float
    median: float
    worst: float


def validation_of(left_out: str, folds: int, log_errors: Sequence[float]) -> Validation:
    """Mean, median and worst relative error from log(measured / predicted) of left-out rows."""
    if not log_errors:
        return Validation(left_out="", folds=0, mean=0.0, median=0.0, worst=0.0)
    errors = sorted(abs(math.expm1(-error)) for error in log_errors)
    return Validation(
        left_out=left_out,
        folds=folds,
        mean=sum(errors) / len(errors),
        median=statistics.median(errors),
        worst=errors[-1],
    )


def interval(
    errors: Sequence[float],
    pools: Iterable[tuple[str, Sequence[float]]],
    least: float,
    least_is: str,
) -> tuple[float, str]:
    """A law's half-width and which errors set it: its own on left-out rows, else those of a pool.

    `pools` name errors of other laws, best first. Where all are too few the half-width is `least`,
    which is `least_is`; no interval is narrower than an error of the law itself.
    """
    own = conformal_halfwidth(errors)
    if own is not None:
        return own, OWN_ROWS
    largest = max(map(abs, errors), default=0.0)
    for name, pool in pools:
        together = conformal_halfwidth(pool)
        if together is not None:
            return (
                max(together, largest, 0.0 if errors else least),
                f"{len(pool)} left-out rows of {name} "
                f"(own: {len(errors)}, {MIN_CALIBRATION_ROWS} needed)",
            )
    return (
        max(largest, least),
        f"{len(errors)} left-out rows {UNCHECKED} ({MIN_CALIBRATION_ROWS} needed); "
        f"at least {least_is}",
    )


def _shown(quantity: str, value: float) -> str:
    """A value of the quantity for a person: messages are bytes, everything else is counted."""
    return format_bytes(value) if quantity.endswith(" message") else f"{value:.10g}"


def outside(
    ranges: Sequence[MeasuredRange], values: Sequence[float], log_halfwidth: float
) -> tuple[float, tuple[str, ...]]:
    """The half-width at these values, and one warning per value outside its measured range.

    Inside all ranges it is the law's own. Outside it grows with the number of doublings between
    the value and the range.
    """
    warnings: tuple[str, ...] = ()
    factor, added = 1.0, 0.0
    for measured, value in zip(ranges, values, strict=True):
        if measured.least <= value <= measured.most:
            continue
        above = value > measured.most
        edge = measured.most if above else measured.least
        doublings = abs(math.log2(value / edge))
        if measured.least < measured.most:
            factor += WIDENING_PER_DOUBLING * doublings
        else:
            added += UNTESTED_LOG_PER_DOUBLING * doublings
        sign = ">" if above else "<"
        shown, least = (_shown(measured.quantity, each) for each in (value, edge))
        warnings += (f"{measured.quantity} {shown} {sign} {least} measured",)
    return log_halfwidth * factor + added, warnings


def refuse(
    what: str, samples: Iterable[_Sample], owner: str, problem: Callable[[_Sample], str]
) -> None:
    """An InputError that lists every sample which cannot be used; nothing where all are right.

    `owner` names the field that says what was measured; `problem` says what is wrong, or nothing.
    """
    faults = [
        Fault(
            message=f"{wrong}; measure it again or remove the row",
            field=f"{what} sample {number} of {getattr(sample, owner)}",
        )
        for number, sample in enumerate(samples, start=1)
        if (wrong := problem(sample))
    ]
    if faults:
        raise InputError(*faults)
