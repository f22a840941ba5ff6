"""What a law of whole measured layers answers for one layer: its table, else its sum of columns.

A shape that was itself measured has its median (`predict.layer.tables`). A layer that was
measured at this tp and sequence length is read off its table (`layer.tables`); a size beyond
the table, or another vocabulary, changes that time by the ratio that the columns give. Everything
else is the sum of columns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hetplan.model.layers import Attention, Mlp
from hetplan.model.operators import Kernels
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.predict import datasheet
from hetplan.predict.law_parts import outside
from hetplan.predict.layer.laws import measured_values
from hetplan.predict.layer.tables import LayerTable
from hetplan.predict.layer.values import Column, LayerLaw, layer_columns
from hetplan.predict.predictor import MEASURED, LayerQuery, Prediction


def by_layer_law(law: LayerLaw, query: LayerQuery) -> Prediction:
    """Time of one pass of this layer by the law, with notes on what it had not seen."""
    itself = measured_itself(law, query)
    if itself is not None:
        return Prediction(
            seconds=itself[0],
            log_halfwidth=itself[1],
            source=MEASURED,
            extrapolating=kernel_notes(law, query.kernels),
        )
    halfwidth, warnings = outside(law.ranges, measured_values(query), law.log_halfwidth)
    seconds, measured = _seconds(law, query)
    if measured:
        halfwidth = min(halfwidth, law.table_log_halfwidth)
    halfwidth, unlike = with_features(query, halfwidth)
    return Prediction(
        seconds=seconds,
        log_halfwidth=halfwidth,
        source=MEASURED,
        extrapolating=(*warnings, *unlike, *kernel_notes(law, query.kernels)),
    )


def with_features(query: LayerQuery, log_halfwidth: float) -> tuple[float, tuple[str, ...]]:
    """The half-width of a layer by laws of plain layers, and a note where it is none."""
    if query.layer is not LayerKind.TRANSFORMER:
        return log_halfwidth, ()
    features = query.model.common_layer(query.sequence_length).features()
    if not features:
        return log_halfwidth, ()
    # Work of other kernels at the rates of the measured ones: no better than a datasheet.
    note = f"layers with {', '.join(features)} not measured: rates of plain layers"
    return max(log_halfwidth, datasheet.MATRIX_LOG_HALFWIDTH), (note,)


def kernel_notes(law: LayerLaw, kernels: Kernels) -> tuple[str, ...]:
    """Notes on kernels of a job that may not be in the law: samples do not say theirs.

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
            *(("separate elementwise operators",) if not kernels.fused_elementwise else ()),
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


def measured_itself(law: LayerLaw, query: LayerQuery) -> tuple[float, float] | None:
    """Seconds and half-width of this very layer at this size; None where it was not measured."""
    key = _key(query.model) if law.measured else None
    if key is None:
        return None
    vocabulary = 0 if query.layer is LayerKind.TRANSFORMER else query.model.vocab_size
    wanted = (*key, vocabulary, query.sequence_length, query.tp)
    for each in law.measured:
        if each.key == wanted:
            return each.at(query.microbatch_size)
    return None


def _seconds(law: LayerLaw, query: LayerQuery) -> tuple[float, bool]:
    """The time, and whether this very layer was measured around this size."""
    table = _table(law, query) if law.tables else None
    if table is None:
        return law.sum_of_columns(layer_columns(query)), False
    sizes = table.microbatch_sizes
    nearest = min(max(query.microbatch_size, sizes[0]), sizes[-1])
    seconds = table.at(nearest) or 0.0
    vocabulary = table.vocab_size or query.model.vocab_size
    if nearest == query.microbatch_size and vocabulary == query.model.vocab_size:
        return seconds, True
    at_edge = replace(query, microbatch_size=nearest)
    if vocabulary != query.model.vocab_size:
        at_edge = replace(at_edge, model=replace(query.model, vocab_size=vocabulary))
    inside = law.sum_of_columns(layer_columns(at_edge))
    wanted = law.sum_of_columns(layer_columns(query))
    return (seconds * wanted / inside if inside > 0 else wanted), False


def _table(law: LayerLaw, query: LayerQuery) -> LayerTable | None:
    """The table of this very layer; of those that differ by vocabulary alone the nearest."""
    key = _key(query.model)
    same_layer = [
        table
        for table in law.tables
        if table.key[:6] == key
        and (table.sequence_length, table.tp) == (query.sequence_length, query.tp)
    ]
    return min(
        same_layer, key=lambda table: abs(table.vocab_size - query.model.vocab_size), default=None
    )


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
