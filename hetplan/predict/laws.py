"""What a fit found, as frozen values: everything that a predictor file holds and a report prints.

A layer's law is a sum of columns (`layer.columns`) with non-negative coefficients. A link's law
is a table of measured times by message size for each operation and group size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.errors import InputError
from hetplan.model.spec import LayerKind
from hetplan.predict.calibration.values import Calibration
from hetplan.predict.law_parts import MeasuredRange, Validation
from hetplan.predict.layer.columns import Column, LayerColumns
from hetplan.predict.layer.tables import LayerTable, MeasuredLayer, MeasuredUpdate
from hetplan.predict.link.shapes import LinkLaw
from hetplan.predict.operator.values import OperatorLaw

SCHEMA = "hetplan.predictor/2"

ALL_LAYERS = "all"
"""Layer of an optimizer's law: an update's time goes by parameters, whichever layer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One column and its coefficient."""

    column: str
    """A `predict.layer.columns.Column` value."""
    coefficient: float
    """Seconds per unit of the column (`layer.columns.COEFFICIENT_UNITS`); never negative."""

    def __post_init__(self) -> None:
        if self.column not in tuple(Column):
            raise InputError(f"column is {self.column!r}; it is one of {', '.join(Column)}")
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise InputError(
                f"coefficient of {self.column} is {self.coefficient}; time cannot fall with more "
                "work: fit again"
            )


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
    """Measured ranges of the quantities that `range_names` lists, in its order."""
    log_halfwidth: float
    """Half-width of the 90 % interval inside the measured ranges."""
    calibration: str
    """Which errors set the interval, in words."""
    rows: int
    points: int
    """Rows with different columns."""
    validation: Validation
    notes: tuple[str, ...] = ()
    """Columns that were dropped, rows that were not steady."""
    tables: tuple[LayerTable, ...] = ()
    """Measured times of the very layers that were measured, where leaving sizes out shows that
    going between them is better than the sum of columns; else empty."""
    table_log_halfwidth: float = 0.0
    """Half-width of the 90 % interval of a time between two of a table's."""
    measured: tuple[MeasuredLayer, ...] = ()
    """The very layers that were measured, where they answer for themselves."""
    measured_updates: tuple[MeasuredUpdate, ...] = ()
    """The very updates that were measured, of an optimizer's law."""

    def sum_of_columns(self, columns: LayerColumns) -> float:
        """Seconds by the terms alone, without tables and measured layers."""
        return sum(term.coefficient * columns.value(term.column) for term in self.terms)

    def update_seconds(self, parameters: float) -> float:
        """Seconds of an optimizer's update of so many parameters, by the terms alone."""
        return sum(
            term.coefficient * (parameters if term.column == Column.PARAMETERS else 1.0)
            for term in self.terms
        )

    def __post_init__(self) -> None:
        names = tuple(measured.quantity for measured in self.ranges)
        if names != range_names(self.layer):
            raise InputError(
                f"a law of layer {self.layer} has ranges of {', '.join(names) or 'nothing'}; it "
                f"needs {', '.join(range_names(self.layer))}: fit again"
            )


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
    operators: tuple[OperatorLaw, ...] = ()
    calibration: Calibration | None = None
    """What measured steps said about these laws (`hetplan compare calibrate`)."""


def range_names(layer: str) -> tuple[str, ...]:
    """Quantities whose measured ranges a law of this layer keeps."""
    if layer == ALL_LAYERS:
        return ("parameters",)
    names = ("hidden", "sequence", "microbatch", "tp")
    return names if layer == LayerKind.TRANSFORMER.value else (*names, "vocabulary")
