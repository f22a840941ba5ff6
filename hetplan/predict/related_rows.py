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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.job.spec import Precision
from hetplan.model.layers import Attention, LatentAttention
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.predict.columns import LayerColumns, layer_columns
from hetplan.predict.datasheet import (
    ELEMENTWISE_EFFICIENCY_FORWARD,
    LAUNCH_SECONDS_FORWARD,
    LAYER_LAUNCHES,
    MATRIX_EFFICIENCY,
    SCORE_PASSES,
)
from hetplan.predict.laws import LayerLaw
from hetplan.predict.layer_answer import LayerShape
from hetplan.predict.layer_table import LayerTable
from hetplan.predict.related_kinds import Rates

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

    model: ModelSpec
    shape: LayerShape
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


def values(
    rates: Rates, model: ModelSpec, layer: LayerKind, shape: LayerShape
) -> tuple[float, ...] | None:
    """What a pass of this layer asks of a kind; None of kinds of layers that have no such form."""
    columns = _columns(model, layer, shape)
    tokens = shape.microbatch_size * shape.sequence_length
    width = shape.precision.bytes_per_element
    one, split = 1.0, float(shape.tp > 1)
    bandwidth = rates.bytes_per_second
    hidden = tokens * model.hidden_size * width / bandwidth
    if layer is LayerKind.EMBEDDING:
        return one, split, hidden, columns.weight_bytes / bandwidth
    if layer is LayerKind.HEAD:
        logits = tokens * model.vocabulary_slice(shape.tp) * width
        return one, split, *_products(columns.matrix_flops, rates), logits / bandwidth, hidden
    if layer is not LayerKind.TRANSFORMER:
        return None
    plain = model.common_layer(shape.sequence_length)
    alone = (2.0 * plain.num_norms + 4.0) * hidden  # as `model.work` counts them
    flops = columns.matrix_flops + _CAUSAL * columns.attention_flops
    return (
        one,
        split,
        *_products(flops, rates),
        _score_bytes(plain.attention, columns, shape) / bandwidth,
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
    attention: Attention | LatentAttention, columns: LayerColumns, shape: LayerShape
) -> float:
    """Bytes of the square of scores of one rank's heads."""
    query, other = attention.slice_sizes(shape.tp)
    value = other if isinstance(attention, LatentAttention) else query
    heads = attention.num_heads / shape.tp
    # 2 operations per multiply-add, for queries with keys and scores with values.
    pairs = columns.attention_flops / (2.0 * (query + value))
    return _CAUSAL * pairs * heads * shape.precision.bytes_per_element


def _columns(model: ModelSpec, layer: LayerKind, shape: LayerShape) -> LayerColumns:
    return layer_columns(
        model,
        layer,
        microbatch_size=shape.microbatch_size,
        sequence_length=shape.sequence_length,
        tp=shape.tp,
        bytes_per_element=shape.precision.bytes_per_element,
    )


def law_seconds(law: LayerLaw, model: ModelSpec, layer: LayerKind, shape: LayerShape) -> float:
    """The law's sum of columns, without its tables."""
    columns = _columns(model, layer, shape)
    return sum(term.coefficient * columns.value(term.column) for term in law.terms)


def sizes_of(law: LayerLaw, others: Sequence[LayerLaw] = ()) -> Iterator[Size]:
    """What the law was measured at: its tables, else sizes between the ends of its ranges.

    `others` are laws of the same kind of device, whose tables know the shapes of its models.
    """
    if law.tables:
        yield from _of_tables(law)
        return
    layer, precision = LayerKind(law.layer), Precision(law.precision)
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
                shape = LayerShape(microbatch, ranges["sequence"][1], tp, precision)
                seconds = law_seconds(law, model, layer, shape)
                if seconds > 0:
                    yield Size(model=model, shape=shape, seconds=seconds)


def _of_tables(law: LayerLaw) -> Iterator[Size]:
    for table in law.tables:
        model = _model(table, table.vocab_size or _VOCABULARY)
        for microbatch, seconds in zip(table.microbatch_sizes, table.seconds, strict=True):
            shape = LayerShape(
                microbatch, table.sequence_length, table.tp, Precision(law.precision)
            )
            yield Size(model=model, shape=shape, seconds=seconds)


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
