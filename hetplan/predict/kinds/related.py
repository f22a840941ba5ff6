"""What a kind without laws of its own takes, by the laws of other kinds.

Two estimators, each with its interval:

    layers      whole layers of all other kinds as one law, or another board of the chip
                (`kinds.layers`)
    operators   laws of single operators, lent class by class (`kinds.operators`) and added up to
                a layer as a kind's own are (`composed`)

Whole layers of three or more chips of the same vendor answer first: they hold everything that a
trainer runs and, like a kind's own law of whole layers, do not ask for kernels, because no measured
layer says which ran. With fewer chips the estimator with the narrower interval answers.

Only laws of equally wide elements are carried: bfloat16 by float16 and the reverse, each against
its own rate. Kinds are looked up in the catalogue: a law names its kind and not its figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TypeVar

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import OperatorClass
from hetplan.model.spec import LayerKind
from hetplan.predict.kinds.layers import (
    PooledLayers,
    RatedLayer,
    kind_rows,
    near_chips,
    pooled_layers,
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

_Law = TypeVar("_Law", OperatorLaw, LayerLaw)


class Related:
    """Answers from the laws of other kinds; intermediate results are cached."""

    def __init__(self, laws: FittedLaws, kinds: Sequence[DeviceKind] | None = None) -> None:
        """`kinds` are known beside the kind of the query; None: the catalogue's."""
        # A law of one or two points says what its kind took there, and nothing of another kind.
        self._laws = replace(
            laws,
            layers=tuple(law for law in laws.layers if law.points >= MIN_POINTS),
            operators=tuple(law for law in laws.operators if law.points >= MIN_POINTS),
        )
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
        for law in self._laws.layers:
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
        if self._given_kinds is not None:
            return {kind.kind: kind for kind in self._given_kinds}
        # Reading files needs a library that a predictor on its own does without.
        from hetplan.cluster.catalogue import load_catalogue

        return {kind.kind: kind for kind in load_catalogue()}

    def _kind(self, name: str, device: DeviceKind) -> DeviceKind | None:
        return device if name == device.kind else self._kinds.get(name)

    def _measured_format(self, kind: DeviceKind, precision: str) -> str:
        """The number format in which this kind's laws of the precision ran."""
        key = (kind.kind, precision)
        products = [
            1.0 / term.coefficient
            for law in self._laws.operators
            if (law.device, law.precision) == key and law.operator == OperatorClass.MATRIX_PRODUCT
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
        summed = composed.layer_prediction(self.operators(device, query.precision), device, query)
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
            extrapolating=(note, *summed.extrapolating),
        )

    def _lend(self, device: DeviceKind, precision: Precision) -> RelatedLaws | None:
        sources = self._rated(self._laws.operators, device, precision)
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
            for law in self._laws.layers
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
            same = [law for law in self._laws.layers if law.device == source.law.device]
            rows = kind_rows(source, same)
            if rows.rows:
                kinds.append(rows)
        return pooled_layers(kinds, target, layer)
