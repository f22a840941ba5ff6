"""How like two device kinds are, and against which rates a measured law ran.

A law that is carried from one kind to another needs three figures of each: the rate of its matrix
products, its memory bandwidth, and whether both are the same chip.

    same chip   same vendor, the same number formats, and rates in all of them higher or lower by
                one ratio: A100 with 40 and 80 GB, H100, H200 and GH200, V100 in a module and in a
                slot, B200 and GB200. What differs is the memory, the board and the clock.
    likeness    exp(-4 |log balance_1 - log balance_2|) with balance = rate / bandwidth (flop per
                byte), a quarter of it across vendors: kinds of one generation have like balances,
                and the more a kind can compute per byte the less of it products reach. Leaving out
                each chip of eight published NVIDIA kinds, products of 16 bit are off by .19 (rms of
                log) with these weights, by .25 with equal ones

float32 is two things. torch multiplies float32 itself unless it is told otherwise
(`torch.backends.cuda.matmul.allow_tf32`, off since torch 1.12), other frameworks and older releases
use TF32, up to eight times faster. What ran is seen from the law: products faster than the kind's
float32 rate were TF32. A job's float32 then means what it meant where it was measured; without
samples of a kind that has TF32 it means float32 itself.

Laws of one device kind carried to another, and the mean of several carried laws.

A law is a sum of columns. Each of its coefficients follows one figure of the datasheet:

    operations    coefficient * rate_from / rate_to         (seconds per flop)
    bytes         coefficient * bandwidth_from / bandwidth_to
    launches, constants, floors: unchanged, they are the host's

so a carried law says what the other kind would take at the same share of its own figures. Of
several kinds the mean is taken coefficient by coefficient, weighted by likeness (`related_kinds`);
a law is linear in its coefficients, so that is the weighted mean of the times that they say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.operators import Operator, OperatorClass
from hetplan.predict.law_parts import MeasuredRange
from hetplan.predict.operator.values import (
    MeasuredShape,
    OperatorColumn,
    OperatorLaw,
    OperatorTerm,
    column_value,
    multiprocessors,
)

TF32 = "tf32"
# A law's products may come out a little above the rate: clocks boost, coefficients have errors.
_ABOVE_RATE = 1.15
_ONE_RATIO = math.log(1.12)
"""Most that ratios of two formats differ by: vendors round (GB200 over B200: 1.11 and 1.00)."""
_NEAR_RATES = math.log(1.35)
"""Most that rates differ by: H100 in a slot has 1/1.31 of those in a module; below, parts of the
chip are switched off and its balance is another."""
_ACROSS_VENDORS = 0.25
"""Other vendors' libraries choose other kernels: they count where there is nothing nearer."""

_MAX_NAMED = 3  # as many as a warning of one line can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a law's terms follow on one kind."""

    kind: DeviceKind
    number_format: str
    """Of its matrix products: a precision, or `tf32`."""
    flops_per_second: float
    bytes_per_second: float

    @property
    def balance(self) -> float:
        """Operations per byte of memory traffic."""
        return self.flops_per_second / self.bytes_per_second


def rates(kind: DeviceKind, number_format: str) -> Rates | None:
    """The kind's figures; None where the datasheet does not have them."""
    rate = dict(kind.peak_flops_per_second).get(number_format, 0.0)
    if rate <= 0 or kind.memory_bandwidth_bytes_per_second <= 0:
        return None
    return Rates(
        kind=kind,
        number_format=number_format,
        flops_per_second=rate,
        bytes_per_second=kind.memory_bandwidth_bytes_per_second,
    )


def same_chip(one: DeviceKind, other: DeviceKind) -> bool:
    """Whether they differ by memory, board and clock alone."""
    return chip_distance(one, other) is not None


def chip_distance(one: DeviceKind, other: DeviceKind) -> float | None:
    """|log| of the ratio of the rates of two kinds of one chip; None: two chips."""
    rates_of, others = dict(one.peak_flops_per_second), dict(other.peak_flops_per_second)
    if one.vendor != other.vendor or not rates_of or rates_of.keys() != others.keys():
        return None
    logs = [math.log(rates_of[name] / others[name]) for name in rates_of]
    if max(logs) - min(logs) > _ONE_RATIO or max(map(abs, logs)) > _NEAR_RATES:
        return None
    return max(map(abs, logs))


def likeness(one: Rates, other: Rates) -> float:
    """Weight of what was measured on one of them for the other, 0 to 1."""
    distance = abs(math.log(one.balance / other.balance))
    near = math.exp(-4.0 * distance)
    return near if one.kind.vendor == other.kind.vendor else _ACROSS_VENDORS * near


def board_distance(one: DeviceKind, other: DeviceKind) -> float:
    """How far boards of one chip are apart: |log| of rates, power limits and bandwidths, summed."""
    return (
        (chip_distance(one, other) or 0.0)
        + _log_ratio(one.max_power_watts, other.max_power_watts)
        + _log_ratio(one.memory_bandwidth_bytes_per_second, other.memory_bandwidth_bytes_per_second)
    )


def _log_ratio(one: float, other: float) -> float:
    return abs(math.log(one / other)) if one > 0 and other > 0 else 0.0


def measured_format(kind: DeviceKind, precision: str, product_rates: Iterable[float]) -> str:
    """The number format in which products labelled `precision` ran at these rates (flop/s)."""
    if precision != Precision.FLOAT32 or not _has_faster_tf32(kind):
        return precision
    known = sorted(rate for rate in product_rates if rate > 0)
    if not known:
        return precision
    middle = known[len(known) // 2]
    return TF32 if middle > _ABOVE_RATE * kind.peak(Precision.FLOAT32) else precision


def _has_faster_tf32(kind: DeviceKind) -> bool:
    """Whether TF32 can be told from float32 by its rate: on GeForce cards both are alike."""
    peaks = dict(kind.peak_flops_per_second)
    return peaks.get(TF32, 0.0) > _ABOVE_RATE * peaks.get(Precision.FLOAT32.value, math.inf)


def asked_format(kind: DeviceKind, precision: str, measured: Iterable[Rates]) -> str:
    """The number format that a job's precision means on a kind, by what it meant on others."""
    if precision != Precision.FLOAT32 or not _has_faster_tf32(kind):
        return precision
    votes = {each.kind.kind: each.number_format for each in measured if _has_faster_tf32(each.kind)}
    ran_tf32 = sum(ran == TF32 for ran in votes.values())
    return TF32 if 2 * ran_tf32 > len(votes) else precision


def named(kinds: Sequence[str]) -> str:
    """These kinds in words: their names, or how many they are where a line has no room."""
    return ", ".join(kinds) if len(kinds) <= _MAX_NAMED else f"{len(kinds)} other kinds"


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
