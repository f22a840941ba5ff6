"""Which times did kinds of device show, in units of their own datasheet figures?

A row is one pass of one layer at one size that a law stands for: the times of its tables where it
has them, else the law's sum of columns over the sizes between the ends of its ranges. Its values
are what the layer asks of a device, each in seconds at the figures of the kind:

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

How long does a layer take on a kind without samples, by one law of all kinds together?

    seconds = sum over columns of coefficient * column at the kind's own datasheet figures

with the values above as columns. Coefficients minimise the sum over rows of |log(measured /
predicted)|; a row counts likeness^x / sqrt(rows of its kind). Which x (0: all kinds alike, 1: those
with a like rate per byte of bandwidth) is decided by the kinds at hand: each chip is left out in
turn and predicted by the others, and the x with the least mean error over chips is taken.

Rows of few sizes leave the split between columns open that grow alike on all of them: any split
fits them, and which one comes out hangs on the processor's rounding (GH200 in float32, left out:
8 to 19 % off). Then the datasheet's arithmetic decides: coefficients are held near it so weakly
that it settles nothing else (weights of 1e-7 to 1e-5 give the same answers).

The same left-out errors set the interval. With o_c the mean and e_c the rest of the log errors of
chip c, s_o^2 from all o_c and the published spread (as in `operators`) and s_e^2 the mean
square of the e_c,

    half-width = t(0.95) * sqrt(s_o^2 (1 + 1 / chips) / (1 + 1 / published chips) + s_e^2)

Published float32 transformer layers of seven kinds, each left out: 12 % off, where the datasheet is
15 to 25 % off. A kind's own coefficients cannot be carried one by one: with one hidden size its
columns cannot be told apart.

A measured layer does not say which kernels ran. This law answers for those that ran in the layers
it was fitted on, as a kind's own law of whole layers does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.layers import Attention, LatentAttention
from hetplan.model.operators import BACKWARD
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
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
    PUBLISHED_CHIPS,
    Rates,
    by_chip,
    likeness,
)
from hetplan.predict.laws import LayerLaw
from hetplan.predict.layer.columns import LayerColumns, layer_columns
from hetplan.predict.layer.tables import LayerTable
from hetplan.predict.predictor import LayerQuery
from hetplan.predict.regression import fit_nonnegative, log_ratio, predict, t_quantile

_CAUSAL = 2.0
"""Attention's operations and scores are counted causally; the square has twice as many."""
_TILE_INTENSITY = 100.0
"""Operations per byte of a product's tiles: a unit, the coefficient beside it is found."""
_WIDE_HIDDEN = 4096
"""From about here on published models have heads of 128, below of 64."""
_VOCABULARY = 50000
"""Of a layer whose time does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One layer at one size, and the time of it."""

    query: LayerQuery
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One time of one kind."""

    size: Size
    values: tuple[float, ...]
    """Seconds at the datasheet's figures, but for the two constants."""

    @property
    def seconds(self) -> float:
        """What was measured."""
        return self.size.seconds


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
        table = known.get(hidden)
        model = plain(hidden, vocabulary) if table is None else _model(table, vocabulary)
        for tp in _doublings(*ranges["tp"]):
            for microbatch in _doublings(*ranges["microbatch"]):
                query = _query(law, model, microbatch, ranges["sequence"][1], tp)
                seconds = law.sum_of_columns(layer_columns(query))
                if seconds > 0:
                    yield Size(query=query, seconds=seconds)


def _of_tables(law: LayerLaw) -> Iterator[Size]:
    for table in law.tables:
        model = _model(table, table.vocab_size or _VOCABULARY)
        for microbatch, seconds in zip(table.microbatch_sizes, table.seconds, strict=True):
            query = _query(law, model, microbatch, table.sequence_length, table.tp)
            yield Size(query=query, seconds=seconds)


def _query(law: LayerLaw, model: ModelSpec, microbatch: int, length: int, tp: int) -> LayerQuery:
    return LayerQuery(
        model=model,
        layer=LayerKind(law.layer),
        microbatch_size=microbatch,
        sequence_length=length,
        tp=tp,
        precision=Precision(law.precision),
        is_backward=law.phase == BACKWARD,
    )


def _doublings(least: int, most: int) -> Iterator[int]:
    value = least
    while value < most:
        yield value
        value *= 2
    yield most


def _model(table: LayerTable, vocabulary: int) -> ModelSpec:
    return plain_model(
        name="sizes",
        architecture=Architecture(table.architecture),
        num_layers=1,
        hidden_size=table.hidden_size,
        ffn_hidden_size=table.ffn_hidden_size,
        num_attention_heads=table.num_attention_heads,
        num_kv_heads=table.num_kv_heads,
        head_dim=table.head_dim,
        vocab_size=vocabulary,
        max_sequence_length=table.sequence_length,
    )


def plain(hidden: int, vocabulary: int = _VOCABULARY) -> ModelSpec:
    """A GPT layer of which the hidden size alone is known."""
    heads = max(1, hidden // (128 if hidden >= _WIDE_HIDDEN else 64))
    return plain_model(
        name="sizes",
        architecture=Architecture.GPT,
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        vocab_size=vocabulary,
        max_sequence_length=1 << 20,
    )


LIKENESS_POWERS = (0.0, 0.5, 1.0)
"""What x may be."""

# Root of the mean square, over chips, of the mean log error of a chip that was left out (Sailor's
# float32 profiles of seven NVIDIA kinds, forward and backward).
_PUBLISHED_SPREADS = (
    (LayerKind.TRANSFORMER, 0.10),
    (LayerKind.HEAD, 0.14),
    (LayerKind.EMBEDDING, 0.69),
)


def published_spread(layer: LayerKind) -> float:
    """Standard deviation of a kind's log ratio to the law of all others, from published layers."""
    spreads = dict(_PUBLISHED_SPREADS)
    return spreads.get(layer, max(spreads.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRows:
    """Everything that one kind showed of one kind of layer and pass."""

    rates: Rates
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """log(measured / predicted) of one chip's rows, by the other chips."""

    errors: tuple[float, ...]
    after_point: tuple[float, ...]
    """Of larger layers (of all, where only one was measured), when each kind's smallest layer is
    known at its most work: the errors less that one's."""

    @property
    def mean(self) -> float:
        """What all rows share."""
        return statistics.fmean(self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutQuality:
    """How good an estimator of a layer's time is, by chips that were left out."""

    log_halfwidth: float
    error: float
    """Mean over chips of the mean |log error| of a chip that was left out."""
    rest: float
    """The same of larger layers when one point of each kind is known."""

    def off(self, shifted: bool) -> float:
        """What is wrong with it, for a kind with or without points of its own."""
        return self.rest if shifted else self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLayers(LeftOutQuality):
    """The law of all kinds, for one kind that it is asked of."""

    coefficients: tuple[float, ...]

    def seconds(self, values: Sequence[float]) -> float:
        """Time of a layer that asks this of a kind (`predict.kinds.pooled.values`)."""
        return predict(self.coefficients, values)


def pooled_layers(
    kinds: Sequence[KindRows], target: Rates, layer: LayerKind
) -> PooledLayers | None:
    """The law for the kind with these rates; None with fewer chips than can be left out."""
    chips = by_chip(kinds, _kind)
    if len(chips) < MIN_CHIPS:
        return None
    centre = arithmetic_coefficients(layer)
    tried = [(power, _left_out(chips, power, centre)) for power in LIKENESS_POWERS]
    power, found = min(tried, key=lambda each: _error(each[1]))
    return PooledLayers(
        coefficients=_fit(kinds, target, power, centre),
        log_halfwidth=left_out_halfwidth(found, published_spread(layer)),
        error=_error(found),
        rest=_mean_size(each.after_point for each in found),
    )


def _kind(rows: KindRows) -> DeviceKind:
    return rows.rates.kind


def _mean_size(errors: Iterable[Sequence[float]]) -> float:
    """Mean without sign; chips count alike, however many rows they have."""
    return statistics.fmean(statistics.fmean(map(abs, each)) for each in errors)


def _error(found: Sequence[LeftOut]) -> float:
    return _mean_size(each.errors for each in found)


Predicted = Callable[[KindRows, Row], float]
"""Seconds of a row of a kind, by something that did not see its chip."""


def left_out_chip(chip: Sequence[KindRows], predicted: Predicted) -> LeftOut:
    """Errors of all rows of a chip; its boards are of one chip and err together."""
    errors: list[float] = []
    after: list[float] = []
    for kind in chip:
        here = [log_ratio(row.seconds, predicted(kind, row)) for row in kind.rows]
        errors += here
        after += _after_point(kind.rows, here)
    return LeftOut(errors=tuple(errors), after_point=tuple(after))


def _after_point(rows: Sequence[Row], errors: Sequence[float]) -> list[float]:
    def size(at: int) -> tuple[int, int, int]:
        query = rows[at].size.query
        return query.model.hidden_size, query.tp, -query.microbatch_size

    point = min(range(len(rows)), key=size)
    larger = [at for at in range(len(rows)) if size(at)[0] > size(point)[0]]
    return [errors[at] - errors[point] for at in larger or range(len(rows))]


_MAX_ROWS = 12
"""Of one kind, evenly over its sizes: enough for a mean, where each costs a sum of operators."""


def corrected_quality(
    kinds: Sequence[KindRows],
    layer: LayerKind,
    without: Callable[[Sequence[KindRows]], Predicted],
) -> LeftOutQuality | None:
    """The same figures of another way, asked at some rows of each kind; None: too few chips."""
    chips = by_chip([replace(kind, rows=_thinned(kind.rows)) for kind in kinds], _kind)
    if len(chips) < MIN_CHIPS:
        return None
    found = [left_out_chip(chip, without(chip)) for chip in chips]
    return LeftOutQuality(
        log_halfwidth=left_out_halfwidth(found, published_spread(layer)),
        error=_error(found),
        rest=_mean_size(each.after_point for each in found),
    )


def _thinned(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(rows[:: math.ceil(len(rows) / _MAX_ROWS)])


def _left_out(
    chips: Sequence[Sequence[KindRows]], power: float, centre: Sequence[float]
) -> tuple[LeftOut, ...]:
    found = []
    for chip in chips:
        others = [kind for other in chips if other is not chip for kind in other]
        found.append(left_out_chip(chip, _predicted_by(others, power, centre)))
    return tuple(found)


def _predicted_by(others: Sequence[KindRows], power: float, centre: Sequence[float]) -> Predicted:
    fits: dict[Rates, tuple[float, ...]] = {}

    def predicted(kind: KindRows, row: Row) -> float:
        if kind.rates not in fits:
            fits[kind.rates] = _fit(others, kind.rates, power, centre)
        return predict(fits[kind.rates], row.values)

    return predicted


_TIE_WEIGHT = 1e-6
"""Of the arithmetic coefficients beside the rows' own mean power."""


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
        [row.values for row in rows],
        [row.seconds for row in rows],
        importance=counts,
        centre=centre,
        weight=_TIE_WEIGHT,
    )
    shown = zip(*(row.values for row in rows), strict=True)
    # Of what no row has nothing is known; its arithmetic is no part of this law.
    return tuple(
        found if any(column) else 0.0 for found, column in zip(coefficients, shown, strict=True)
    )


def left_out_halfwidth(found: Sequence[LeftOut], published: float) -> float:
    """Of the 90 % interval of a further chip."""
    means = [each.mean for each in found]
    rest = [(error - each.mean) ** 2 for each in found for error in each.errors]
    chips = len(found)
    between = (PRIOR_KINDS * published**2 + sum(mean * mean for mean in means)) / (
        PRIOR_KINDS + chips
    )
    between *= (1.0 + 1.0 / chips) / (1.0 + 1.0 / PUBLISHED_CHIPS)
    return t_quantile(PRIOR_KINDS + chips) * math.sqrt(between + statistics.fmean(rest))
