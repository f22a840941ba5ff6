"""What a law of whole measured layers answers for one layer: its table, else its sum of columns.

A layer that was itself measured at this tp and sequence length is read off its table
(`predict.layer_table`); a size beyond the table, or another vocabulary, changes that time by the
ratio that the columns give. Everything else is the sum of columns.
"""

from __future__ import annotations

from typing import NamedTuple

from hetplan.job.spec import Precision
from hetplan.model.layers import Attention, Mlp
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.predict import datasheet
from hetplan.predict.columns import layer_columns
from hetplan.predict.laws import LayerLaw, outside
from hetplan.predict.layer_laws import measured_values
from hetplan.predict.layer_table import LayerTable
from hetplan.predict.links import SOURCE
from hetplan.predict.predictor import Prediction


class LayerShape(NamedTuple):
    """Everything but the layer itself that its time depends on."""

    microbatch_size: int
    sequence_length: int
    tp: int
    precision: Precision
    kernels: Kernels = DEFAULT_KERNELS


def by_layer_law(
    law: LayerLaw, model: ModelSpec, layer: LayerKind, shape: LayerShape
) -> Prediction:
    """Time of one pass of this layer by the law, with notes on what it had not seen."""
    values = measured_values(model, layer, shape.microbatch_size, shape.sequence_length, shape.tp)
    halfwidth, warnings = outside(law.ranges, values, law.log_halfwidth)
    seconds, measured = _seconds(law, model, layer, shape)
    if measured:
        halfwidth = min(halfwidth, law.table_log_halfwidth)
    if layer is LayerKind.TRANSFORMER:
        features = model.common_layer(shape.sequence_length).features()
        if features:
            # Work of other kernels at the rates of the measured ones: no better than a datasheet.
            halfwidth = max(halfwidth, datasheet.MATRIX_LOG_HALFWIDTH)
            note = f"layers with {', '.join(features)} not measured: rates of plain layers"
            warnings = (*warnings, note)
    return Prediction(
        seconds=seconds, log_halfwidth=halfwidth, source=SOURCE, extrapolating=warnings
    )


def _seconds(
    law: LayerLaw, model: ModelSpec, layer: LayerKind, shape: LayerShape
) -> tuple[float, bool]:
    """The time, and whether this very layer was measured around this size."""
    table = _table(law, model, layer, shape) if law.tables else None
    if table is None:
        return _by_columns(law, model, layer, shape, model.vocab_size), False
    sizes = table.microbatch_sizes
    nearest = min(max(shape.microbatch_size, sizes[0]), sizes[-1])
    seconds = table.at(nearest) or 0.0
    vocabulary = table.vocab_size or model.vocab_size
    if nearest == shape.microbatch_size and vocabulary == model.vocab_size:
        return seconds, True
    inside = _by_columns(law, model, layer, shape._replace(microbatch_size=nearest), vocabulary)
    asked = _by_columns(law, model, layer, shape, model.vocab_size)
    return (seconds * asked / inside if inside > 0 else asked), False


def _table(
    law: LayerLaw, model: ModelSpec, layer: LayerKind, shape: LayerShape
) -> LayerTable | None:
    """The table of this very layer; of those that differ by vocabulary alone the nearest."""
    plain = model.layer_runs[0].layer
    attention, mlp = plain.attention, plain.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp) or plain.features():
        return None
    architecture = Architecture.LLAMA if mlp.gated else Architecture.GPT
    key = (
        architecture.value,
        model.hidden_size,
        mlp.ffn_hidden_size,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
    )
    found = [
        table
        for table in law.tables
        if table.key[:6] == key
        and (table.sequence_length, table.tp) == (shape.sequence_length, shape.tp)
    ]
    return min(found, key=lambda each: abs(each.vocab_size - model.vocab_size), default=None)


def _by_columns(
    law: LayerLaw, model: ModelSpec, layer: LayerKind, shape: LayerShape, vocabulary: int
) -> float:
    from dataclasses import replace

    columns = layer_columns(
        model if vocabulary == model.vocab_size else replace(model, vocab_size=vocabulary),
        layer,
        microbatch_size=shape.microbatch_size,
        sequence_length=shape.sequence_length,
        tp=shape.tp,
        bytes_per_element=shape.precision.bytes_per_element,
    )
    return sum(term.coefficient * columns.value(term.column) for term in law.terms)
