"""Laws of one device kind carried to another, and the mean of several carried laws.

A law is a sum of columns. Each of its coefficients follows one figure of the datasheet:

    operations    coefficient * rate_from / rate_to         (seconds per flop)
    bytes         coefficient * bandwidth_from / bandwidth_to
    launches, constants, floors: unchanged, they are the host's

so a carried law says what the other kind would take at the same share of its own figures. Of
several kinds the mean is taken coefficient by coefficient, weighted by likeness (`related_kinds`);
a law is linear in its coefficients, so that is the weighted mean of the times that they say.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.model.operators import Operator, OperatorClass
from hetplan.predict.law_parts import MeasuredRange
from hetplan.predict.operator_columns import column_value, multiprocessors
from hetplan.predict.operator_values import (
    MeasuredShape,
    OperatorColumn,
    OperatorLaw,
    OperatorTerm,
)
from hetplan.predict.related_kinds import Rates, likeness

BY_RATE = frozenset({OperatorColumn.FLOPS.value, OperatorColumn.TILED_FLOPS.value})
BY_BANDWIDTH = frozenset({OperatorColumn.BYTES.value, OperatorColumn.TABLE_BYTES.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A law and the figures of the kind that it was measured on."""

    law: OperatorLaw
    rates: Rates


def factor(column: str, source: Rates, target: Rates) -> float:
    """What a coefficient of this column is multiplied by from one kind to the other."""
    if column in BY_RATE:
        return source.flops_per_second / target.flops_per_second
    if column in BY_BANDWIDTH:
        return source.bytes_per_second / target.bytes_per_second
    return 1.0


def seconds(law: OperatorLaw, op: Operator) -> float:
    """Time of one launch by the law's columns and floor alone, without shapes and residual."""
    total = sum(
        term.coefficient
        * column_value(term.column, op, law.phase, law.precision, waves_of=law.multiprocessors)
        for term in law.terms
    )
    return max(law.floor_seconds, total)


def carried(source: Rated, target: Rates, precision: str) -> OperatorLaw:
    """The law on another kind of the same chip: measured shapes go with it, at the law's ratio."""
    law = source.law
    there = replace(
        law,
        device=target.kind.kind,
        precision=precision,
        terms=tuple(
            OperatorTerm(
                column=term.column,
                coefficient=term.coefficient * factor(term.column, source.rates, target),
            )
            for term in law.terms
        ),
        sustained_flops_per_second=_sustained(source, target),
        multiprocessors=multiprocessors(target.kind.kind) or law.multiprocessors,
    )
    shapes = tuple(_carried_shape(shape, law, there) for shape in law.shapes)
    return replace(there, shapes=shapes)


def _carried_shape(shape: MeasuredShape, law: OperatorLaw, there: OperatorLaw) -> MeasuredShape:
    op = Operator(
        operator=OperatorClass(law.operator),
        what="shape",
        batch=shape.batch,
        m=shape.m,
        n=shape.n,
        k=shape.k,
    )
    here = seconds(law, op)
    ratio = seconds(there, op) / here if here > 0 else 1.0
    return replace(shape, seconds=shape.seconds * ratio)


def pooled(sources: Sequence[Rated], target: Rates, precision: str) -> OperatorLaw:
    """The mean of laws of one class and pass of other kinds, at the target's figures.

    The half-width is the middle one of the laws' own: how far shapes of one kind lie from its law.
    """
    weights = _weights([each.rates for each in sources], target)
    terms: dict[str, float] = {}
    for source, weight in zip(sources, weights, strict=True):
        for term in source.law.terms:
            there = term.coefficient * factor(term.column, source.rates, target)
            terms[term.column] = terms.get(term.column, 0.0) + weight * there
    laws = [source.law for source in sources]
    return replace(
        laws[0],
        device=target.kind.kind,
        precision=precision,
        terms=tuple(
            OperatorTerm(column=column.value, coefficient=terms[column.value])
            for column in OperatorColumn
            if column.value in terms
        ),
        # The host's, and its profiler's: the middle one, where most saw none it is 0.
        floor_seconds=statistics.median(law.floor_seconds for law in laws),
        ranges=common_ranges([law.ranges for law in laws]),
        log_halfwidth=statistics.median(law.log_halfwidth for law in laws),
        calibration=f"laws of {len(laws)} other kinds",
        rows=sum(law.rows for law in laws),
        points=sum(law.points for law in laws),
        sustained_flops_per_second=_mean_sustained(sources, weights, target),
        multiprocessors=multiprocessors(target.kind.kind),
        shapes=(),
        residual=None,
        notes=(),
    )


def _sustained(source: Rated, target: Rates) -> float:
    return (
        source.law.sustained_flops_per_second
        * target.flops_per_second
        / source.rates.flops_per_second
    )


def _mean_sustained(sources: Sequence[Rated], weights: Sequence[float], target: Rates) -> float:
    """Of the kinds that showed one, where they are most of the weight; 0: no such limit."""
    found = [
        (weight, _sustained(source, target))
        for source, weight in zip(sources, weights, strict=True)
        if source.law.sustained_flops_per_second
    ]
    total = sum(weight for weight, _ in found)
    return sum(weight * rate for weight, rate in found) / total if total > 0.5 else 0.0


def _weights(sources: Sequence[Rates], target: Rates) -> list[float]:
    raw = [likeness(source, target) for source in sources]
    return [weight / sum(raw) for weight in raw]


def common_ranges(
    ranges: Sequence[tuple[MeasuredRange, ...]],
) -> tuple[MeasuredRange, ...]:
    """Of each quantity from the least to the most that any of them measured."""
    return tuple(
        MeasuredRange(
            quantity=same[0].quantity,
            least=min(each.least for each in same),
            most=max(each.most for each in same),
        )
        for same in zip(*ranges, strict=True)
    )
