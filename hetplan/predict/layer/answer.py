"""What a law of whole measured layers answers for one layer: its table, else its sum of columns.

A shape that was itself measured has its median (`predict.layer_measured`). A layer that was
measured at this tp and sequence length is read off its table (`predict.layer_table`); a size beyond
the table, or another vocabulary, changes that time by the ratio that the columns give. Everything
else is the sum of columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hetplan.job.spec import Precision
from hetplan.model.layers import Attention, Mlp
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.predict import datasheet
from hetplan.predict.laws import LayerLaw, outside
from hetplan.predict.layer.columns import Column, layer_columns
from hetplan.predict.layer.laws import measured_values
from hetplan.predict.layer.tables import LayerTable
from hetplan.predict.predictor import MEASURED, Prediction


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
    itself = measured_itself(law, model, layer, shape)
    if itself is not None:
        return Prediction(
            seconds=itself[0],
            log_halfwidth=itself[1],
            source=MEASURED,
            extrapolating=kernel_notes(law, shape.kernels),
        )
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
        seconds=seconds,
        log_halfwidth=halfwidth,
        source=MEASURED,
        extrapolating=(*warnings, *kernel_notes(law, shape.kernels)),
    )


def kernel_notes(law: LayerLaw, kernels: Kernels) -> tuple[str, ...]:
    """What of a job's kernels is not known to be in the law, because samples do not say theirs.

    A law with a column of scores was measured with scores in memory, by all that its rows say.
    """
    return _kernel_notes(
        law.layer, any(term.column == Column.SCORE_BYTES for term in law.terms), kernels
    )


@lru_cache(maxsize=64)
def _kernel_notes(layer: str, kept_scores: bool, kernels: Kernels) -> tuple[str, ...]:
    if layer == LayerKind.TRANSFORMER:
        asked = [
            *(("scores in memory",) if not (kernels.fused_attention or kept_scores) else ()),
            *(("dropout of scores",) if kernels.attention_dropout else ()),
            *(("dropout of the residual",) if kernels.hidden_dropout else ()),
            *(("sequence parallelism",) if kernels.sequence_parallel else ()),
        ]
    elif layer == LayerKind.HEAD:
        asked = [] if kernels.fused_loss else ["a float32 copy of the logits"]
    else:
        asked = ["dropout"] if kernels.hidden_dropout else []
    notes = []
    if asked:
        notes.append(
            f"kernels of the measured {layer} layers are not known: {', '.join(asked)} may "
            "not be in their times"
        )
    if kept_scores and kernels.fused_attention:
        notes.append(
            "the measured transformer layers kept attention scores in memory, by their times; "
            "fused attention takes less"
        )
    return tuple(notes)


def measured_itself(
    law: LayerLaw, model: ModelSpec, layer: LayerKind, shape: LayerShape
) -> tuple[float, float] | None:
    """Seconds and half-width of this very layer at this size; None where it was not measured."""
    key = _key(model) if law.measured else None
    if key is None:
        return None
    vocabulary = 0 if layer is LayerKind.TRANSFORMER else model.vocab_size
    asked = (*key, vocabulary, shape.sequence_length, shape.tp)
    for each in law.measured:
        if each.key == asked:
            return each.at(shape.microbatch_size)
    return None


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
    key = _key(model)
    found = [
        table
        for table in law.tables
        if table.key[:6] == key
        and (table.sequence_length, table.tp) == (shape.sequence_length, shape.tp)
    ]
    return min(found, key=lambda each: abs(each.vocab_size - model.vocab_size), default=None)


def _key(model: ModelSpec) -> tuple[str | int, ...] | None:
    """A plain model's layer as samples name it; None of any other."""
    plain = model.layer_runs[0].layer
    attention, mlp = plain.attention, plain.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp) or plain.features():
        return None
    architecture = Architecture.LLAMA if mlp.gated else Architecture.GPT
    return (
        architecture.value,
        model.hidden_size,
        mlp.ffn_hidden_size,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
    )


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
