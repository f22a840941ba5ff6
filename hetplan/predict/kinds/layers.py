"""A layer's time on a device kind without whole layers of its own, by the layers of other kinds.

    seconds = sum over columns of coefficient * column at the kind's own datasheet figures

The columns are what the layer asks of a device, each in seconds at the figures of the kind:

    transformer   1, [tp > 1], products and the whole square of attention / rate, their tiles'
                  bytes / bandwidth, the scores' bytes / bandwidth, bytes of what is split over
                  ranks / bandwidth, bytes of what every rank does alone (norms, additions) /
                  bandwidth
    head          1, [tp > 1], products / rate, their tiles' bytes / bandwidth, the logits' bytes /
                  bandwidth, the hidden states' bytes / bandwidth
    embedding     1, [tp > 1], the hidden states' bytes / bandwidth, the table's bytes / bandwidth

so coefficients are pure numbers (1 / share of the rate, passes over memory) and seconds of a
launch, which kinds share as far as they share a trainer. tp > 1 has a constant of its own because
trainers run their collectives' host code there. A product reads its operands tile by tile, bytes in
proportion to its operations: that is why a kind with more rate per byte of bandwidth reaches less
of its rate (A100 and GH200 in TF32: .65 to .95 and .5; five kinds in float32: .9).

A row is one pass of one layer at one size that a law stands for: the times of its tables where it
has them, else the law's sum of columns over the sizes between the ends of its ranges. Coefficients
minimise the sum over rows of |log(measured / predicted)|; a row counts likeness^x / sqrt(rows of
its kind). Which x (0: all kinds alike, 1: those with a like rate per byte of bandwidth) is decided
by the kinds at hand: each chip is left out in turn and predicted by the others, and the x with the
least mean error over chips is taken. With fewer than three chips of the vendor x is 1.

Rows of few sizes leave the split between columns open that grow alike on all of them: any split
fits them, and which one comes out hangs on the processor's rounding (GH200 in float32, left out:
8 to 19 % off). Then the datasheet's arithmetic decides: coefficients are held near it so weakly
that it settles nothing else (weights of 1e-7 to 1e-5 give the same answers).

The same left-out errors set the interval. With o_c the mean and e_c the rest of the log errors of
chip c, s_o^2 from all o_c and the published spread (as in `operators`) and s_e^2 the mean
square of the e_c,

    half-width = t(0.95) * sqrt(s_o^2 (1 + 1 / chips) / (1 + 1 / published chips) + s_e^2)

Published float32 transformer layers of seven kinds, each left out: 12 % off, where the datasheet is
15 to 25 % off. By a single one of the other kinds: 14 % in the median of all pairs. A kind's own
coefficients cannot be carried one by one: with one hidden size its columns cannot be told apart.

Another board of the same chip answers first where its law knows the size better than the others
know the kind: seconds = its law's * (ratio of the law of all kinds)^BOARD_SHARE.

A measured layer does not say which kernels ran. The law answers for those that ran in the layers
it was fitted on, as a kind's own law of whole layers does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.layers import Attention, LatentAttention
from hetplan.model.operators import Kernels
from hetplan.model.spec import Architecture, LayerKind
from hetplan.predict import datasheet
from hetplan.predict.datasheet import (
    ELEMENTWISE_EFFICIENCY_FORWARD,
    LAUNCH_SECONDS_FORWARD,
    LAYER_LAUNCHES,
    MATRIX_EFFICIENCY,
    SCORE_PASSES,
)
from hetplan.predict.kinds.operators import (
    MIN_CHIPS,
    PRIOR_KINDS,
    Rated,
    Rates,
    between_chips,
    by_chip,
    chip_halfwidth,
    common_ranges,
    different_chips,
    likeness,
    named,
    of_a_further_chip,
    same_chip,
)
from hetplan.predict.law_parts import MeasuredRange, outside
from hetplan.predict.layer.answer import by_layer_law, with_features
from hetplan.predict.layer.laws import measured_values
from hetplan.predict.layer.tables import LayerIdentity
from hetplan.predict.layer.values import LayerColumns, LayerLaw, layer_columns, measured_layer
from hetplan.predict.predictor import RELATED, LayerQuery, Prediction
from hetplan.predict.regression import fit_nonnegative, log_ratio, predict, t_quantile
from hetplan.predict.sustained import typical_halfwidth

RatedLayer = Rated[LayerLaw]

_CAUSAL = 2.0
"""Attention's operations and scores are counted causally; the square has twice as many."""
_TILE_INTENSITY = 100.0
"""Operations per byte of a product's tiles: only a unit, its coefficient is fitted."""
_WIDE_HIDDEN = 4096
"""Published models have heads of 128 from about this hidden size on, of 64 below."""
_VOCABULARY = 50000
"""Vocabulary of a layer whose time does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One layer at one size, and the time of it."""

    query: LayerQuery
    seconds: float


def values(rates: Rates, query: LayerQuery) -> tuple[float, ...] | None:
    """What a pass of this layer asks of a kind; None of kinds of layers that have no such form."""
    columns, model = layer_columns(query), query.model
    tokens = query.microbatch_size * query.sequence_length
    width = query.precision.bytes_per_element
    one, split = 1.0, float(query.tp > 1)
    bandwidth = rates.bytes_per_second
    hidden = tokens * model.hidden_size * width / bandwidth
    if query.layer is LayerKind.EMBEDDING:
        return one, split, hidden, columns.weight_bytes / bandwidth
    if query.layer is LayerKind.HEAD:
        logits = tokens * model.vocabulary_slice(query.tp) * width
        return one, split, *_products(columns.matrix_flops, rates), logits / bandwidth, hidden
    if query.layer is not LayerKind.TRANSFORMER:
        return None
    plain = model.common_layer(query.sequence_length)
    alone = (2.0 * plain.num_norms + 4.0) * hidden  # as `model.work` counts them
    flops = columns.matrix_flops + _CAUSAL * columns.attention_flops
    return (
        one,
        split,
        *_products(flops, rates),
        _score_bytes(plain.attention, columns, query) / bandwidth,
        max(0.0, columns.elementwise_bytes / bandwidth - alone),
        alone,
    )


def arithmetic_coefficients(layer: LayerKind) -> tuple[float, ...]:
    """What the datasheet's prior would have as coefficient of each of `values`, of a forward pass.

    Empty of kinds of layers that have no such form.
    """
    launches = LAYER_LAUNCHES * LAUNCH_SECONDS_FORWARD
    streaming = 1.0 / ELEMENTWISE_EFFICIENCY_FORWARD
    products = 1.0 / MATRIX_EFFICIENCY, 1.0
    if layer is LayerKind.EMBEDDING:
        return launches, launches, streaming, streaming
    if layer is LayerKind.HEAD:
        return launches, launches, *products, streaming, streaming
    if layer is LayerKind.TRANSFORMER:
        return launches, launches, *products, SCORE_PASSES, streaming, streaming
    return ()


def _products(flops: float, rates: Rates) -> tuple[float, float]:
    return flops / rates.flops_per_second, flops / _TILE_INTENSITY / rates.bytes_per_second


def _score_bytes(
    attention: Attention | LatentAttention, columns: LayerColumns, query: LayerQuery
) -> float:
    """Bytes of the square of scores of one rank's heads."""
    queries, other = attention.slice_sizes(query.tp)
    value = other if isinstance(attention, LatentAttention) else queries
    heads = attention.num_heads / query.tp
    # 2 operations per multiply-add, for queries with keys and scores with values.
    pairs = columns.attention_flops / (2.0 * (queries + value))
    return _CAUSAL * pairs * heads * query.precision.bytes_per_element


def sizes_of(law: LayerLaw, others: Sequence[LayerLaw] = ()) -> Iterator[Size]:
    """What the law was measured at: its tables, else sizes between the ends of its ranges.

    `others` are laws of the same kind of device, whose tables know the shapes of its models.
    """
    if law.tables:
        yield from _of_tables(law)
        return
    ranges = {each.quantity: (int(each.least), int(each.most)) for each in law.ranges}
    known = {table.hidden_size: table for other in others for table in other.tables}
    vocabulary = ranges.get("vocabulary", (_VOCABULARY, _VOCABULARY))[1]
    for hidden in sorted({*ranges["hidden"], *known}):
        if not ranges["hidden"][0] <= hidden <= ranges["hidden"][1]:
            continue
        shape = known.get(hidden) or _gpt_layer(hidden)
        for tp in _doublings(*ranges["tp"]):
            at_tp = replace(shape, sequence_length=ranges["sequence"][1], tp=tp)
            for microbatch in _doublings(*ranges["microbatch"]):
                query = _query(law, at_tp, vocabulary, microbatch)
                seconds = law.sum_of_columns(layer_columns(query))
                if seconds > 0:
                    yield Size(query=query, seconds=seconds)


def _of_tables(law: LayerLaw) -> Iterator[Size]:
    for table in law.tables:
        for microbatch, seconds in zip(table.microbatch_sizes, table.seconds, strict=True):
            query = _query(law, table, table.vocab_size or _VOCABULARY, microbatch)
            yield Size(query=query, seconds=seconds)


def _query(law: LayerLaw, shape: LayerIdentity, vocabulary: int, microbatch: int) -> LayerQuery:
    return measured_layer(
        shape,
        vocabulary,
        layer=law.layer,
        precision=law.precision,
        phase=law.phase,
        microbatch_size=microbatch,
    )


def _doublings(least: int, most: int) -> Iterator[int]:
    value = least
    while value < most:
        yield value
        value *= 2
    yield most


def _gpt_layer(hidden: int) -> LayerIdentity:
    """A GPT layer of which the hidden size alone is known; its length and tp are not set."""
    heads = max(1, hidden // (128 if hidden >= _WIDE_HIDDEN else 64))
    return LayerIdentity(
        architecture=Architecture.GPT.value,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        vocab_size=0,
        sequence_length=1,
        tp=1,
    )


def ends_of(law: LayerLaw, kernels: Kernels) -> list[Size]:
    """The least and the most work that a law's kind measured, with these kernels."""
    sizes = list(sizes_of(law))
    ends = sizes if len(sizes) < 2 else [sizes[0], sizes[-1]]
    return [replace(size, query=replace(size.query, kernels=kernels)) for size in ends]


LIKENESS_POWERS = (0.0, 0.5, 1.0)
"""What x may be."""

# Root of the mean square, over chips, of the mean log error of a chip that was left out (Sailor's
# float32 profiles of seven NVIDIA kinds, forward and backward).
_PUBLISHED_SPREADS = {
    LayerKind.TRANSFORMER: 0.10,
    LayerKind.HEAD: 0.14,
    LayerKind.EMBEDDING: 0.69,
}

# Sailor's float32 transformer layers of seven NVIDIA kinds by one or two others: 97 and 84 % of the
# errors lie within it, widened by how far the kind's figures lie from theirs.
FEW_CHIPS_LOG_HALFWIDTH = 0.46


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRows:
    """All times that one kind showed of one kind of layer and pass."""

    rates: Rates
    rows: tuple[tuple[float, ...], ...]
    """`values` of each size."""
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLayers:
    """The law of all kinds, weighted for one of them."""

    coefficients: tuple[float, ...]
    log_halfwidth: float
    """Half-width of the 90 % interval of an unmeasured kind, inside the measured ranges."""

    def seconds(self, rates: Rates, query: LayerQuery) -> float:
        """Time of a layer on a kind; 0 of layers that the law has no columns for."""
        row = values(rates, query)
        return 0.0 if row is None else predict(self.coefficients, row)


def kind_rows(source: RatedLayer, others: Sequence[LayerLaw]) -> KindRows:
    """What the law's kind measured; `others`: laws of the same kind (`sizes_of`)."""
    rows, seconds = [], []
    for size in sizes_of(source.law, others):
        row = values(source.rates, size.query)
        if row is not None:
            rows.append(row)
            seconds.append(size.seconds)
    return KindRows(rates=source.rates, rows=tuple(rows), seconds=tuple(seconds))


def pooled_layers(
    kinds: Sequence[KindRows], target: Rates, layer: LayerKind
) -> PooledLayers | None:
    """The law for the kind with these rates; None where no kind has rows."""
    centre = arithmetic_coefficients(layer)
    near = [kind for kind in kinds if kind.rates.kind.vendor == target.kind.vendor]
    chips = by_chip(near, lambda kind: kind.rates.kind)
    if len(chips) < MIN_CHIPS:
        if not kinds:
            return None
        coefficients = _fit(kinds, target, 1.0, centre)
        return PooledLayers(coefficients=coefficients, log_halfwidth=FEW_CHIPS_LOG_HALFWIDTH)
    errors = {power: _left_out_errors(chips, power, centre) for power in LIKENESS_POWERS}
    power = min(errors, key=lambda each: _mean_size(errors[each]))
    return PooledLayers(
        coefficients=_fit(near, target, power, centre),
        log_halfwidth=_halfwidth(errors[power], _PUBLISHED_SPREADS[layer]),
    )


def _left_out_errors(
    chips: Sequence[Sequence[KindRows]], power: float, centre: Sequence[float]
) -> list[list[float]]:
    """log(measured / predicted) of all rows of each chip, by a fit of the other chips."""
    errors = []
    for chip in chips:
        others = [kind for other in chips if other is not chip for kind in other]
        of_chip: list[float] = []
        for kind in chip:
            coefficients = _fit(others, kind.rates, power, centre)
            of_chip += [
                log_ratio(seconds, predict(coefficients, row))
                for row, seconds in zip(kind.rows, kind.seconds, strict=True)
            ]
        errors.append(of_chip)
    return errors


def _mean_size(errors: Sequence[Sequence[float]]) -> float:
    """Mean |error|; chips count alike, however many rows they have."""
    return statistics.fmean(statistics.fmean(map(abs, of_chip)) for of_chip in errors)


_TIE_WEIGHT = 1e-6
"""Weight of the arithmetic coefficients beside the rows' own mean power."""


def _fit(
    kinds: Sequence[KindRows], target: Rates, power: float, centre: Sequence[float]
) -> tuple[float, ...]:
    rows = [row for kind in kinds for row in kind.rows]
    counts = [
        likeness(kind.rates, target) ** power / math.sqrt(len(kind.rows))
        for kind in kinds
        for _ in kind.rows
    ]
    coefficients = fit_nonnegative(
        rows,
        [seconds for kind in kinds for seconds in kind.seconds],
        importance=counts,
        centre=centre,
        weight=_TIE_WEIGHT,
    )
    # Nothing is known of a column that no row has; its arithmetic is no part of this law.
    return tuple(
        coefficient if any(column) else 0.0
        for coefficient, column in zip(coefficients, zip(*rows, strict=True), strict=True)
    )


def _halfwidth(errors: Sequence[Sequence[float]], published: float) -> float:
    """Half-width of the 90 % interval of a further chip, by the errors of left-out chips."""
    means = [statistics.fmean(of_chip) for of_chip in errors]
    rest = [
        (error - mean) ** 2
        for of_chip, mean in zip(errors, means, strict=True)
        for error in of_chip
    ]
    chips = len(errors)
    spread = between_chips(published, statistics.fmean(mean * mean for mean in means), chips)
    between = of_a_further_chip(spread, chips)
    return t_quantile(PRIOR_KINDS + chips) * math.sqrt(between**2 + statistics.fmean(rest))


# Layers of A100-40 took 1.00 to 1.14 times as long as of A100-80 (the middle half of 92 transformer
# and head passes that both have), where the bandwidth's ratio is 1.31 and that of the law of all
# kinds 1.2: of a chip's figures, the memory's is the one that layers follow least.
BOARD_SHARE = 0.5
"""Share of the log ratio of two boards of one chip that layers follow: between none and all."""

# 90 % of the log errors of layers that A100-40 and A100-80 predict for each other lie within.
_SAME_CHIP_LOG_HALFWIDTH = 0.25
_SAME_CHIP_EMBEDDING_LOG_HALFWIDTH = 1.2


def related_layer(
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, pooled: PooledLayers
) -> Prediction | None:
    """A layer's time by laws of other kinds; None of layers without columns."""
    far = _by_all_kinds(sources, target, query, pooled)
    if far is None:
        return None
    best = far
    for source in sources:
        if not same_chip(source.rates.kind, target.kind):
            continue
        own = by_layer_law(source.law, replace(query, precision=Precision(source.law.precision)))
        near = _by_board(source, own, target, query, pooled)
        # A board that knows this size better than all others do; what a law of other chips is
        # sure of is never how two boards of one chip differ.
        if own.log_halfwidth <= far.log_halfwidth and (
            best is far or near.log_halfwidth < best.log_halfwidth
        ):
            best = near
    return best


def _by_board(
    source: RatedLayer,
    own: Prediction,
    target: Rates,
    query: LayerQuery,
    pooled: PooledLayers,
) -> Prediction:
    """On the target, by another board of its chip; `own` is what its law says of itself."""
    mine, others = (pooled.seconds(rates, query) for rates in (target, source.rates))
    ratio = mine / others if others > 0 else 1.0
    kind, boards = source.rates.kind, _SAME_CHIP_LOG_HALFWIDTH
    if query.layer is LayerKind.EMBEDDING:
        boards = _SAME_CHIP_EMBEDDING_LOG_HALFWIDTH
    added = max(chip_halfwidth(kind, target.kind), boards)
    return Prediction(
        seconds=own.seconds * ratio**BOARD_SHARE,
        log_halfwidth=math.hypot(own.log_halfwidth, added),
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {query.layer.value} {query.phase} not measured: as {kind.kind}, "
            "the same chip",
            *own.extrapolating,
        ),
    )


def _by_all_kinds(
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, pooled: PooledLayers
) -> Prediction | None:
    seconds = pooled.seconds(target, query)
    if not seconds:
        return None
    halfwidth, beyond = _outside(sources, target, query, pooled.log_halfwidth)
    halfwidth = math.hypot(halfwidth, typical_halfwidth(target.kind.kind))
    halfwidth, unlike = with_features(query, halfwidth)
    if near_chips(sources, target.kind) < MIN_CHIPS:
        # Too few of this vendor's to say how its kinds differ: no better than a datasheet.
        halfwidth = max(halfwidth, datasheet.layer(target.kind, query).log_halfwidth)
    kinds = tuple(dict.fromkeys(source.rates.kind.kind for source in sources))
    return Prediction(
        seconds=seconds,
        log_halfwidth=halfwidth,
        source=RELATED,
        extrapolating=(
            f"{target.kind.kind} {query.layer.value} {query.phase} not measured: law of "
            f"{named(kinds)}, by datasheet figures, with the kernels that ran there",
            *beyond,
            *unlike,
        ),
    )


def near_chips(sources: Sequence[RatedLayer], kind: DeviceKind) -> int:
    """Chips of the kind's vendor among the sources."""
    kinds = (source.rates.kind for source in sources)
    return different_chips(each for each in kinds if each.vendor == kind.vendor)


_TERA, _GIGA = 1e12, 1e9


def _outside(
    sources: Sequence[RatedLayer], target: Rates, query: LayerQuery, log_halfwidth: float
) -> tuple[float, tuple[str, ...]]:
    """The half-width at this size and of this kind, and a warning for each unmeasured quantity.

    Beyond the figures of all measured kinds is a new generation of devices.
    """
    flops = [source.rates.flops_per_second / _TERA for source in sources]
    bandwidths = [source.rates.bytes_per_second / _GIGA for source in sources]
    return outside(
        (
            *common_ranges([source.law.ranges for source in sources]),
            MeasuredRange(quantity="TFLOP/s", least=min(flops), most=max(flops)),
            MeasuredRange(quantity="GB/s", least=min(bandwidths), most=max(bandwidths)),
        ),
        (*measured_values(query), target.flops_per_second / _TERA, target.bytes_per_second / _GIGA),
        log_halfwidth,
    )
