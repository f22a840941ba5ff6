"""What a kind with few samples, or none, takes by the laws of other kinds.

Without samples there are two estimators, each with its interval:

    layers      whole layers of all other kinds as one law, or another board of the chip
                (`kinds.layers`)
    operators   laws of single operators, lent class by class (`kinds.operators`) and added up to
                a layer as a kind's own are (`composed`)

Whole layers of three or more chips of the same vendor answer first: they hold everything that a
trainer runs and, like a kind's own law of whole layers, do not ask for kernels, because no measured
layer says which ran. With fewer chips the estimator with the narrower interval answers.

Only laws of equally wide elements are carried: bfloat16 by float16 and the reverse, each against
its own rate. Kinds are looked up in the catalogue: a law names its kind and not its figures.

A law needs three points of different work. With fewer the prior answers: the kind's own operators,
other kinds' laws (`related`), or the datasheet. How far a kind lies from its prior is a part that
all its sizes share, and a part of each size of its own. In logarithms, with r_i = log(measured_i /
prior_i) and both parts normal,

    r_i = d + e_i,   d ~ N(0, tau^2),   e_i ~ N(0, sigma^2)
    mean of d = sum r_i * tau^2 / (n tau^2 + sigma^2),   variance of d = 1 / (1/tau^2 + n/sigma^2)
    seconds = prior * exp(mean of d),  half-width = 1.645 sqrt(variance of d + sigma^2)

(Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.5). A point scales the prior and does
nothing else: a regression on one or two points is far worse than the prior that they correct (on
published layers of seven kinds 24 to 26 % against 9 %). A further point never widens the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import OperatorClass
from hetplan.model.spec import LayerKind
from hetplan.predict.calibration.values import corrected
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.kinds.layers import (
    PooledLayers,
    RatedLayer,
    ends_of,
    kind_rows,
    near_chips,
    pooled_layers,
    related_layer,
)
from hetplan.predict.kinds.narrow import NarrowLaws
from hetplan.predict.kinds.operators import (
    MIN_CHIPS,
    Rated,
    Rates,
    RelatedLaws,
    Spreads,
    asked_format,
    chip_halfwidth,
    measured_format,
    probes,
    rates,
    related_laws,
    same_chip,
)
from hetplan.predict.law_parts import MIN_POINTS
from hetplan.predict.layer import composed, float8
from hetplan.predict.layer.answer import measured_itself
from hetplan.predict.layer.values import ALL_LAYERS, Column, LayerLaw
from hetplan.predict.operator.answer import DeviceOperators, index_operators
from hetplan.predict.operator.values import OperatorLaw
from hetplan.predict.predictor import RELATED, LayerQuery, Prediction
from hetplan.predict.regression import NORMAL_90
from hetplan.profiling.samples import Phase

# Whole float32 layers of Sailor's profiles against the sum of operators of the same chip or of
# others (Megatron-LM's kernels): the mean of a pass is off by .04 to .36. With this much, 82 % of
# those layers and all 16-bit sums of operators lie inside the interval: 90 % of both together.
SUM_LOG_HALFWIDTH = 0.30
"""What a trainer's layers differ by from the sum of operators that another program measured."""

_Law = TypeVar("_Law", OperatorLaw, LayerLaw)


class Related:
    """Answers from the laws of other kinds; intermediate results are cached."""

    def __init__(
        self,
        layers: Sequence[LayerLaw],
        operators: Sequence[OperatorLaw],
        kinds: Sequence[DeviceKind] | None = None,
    ) -> None:
        """`kinds` are known beside the kind of the query; None: the catalogue's."""
        # A law of one or two points says what its kind took there, and nothing of another kind.
        self._layers = tuple(law for law in layers if law.points >= MIN_POINTS)
        own = [law for law in operators if law.points >= MIN_POINTS]
        self._operator_laws = tuple(law for law in own if law.precision in tuple(Precision))
        self.narrow = NarrowLaws(own).of
        self._given_kinds = kinds
        self.lent = cache(self._lend)
        """(device, precision) -> laws of single operators lent to this kind; None: none can be."""
        self.operators = cache(self._operators)
        """(device, precision) -> the same, ready to add up."""
        self._spreads: dict[int, Spreads] = {}
        self._format = cache(self._measured_format)
        self._sources = cache(self._layer_sources)
        self._pooled = cache(self._pooled_layers)

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction | None:
        """One pass of a layer; None where no law of another kind says anything of it."""
        if query.kernels.product_format:
            return self._narrow(device, query)
        sources = self._sources(device, query.layer, query.phase, query.precision)
        by_layers = self._by_layers(device, query, sources)
        if by_layers is not None and near_chips(sources, device) >= MIN_CHIPS:
            return by_layers
        known = [each for each in (by_layers, self._by_operators(device, query)) if each]
        return min(known, key=lambda each: each.log_halfwidth, default=None)

    def _narrow(self, device: DeviceKind, query: LayerQuery) -> Prediction | None:
        """With narrow products: by operators; by whole layers, changed as the operators change."""
        plain = float8.in_one_format(query)
        whole = self.layer(device, plain)
        narrow, wide = self._by_operators(device, query), self._by_operators(device, plain)
        if whole is None or narrow is None or wide is None or whole.parts:
            return narrow
        return float8.scaled(whole, wide, narrow)

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction | None:
        """From another board of the same chip, by bandwidth; None where none was measured."""
        phase = f"{Phase.OPTIMIZER.value}:{optimizer.value}"
        for law in self._layers:
            kind = self._kind(law.device, device)
            here = (law.layer, law.phase, law.precision) == (ALL_LAYERS, phase, precision.value)
            if not here or kind is None or not same_chip(kind, device):
                continue
            own, other = (each.memory_bandwidth_bytes_per_second for each in (device, kind))
            if own <= 0 or other <= 0 or kind.kind == device.kind:
                continue
            return Prediction(
                seconds=law.update_seconds(parameters * other / own),
                log_halfwidth=math.hypot(law.log_halfwidth, chip_halfwidth(kind, device)),
                source=RELATED,
                extrapolating=(f"{device.kind} update not measured: as {kind.kind}, same chip",),
            )
        return None

    @cached_property
    def _kinds(self) -> dict[str, DeviceKind]:
        if self._given_kinds is None:
            return known_kinds()
        return {kind.kind: kind for kind in self._given_kinds}

    def _kind(self, name: str, device: DeviceKind) -> DeviceKind | None:
        return device if name == device.kind else self._kinds.get(name)

    def _measured_format(self, kind: DeviceKind, precision: str) -> str:
        """The number format in which this kind's laws of the precision ran."""
        key = (kind.kind, precision)
        products = [
            1.0 / term.coefficient
            for law in self._operator_laws
            if (law.device, law.precision) == key and law.operator == OperatorClass.MATRIX_PRODUCT
            for term in law.terms
            if "flops" in term.column and term.coefficient > 0
        ]
        layers = [
            1.0 / term.coefficient
            for law in self._layers
            if (law.device, law.precision, law.phase) == (*key, Phase.FORWARD.value)
            for term in law.terms
            if term.column in (Column.FLOPS, Column.MATRIX_FLOPS) and term.coefficient > 0
        ]
        return measured_format(kind, precision, products or layers)

    def _rated(
        self, laws: Iterable[_Law], device: DeviceKind, precision: Precision
    ) -> list[Rated[_Law]]:
        """Laws of equally wide elements whose kinds' figures are known."""
        rated = []
        for law in laws:
            if Precision(law.precision).bytes_per_element != precision.bytes_per_element:
                continue
            kind = self._kind(law.device, device)
            of_kind = None if kind is None else rates(kind, self._format(kind, law.precision))
            if of_kind is not None:
                rated.append(Rated(law=law, rates=of_kind))
        return rated

    def _target(
        self, device: DeviceKind, precision: Precision, sources: Sequence[Rated[_Law]]
    ) -> Rates | None:
        measured = [source.rates for source in sources]
        return rates(device, asked_format(device, precision.value, measured))

    def _by_operators(self, device: DeviceKind, query: LayerQuery) -> Prediction | None:
        lent = self.lent(device, query.precision)
        if lent is None:
            return None
        operators = self.operators(device, query.precision)
        summed = composed.layer_prediction(operators, device, query, narrow=self.narrow)
        if summed is None:
            return None
        averages = lent.classes_of_others
        lent_seconds = sum(part.seconds for part in summed.parts if part.name in averages)
        added = SUM_LOG_HALFWIDTH * lent_seconds / summed.seconds if summed.seconds > 0 else 0.0
        note = (
            f"{device.kind} {query.precision.value} not measured: {lent.lenders}, by datasheet "
            "ratios"
        )
        return replace(
            summed,
            source=RELATED,
            log_halfwidth=math.hypot(summed.log_halfwidth, added),
            extrapolating=(note, *composed.worth_saying(summed.extrapolating)),
        )

    def _lend(self, device: DeviceKind, precision: Precision) -> RelatedLaws | None:
        sources = self._rated(self._operator_laws, device, precision)
        target = self._target(device, precision, sources)
        if target is None or not sources:
            return None
        spreads = self._spreads.setdefault(precision.bytes_per_element, Spreads(sources))
        return related_laws(target, precision.value, sources, spreads)

    def _operators(self, device: DeviceKind, precision: Precision) -> DeviceOperators | None:
        lent = self.lent(device, precision)
        if lent is None:
            return None
        return index_operators(lent.laws).get((device.kind, precision.value))

    def _layer_sources(
        self, device: DeviceKind, layer: LayerKind, phase: str, precision: Precision
    ) -> list[RatedLayer]:
        laws = (
            law
            for law in self._layers
            if (law.layer, law.phase) == (layer.value, phase)
            and (law.device, law.precision) != (device.kind, precision.value)
        )
        return self._rated(laws, device, precision)

    def _by_layers(
        self, device: DeviceKind, query: LayerQuery, sources: Sequence[RatedLayer]
    ) -> Prediction | None:
        target = self._target(device, query.precision, sources)
        if target is None:
            return None
        pooled = self._pooled(device, query.layer, query.phase, query.precision)
        return None if pooled is None else related_layer(sources, target, query, pooled)

    def _pooled_layers(
        self, device: DeviceKind, layer: LayerKind, phase: str, precision: Precision
    ) -> PooledLayers | None:
        sources = self._sources(device, layer, phase, precision)
        target = self._target(device, precision, sources)
        if target is None:
            return None
        kinds = []
        for source in sources:
            same = [law for law in self._layers if law.device == source.law.device]
            rows = kind_rows(source, same)
            if rows.rows:
                kinds.append(rows)
        return pooled_layers(kinds, target, layer)


# Layers of published kinds, each chip left out: 16-bit sums of operators (6 kinds) and whole
# float32 layers (7). By analysis of variance over kinds and passes tau^2 / (tau^2 + sigma^2) is
# .70. A point leaves sqrt(1 - s^2) of the errors; by what it left s is .80 (.75 and .85).
# Between the two: test_predict_related_reference computes both, and with a point 100 % of its rows
# are inside the interval.
SHARED_VARIANCE = 0.77
"""Part of a prior's variance that all sizes of a kind share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How far a kind lies from its prior, after its measured points."""

    log_mean: float
    log_halfwidth: float
    """Half-width of a prediction that was multiplied by exp(log_mean)."""


def shift(log_ratios: Sequence[float], log_halfwidth: float) -> Shift:
    """The shift by log(measured / prior) of each point and the prior's own half-width."""
    variance = (log_halfwidth / NORMAL_90) ** 2
    shared = SHARED_VARIANCE * variance
    single = variance - shared
    if not log_ratios or variance <= 0:
        return Shift(log_mean=0.0, log_halfwidth=log_halfwidth)
    count = len(log_ratios)
    left = 1.0 / (1.0 / shared + count / single)
    mean = sum(log_ratios) * shared / (count * shared + single)
    return Shift(log_mean=mean, log_halfwidth=NORMAL_90 * math.sqrt(left + single))


Answer = Callable[[LayerQuery], Prediction]
"""One pass of a layer on one kind, by everything but laws of its own whole layers."""


def with_prior(own: Prediction, law: LayerLaw, query: LayerQuery, prior: Answer) -> Prediction:
    """The law's own answer; where it has one or two points the prior, shifted to them.

    A law of more points is not second-guessed far from them either: what a trainer ran when its
    layers were measured is in the law, and in the prior only by assumption.
    """
    if law.points >= MIN_POINTS or measured_itself(law, query):
        return own
    shifted = _shifted_prior(law, query, prior)
    if shifted is None:
        return own
    return replace(shifted, extrapolating=(*shifted.extrapolating, *own.extrapolating))


def _shifted_prior(law: LayerLaw, query: LayerQuery, prior: Answer) -> Prediction | None:
    """The prior times what the law's points say; None where nothing else is known of its kind."""
    try:
        assumed = prior(query)
        ratios = [
            math.log(size.seconds / prior(size.query).seconds)
            for size in ends_of(law, query.kernels)
        ]
    except InputError:
        return None  # a kind without a datasheet, such as a CPU
    # One point of a range with two ends is one point.
    shifted = shift(ratios[: law.points], assumed.log_halfwidth)
    count = f"{law.points} point{'s' if law.points > 1 else ''} measured"
    note = f"{law.device} {law.layer} {law.phase}: {count}, which scale the rest"
    return replace(
        corrected(assumed, math.exp(shifted.log_mean)),
        log_halfwidth=shifted.log_halfwidth,
        extrapolating=(note, *assumed.extrapolating),
    )


class OwnOperators:
    """Operators of each kind by its own laws; those of one or two points shift what others lend."""

    def __init__(self, laws: Sequence[OperatorLaw], related: Related) -> None:
        self._laws = tuple(law for law in laws if law.precision in tuple(Precision))
        self._few = {(law.device, law.precision) for law in laws if law.points < MIN_POINTS}
        self._measured = index_operators(laws)
        self._related = related
        self._shifted = cache(self._with_shifted_laws)

    def of(self, device: DeviceKind, precision: Precision) -> DeviceOperators | None:
        """Laws of this kind and precision; None where no operator was measured."""
        key = (device.kind, precision.value)
        return self._shifted(device, precision) if key in self._few else self._measured.get(key)

    def _with_shifted_laws(self, device: DeviceKind, precision: Precision) -> DeviceOperators:
        key = (device.kind, precision.value)
        related = self._related.lent(device, precision)
        lent = () if related is None else related.laws
        return index_operators(
            _shifted_law(law, lent) if law.points < MIN_POINTS else law
            for law in self._laws
            if (law.device, law.precision) == key
        )[key]


def _shifted_law(law: OperatorLaw, lent: Sequence[OperatorLaw]) -> OperatorLaw:
    """The lent law of this class and pass, shifted to the points; itself where none is lent."""
    same = [each for each in lent if (each.operator, each.phase) == (law.operator, law.phase)]
    if not same:
        return law
    ratios = [math.log(own / other) for own, other in _times(law, same[0]) if own > 0 and other > 0]
    if not ratios:
        return same[0]
    moved = shift([statistics.fmean(ratios)] * law.points, same[0].log_halfwidth)
    factor = math.exp(moved.log_mean)
    return replace(
        same[0],
        terms=same[0].scaled_terms(lambda _: factor),
        log_halfwidth=moved.log_halfwidth,
        shapes=(),
        residual=None,
        calibration=f"{same[0].calibration}, moved to {law.points} measured",
    )


def _times(law: OperatorLaw, lent: OperatorLaw) -> list[tuple[float, float]]:
    """Measured seconds and those of the lent law, where the shapes are known; else both laws'."""
    if law.shapes:
        return [(shape.seconds, lent.seconds(shape.operator(law.operator))) for shape in law.shapes]
    return [(law.seconds(op), lent.seconds(op)) for op in probes(law.operator)]
