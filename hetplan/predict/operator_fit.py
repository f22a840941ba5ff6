"""Which law a set of operator samples earns: a floor, columns, a learned residual.

The floor comes first: rows on it show the host, not the device, so they say nothing about the
columns and are judged by none. Then the column sets of `operator_columns.column_sets` are each
fitted without one whole size at a time and judged on it. The simplest one stands unless a richer
one lowers the mean absolute log error by more than the standard error of that gain over the rows
(the one-standard-error rule: Breiman et al., Classification and Regression Trees, 1984, section
3.4.3): what noise can give does not count as physics. A learned residual has to gain twice as
much, because several reaches are tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.predict.operator_columns import column_sets
from hetplan.predict.operator_values import LearnedResidual, OperatorColumn
from hetplan.predict.regression import (
    fit_nonnegative,
    independent,
    left_out_errors,
    log_ratio,
    predict,
)
from hetplan.predict.residual import REACHES, Point, left_out_residuals

# Floors that are tried: times that this share of the rows stays below.
_FLOOR_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_TURNS = 5
"""Of sorting rows by the floor and fitting those above it, at most: it ends when no row moves."""
_MIN_FOR_FLOOR = 8
"""Rows from which a floor is looked for: half of them on it still leave a fit of three columns."""
_MIN_FOR_WAVES = 3
"""Models (or widths) from which whole waves of tiles are believed: they jump from shape to shape,
and of two one is always near a jump (of three models' products on A100 two alone lost 13 %)."""
_MIN_GAIN = 0.003
"""Smaller gains of the mean error are below the timing noise of 1 % per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted candidate."""

    columns: tuple[OperatorColumn, ...]
    coefficients: tuple[float, ...]
    floor: float

    def seconds(self, row: Sequence[float]) -> float:
        """Of one launch alone; `row` has the values of `columns`."""
        return max(self.floor, predict(self.coefficients, row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The law that was chosen, and its errors on rows it had not seen."""

    fit: Fit
    rows: tuple[int, ...]
    """Rows above the floor: those that the columns were fitted to."""
    errors: tuple[float, ...] = ()
    """log(measured / predicted) of these, whole groups left out; with the residual if any."""
    left_out: str = ""
    folds: int = 0
    residual: LearnedResidual | None = None


Values = Sequence[dict[OperatorColumn, float]]
"""Each row's columns."""


def choose_law(
    operator: str,
    phase: str,
    values: Values,
    seconds: Sequence[float],
    sizes: Sequence[tuple[str, Sequence[float]]],
    points: Sequence[Point] | None,
) -> Choice:
    """The law that leaving out whole sizes asks for.

    `sizes` are what may be left out, best first: a name and each row's group. Where no rows could
    be left out the simplest columns stand, untested. `points` (where each shape lies) are given
    where a residual may be learned.
    """
    sets = column_sets(operator, phase)
    floor, above = _floor(_richest(sets, values, seconds), values, seconds)
    values, seconds = [values[at] for at in above], [seconds[at] for at in above]
    kept = [(name, [group[at] for at in above]) for name, group in sizes]
    name, groups = _groups(kept)
    candidates = _told_apart(sets, values, seconds)
    if len(set(kept[0][1])) < _MIN_FOR_WAVES:
        candidates = [each for each in candidates if OperatorColumn.TILED_FLOPS not in each]
    if not groups:
        return Choice(fit=_fit(candidates[0], values, seconds, floor), rows=above)
    best, errors = candidates[0], _left_out(candidates[0], values, seconds, groups)
    for columns in candidates[1:]:
        tried = _left_out(columns, values, seconds, groups)
        if gain_is_earned(errors, tried, 1.0):
            best, errors = columns, tried
    fit = _fit(best, values, seconds, floor)
    learned = None
    if points is not None:
        at_rows = [points[at] for at in above]
        errors, learned = _learn(fit, values, seconds, groups, at_rows, errors)
    return Choice(
        fit=fit,
        rows=above,
        errors=errors,
        left_out=name,
        folds=len(set(groups)),
        residual=learned,
    )


def _groups(sizes: Sequence[tuple[str, list[float]]]) -> tuple[str, list[float]]:
    """The first way to leave sizes out in which no group is most of the rows; else any; else none.

    With two thirds of the rows in one group the rest cannot tell what a law is without it.
    """
    for name, groups in sizes:
        counts = [groups.count(group) for group in set(groups)]
        if len(counts) > 2 and max(counts) <= len(groups) * 2 / 3:
            return name, groups
    for name, groups in reversed(sizes):
        if len(set(groups)) > 1:
            return name, groups
    return "", []


def _told_apart(
    sets: Sequence[tuple[OperatorColumn, ...]], values: Values, seconds: Sequence[float]
) -> list[tuple[OperatorColumn, ...]]:
    return [
        columns
        for columns in sets
        if len(columns) == 1 or independent(_rows(values, columns), seconds)
    ]


def _richest(
    sets: Sequence[tuple[OperatorColumn, ...]], values: Values, seconds: Sequence[float]
) -> tuple[OperatorColumn, ...]:
    """The set with most columns that the rows can tell apart, of equals the first."""
    return max(_told_apart(sets, values, seconds), key=len)


def gain_is_earned(before: Sequence[float], after: Sequence[float], standard_errors: float) -> bool:
    """Whether the mean absolute error falls by more than this many standard errors of its fall."""
    gains = [abs(old) - abs(new) for old, new in zip(before, after, strict=True)]
    mean = sum(gains) / len(gains)
    if len(gains) < 2 or mean <= _MIN_GAIN:
        return False
    variance = sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    return mean > standard_errors * math.sqrt(variance / len(gains))


def _fit(
    columns: tuple[OperatorColumn, ...], values: Values, seconds: Sequence[float], floor: float
) -> Fit:
    coefficients = fit_nonnegative(_rows(values, columns), seconds)
    return Fit(columns=columns, coefficients=coefficients, floor=floor)


def _rows(values: Values, columns: Sequence[OperatorColumn]) -> list[tuple[float, ...]]:
    return [tuple(value[column] for column in columns) for value in values]


def _floor(
    columns: tuple[OperatorColumn, ...], values: Values, seconds: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """The floor, 0 where none shows, and the rows above it: those with more work than it."""
    everything = tuple(range(len(seconds)))
    rows = _rows(values, columns)
    plain = _fit(columns, values, seconds, 0.0)
    best, above_best = plain, everything
    errors = plain_errors = _errors(plain, rows, seconds)
    ordered = sorted(seconds)
    for share in _FLOOR_SHARES if len(seconds) >= _MIN_FOR_FLOOR else ():
        found = _above(plain, rows, seconds, ordered[int(share * (len(ordered) - 1))])
        if found is None:
            continue
        fit, above = found
        tried = _errors(fit, rows, seconds)
        if fit.floor and sum(map(abs, tried)) < sum(map(abs, errors)):
            best, above_best, errors = fit, above, tried
    # A host's floor is no matter of chance: any gain above noise shows it.
    if best.floor and gain_is_earned(plain_errors, errors, 0.0):
        return best.floor, above_best
    return 0.0, everything


def _above(
    plain: Fit, rows: Sequence[Sequence[float]], seconds: Sequence[float], edge: float
) -> tuple[Fit, tuple[int, ...]] | None:
    """The fit to rows whose own work takes more than `edge`, and these; None where few are left.

    Which rows these are follows from the fit, and the fit from them: a few turns settle it.
    """
    least = max(len(plain.columns) + 1, len(seconds) / 3)
    fit, above = plain, tuple(range(len(seconds)))
    for _ in range(_TURNS):
        now = tuple(at for at, row in enumerate(rows) if predict(fit.coefficients, row) > edge)
        if len(now) < least:
            return None
        if now == above:
            break
        above = now
        coefficients = fit_nonnegative([rows[at] for at in above], [seconds[at] for at in above])
        fit = replace(fit, coefficients=coefficients)
    chosen = set(above)
    below = sorted(value for at, value in enumerate(seconds) if at not in chosen)
    return replace(fit, floor=below[len(below) // 2] if below else 0.0), above


def _errors(
    fit: Fit, rows: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[float, ...]:
    return tuple(
        log_ratio(value, fit.seconds(row)) for value, row in zip(seconds, rows, strict=True)
    )


def _left_out(
    columns: tuple[OperatorColumn, ...],
    values: Values,
    seconds: Sequence[float],
    groups: Sequence[float],
) -> tuple[float, ...]:
    return left_out_errors(_rows(values, columns), seconds, groups)


def _learn(
    fit: Fit,
    values: Values,
    seconds: Sequence[float],
    groups: Sequence[float],
    points: Sequence[Point],
    errors: tuple[float, ...],
) -> tuple[tuple[float, ...], LearnedResidual | None]:
    seen = _errors(replace(fit, floor=0.0), _rows(values, fit.columns), seconds)
    tried = {reach: left_out_residuals(points, seen, errors, groups, reach) for reach in REACHES}
    reach = min(tried, key=lambda each: sum(map(abs, tried[each])))
    if not gain_is_earned(errors, tried[reach], 2.0):
        return errors, None
    learned = LearnedResidual(
        doublings=reach,
        error_before=sum(map(abs, errors)) / len(errors),
        error_after=sum(map(abs, tried[reach])) / len(errors),
    )
    return tried[reach], learned
