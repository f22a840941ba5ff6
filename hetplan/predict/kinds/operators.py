"""Operator laws for a kind that has none of its own, and how far they can be off.

Class by class (all passes of one class from one place):

    same chip    the nearest board's laws, carried; half-width of the law and of what two boards of
                 one chip differ by
    other kinds  the mean of all kinds that were measured, carried; half-width of the laws (how far
                 shapes of one kind lie from its law) and of what kinds differ by

What kinds differ by is measured on the kinds at hand where there are at least three chips: each is
left out in turn, with every kind of its chip, and its laws are set against the mean of the others.
With o_d the root of the mean square log ratio of kind d and s0 what published measurements give,

    s^2 = (PRIOR_KINDS * s0^2 + sum o_d^2) / (PRIOR_KINDS + n),   half-width = t(0.95) * s

the predictive interval of a normal mean of zero whose variance has a scaled inverse-chi-square
prior (Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6), t with PRIOR_KINDS + n
degrees of freedom. Fewer chips: s0 alone. A kind whose figures lie beyond those of all measured
kinds has a wider one, by as much per doubling as sizes beyond the measured ones.

A law is carried by the rates of the matrix products and the memory bandwidths of both kinds:

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

A carried law is a sum of columns whose coefficients follow one figure of the datasheet each:

    operations    coefficient * rate_from / rate_to         (seconds per flop)
    bytes         coefficient * bandwidth_from / bandwidth_to
    launches, constants, floors: unchanged, they are the host's

so a carried law says what the other kind would take at the same share of its own figures, with
rates by what each sustains (`predict.sustained`: most kinds alike, a T4 or an MI300X less). Of
several kinds the mean is taken coefficient by coefficient, weighted by likeness.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.operators import PRODUCTS, Operator, OperatorClass
from hetplan.predict.datasheet import (
    ATTENTION_LOG_HALFWIDTH,
    ELEMENTWISE_LOG_HALFWIDTH,
    MATRIX_EFFICIENCY,
    MATRIX_LOG_HALFWIDTH,
    matrix_efficiency,
)
from hetplan.predict.law_parts import WIDENING_PER_DOUBLING, MeasuredRange, Term
from hetplan.predict.layer.values import LayerLaw
from hetplan.predict.operator.values import (
    OperatorColumn,
    OperatorLaw,
    multiprocessors,
)
from hetplan.predict.regression import t_quantile
from hetplan.predict.sustained import typical_halfwidth

TF32 = "tf32"
_ABOVE_RATE = 1.15  # clocks boost, coefficients have errors
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
    """Number format of its matrix products: a precision, or `tf32`."""
    flops_per_second: float
    """By what the kind sustains: its rate times `matrix_efficiency` over that of most kinds."""
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
        flops_per_second=rate * matrix_efficiency(kind.kind, number_format) / MATRIX_EFFICIENCY,
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


_Law = TypeVar("_Law", bound="OperatorLaw | LayerLaw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated(Generic[_Law]):
    """A law and the figures of the kind that it was measured on."""

    law: _Law
    rates: Rates


RatedOperator = Rated[OperatorLaw]


def factor(column: str, source: Rates, target: Rates) -> float:
    """What a coefficient of this column is multiplied by from one kind to the other."""
    if column in BY_RATE:
        return source.flops_per_second / target.flops_per_second
    if column in BY_BANDWIDTH:
        return source.bytes_per_second / target.bytes_per_second
    return 1.0


def carried(source: RatedOperator, target: Rates, precision: str) -> OperatorLaw:
    """The law on another kind of the same chip: measured shapes go with it, at the law's ratio."""
    law = source.law
    added = chip_halfwidth(source.rates.kind, target.kind)
    there = replace(
        law,
        device=target.kind.kind,
        precision=precision,
        terms=law.scaled_terms(lambda column: factor(column, source.rates, target)),
        sustained_flops_per_second=_sustained(source, target),
        multiprocessors=multiprocessors(target.kind.kind) or law.multiprocessors,
        log_halfwidth=math.hypot(law.log_halfwidth, added),
        large_log_halfwidth=math.hypot(law.large_log_halfwidth, added),
    )
    shapes = []
    for shape in law.shapes:
        op = shape.operator(law.operator)
        here = law.seconds(op)
        ratio = there.seconds(op) / here if here > 0 else 1.0
        shapes.append(replace(shape, seconds=shape.seconds * ratio))
    return replace(there, shapes=tuple(shapes))


def pooled(sources: Sequence[RatedOperator], target: Rates, precision: str) -> OperatorLaw:
    """The mean of laws of one class and pass of other kinds, at the target's figures.

    The half-width is the middle one of the laws' own: how far shapes of one kind lie from its law.
    """
    raw = [likeness(source.rates, target) for source in sources]
    weights = [weight / sum(raw) for weight in raw]
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
            Term(column=column.value, coefficient=terms[column.value])
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


def _sustained(source: RatedOperator, target: Rates) -> float:
    return (
        source.law.sustained_flops_per_second
        * target.flops_per_second
        / source.rates.flops_per_second
    )


def _mean_sustained(
    sources: Sequence[RatedOperator], weights: Sequence[float], target: Rates
) -> float:
    """Mean of the kinds that showed a limit, where they are most of the weight; 0: no limit."""
    weighted = [
        (weight, _sustained(source, target))
        for source, weight in zip(sources, weights, strict=True)
        if source.law.sustained_flops_per_second
    ]
    total = sum(weight for weight, _ in weighted)
    return sum(weight * rate for weight, rate in weighted) / total if total > 0.5 else 0.0


def common_ranges(
    ranges: Sequence[tuple[MeasuredRange, ...]],
) -> tuple[MeasuredRange, ...]:
    """Each quantity's range from the least to the most that any of them measured."""
    return tuple(
        MeasuredRange(
            quantity=same[0].quantity,
            least=min(each.least for each in same),
            most=max(each.most for each in same),
        )
        for same in zip(*ranges, strict=True)
    )


# Whole float32 layers of A100-80 by the laws of A100-40 and the reverse (Sailor's profiles, 48
# transformer and 20 head passes): the mean of one layer and pass is off by .01 to .18.
SAME_CHIP_LOG_HALFWIDTH = 0.15
# Matrix products of A100 in a module of 400 W run at 1.13 times the rate of those in a slot of
# 300 W (medians of Sailor's and SimuMax's tables): log 1.13 / log (400 / 300) = .43.
BOARD_LOG_PER_LOG_POWER = 0.43

PRIOR_KINDS = 4.0
"""How many kinds the shipped spread counts as: published measurements are of six to eight kinds, of
one vendor, and yours may be of another."""
MIN_CHIPS = 3
"""Fewest chips that say how much chips differ."""
PUBLISHED_CHIPS = 5
"""Chips that the mean was of when one was left out of the published ones."""

# Standard deviation of the log ratio of one kind to the mean of the others, over the classes of a
# group and all passes, 16 bit and 32 bit: Sailor's operator tables of six NVIDIA kinds and
# SimuMax's of A100 and B200, each chip left out in turn.
_PRODUCTS = frozenset({OperatorClass.MATRIX_PRODUCT, OperatorClass.GROUPED_PRODUCT})
_SPREADS = (
    (_PRODUCTS, 0.19),
    (PRODUCTS - _PRODUCTS, 0.17),  # attention
    (frozenset({OperatorClass.LOSS}), 0.10),
    (frozenset({OperatorClass.EMBEDDING}), 0.20),
)
_PASSES = frozenset(OperatorClass) - {each for group, _ in _SPREADS for each in group}, 0.13


def spread_group(operator: str) -> tuple[frozenset[str], float]:
    """Classes whose kinds differ by about the same, and by how much in published tables.

    Standard deviation of a kind's log ratio to the mean of others.
    """
    return next((entry for entry in _SPREADS if operator in entry[0]), _PASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedLaws:
    """Laws for one kind and precision that others lend it."""

    laws: tuple[OperatorLaw, ...]
    same_chip: tuple[str, ...]
    """Kinds of the same chip that laws were taken from."""
    others: tuple[str, ...]
    """Kinds of other chips that laws were averaged over."""
    classes_of_others: frozenset[str]
    """Classes whose laws are such averages."""

    @property
    def lenders(self) -> str:
        """The kinds that lent the laws, in words."""
        parts = []
        if self.same_chip:
            parts.append(f"laws of {', '.join(self.same_chip)} (same chip)")
        if self.others:
            parts.append(f"mean of {named(self.others)}")
        return " and ".join(parts)


def related_laws(
    target: Rates, precision: str, sources: Sequence[RatedOperator], spreads: Spreads
) -> RelatedLaws:
    """One law per class and pass that any of the sources has."""
    laws: list[OperatorLaw] = []
    near: dict[str, None] = {}
    far: dict[str, None] = {}
    averaged: set[str] = set()
    for operator in dict.fromkeys(source.law.operator for source in sources):
        of_class = [source for source in sources if source.law.operator == operator]
        chip = nearest_board(of_class, target.kind, precision)
        if chip:
            near[chip[0].rates.kind.kind] = None
            laws.extend(carried(source, target, precision) for source in chip)
            continue
        for phase in dict.fromkeys(source.law.phase for source in of_class):
            same = [source for source in of_class if source.law.phase == phase]
            averaged.add(operator)
            far |= dict.fromkeys(source.rates.kind.kind for source in same)
            laws.append(_of_others(same, target, precision, spreads))
    return RelatedLaws(
        laws=tuple(laws),
        same_chip=tuple(near),
        others=tuple(far),
        classes_of_others=frozenset(averaged),
    )


def nearest_board(
    sources: Sequence[RatedOperator], kind: DeviceKind, precision: str
) -> list[RatedOperator]:
    """The laws of the kind and precision of this chip whose board is nearest; empty: none."""
    same = [source for source in sources if same_chip(source.rates.kind, kind)]
    if not same:
        return []

    def distance(source: RatedOperator) -> tuple[float, bool, str, str]:
        board = board_distance(source.rates.kind, kind)
        law = source.law
        return board, law.precision != precision, law.device, law.precision

    best = min(map(distance, same))
    return [source for source in same if distance(source) == best]


def chip_halfwidth(source: DeviceKind, target: DeviceKind) -> float:
    """What boards of one chip differ by; nothing for the same kind."""
    if source.kind == target.kind:
        return 0.0
    power = _log_ratio(source.max_power_watts, target.max_power_watts)
    clock = chip_distance(source, target) or 0.0
    return SAME_CHIP_LOG_HALFWIDTH + max(BOARD_LOG_PER_LOG_POWER * power, clock)


def _of_others(
    sources: Sequence[RatedOperator], target: Rates, precision: str, spreads: Spreads
) -> OperatorLaw:
    law = pooled(sources, target, precision)
    # The spread between chips is of all sizes, so the interval is.
    law = replace(law, large_seconds=0.0, large_log_halfwidth=0.0)
    between = spreads.halfwidth(law.operator, different_chips(each.rates.kind for each in sources))
    halfwidth = math.hypot(law.log_halfwidth, between) * _beyond(law, sources, target)
    if law.operator in PRODUCTS:
        halfwidth = math.hypot(halfwidth, typical_halfwidth(target.kind.kind))
    if all(source.rates.kind.vendor != target.kind.vendor for source in sources):
        # How another vendor's kernels fare was measured nowhere: no better than a datasheet.
        halfwidth = max(halfwidth, _datasheet_halfwidth(law.operator))
    return replace(law, log_halfwidth=halfwidth)


def _beyond(law: OperatorLaw, sources: Sequence[RatedOperator], target: Rates) -> float:
    """How much wider the interval of a kind is whose figures none of the measured kinds has.

    Only figures that the law's columns follow count. A new generation is beyond both: GH200 beside
    five older kinds has 2.6 times the highest bandwidth and 3.2 times the highest rate.
    """
    columns = {term.column for term in law.terms if term.coefficient > 0}
    doublings = 0.0
    for followed, figure in (
        (columns & BY_RATE, "flops_per_second"),
        (columns & BY_BANDWIDTH, "bytes_per_second"),
    ):
        if followed:
            there = getattr(target, figure)
            known = [getattr(source.rates, figure) for source in sources]
            doublings += max(0.0, math.log2(there / max(known)), math.log2(min(known) / there))
    return 1.0 + WIDENING_PER_DOUBLING * doublings


def _datasheet_halfwidth(operator: str) -> float:
    if operator == OperatorClass.FUSED_ATTENTION:
        return ATTENTION_LOG_HALFWIDTH
    return MATRIX_LOG_HALFWIDTH if operator in tuple(PRODUCTS) else ELEMENTWISE_LOG_HALFWIDTH


_T = TypeVar("_T")


def by_chip(items: Iterable[_T], kind_of: Callable[[_T], DeviceKind]) -> list[list[_T]]:
    """The items with those whose kinds are of one chip together."""
    chips: list[list[_T]] = []
    for item in items:
        kind = kind_of(item)
        known = ((kind_of(chip[0]), chip) for chip in chips)
        same = [chip for other, chip in known if kind.kind == other.kind or same_chip(kind, other)]
        if same:
            same[0].append(item)
        else:
            chips.append([item])
    return chips


def different_chips(kinds: Iterable[DeviceKind]) -> int:
    """How many different chips these are."""
    return len(by_chip(kinds, lambda kind: kind))


def between_chips(published: float, mean_square: float, chips: int) -> float:
    """Standard deviation of a chip's log ratio to the others, by the published one and what so
    many chips at hand showed; `PRIOR_KINDS + chips` degrees of freedom.
    """
    return math.sqrt((PRIOR_KINDS * published**2 + chips * mean_square) / (PRIOR_KINDS + chips))


def of_a_further_chip(spread: float, chips: int) -> float:
    """The spread of a further chip from the mean of so many; published ones are of a mean too."""
    return spread * math.sqrt((1.0 + 1.0 / max(chips, 1)) / (1.0 + 1.0 / PUBLISHED_CHIPS))


class Spreads:
    """What kinds differ by in each class, learned from laws of one width of elements."""

    def __init__(self, sources: Sequence[RatedOperator]) -> None:
        self._sources = tuple(sources)
        self._learned = cache(self._learn)

    def halfwidth(self, operator: str, chips: int) -> float:
        """90 % of kinds lie within it of the mean of this many chips."""
        spread, freedom = self._learned(*spread_group(operator))
        return t_quantile(freedom) * of_a_further_chip(spread, chips)

    def _learn(self, group: frozenset[str], published: float) -> tuple[float, float]:
        """Standard deviation and degrees of freedom."""
        sources = [source for source in self._sources if source.law.operator in group]
        chips = different_chips(source.rates.kind for source in sources)
        if chips < MIN_CHIPS:
            return published, PRIOR_KINDS
        offsets = [value for value in map(self._offset, sources) if value is not None]
        # Classes and passes of one chip err together: chips count, not laws.
        return between_chips(published, statistics.fmean(offsets), chips), PRIOR_KINDS + chips

    def _offset(self, source: RatedOperator) -> float | None:
        """Mean square of a law's log ratio to the mean of other chips' laws; None: no others.

        Over sizes, because kinds differ by size as well (caches, launches).
        """
        law = source.law
        others = [
            other
            for other in self._sources
            if (other.law.operator, other.law.phase) == (law.operator, law.phase)
            and other.rates.kind.kind != source.rates.kind.kind
            and not same_chip(other.rates.kind, source.rates.kind)
        ]
        if not others:
            return None
        mean = pooled(others, source.rates, law.precision)
        times = [(law.seconds(op), mean.seconds(op)) for op in probes(law.operator)]
        logs = [math.log(own / other) for own, other in times if own > 0 and other > 0]
        return statistics.fmean(log * log for log in logs) if logs else None


_TOKENS = (4096, 16384)
_WIDTHS = (2048, 8192)
_SEQUENCE = 2048
_VOCABULARY = 50000


def probes(operator: str) -> tuple[Operator, ...]:
    """Operators of common sizes at which laws are compared: large enough to be no launches."""
    kind = OperatorClass(operator)
    sizes: list[tuple[int, int, int, int]] = []
    for tokens in _TOKENS:
        heads = tokens // _SEQUENCE * 16
        for width in _WIDTHS:
            head = width // 64
            sizes.append(
                {
                    OperatorClass.GROUPED_PRODUCT: (8, tokens // 4, width, width),
                    OperatorClass.MATRIX_PRODUCT: (1, tokens, width, width),
                    OperatorClass.ATTENTION_SCORE: (heads, _SEQUENCE, _SEQUENCE, head),
                    OperatorClass.FUSED_ATTENTION: (heads, _SEQUENCE, _SEQUENCE, head),
                    OperatorClass.ATTENTION_CONTEXT: (heads, _SEQUENCE, head, _SEQUENCE),
                    OperatorClass.SOFTMAX: (1, heads * _SEQUENCE, _SEQUENCE, 0),
                    OperatorClass.ATTENTION_DROPOUT: (1, heads * _SEQUENCE, _SEQUENCE, 0),
                    OperatorClass.EMBEDDING: (1, tokens, width, _VOCABULARY),
                    OperatorClass.LOSS: (1, tokens, _VOCABULARY, 0),
                    OperatorClass.OPTIMIZER: (1, tokens * width, 1, 0),
                    OperatorClass.ADDITION: (1, tokens, width, 1),
                }.get(kind, (1, tokens, width, 0))
            )
    return tuple(
        Operator(operator=kind, what="probe", batch=batch, m=m, n=n, k=k)
        for batch, m, n, k in sizes
    )
