"""Which columns does a transformer layer's law have, and is it held near a datasheet's rates?

Layers of one or two sizes cannot tell operations from bytes: on them both grow alike, and a sum
that fits them all can be far off on a third size. A weak prior settles what the rows leave open.
With x_j the coefficient of column j over its arithmetic value c_j,

    minimise  sum of |log error| + (WEIGHT * rows * power / 2) * sum over j of (x_j - 1)^2

where power is the columns' mean share of a time at x = 1, squared. Arithmetic values, from the
kind's rate P and bandwidth B in the catalogue (n = 1 forward, 2 backward):

    constant           launches of the datasheet's prior, per layer
    matrix_flops       n / (.70 P)
    attention_flops    fused n / (.40 P); over the whole square 2 n / (.70 P)
    elementwise_bytes  n / (.53 B) forward, n / (.73 B) backward
    score_bytes        8 n / B, only of layers that keep scores in memory: written by the product,
                       read and written by scale and mask, by softmax and by dropout, read by the
                       context

Samples do not say whether their attention was fused, nor whether their float32 was TF32: each is a
reading of them. With several hidden sizes the readings are fitted, and the law without a prior, and
leaving whole sizes out chooses. One size fits every reading as well as any, so there the reading
counts whose arithmetic alone is nearest to both passes (layers of hidden 1024 on seven kinds of
device, eager attention: off by a factor of 1.2 on average, as fused 1.9).

On Sailor's published layers of four kinds of device, each hidden size left out in turn (276 times):
49 % off without scores and prior, 32 to 35 % with scores, 48 % with the prior, 9 % with both where
the reading is known; 11 % with it chosen. Weights of .0001 to .03 are alike there; from .003 on the
prior pulls at what a single size's own microbatches say (2.9 % off at .001, 3.1 % without).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.predict.datasheet import (
    LAYER_LAUNCHES,
    SCORE_PASSES,
    attention_efficiency,
    known_kinds,
    matrix_efficiency,
    pass_prior,
)
from hetplan.predict.layer.values import Column
from hetplan.predict.regression import Rows, fit_nonnegative, left_out_errors, log_ratio, predict
from hetplan.profiling.samples import Phase

WEIGHT = 0.001
"""Weight of the prior beside the rows' own mean power; see above for how little it matters."""
_SQUARE = 2.0
"""Whole square over causal operations."""
_TF32 = "tf32"

RowsOf = Callable[[Sequence[Column]], list[tuple[float, ...]]]
"""Values of these columns in every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A law's columns and how it is fitted."""

    columns: tuple[Column, ...]
    rows: Rows
    centre: tuple[float, ...] = ()
    """Arithmetic coefficients; empty: no prior."""
    words: str = ""

    def fit(self, rows: Rows, seconds: Sequence[float]) -> tuple[float, ...]:
        """Coefficients of these rows."""
        if not self.centre:
            return fit_nonnegative(rows, seconds)
        return fit_nonnegative(rows, seconds, centre=self.centre, weight=WEIGHT)

    def left_out(self, seconds: Sequence[float], groups: Sequence[float]) -> tuple[float, ...]:
        """log(measured / predicted) of every row by a fit without its group."""
        return left_out_errors(self.rows, seconds, groups, fit=self.fit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """All times of one pass of one device's transformer layers."""

    phase: str
    rows_of: RowsOf
    seconds: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What ran when samples were taken."""

    flops_per_second: float
    keeps_scores: bool


def choose(
    plain: Candidate,
    device: str,
    precision: str,
    asked: Passes,
    hidden: Sequence[float],
    measured: Sequence[Passes],
) -> Candidate:
    """`plain`, or the best of those with a prior, for one pass.

    `hidden` is the hidden size of each of its rows, `measured` every pass of the same layers.
    """
    kind = known_kinds().get(device)
    if kind is None or kind.memory_bandwidth_bytes_per_second <= 0:
        return plain
    readings = [
        _Reading(flops_per_second=rate, keeps_scores=scores)
        for rate in _rates(kind, precision)
        if all(_reached(each) <= rate for each in measured)
        for scores in (False, True)
    ]
    if not readings:
        return plain
    if len(set(hidden)) < 2:

        def distance(reading: _Reading) -> float:
            return sum(_distance(_held(kind, reading, each), each.seconds) for each in measured)

        return _held(kind, min(readings, key=distance), asked)

    def left_out(each: Candidate) -> float:
        return sum(abs(error) for error in each.left_out(asked.seconds, hidden))

    return min((plain, *(_held(kind, each, asked) for each in readings)), key=left_out)


def _reached(measured: Passes) -> float:
    """The highest rate of a whole layer; a rate below it is not what ran."""
    work = pass_prior(backward=measured.phase == Phase.BACKWARD).work
    flops = measured.rows_of((Column.FLOPS,))
    return max(work * row[0] / y for row, y in zip(flops, measured.seconds, strict=True))


def _distance(held: Candidate, seconds: Sequence[float]) -> float:
    """Mean |log error| of the arithmetic alone."""
    errors = [
        log_ratio(y, predict(held.centre, row)) for y, row in zip(seconds, held.rows, strict=True)
    ]
    return sum(map(abs, errors)) / len(errors)


def _held(kind: DeviceKind, reading: _Reading, measured: Passes) -> Candidate:
    bandwidth, rate = kind.memory_bandwidth_bytes_per_second, reading.flops_per_second
    work, launch, streaming = pass_prior(backward=measured.phase == Phase.BACKWARD)
    product = work / (matrix_efficiency(kind.kind) * rate)
    centre = {
        Column.CONSTANT: LAYER_LAUNCHES * launch,
        Column.MATRIX_FLOPS: product,
        Column.ATTENTION_FLOPS: work / (attention_efficiency(kind.kind) * rate),
        Column.ELEMENTWISE_BYTES: work / (streaming * bandwidth),
    }
    if reading.keeps_scores:
        centre[Column.ATTENTION_FLOPS] = _SQUARE * product
        centre[Column.SCORE_BYTES] = work * SCORE_PASSES / bandwidth
    attention = "scores in memory" if reading.keeps_scores else "fused attention"
    return Candidate(
        columns=tuple(centre),
        rows=measured.rows_of(tuple(centre)),
        centre=tuple(centre.values()),
        words=f"{rate / 1e12:g} TFLOP/s, {attention}",
    )


def _rates(kind: DeviceKind, precision: str) -> tuple[float, ...]:
    """Dense rates that may lie behind a precision: float32 is TF32 where a trainer allows it."""
    peaks = dict(kind.peak_flops_per_second)
    names = (precision, _TF32) if precision == Precision.FLOAT32 else (precision,)
    return tuple(dict.fromkeys(rate for name in names if (rate := peaks.get(name, 0.0)) > 0))
