"""Operator samples of one population per device to laws, with errors on sizes left out.

One law per (device kind, precision, class of operators, pass). The floor comes first: rows on it
show the host, not the device, so they say nothing about the columns and are judged by none. Then
the column sets of `operator.values.column_sets` are each fitted without one whole size at a time
and judged on it. The simplest one stands unless a richer one lowers the mean absolute log error by
more than the standard error of that gain over the rows (the one-standard-error rule: Breiman et
al., Classification and Regression Trees, 1984, section 3.4.3): what noise can give does not count
as physics. A learned residual has to gain twice as much, because several reaches are tried.

A benchmark's bursts may all be off together (`profiling.bursts`): leaving sizes out does not show
it, so it widens the law, and their shapes are not looked up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import PRODUCTS, WITH_WEIGHTS, OperatorClass, operator_flops
from hetplan.predict.datasheet import MATRIX_LOG_HALFWIDTH
from hetplan.predict.law_parts import (
    MIN_POINTS,
    MeasuredRange,
    Term,
    interval,
    refuse,
    validation_of,
)
from hetplan.predict.operator.answer import LOOKED_UP_LOG_HALFWIDTH
from hetplan.predict.operator.values import (
    REACHES,
    LearnedResidual,
    MeasuredShape,
    OperatorColumn,
    OperatorLaw,
    Point,
    column_sets,
    column_value,
    left_out_residuals,
    multiprocessors,
    point_of,
    range_values,
    sample_operator,
    size_groups,
)
from hetplan.predict.regression import (
    COVERAGE,
    MIN_CALIBRATION_ROWS,
    fit_nonnegative,
    independent,
    left_out_errors,
    log_ratio,
    predict,
)
from hetplan.profiling.bursts import figure_log_halfwidth
from hetplan.profiling.samples import OperatorPhase, OperatorSample

# Floors that are tried: times that this share of the rows stays below.
_FLOOR_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_TURNS = 5
"""Most rounds of sorting rows by the floor and fitting those above it; no row moves earlier."""
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
        """Seconds of one launch alone; `row` has the values of `columns`."""
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
    best, errors = candidates[0], left_out_errors(_rows(values, candidates[0]), seconds, groups)
    for columns in candidates[1:]:
        tried = left_out_errors(_rows(values, columns), seconds, groups)
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
        above_edge = _above(plain, rows, seconds, ordered[int(share * (len(ordered) - 1))])
        if above_edge is None:
            continue
        fit, above = above_edge
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


# Classes whose time depends on the kernel that a library picks for a shape: shapes are kept.
LOOKED_UP = PRODUCTS - {OperatorClass.ATTENTION_SCORE, OperatorClass.ATTENTION_CONTEXT}

# Large: within four doublings of the most work that was measured. B200 products of 4 to 70 TFLOP
# keep 1100 TFLOP/s within 3 %, those of 0.05 to 1 TFLOP reach 1430; A100 products show no such gap
# (SimuMax's efficiency tables), so a tenth faster is the least that counts. By the length of
# a whole run: nine of ten B200 forward products stay below 1435 TFLOP/s in runs of less than 0.02
# s, below 1270 in 0.05 to 0.1 s, 1153 in 0.1 to 0.2 s, 1130 from 0.2 s on.
_LARGE, _FASTER = 1 / 16, 1.1
_LONG_SECONDS = 0.5
_MIN_LARGE = 3

_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A law before its interval."""

    key: _Key
    samples: tuple[OperatorSample, ...]
    sustained: tuple[tuple[str, float], ...]
    """Sustained rates by the format that the products write."""
    choice: Choice

    @property
    def asked(self) -> float:
        """The sustained rate of products that write what this pass is asked for."""
        _, precision, _, phase = self.key
        rates = dict(self.sustained)
        # Sums of weights' gradients are kept in float32 by every trainer that is planned for.
        first = "float32" if phase == OperatorPhase.WEIGHT_GRADIENT else precision
        return rates.get(first, max(rates.values(), default=0.0))


def fit_operator_laws(samples: Sequence[OperatorSample]) -> tuple[OperatorLaw, ...]:
    """One law per device, precision, class and pass in the samples, in that order.

    An InputError names every sample that cannot be used.
    """
    refuse("operator", samples, "device", _problem)
    groups: dict[_Key, list[OperatorSample]] = {}
    for sample in samples:
        key = (sample.device, sample.precision, sample.operator, sample.phase)
        groups.setdefault(key, []).append(sample)
    drafts = [_draft(key, tuple(groups[key])) for key in sorted(groups)]
    return tuple(_finish(draft, drafts) for draft in drafts)


def _problem(sample: OperatorSample) -> str:
    """What is wrong with a sample; empty: nothing."""
    product = sample.operator in tuple(PRODUCTS)
    if sample.operator not in tuple(OperatorClass):
        known = ", ".join(OperatorClass)
        return f"operator is {sample.operator!r}; it is one of {known}"
    if sample.phase not in tuple(OperatorPhase):
        return f"phase is {sample.phase!r}; it is one of {', '.join(OperatorPhase)}"
    formats = {*Precision, *(ProductFormat if sample.operator in tuple(WITH_WEIGHTS) else ())}
    if sample.precision not in formats or sample.output_precision not in tuple(Precision):
        return (
            f"precisions are {sample.precision!r} and {sample.output_precision!r}; each is one "
            f"of {', '.join(Precision)}"
        )
    if min(sample.batch, sample.m, sample.n) < 1 or sample.k < (1 if product else 0):
        sizes = f"{sample.batch} x [{sample.m}, {sample.n}, {sample.k}]"
        return f"its sizes are {sizes}; all are at least 1, k only of products"
    if not (math.isfinite(sample.median_seconds) and sample.median_seconds > 0):
        return f"median_seconds is {sample.median_seconds}; a time is more than 0"
    return ""


# Validation by leaving devices out fits the same rows again and again.
@lru_cache(maxsize=2048)
def _draft(key: _Key, samples: tuple[OperatorSample, ...]) -> _Draft:
    device, precision, operator, phase = key
    waves_of = multiprocessors(device)
    sustained = _sustained(samples)
    values = [
        {
            column: column_value(
                column, sample_operator(sample), phase, precision, _output(sample), waves_of
            )
            for column in OperatorColumn
        }
        for sample in samples
    ]
    choice = choose_law(
        operator,
        phase,
        values,
        [max(sample.median_seconds, _least(sample, sustained)) for sample in samples],
        size_groups(samples),
        [_point(sample) for sample in samples] if all(map(_is_looked_up, samples)) else None,
    )
    return _Draft(key, samples, sustained, choice)


def _sustained(samples: Sequence[OperatorSample]) -> tuple[tuple[str, float], ...]:
    """The rate that is kept up by what is written: float32 sums take longer to write."""
    outputs = sorted({sample.output_precision for sample in samples})
    return tuple(
        (output, sustained_rate([each for each in samples if each.output_precision == output]))
        for output in outputs
    )


def sustained_rate(samples: Sequence[OperatorSample]) -> float:
    """Operations per second that products keep up for long; 0 where short ones do no better.

    A benchmark of a short product ends before the device's power or heat limits its clock; one of
    a large product does not, and neither does training. Which rows ran for long, their repeats
    say; where none did, the most work of one launch stands in. Of at least 9 such rows the median
    rate counts, of fewer the best.
    """
    if samples[0].operator not in tuple(PRODUCTS):
        return 0.0
    work = [operator_flops(sample_operator(sample), sample.phase) for sample in samples]
    lasting = [sample.repeats * sample.median_seconds >= _LONG_SECONDS for sample in samples]
    if not any(lasting):
        edge = max(work) * _LARGE
        lasting = [flops >= edge for flops in work]
    rates = [flops / sample.median_seconds for flops, sample in zip(work, samples, strict=True)]
    large = sorted(rate for rate, long in zip(rates, lasting, strict=True) if long)
    small = sorted(rate for rate, long in zip(rates, lasting, strict=True) if not long)
    if len(large) < _MIN_LARGE or not small:
        return 0.0
    rate = statistics.median(large) if len(large) >= MIN_CALIBRATION_ROWS else large[-1]
    fast = small[int(0.9 * (len(small) - 1))]
    return rate if fast > rate * _FASTER else 0.0


def _least(sample: OperatorSample, sustained: Sequence[tuple[str, float]]) -> float:
    """Seconds of the sample's operations at the sustained rate; 0 where there is none."""
    rate = dict(sustained)[sample.output_precision]
    flops = operator_flops(sample_operator(sample), sample.phase)
    return flops / rate if rate else 0.0


def _output(sample: OperatorSample) -> str:
    """What a product writes; a loss says by it whether it copies (`sample_operator`)."""
    return sample.output_precision if sample.operator in tuple(PRODUCTS) else ""


def _is_looked_up(sample: OperatorSample) -> bool:
    """Whether its time may be looked up: it is as sure as a look-up says."""
    surest = figure_log_halfwidth(sample) <= LOOKED_UP_LOG_HALFWIDTH
    return surest and OperatorClass(sample.operator) in LOOKED_UP


def _point(sample: OperatorSample) -> tuple[float, ...]:
    return point_of(sample.batch, sample.m, sample.n, sample.k)


def _halfwidth(draft: _Draft, drafts: Sequence[_Draft]) -> tuple[float, str]:
    """The interval's half-width and which errors set it."""
    device, _, operator, _ = draft.key
    pools = (
        (f"{operator} of {device}", [d for d in drafts if d.key[::2] == draft.key[::2]]),
        (f"all operators of {device}", [d for d in drafts if d.key[0] == device]),
    )
    return interval(
        draft.choice.errors,
        [(name, [error for d in pool for error in d.choice.errors]) for name, pool in pools],
        MATRIX_LOG_HALFWIDTH,
        f"the datasheet's {MATRIX_LOG_HALFWIDTH:g}",
    )


def _large(draft: _Draft) -> tuple[float, float]:
    """(time from which rows are of the longer half, half-width of those); zeros where too few.

    Errors of short operators (launches, few tiles) are larger than those of long ones, and steps
    are made of long ones: fp16 products of A100-40, 90 % of the left-out rows lie within 0.30, 90 %
    of their time within 0.08. So rows count by their time, which is conformal prediction under a
    shift of what is asked (Tibshirani and others 2019, eq. 7); the next row's time is their mean.
    """
    choice = draft.choice
    seconds = [draft.samples[at].median_seconds for at in choice.rows]
    if len(seconds) != len(choice.errors):
        return 0.0, 0.0
    edge = statistics.median_low(seconds) if seconds else 0.0
    rows = sorted(
        (abs(error), each)
        for error, each in zip(choice.errors, seconds, strict=True)
        if each >= edge
    )
    if len(rows) < MIN_CALIBRATION_ROWS:
        return 0.0, 0.0
    whole = sum(each for _, each in rows)
    needed, inside = COVERAGE * whole * (1.0 + 1.0 / len(rows)), 0.0
    for error, each in rows:
        inside += each
        if inside >= needed:
            return edge, error
    return edge, rows[-1][0]


def _finish(draft: _Draft, drafts: Sequence[_Draft]) -> OperatorLaw:
    device, precision, operator, phase = draft.key
    halfwidth, calibration = _halfwidth(draft, drafts)
    large = _large(draft)
    fit = draft.choice.fit
    points = len({sample.shape for sample in draft.samples})
    kept = [each for each in draft.samples if points < MIN_POINTS or _is_looked_up(each)]
    shapes = _shapes(kept, draft.sustained) if OperatorClass(operator) in LOOKED_UP else ()
    together = statistics.fmean(map(figure_log_halfwidth, draft.samples))
    choice = draft.choice
    notes: tuple[str, ...] = ()
    if not choice.left_out:
        notes = ("one size only: nothing could be left out, untested",)
    if draft.asked:
        rate = f"{draft.asked / 1e12:.4g} TFLOP/s"
        notes += (f"never faster than long runs keep up, {rate}",)
    if together:
        off = f"{math.expm1(together):.0%}"
        notes += (f"interval widened, because all samples may be off by {off} together",)
    law = OperatorLaw(
        device=device,
        precision=precision,
        operator=operator,
        phase=phase,
        terms=tuple(
            Term(column=column.value, coefficient=coefficient)
            for column, coefficient in zip(fit.columns, fit.coefficients, strict=True)
        ),
        floor_seconds=fit.floor,
        ranges=_ranges(draft.samples, phase),
        log_halfwidth=halfwidth,
        calibration=calibration,
        rows=len(draft.samples),
        points=points,
        validation=validation_of(choice.left_out, choice.folds, choice.errors),
        sustained_flops_per_second=draft.asked,
        floor_rows=len(draft.samples) - len(choice.rows) if fit.floor else 0,
        multiprocessors=multiprocessors(device),
        shapes=shapes,
        residual=draft.choice.residual,
        notes=notes,
        large_seconds=large[0],
        large_log_halfwidth=large[1],
    )
    return law.widened(together) if together else law


def _ranges(samples: Sequence[OperatorSample], phase: str) -> tuple[MeasuredRange, ...]:
    rows = [range_values(sample_operator(sample), phase) for sample in samples]
    return tuple(
        MeasuredRange(
            quantity=name,
            least=min(row[at][1] for row in rows),
            most=max(row[at][1] for row in rows),
        )
        for at, (name, _) in enumerate(rows[0])
    )


def _shapes(
    samples: Sequence[OperatorSample], sustained: Sequence[tuple[str, float]]
) -> tuple[MeasuredShape, ...]:
    """Each shape once, with the median of its times."""
    times: dict[tuple[int, int, int, int, str], list[float]] = {}
    for sample in samples:
        key = (sample.batch, sample.m, sample.n, sample.k, sample.output_precision)
        times.setdefault(key, []).append(max(sample.median_seconds, _least(sample, sustained)))
    return tuple(
        MeasuredShape(
            batch=batch,
            m=m,
            n=n,
            k=k,
            output_precision=output,
            seconds=statistics.median(times[batch, m, n, k, output]),
        )
        for batch, m, n, k, output in sorted(times)
    )
