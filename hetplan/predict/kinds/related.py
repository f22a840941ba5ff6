"""What a kind without laws of its own takes, by the laws of other kinds.

Two estimators, each with its interval:

    layers      laws of whole layers of all other kinds as one (`kinds.pooled`), another board of
                the chip, or what is assumed corrected as for others (`predict.kinds.layers`)
    operators   laws of single operators, lent class by class (`kinds.operators`) and added up to
                a layer as a kind's own are (`composed`)

Whole layers of three or more chips of the same vendor answer first: they hold everything that a
trainer runs and, like a kind's own law of whole layers, do not ask for kernels, because no measured
layer says which ran. Which of the ways through them is taken, and how wide the interval is, the
chips at hand decide: each is left out and predicted by the others. Otherwise the narrower one of
the two answers.

Only laws of equally wide elements are carried: bfloat16 by float16 and the reverse, each against
its own rate. Kinds are looked up in the catalogue: a law names its kind and not its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import Kernels, OperatorClass
from hetplan.model.spec import LayerKind
from hetplan.predict.kinds.layers import (
    Assumed,
    RatedLayer,
    TransferEstimators,
    corrected_layer,
    datasheet_prediction,
    near_chips,
    related_layer,
)
from hetplan.predict.kinds.operators import (
    MIN_CHIPS,
    MIN_POINTS,
    Rated,
    Rates,
    RelatedLaws,
    Spreads,
    asked_format,
    chip_halfwidth,
    measured_format,
    rates,
    related_laws,
    same_chip,
)
from hetplan.predict.kinds.pooled import (
    KindRows,
    Predicted,
    Row,
    corrected_quality,
    pooled_layers,
    sizes_of,
    values,
)
from hetplan.predict.laws import ALL_LAYERS, FittedLaws, LayerLaw
from hetplan.predict.layer import composed, float8
from hetplan.predict.layer.columns import Column
from hetplan.predict.operator.answer import DeviceOperators, index_operators
from hetplan.predict.operator.values import OperatorLaw
from hetplan.predict.predictor import RELATED, LayerQuery, Prediction
from hetplan.profiling.samples import Phase

# Whole float32 layers of Sailor's profiles against the sum of operators of the same chip or of
# others (Megatron-LM's kernels): the mean of a pass is off by .04 to .36. With this much, 82 % of
# those layers and all 16-bit sums of operators lie inside the interval: 90 % of both together.
SUM_LOG_HALFWIDTH = 0.30
"""What a trainer's layers differ by from the sum of operators that another program measured."""


@dataclass(frozen=True, slots=True)
class _Lent:
    """Operator laws that others lend one kind and precision, ready to add up."""

    laws: RelatedLaws
    index: dict[tuple[str, str], DeviceOperators]


_EstimatorKey: TypeAlias = tuple[DeviceKind, LayerKind, str, Precision, Kernels]


class Related:
    """Answers from the laws of other kinds; what was worked out once is kept."""

    __slots__ = (
        "_estimators",
        "_formats",
        "_kinds",
        "_laws",
        "_lent",
        "_others",
        "_sources",
        "_spreads",
    )

    def __init__(self, laws: FittedLaws, kinds: Sequence[DeviceKind] | None = None) -> None:
        """`kinds` are looked up beside the kind that is asked for; None: the catalogue's."""
        # A law of one or two points says what its kind took there, and nothing of another kind.
        self._laws = replace(
            laws,
            layers=tuple(law for law in laws.layers if law.points >= MIN_POINTS),
            operators=tuple(law for law in laws.operators if law.points >= MIN_POINTS),
        )
        self._kinds: dict[str, DeviceKind] | None = None
        if kinds is not None:
            self._kinds = {kind.kind: kind for kind in kinds}
        self._lent: dict[tuple[DeviceKind, str], _Lent | None] = {}
        self._spreads: dict[int, Spreads] = {}
        self._sources: dict[tuple[DeviceKind, LayerKind, str, Precision], list[RatedLayer]] = {}
        self._estimators: dict[_EstimatorKey, TransferEstimators] = {}
        self._others: dict[frozenset[str], Related] = {}
        self._formats: dict[tuple[str, str], str] = {}

    def layer(
        self, device: DeviceKind, query: LayerQuery, *, shifted: bool = False
    ) -> Prediction | None:
        """One pass of a layer; None where no law of another kind says anything of it.

        `shifted`: the answer will be scaled to points of the kind (`few_points`).
        """
        if query.kernels.product_format:
            return self._narrow(device, query, shifted=shifted)
        sources = self._layer_sources(device, query)
        layers = self._by_layers(device, query, sources, shifted=shifted)
        if layers is not None and near_chips(sources, device) >= MIN_CHIPS:
            return layers
        found = (layers, self._by_operators(device, query))
        known = [each for each in found if each is not None]
        return min(known, key=lambda each: each.log_halfwidth, default=None)

    def _narrow(self, device: DeviceKind, query: LayerQuery, *, shifted: bool) -> Prediction | None:
        """With narrow products: by operators; by whole layers, changed as the operators change."""
        plain = float8.in_one_format(query)
        whole = self.layer(device, plain, shifted=shifted)
        narrow, wide = self._by_operators(device, query), self._by_operators(device, plain)
        if whole is None or narrow is None or wide is None or whole.parts:
            return narrow
        return float8.scaled(whole, wide, narrow)

    def operators(self, device: DeviceKind, precision: Precision) -> DeviceOperators | None:
        """What other kinds lend this one, class by class; None where nothing can be lent."""
        lent = self._lent_to(device, precision)
        return None if lent is None else lent.index.get((device.kind, precision.value))

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction | None:
        """From another board of the same chip, by bandwidth; None where none was measured."""
        phase = f"{Phase.OPTIMIZER.value}:{optimizer.value}"
        for law in self._laws.layers:
            kind = self._kind(law.device, device)
            here = (law.layer, law.phase, law.precision) == (ALL_LAYERS, phase, precision.value)
            if not here or kind is None or not same_chip(kind, device):
                continue
            own, other = (each.memory_bandwidth_bytes_per_second for each in (device, kind))
            if own <= 0 or other <= 0 or kind.kind == device.kind:
                continue
            seconds = sum(
                term.coefficient
                * (parameters * other / own if term.column == Column.PARAMETERS else 1.0)
                for term in law.terms
            )
            return Prediction(
                seconds=seconds,
                log_halfwidth=math.hypot(law.log_halfwidth, chip_halfwidth(kind, device)),
                source=RELATED,
                extrapolating=(f"{device.kind} update not measured: as {kind.kind}, same chip",),
            )
        return None

    def lent(self, device: DeviceKind, precision: Precision) -> RelatedLaws | None:
        """Laws of single operators that other kinds lend this one; None where nothing can be."""
        lent = self._lent_to(device, precision)
        return None if lent is None else lent.laws

    def operator_laws(self, device: DeviceKind, precision: Precision) -> tuple[OperatorLaw, ...]:
        """Laws of single operators that others lend this kind; empty: none can be carried."""
        lent = self.lent(device, precision)
        return () if lent is None else lent.laws

    def _kind(self, name: str, device: DeviceKind) -> DeviceKind | None:
        if name == device.kind:
            return device
        if self._kinds is None:
            # Reading files needs a library that a predictor on its own does without.
            from hetplan.cluster.catalogue import load_catalogue

            self._kinds = {kind.kind: kind for kind in load_catalogue()}
        return self._kinds.get(name)

    def _format(self, kind: DeviceKind, precision: str) -> str:
        """The number format in which this kind's laws of the precision ran."""
        key = (kind.kind, precision)
        if key not in self._formats:
            products = [
                1.0 / term.coefficient
                for law in self._laws.operators
                if (law.device, law.precision) == key
                and law.operator == OperatorClass.MATRIX_PRODUCT
                for term in law.terms
                if "flops" in term.column and term.coefficient > 0
            ]
            layers = [
                1.0 / term.coefficient
                for law in self._laws.layers
                if (law.device, law.precision, law.phase) == (*key, Phase.FORWARD.value)
                for term in law.terms
                if term.column in (Column.FLOPS, Column.MATRIX_FLOPS) and term.coefficient > 0
            ]
            self._formats[key] = measured_format(kind, precision, products or layers)
        return self._formats[key]

    def _source_rates(self, law: OperatorLaw | LayerLaw, device: DeviceKind) -> Rates | None:
        kind = self._kind(law.device, device)
        return None if kind is None else rates(kind, self._format(kind, law.precision))

    def _target(
        self, device: DeviceKind, precision: Precision, measured: Sequence[Rates]
    ) -> Rates | None:
        return rates(device, asked_format(device, precision.value, measured))

    def _by_operators(self, device: DeviceKind, query: LayerQuery) -> Prediction | None:
        lent = self._lent_to(device, query.precision)
        if lent is None:
            return None
        found = composed.layer_prediction(lent.index, device, query)
        if found is None:
            return None
        averages = lent.laws.classes_of_others
        lent_seconds = sum(part.seconds for part in found.parts if part.name in averages)
        added = SUM_LOG_HALFWIDTH * lent_seconds / found.seconds if found.seconds > 0 else 0.0
        note = (
            f"{device.kind} {query.precision.value} not measured: {lent.laws.lenders}, by "
            "datasheet ratios"
        )
        return replace(
            found,
            source=RELATED,
            log_halfwidth=math.hypot(found.log_halfwidth, added),
            extrapolating=(note, *found.extrapolating),
        )

    def _lent_to(self, device: DeviceKind, precision: Precision) -> _Lent | None:
        key = (device, precision.value)
        if key not in self._lent:
            self._lent[key] = self._lend(device, precision)
        return self._lent[key]

    def _lend(self, device: DeviceKind, precision: Precision) -> _Lent | None:
        sources = []
        for law in self._laws.operators:
            if Precision(law.precision).bytes_per_element != precision.bytes_per_element:
                continue
            of = self._source_rates(law, device)
            if of is not None:
                sources.append(Rated(law=law, rates=of))
        target = self._target(device, precision, [source.rates for source in sources])
        if target is None or not sources:
            return None
        width = precision.bytes_per_element
        if width not in self._spreads:
            self._spreads[width] = Spreads(sources)
        laws = related_laws(target, precision.value, sources, self._spreads[width])
        return _Lent(laws, index_operators(laws.laws))

    def _layer_sources(self, device: DeviceKind, query: LayerQuery) -> list[RatedLayer]:
        key = (device, query.layer, query.phase, query.precision)
        if key not in self._sources:
            self._sources[key] = self._find_layer_sources(device, query)
        return self._sources[key]

    def _find_layer_sources(self, device: DeviceKind, query: LayerQuery) -> list[RatedLayer]:
        precision = query.precision
        sources = []
        for law in self._laws.layers:
            if (law.layer, law.phase) != (query.layer.value, query.phase):
                continue
            if (law.device, law.precision) == (device.kind, precision.value):
                continue
            if Precision(law.precision).bytes_per_element != precision.bytes_per_element:
                continue
            of = self._source_rates(law, device)
            if of is not None:
                sources.append(RatedLayer(law=law, rates=of))
        return sources

    def _by_layers(
        self, device: DeviceKind, query: LayerQuery, sources: Sequence[RatedLayer], *, shifted: bool
    ) -> Prediction | None:
        target = self._target(device, query.precision, [each.rates for each in sources])
        if target is None:
            return None
        estimators = self._layer_estimators(device, query, target, sources)
        assumed = self._assumed(device, query, sources)
        return related_layer(sources, target, query, assumed, estimators, shifted=shifted)

    def _assumed(
        self, device: DeviceKind, query: LayerQuery, sources: Sequence[RatedLayer]
    ) -> Assumed:
        kinds = [device, *(source.rates.kind for source in sources)]
        by_operators = all(self._lent_to(kind, query.precision) for kind in kinds)
        return self._sum_of_operators if by_operators else datasheet_prediction

    def _layer_estimators(
        self, device: DeviceKind, query: LayerQuery, target: Rates, sources: Sequence[RatedLayer]
    ) -> TransferEstimators:
        """Both estimators of a layer, judged by leaving out each chip of the vendor; kept."""
        key = (device, query.layer, query.phase, query.precision, query.kernels)
        if key not in self._estimators:
            near = [each for each in sources if each.rates.kind.vendor == device.vendor]
            kinds = [each for each in map(self._rows_of, near) if each.rows]
            self._estimators[key] = TransferEstimators(
                pooled=pooled_layers(kinds, target, query.layer),
                corrected=corrected_quality(
                    kinds, query.layer, lambda chip: self._corrected_without(chip, query)
                ),
            )
        return self._estimators[key]

    def _corrected_without(self, chip: Sequence[KindRows], query: LayerQuery) -> Predicted:
        """What is assumed of a kind, corrected as for others, without the laws of this chip."""
        others = self._without(frozenset(each.rates.kind.kind for each in chip))

        def predicted(kind: KindRows, row: Row) -> float:
            one = replace(row.size.query, kernels=query.kernels)
            device = kind.rates.kind
            sources = others._layer_sources(device, one)
            assumed = others._assumed(device, one, sources)
            return corrected_layer(sources, kind.rates, one, assumed).seconds

        return predicted

    def _without(self, kinds: frozenset[str]) -> Related:
        """The same without the laws of these kinds."""
        if kinds not in self._others:
            known = None if self._kinds is None else tuple(self._kinds.values())
            laws = replace(
                self._laws,
                layers=tuple(law for law in self._laws.layers if law.device not in kinds),
                operators=tuple(law for law in self._laws.operators if law.device not in kinds),
            )
            self._others[kinds] = Related(laws, known)
        return self._others[kinds]

    def _rows_of(self, source: RatedLayer) -> KindRows:
        law = source.law
        same = [each for each in self._laws.layers if each.device == law.device]
        rows = []
        for size in sizes_of(law, same):
            found = values(source.rates, size.query)
            if found is not None:
                rows.append(Row(size=size, values=found))
        return KindRows(rates=source.rates, rows=tuple(rows))

    def _sum_of_operators(self, of: Rates, query: LayerQuery) -> Prediction:
        return self._by_operators(of.kind, query) or datasheet_prediction(of, query)
