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
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.model.operators import PRODUCTS, Operator, OperatorClass
from hetplan.predict.datasheet import (
    ATTENTION_LOG_HALFWIDTH,
    ELEMENTWISE_LOG_HALFWIDTH,
    MATRIX_LOG_HALFWIDTH,
)
from hetplan.predict.kinds.carried_laws import (
    BY_BANDWIDTH,
    BY_RATE,
    Rated,
    Rates,
    board_distance,
    carried,
    chip_distance,
    named,
    pooled,
    same_chip,
    seconds,
)
from hetplan.predict.law_parts import WIDENING_PER_DOUBLING
from hetplan.predict.operator.values import OperatorLaw

# Whole float32 layers of A100-80 by the laws of A100-40 and the reverse (Sailor's profiles, 48
# transformer and 20 head passes): the mean of one layer and pass is off by .01 to .18.
SAME_CHIP_LOG_HALFWIDTH = 0.15
# Matrix products of A100 in a module of 400 W run at 1.13 times the rate of those in a slot of
# 300 W (medians of Sailor's and SimuMax's tables): log 1.13 / log (400 / 300) = .43.
BOARD_LOG_PER_LOG_POWER = 0.43

PRIOR_KINDS = 4.0
"""How many kinds the shipped spread counts as: published measurements are of six to eight kinds, of
one vendor, and yours may be of another."""
MIN_POINTS = 3
"""Fewest points of different work that a law stands on; with fewer the prior answers (`prior`)."""
MIN_CHIPS = 3
"""Fewest chips that say how much chips differ."""
PUBLISHED_CHIPS = 5
"""Chips that the mean was of when one was left out of the published ones."""

# Standard deviation of the log ratio of one kind to the mean of the others, over the classes of a
# group and all passes, 16 bit and 32 bit: Sailor's operator tables of six NVIDIA kinds and
# SimuMax's of A100 and B200, each chip left out in turn.
_SPREADS = (
    (frozenset({OperatorClass.MATRIX_PRODUCT, OperatorClass.GROUPED_PRODUCT}), 0.19),
    (
        frozenset(
            {
                OperatorClass.ATTENTION_SCORE,
                OperatorClass.ATTENTION_CONTEXT,
                OperatorClass.FUSED_ATTENTION,
            }
        ),
        0.17,
    ),
    (frozenset({OperatorClass.LOSS}), 0.10),
    (frozenset({OperatorClass.EMBEDDING}), 0.20),
)
_PASSES_SPREAD = 0.13


def published_spread(operator: str) -> float:
    """Standard deviation of a kind's log ratio to the mean of others, from published tables."""
    return next((spread for group, spread in _SPREADS if operator in group), _PASSES_SPREAD)


def spread_group(operator: str) -> frozenset[str]:
    """Classes whose kinds differ by about the same."""
    named = {each for group, _ in _SPREADS for each in group}
    rest = frozenset(each for each in OperatorClass if each not in named)
    return next((group for group, _ in _SPREADS if operator in group), rest)


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
        """Whose laws they are, in words."""
        parts = []
        if self.same_chip:
            parts.append(f"laws of {', '.join(self.same_chip)} (same chip)")
        if self.others:
            parts.append(f"mean of {named(self.others)}")
        return " and ".join(parts)


def related_laws(
    target: Rates, precision: str, sources: Sequence[Rated], spreads: Spreads
) -> RelatedLaws:
    """One law per class and pass that any of the sources has."""
    found: list[OperatorLaw] = []
    near: dict[str, None] = {}
    far: dict[str, None] = {}
    averaged: set[str] = set()
    for operator in dict.fromkeys(source.law.operator for source in sources):
        of_class = [source for source in sources if source.law.operator == operator]
        chip = nearest_board(of_class, target.kind, precision)
        if chip:
            near[chip[0].rates.kind.kind] = None
            found.extend(_of_chip(source, target, precision) for source in chip)
            continue
        for phase in dict.fromkeys(source.law.phase for source in of_class):
            same = [source for source in of_class if source.law.phase == phase]
            averaged.add(operator)
            far |= dict.fromkeys(source.rates.kind.kind for source in same)
            found.append(_of_others(same, target, precision, spreads))
    return RelatedLaws(
        laws=tuple(found),
        same_chip=tuple(near),
        others=tuple(far),
        classes_of_others=frozenset(averaged),
    )


def nearest_board(sources: Sequence[Rated], kind: DeviceKind, precision: str) -> list[Rated]:
    """The laws of the kind and precision of this chip whose board is nearest; empty: none."""
    same = [source for source in sources if same_chip(source.rates.kind, kind)]
    if not same:
        return []

    def distance(source: Rated) -> tuple[float, bool, str, str]:
        board = board_distance(source.rates.kind, kind)
        law = source.law
        return board, law.precision != precision, law.device, law.precision

    best = min(map(distance, same))
    return [source for source in same if distance(source) == best]


def chip_halfwidth(source: DeviceKind, target: DeviceKind) -> float:
    """What boards of one chip differ by; nothing for the same kind."""
    if source.kind == target.kind:
        return 0.0
    power = 0.0
    if source.max_power_watts > 0 and target.max_power_watts > 0:
        power = abs(math.log(source.max_power_watts / target.max_power_watts))
    clock = chip_distance(source, target) or 0.0
    return SAME_CHIP_LOG_HALFWIDTH + max(BOARD_LOG_PER_LOG_POWER * power, clock)


def _of_chip(source: Rated, target: Rates, precision: str) -> OperatorLaw:
    law = carried(source, target, precision)
    added = chip_halfwidth(source.rates.kind, target.kind)
    return replace(
        law,
        log_halfwidth=math.hypot(law.log_halfwidth, added),
        large_log_halfwidth=math.hypot(law.large_log_halfwidth, added),
    )


def _of_others(
    sources: Sequence[Rated], target: Rates, precision: str, spreads: Spreads
) -> OperatorLaw:
    law = pooled(sources, target, precision)
    # The spread between chips is of all sizes, so the interval is.
    law = replace(law, large_seconds=0.0, large_log_halfwidth=0.0)
    between = spreads.halfwidth(law.operator, different_chips(each.rates.kind for each in sources))
    halfwidth = math.hypot(law.log_halfwidth, between) * _beyond(law, sources, target)
    if all(source.rates.kind.vendor != target.kind.vendor for source in sources):
        # How another vendor's kernels fare was measured nowhere: no better than a datasheet.
        halfwidth = max(halfwidth, _datasheet_halfwidth(law.operator))
    return replace(law, log_halfwidth=halfwidth)


def _beyond(law: OperatorLaw, sources: Sequence[Rated], target: Rates) -> float:
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


def different_chips(kinds: Iterable[DeviceKind]) -> int:
    """How many different chips these are."""
    seen: list[DeviceKind] = []
    for kind in kinds:
        if not any(kind.kind == other.kind or same_chip(kind, other) for other in seen):
            seen.append(kind)
    return len(seen)


class Spreads:
    """What kinds differ by in each class, learned from laws of one width of elements."""

    __slots__ = ("_known", "_sources")

    def __init__(self, sources: Sequence[Rated]) -> None:
        self._sources = tuple(sources)
        self._known: dict[frozenset[str], tuple[float, float]] = {}

    def halfwidth(self, operator: str, chips: int) -> float:
        """90 % of kinds lie within it of the mean of this many chips."""
        group = spread_group(operator)
        if group not in self._known:
            self._known[group] = self._learn(operator, group)
        spread, freedom = self._known[group]
        return (
            t_quantile(freedom)
            * spread
            * math.sqrt((1.0 + 1.0 / max(chips, 1)) / (1.0 + 1.0 / PUBLISHED_CHIPS))
        )

    def _learn(self, operator: str, group: frozenset[str]) -> tuple[float, float]:
        """Standard deviation and degrees of freedom."""
        published = published_spread(operator)
        sources = [source for source in self._sources if source.law.operator in group]
        chips = different_chips(source.rates.kind for source in sources)
        if chips < MIN_CHIPS:
            return published, PRIOR_KINDS
        offsets = [value for value in map(self._offset, sources) if value is not None]
        learned = statistics.fmean(offsets)
        # Classes and passes of one chip err together: chips count, not laws.
        variance = (PRIOR_KINDS * published**2 + chips * learned) / (PRIOR_KINDS + chips)
        return math.sqrt(variance), PRIOR_KINDS + chips

    def _offset(self, source: Rated) -> float | None:
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
        times = [(seconds(law, op), seconds(mean, op)) for op in probes(law.operator)]
        logs = [math.log(own / other) for own, other in times if own > 0 and other > 0]
        return statistics.fmean(log * log for log in logs) if logs else None


def t_quantile(freedom: float) -> float:
    """95 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.95))


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
