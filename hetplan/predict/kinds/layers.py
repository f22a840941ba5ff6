"""Laws of whole layers carried to a kind that has none.

A law of whole layers cannot always tell its columns apart (with one hidden size all of them grow
alike), so its coefficients are not carried one by one. Three ways carry it:

    same chip     seconds = law_s(x) * (P_t(x) / P_s(x))^BOARD_SHARE
    pooled        seconds = P_t(x), one law of all kinds by datasheet figures (`pooled`)
    corrected     seconds = A_t(x) * exp(sum_s w_s d_s / (PRIOR_WEIGHT + sum_s w_s)),
                  d_s = mean of log(law_s(x') / A_s(x')) over sizes x' that s measured

A is what is assumed of a kind without its layers: the sum of operators that it has or that others
lend it (`operators`), where no operators were measured the datasheet; it stands in for P
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
from hetplan.model.spec import LayerKind
from hetplan.predict import datasheet
from hetplan.predict.kinds.operators import (
    MIN_CHIPS,
    Rates,
    chip_halfwidth,
    common_ranges,
    different_chips,
    likeness,
    named,
    same_chip,
)
from hetplan.predict.kinds.pooled import LeftOutQuality, PooledLayers, Size, sizes_of, values
from hetplan.predict.laws import LayerLaw, MeasuredRange, outside
from hetplan.predict.layer.answer import by_layer_law, with_features
from hetplan.predict.layer.laws import measured_values
from hetplan.predict.predictor import RELATED, LayerQuery, Prediction

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
class RatedLayer:
    """A law of whole layers and the figures of the kind that it was measured on."""

    law: LayerLaw
    rates: Rates
    offsets: dict[tuple[Kernels, Assumed], tuple[float, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What `offsets` worked out, which no size that is asked for changes."""


def datasheet_prediction(rates: Rates, query: LayerQuery) -> Prediction:
    """The datasheet's prediction on a kind in the number format that its rates are of."""
    return datasheet.layer(_in_format(rates, query.precision.value), query)


def _in_format(rates: Rates, precision: str) -> DeviceKind:
    """The kind with the rate of its number format under the job's name for it (TF32: float32)."""
    if rates.number_format == precision:
        return rates.kind
    others = tuple(pair for pair in rates.kind.peak_flops_per_second if pair[0] != precision)
    return replace(rates.kind, peak_flops_per_second=(*others, (precision, rates.flops_per_second)))


Assumed = Callable[[Rates, LayerQuery], Prediction]
"""What is assumed of a kind without its whole layers: its operators' sum, or the datasheet."""


EARNED = 0.75
"""A sum of operators replaces the law of whole layers where its left-out error is below this part:
a mean over six chips has a standard error of about a quarter of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEstimators:
    """Both estimators of a layer of a kind by other kinds' laws, and how good they are.

    None where there are too few chips of the kind's vendor to leave one out.
    """

    pooled: PooledLayers | None
    """One law of all kinds in units of their datasheets."""
    corrected: LeftOutQuality | None
    """What is assumed of the kind (its operators, as others lend them), corrected as for others."""


def related_layer(
    sources: Sequence[RatedLayer],
    target: Rates,
    query: LayerQuery,
    assumed: Assumed,
    estimators: TransferEstimators,
    *,
    shifted: bool = False,
) -> Prediction | None:
    """From laws of this layer and phase on other kinds; None where there are none.

    From another board of the same chip, else by the estimator that was less off on chips left out.
    `shifted`: the answer will be scaled to points of the kind, so that only the rest of the errors
    counts.
    """
    far = _of_other_chips(sources, target, query, assumed, estimators, shifted=shifted)
    found = []
    for source in sources:
        if same_chip(source.rates.kind, target.kind):
            own, near = _of_chip(source, target, query, assumed, estimators.pooled)
            # A board that knows this size better than all others do; what a law of other chips is
            # sure of is never how two boards of one chip differ.
            if far is None or own.log_halfwidth <= far.log_halfwidth:
                found.append(near)
    return min(found, key=lambda each: each.log_halfwidth, default=far)


def _of_other_chips(
    sources: Sequence[RatedLayer],
    target: Rates,
    query: LayerQuery,
    assumed: Assumed,
    estimators: TransferEstimators,
    *,
    shifted: bool,
) -> Prediction | None:
    pooled, corrected = estimators.pooled, estimators.corrected
    earned = corrected is not None and (
        pooled is None or corrected.off(shifted) < EARNED * pooled.off(shifted)
    )
    if pooled is not None and not earned:
        together = _of_all(sources, target, query, pooled)
        if together is not None:
            return together
    if not sources:
        return None
    there = corrected_layer(sources, target, query, assumed)
    if corrected is None:
        return there
    halfwidth, outer = _outside(sources, target, query, corrected.log_halfwidth)
    return replace(there, log_halfwidth=halfwidth, extrapolating=(*there.extrapolating, *outer))


def _of_chip(
    source: RatedLayer,
    target: Rates,
    query: LayerQuery,
    assumed: Assumed,
    pooled: PooledLayers | None,
) -> tuple[Prediction, Prediction]:
    """What the law says of its own board, and that of the target."""
    there = replace(query, precision=Precision(source.law.precision))
    own = by_layer_law(source.law, there)
    ratio = None
    if pooled is not None:
        mine, others = (pooled_seconds(pooled, each, query) for each in (target, source.rates))
        ratio = None if mine is None or not others else mine / others
    if ratio is None:
        kernels = kernels_that_ran([source], target, query, assumed)
        ratio = (
            assumed(target, replace(query, kernels=kernels)).seconds
            / assumed(source.rates, replace(there, kernels=kernels)).seconds
        )
    kind = source.rates.kind
    what = f"{query.layer.value} {query.phase}"
    added = max(chip_halfwidth(kind, target.kind), _same_chip_halfwidth(query.layer))
    return own, Prediction(
        seconds=own.seconds * ratio**BOARD_SHARE,
        log_halfwidth=math.hypot(own.log_halfwidth, added),
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {what} not measured: as {kind.kind}, the same chip",
            *own.extrapolating,
        ),
    )


def pooled_seconds(pooled: PooledLayers, rates: Rates, query: LayerQuery) -> float | None:
    """What the law of all kinds says of one; None of layers that it has no columns for."""
    found = values(rates, query)
    return None if found is None else pooled.seconds(found)


def _of_all(
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, pooled: PooledLayers
) -> Prediction | None:
    seconds = pooled_seconds(pooled, target, query)
    if not seconds:
        return None
    halfwidth, outer = _outside(sources, target, query, pooled.log_halfwidth)
    halfwidth, unlike = with_features(query, halfwidth)
    return Prediction(
        seconds=seconds,
        log_halfwidth=halfwidth,
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {query.layer.value} {query.phase} not measured: law of "
            f"{_named(sources)}, by datasheet figures, with the kernels that ran there",
            *outer,
            *unlike,
        ),
    )


def _outside(
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, log_halfwidth: float
) -> tuple[float, tuple[str, ...]]:
    """The half-width at this size and of this kind, and what of both nobody measured."""
    return outside(
        (
            *common_ranges([source.law.ranges for source in sources]),
            *_figures([source.rates for source in sources]),
        ),
        (*measured_values(query), target.flops_per_second / _TERA, target.bytes_per_second / _GIGA),
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
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, assumed: Assumed
) -> Prediction:
    """What is assumed of a kind, corrected by how far others lie from what is assumed of them."""
    kernels = kernels_that_ran(sources, target, query, assumed)
    there = assumed(target, replace(query, kernels=kernels))
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
            f"{target.kind.kind} {query.layer.value} {query.phase} not measured: what is "
            f"assumed of it, corrected as for {_named(sources)}",
        ),
    )


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
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, assumed: Assumed
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
    here = query.kernels
    return nearest if far(nearest) < far(here) - _CLEARLY else here


def offsets(source: RatedLayer, kernels: Kernels, assumed: Assumed) -> tuple[float, ...]:
    """log(measured / what is assumed of its kind) at sizes that the kind measured."""
    key = (kernels, assumed)
    if key not in source.offsets:
        source.offsets[key] = tuple(
            math.log(size.seconds / assumed(source.rates, size.query).seconds)
            for size in ends_of(source.law, kernels)
        )
    return source.offsets[key]


def ends_of(law: LayerLaw, kernels: Kernels) -> Iterator[Size]:
    """The least and the most work that a law's kind measured, with these kernels."""
    sizes = list(sizes_of(law))
    for size in {id(each): each for each in (*sizes[:1], *sizes[-1:])}.values():
        yield replace(size, query=replace(size.query, kernels=kernels))
