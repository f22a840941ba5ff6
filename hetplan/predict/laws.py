"""What a fit found, as frozen values: everything that a predictor file holds and a report prints.

A layer's law is a sum of columns (`predict.columns`) with non-negative coefficients. A link's law
is a table of measured times by message size for each operation and group size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SCHEMA = "hetplan.predictor/1"

ALL_LAYERS = "all"
"""Layer of an optimizer's law: an update's time goes by parameters, whichever layer's."""

# Fits on two hidden sizes, applied 1.3 and 1.5 doublings outside of them (fp16 layers of six NVIDIA
# devices, 146 rows): unwidened intervals held 98 % of the rows, so this is on the safe side.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One column and its coefficient."""

    column: str
    """A `predict.columns.Column` value."""
    coefficient: float
    """Seconds per unit of the column (`predict.columns.COEFFICIENT_UNITS`); never negative."""


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
    """In the order in which `measured_values` lists the quantities."""
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


def validation_of(left_out: str, folds: int, log_errors: Sequence[float]) -> Validation:
    """Mean, median and worst relative error from log(measured / predicted) of left-out rows."""
    if not log_errors:
        return Validation(left_out="", folds=0, mean=0.0, median=0.0, worst=0.0)
    errors = sorted(abs(math.expm1(-error)) for error in log_errors)
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    return Validation(
        left_out=left_out,
        folds=folds,
        mean=sum(errors) / len(errors),
        median=median,
        worst=errors[-1],
    )


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
        warnings += (f"{measured.quantity} {value:g} {sign} {edge:g} measured",)
    return log_halfwidth * factor + added, warnings
