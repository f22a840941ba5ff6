"""Laws of whole layers carried to a kind that has none.

A law of whole layers cannot always tell its columns apart (with one hidden size all of them grow
alike), so its coefficients are not carried one by one. Three ways carry it:

    same chip     seconds = law_s(x) * (P_t(x) / P_s(x))^BOARD_SHARE
    pooled        seconds = P_t(x), one law of all kinds by datasheet figures (`related_pooled`)
    corrected     seconds = A_t(x) * exp(sum_s w_s d_s / (PRIOR_WEIGHT + sum_s w_s)),
                  d_s = mean of log(law_s(x') / A_s(x')) over sizes x' that s measured

A is what is assumed of a kind without its layers: the sum of operators that it has or that others
lend it (`related_operators`), where no operators were measured the datasheet; it stands in for P
where there are too few chips for one. Weights w by likeness, PRIOR_WEIGHT for the assumption itself
(d = 0). A is asked for the kernels that ran when the layers were measured (`kernels_that_ran`).

Another board of the chip answers where its law knows the size better than the others know the kind.
Of the other two the pooled law answers unless chips that were left out say that the corrected
assumption is clearly better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict import datasheet
from hetplan.predict.kinds.carried_laws import Rates, common_ranges, likeness, named, same_chip
from hetplan.predict.kinds.operators import MIN_CHIPS, chip_halfwidth, different_chips
from hetplan.predict.kinds.pooled import LeftOutRoad, PooledLayers, Size, sizes_of, values
from hetplan.predict.laws import LayerLaw, MeasuredRange, outside
from hetplan.predict.layer.answer import LayerShape, by_layer_law
from hetplan.predict.layer.laws import measured_values
from hetplan.predict.predictor import RELATED, Prediction
from hetplan.profiling.samples import Phase

PRIOR_WEIGHT = 1.0
"""Of the assumption against the laws of kinds: as much as one kind just like it."""

# Sailor's float32 transformer layers of seven NVIDIA kinds, each chip left out: 89 % of the errors
# lie within it, their mean is 19 % (tests/predict/test_predict_related_reference.py).
OTHER_KINDS_LOG_HALFWIDTH = 0.46


# Layers of A100-40 took 1.00 to 1.14 times as long as of A100-80 (the middle half of 92 transformer
# and head passes that both have), where the bandwidth's ratio is 1.31 and that of the law of all
# kinds 1.2: of a chip's figures, the memory's is the one that layers follow least.
BOARD_SHARE = 0.5
"""Share of the log ratio of two boards of one chip that layers follow: between none and all."""

# 90 % of the log errors of layers that A100-40 and A100-80 predict for each other lie within.
_SAME_CHIP_HALFWIDTHS = ((LayerKind.EMBEDDING, 1.2), (LayerKind.TRANSFORMER, 0.25))


def _same_chip_halfwidth(layer: LayerKind) -> float:
    known = dict(_SAME_CHIP_HALFWIDTHS)
    return known.get(layer, known[LayerKind.TRANSFORMER])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One pass of one layer at one size."""

    model: ModelSpec
    layer: LayerKind
    shape: LayerShape
    is_backward: bool

    @property
    def phase(self) -> str:
        """A `Phase` value."""
        return (Phase.BACKWARD if self.is_backward else Phase.FORWARD).value


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedLayer:
    """A law of whole layers and the figures of the kind that it was measured on."""

    law: LayerLaw
    rates: Rates
    offsets: dict[tuple[Kernels, Assumed], tuple[float, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What `offsets` worked out, which no size that is asked for changes."""


def paper(rates: Rates, asked: Asked) -> Prediction:
    """The datasheet's prediction on a kind in the number format that its rates are of."""
    answer = datasheet.backward if asked.is_backward else datasheet.forward
    shape = asked.shape
    return answer(
        _in_format(rates, shape.precision.value),
        asked.model,
        asked.layer,
        microbatch_size=shape.microbatch_size,
        sequence_length=shape.sequence_length,
        tp=shape.tp,
        precision=shape.precision,
        kernels=shape.kernels,
    )


def _in_format(rates: Rates, precision: str) -> DeviceKind:
    """The kind with the rate of its number format under the job's name for it (TF32: float32)."""
    if rates.number_format == precision:
        return rates.kind
    others = tuple(pair for pair in rates.kind.peak_flops_per_second if pair[0] != precision)
    return replace(rates.kind, peak_flops_per_second=(*others, (precision, rates.flops_per_second)))


Assumed = Callable[[Rates, Asked], Prediction]
"""What is assumed of a kind without its whole layers: the sum of its operators, or `paper`."""


EARNED = 0.75
"""A sum of operators replaces the law of whole layers where its left-out error is below this part:
a mean over six chips has a standard error of about a quarter of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roads:
    """Both ways to a layer of a kind by other kinds' laws, and how good they are.

    None where there are too few chips of the kind's vendor to leave one out.
    """

    pooled: PooledLayers | None
    """One law of all kinds in units of their datasheets."""
    corrected: LeftOutRoad | None
    """What is assumed of the kind (its operators, as others lend them), corrected as for others."""


def related_layer(
    sources: Sequence[RatedLayer],
    target: Rates,
    asked: Asked,
    assumed: Assumed,
    roads: Roads,
    *,
    moved: bool = False,
) -> Prediction | None:
    """From laws of this layer and phase on other kinds; None where there are none.

    From another board of the same chip, else the way that was less off on chips left out; `moved`:
    by a constant factor to points of the kind, so that only the rest of the errors counts.
    """
    far = _of_other_chips(sources, target, asked, assumed, roads, moved=moved)
    found = []
    for source in sources:
        if same_chip(source.rates.kind, target.kind):
            own, near = _of_chip(source, target, asked, assumed, roads.pooled)
            # A board that knows this size better than all others do; what a law of other chips is
            # sure of is never how two boards of one chip differ.
            if far is None or own.log_halfwidth <= far.log_halfwidth:
                found.append(near)
    return min(found, key=lambda each: each.log_halfwidth, default=far)


def _of_other_chips(
    sources: Sequence[RatedLayer],
    target: Rates,
    asked: Asked,
    assumed: Assumed,
    roads: Roads,
    *,
    moved: bool,
) -> Prediction | None:
    pooled, corrected = roads.pooled, roads.corrected
    earned = corrected is not None and (
        pooled is None or corrected.off(moved) < EARNED * pooled.off(moved)
    )
    if pooled is not None and not earned:
        together = _of_all(sources, target, asked, pooled)
        if together is not None:
            return together
    if not sources:
        return None
    there = corrected_layer(sources, target, asked, assumed)
    if corrected is None:
        return there
    halfwidth, outer = _outside(sources, target, asked, corrected.log_halfwidth)
    return replace(there, log_halfwidth=halfwidth, extrapolating=(*there.extrapolating, *outer))


def _of_chip(
    source: RatedLayer,
    target: Rates,
    asked: Asked,
    assumed: Assumed,
    pooled: PooledLayers | None,
) -> tuple[Prediction, Prediction]:
    """What the law says of its own board, and that of the target."""
    there = asked.shape._replace(precision=Precision(source.law.precision))
    own = by_layer_law(source.law, asked.model, asked.layer, there)
    ratio = None
    if pooled is not None:
        mine, others = (pooled_seconds(pooled, each, asked) for each in (target, source.rates))
        ratio = None if mine is None or not others else mine / others
    if ratio is None:
        kernels = kernels_that_ran([source], target, asked, assumed)
        here = replace(asked, shape=there)
        ratio = (
            _with(kernels, target, asked, assumed).seconds
            / _with(kernels, source.rates, here, assumed).seconds
        )
    kind = source.rates.kind
    what = f"{asked.layer.value} {asked.phase}"
    added = max(chip_halfwidth(kind, target.kind), _same_chip_halfwidth(asked.layer))
    return own, Prediction(
        seconds=own.seconds * ratio**BOARD_SHARE,
        log_halfwidth=math.hypot(own.log_halfwidth, added),
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {what} not measured: as {kind.kind}, the same chip",
            *own.extrapolating,
        ),
    )


def pooled_seconds(pooled: PooledLayers, rates: Rates, asked: Asked) -> float | None:
    """What the law of all kinds says of one; None of layers that it has no columns for."""
    found = values(rates, asked.model, asked.layer, asked.shape)
    return None if found is None else pooled.seconds(found)


def _of_all(
    sources: Sequence[RatedLayer], target: Rates, asked: Asked, pooled: PooledLayers
) -> Prediction | None:
    seconds = pooled_seconds(pooled, target, asked)
    if not seconds:
        return None
    halfwidth, outer = _outside(sources, target, asked, pooled.log_halfwidth)
    features: tuple[str, ...] = ()
    if asked.layer is LayerKind.TRANSFORMER:
        features = asked.model.common_layer(asked.shape.sequence_length).features()
    if features:
        # Work of other kernels at the rates of the measured ones: no better than a datasheet.
        halfwidth = max(halfwidth, datasheet.MATRIX_LOG_HALFWIDTH)
        outer = (*outer, f"layers with {', '.join(features)} not measured: rates of plain layers")
    return Prediction(
        seconds=seconds,
        log_halfwidth=halfwidth,
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {asked.layer.value} {asked.phase} not measured: law of "
            f"{_named(sources)}, by datasheet figures, with the kernels that ran there",
            *outer,
        ),
    )


def _outside(
    sources: Sequence[RatedLayer], target: Rates, asked: Asked, log_halfwidth: float
) -> tuple[float, tuple[str, ...]]:
    """The half-width at this size and of this kind, and what of both nobody measured."""
    shape = asked.shape
    sizes = measured_values(
        asked.model, asked.layer, shape.microbatch_size, shape.sequence_length, shape.tp
    )
    return outside(
        (
            *common_ranges([source.law.ranges for source in sources]),
            *_figures([source.rates for source in sources]),
        ),
        (*sizes, target.flops_per_second / _TERA, target.bytes_per_second / _GIGA),
        log_halfwidth,
    )


_TERA, _GIGA = 1e12, 1e9


def _figures(rates: Sequence[Rates]) -> tuple[MeasuredRange, MeasuredRange]:
    """Ranges of the figures that a law of all kinds stands on: beyond them is a new generation."""
    flops = [each.flops_per_second / _TERA for each in rates]
    bandwidths = [each.bytes_per_second / _GIGA for each in rates]
    return (
        MeasuredRange(quantity="TFLOP/s", least=min(flops), most=max(flops)),
        MeasuredRange(quantity="GB/s", least=min(bandwidths), most=max(bandwidths)),
    )


def corrected_layer(
    sources: Sequence[RatedLayer], target: Rates, asked: Asked, assumed: Assumed
) -> Prediction:
    """What is assumed of a kind, corrected by how far others lie from what is assumed of them."""
    kernels = kernels_that_ran(sources, target, asked, assumed)
    there = _with(kernels, target, asked, assumed)
    weights = [likeness(source.rates, target) for source in sources]
    means = [statistics.fmean(offsets(source, kernels, assumed) or [0.0]) for source in sources]
    total = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
    halfwidth = OTHER_KINDS_LOG_HALFWIDTH
    if near_chips(sources, target.kind) < MIN_CHIPS:
        # Too few of this vendor's to say how its kinds differ: no better than a datasheet.
        halfwidth = max(halfwidth, there.log_halfwidth)
    return Prediction(
        seconds=there.seconds * math.exp(total / (PRIOR_WEIGHT + sum(weights))),
        log_halfwidth=halfwidth,
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {asked.layer.value} {asked.phase} not measured: what is "
            f"assumed of it, corrected as for {_named(sources)}",
        ),
    )


def _with(kernels: Kernels, of: Rates, asked: Asked, assumed: Assumed) -> Prediction:
    return assumed(of, replace(asked, shape=asked.shape._replace(kernels=kernels)))


def _named(sources: Sequence[RatedLayer]) -> str:
    names = tuple(dict.fromkeys(source.rates.kind.kind for source in sources))
    return named(names)


def near_chips(sources: Sequence[RatedLayer], kind: DeviceKind) -> int:
    """Chips of the kind's vendor among the sources."""
    kinds = (source.rates.kind for source in sources)
    return different_chips(each for each in kinds if each.vendor == kind.vendor)


# A sample of a whole layer does not say which kernels ran.
_LIKELY_KERNELS = (DEFAULT_KERNELS, Kernels(fused_attention=False, fused_loss=False))


# Kinds of one trainer scatter by about this (mean |log|): less does not tell kernels apart.
_CLEARLY = 0.1


def kernels_that_ran(
    sources: Sequence[RatedLayer], target: Rates, asked: Asked, assumed: Assumed
) -> Kernels:
    """The kernels with which what is assumed of the sources lies nearest to what they showed.

    Those that are asked for, unless likely other ones lie clearly nearer (attention whose scores go
    through memory, say): then those ran when the layers were measured.
    """
    weights = [likeness(source.rates, target) for source in sources]

    def far(kernels: Kernels) -> float:
        logs = [
            (weight, abs(value))
            for source, weight in zip(sources, weights, strict=True)
            for value in offsets(source, kernels, assumed)
        ]
        total = sum(weight for weight, _ in logs)
        return sum(weight * value for weight, value in logs) / total if total > 0 else 0.0

    nearest = min(_LIKELY_KERNELS, key=far)
    here = asked.shape.kernels
    return nearest if far(nearest) < far(here) - _CLEARLY else here


def offsets(source: RatedLayer, kernels: Kernels, assumed: Assumed) -> tuple[float, ...]:
    """log(measured / what is assumed of its kind) at sizes that the kind measured."""
    key = (kernels, assumed)
    if key not in source.offsets:
        source.offsets[key] = tuple(
            math.log(size.seconds / assumed(source.rates, asked).seconds)
            for size, asked in measured_sizes(source.law, kernels)
        )
    return source.offsets[key]


def measured_sizes(law: LayerLaw, kernels: Kernels) -> Iterator[tuple[Size, Asked]]:
    """The least and the most work that a law's kind measured."""
    sizes = list(sizes_of(law))
    for size in {id(each): each for each in (*sizes[:1], *sizes[-1:])}.values():
        asked = Asked(
            model=size.model,
            layer=LayerKind(law.layer),
            shape=size.shape._replace(kernels=kernels),
            is_backward=law.phase == Phase.BACKWARD,
        )
        yield size, asked
