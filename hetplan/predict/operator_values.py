"""What a fit of operators found, as frozen values: one law per device, precision, class and pass.

    seconds of one launch alone = max(floor, sum over terms of coefficient * column)

The sum is the device's own time. The floor is the host's: below it a device waits for the next
launch, which in a row of operators is hidden behind the one before (`predict.composed`). Columns:
`predict.operator_columns`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import InputError
from hetplan.model.operators import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from hetplan.predict.law_parts import MeasuredRange, Validation


class OperatorColumn(StrEnum):
    """One physical quantity of one launch of an operator."""

    LAUNCHES = "launches"
    """1: what a launch costs the device itself, its ramp and its tail."""
    FLOPS = "flops"
    """`hetplan.model.operators.operator_flops`."""
    TILED_FLOPS = "tiled_flops"
    """The same with the result rounded up to whole tiles, and the tiles to whole waves."""
    BYTES = "bytes"
    """`hetplan.model.operators.operator_bytes`."""
    OUTPUT_BYTES = "output_bytes"
    """Of a product's result alone: written after the last operation, which nothing hides."""
    TABLE_BYTES = "table_bytes"
    """Of an embedding's backward pass: the table's gradient."""


OPERATOR_COEFFICIENT_UNITS: tuple[tuple[OperatorColumn, str], ...] = (
    (OperatorColumn.LAUNCHES, "s"),
    (OperatorColumn.FLOPS, "s/flop"),
    (OperatorColumn.TILED_FLOPS, "s/flop"),
    (OperatorColumn.BYTES, "s/B"),
    (OperatorColumn.OUTPUT_BYTES, "s/B"),
    (OperatorColumn.TABLE_BYTES, "s/B"),
)
"""Unit of each column's coefficient."""

_PHASES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTerm:
    """One column and its coefficient."""

    column: str
    """An `OperatorColumn` value."""
    coefficient: float
    """Seconds per unit of the column; never negative."""

    def __post_init__(self) -> None:
        if self.column not in tuple(OperatorColumn):
            known = ", ".join(OperatorColumn)
            raise InputError(f"column is {self.column!r}; it is one of {known}")
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise InputError(
                f"coefficient of {self.column} is {self.coefficient}; time cannot fall with more "
                "work: fit again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape:
    """The measured time of one shape, to be looked up where exactly it is asked for."""

    batch: int
    m: int
    n: int
    k: int
    output_precision: str
    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(
                f"shape {self.batch} x [{self.m}, {self.n}, {self.k}] took {self.seconds} s; a "
                "time is more than 0: fit again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedResidual:
    """How far measured shapes near the one asked for lay from the law (`predict.residual`)."""

    doublings: float
    """Distance in log2 of the sizes at which a measured shape counts exp(-1/2)."""
    error_before: float
    """Mean |log(measured / predicted)| on left-out sizes without it."""
    error_after: float
    """The same with it."""

    def __post_init__(self) -> None:
        if not self.doublings > 0:
            raise InputError(f"a residual reaches {self.doublings} doublings; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLaw:
    """Time of one pass of one class of operators on one kind of device."""

    device: str
    precision: str
    operator: str
    """A `hetplan.model.operators.OperatorClass` value."""
    phase: str
    """`forward`, `backward`, `input_gradient` or `weight_gradient`."""
    terms: tuple[OperatorTerm, ...]
    floor_seconds: float
    """Least time of one launch alone: the host's; 0: none was seen."""
    ranges: tuple[MeasuredRange, ...]
    """Of `predict.operator_columns.range_values`."""
    log_halfwidth: float
    """Of the 90 % interval inside the measured ranges."""
    calibration: str
    """Which errors set the interval, in words."""
    rows: int
    points: int
    """Rows of different shapes."""
    validation: Validation
    sustained_flops_per_second: float = 0.0
    """Rate of the largest products, which no smaller one exceeds for long: short benchmarks run
    above the clock that a training step keeps; 0: no such difference was seen."""
    floor_rows: int = 0
    """Rows on the floor; they tell the floor and nothing else."""
    multiprocessors: int = 0
    """Tiles of one wave (`tiled_flops`); 0: waves are not counted."""
    shapes: tuple[MeasuredShape, ...] = ()
    """Measured shapes of products, sorted."""
    residual: LearnedResidual | None = None
    """None: leaving out whole sizes, nothing was learned from them."""
    notes: tuple[str, ...] = ()
    large_seconds: float = 0.0
    """Times from which `large_log_halfwidth` holds: half of the rows; 0: all are as good."""
    large_log_halfwidth: float = 0.0
    """Of the 90 % interval of the longer half, rows by their time: steps are made of those."""

    def halfwidth_at(self, seconds: float) -> float:
        """Half-width inside the measured ranges of a launch that takes so long."""
        if self.large_seconds and seconds >= self.large_seconds:
            return self.large_log_halfwidth
        return self.log_halfwidth

    def __post_init__(self) -> None:
        if self.phase not in _PHASES:
            raise InputError(f"phase is {self.phase!r}; it is one of {', '.join(_PHASES)}")
        if not (math.isfinite(self.floor_seconds) and self.floor_seconds >= 0):
            raise InputError(f"floor is {self.floor_seconds} s; it is at least 0: fit again")
        for value in (self.log_halfwidth, self.large_log_halfwidth):
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"half-width is {value}; it is at least 0: fit again")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Device, precision, class and pass."""
        return self.device, self.precision, self.operator, self.phase
