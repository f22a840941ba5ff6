"""What a fit found, as frozen values: everything that a predictor file holds and a report prints.

A layer's law is a sum of columns (`predict.columns`) with non-negative coefficients. A link's law
is a table of measured times by message size for each operation and group size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetplan.errors import InputError
from hetplan.model.spec import LayerKind
from hetplan.predict.columns import Column
from hetplan.units import format_bytes

SCHEMA = "hetplan.predictor/1"

ALL_LAYERS = "all"
"""Layer of an optimizer's law: an update's time goes by parameters, whichever layer's."""

OWN_ROWS = "own left-out rows"
"""Calibration of a law whose interval its own errors set."""

# Fits on two hidden sizes, applied 1.3 and 1.5 doublings outside of them (fp16 layers of six NVIDIA
# devices, 90 rows): unwidened intervals held every row but one, so this is on the safe side.
WIDENING_PER_DOUBLING = 0.25
"""Relative growth of the half-width per doubling outside a range of several measured values."""

# Fits on one hidden size, applied to others (the same data, 272 rows): 90 % of |log(measured /
# predicted)| per doubling of distance lie below 0.44.
UNTESTED_LOG_PER_DOUBLING = 0.44
"""Growth of the half-width per doubling away from the only value measured."""


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
class Term:
    """One column and its coefficient."""

    column: str
    """A `predict.columns.Column` value."""
    coefficient: float
    """Seconds per unit of the column (`predict.columns.COEFFICIENT_UNITS`); never negative."""

    def __post_init__(self) -> None:
        if self.column not in tuple(Column):
            raise InputError(f"column is {self.column!r}; it is one of {', '.join(Column)}")
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise InputError(
                f"coefficient of {self.column} is {self.coefficient}; time cannot fall with more "
                "work: fit again"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLaw:
    """Time of one phase of one kind of layer on one kind of device."""

    device: str
    precision: str
    layer: str
    """A `LayerKind` value, or `ALL_LAYERS`."""
    phase: str
    """`forward`, `backward` or `optimizer:<name>`."""
    terms: tuple[Term, ...]
    ranges: tuple[MeasuredRange, ...]
    """Of the quantities `range_names` lists, in its order."""
    log_halfwidth: float
    """Of the 90 % interval inside the measured ranges."""
    calibration: str
    """Which errors set the interval, in words."""
    rows: int
    points: int
    """Rows with different columns."""
    validation: Validation
    notes: tuple[str, ...] = ()
    """Columns that were dropped, rows that were not steady."""

    def __post_init__(self) -> None:
        names = tuple(measured.quantity for measured in self.ranges)
        if names != range_names(self.layer):
            raise InputError(
                f"a law of layer {self.layer} has ranges of {', '.join(names) or 'nothing'}; it "
                f"needs {', '.join(range_names(self.layer))}: fit again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTable:
    """Measured times of one operation among one number of ranks, by message size."""

    operation: str
    """A `LinkOperation` value."""
    backend: str
    group_size: int
    message_bytes: tuple[float, ...]
    """Rising."""
    seconds: tuple[float, ...]
    """Medians, made non-decreasing in size."""
    log_halfwidth: float
    calibration: str
    rows: int
    validation: Validation

    def __post_init__(self) -> None:
        sizes, seconds = self.message_bytes, self.seconds
        if not sizes or len(sizes) != len(seconds) or sizes[0] <= 0 or min(seconds) <= 0:
            raise InputError(
                f"the {self.operation} table has {len(sizes)} sizes and {len(seconds)} times; it "
                "needs one positive time per positive size, and at least one: fit again"
            )
        if any(left >= right for left, right in pairwise(sizes)) or any(
            left > right for left, right in pairwise(seconds)
        ):
            raise InputError(
                f"the {self.operation} table does not rise with the message size: fit again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLaw:
    """Everything measured under one link name."""

    link: str
    tables: tuple[SizeTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaws:
    """What `hetplan fit` writes: laws, and which measurements they came from."""

    hetplan_version: str
    layers: tuple[LayerLaw, ...]
    links: tuple[LinkLaw, ...]
    populations: tuple[str, ...]
    """The populations that were used, in words: device, date, driver, threads, pace."""
    notes: tuple[str, ...]
    """What was passed over, and why."""


def range_names(layer: str) -> tuple[str, ...]:
    """Quantities whose measured ranges a law of this layer keeps."""
    if layer == ALL_LAYERS:
        return ("parameters",)
    names = ("hidden", "sequence", "microbatch", "tp")
    return names if layer == LayerKind.TRANSFORMER.value else (*names, "vocabulary")


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
