"""A layer's law as frozen values: which physical quantities its time is a sum of.

    seconds = sum over columns of coefficient * column,   coefficient >= 0

Each column grows with the shape by a formula that holds at every size (`model.work`), so a sum
fitted on small layers carries to large ones. Few columns, because every further one is paid for in
extrapolation; where there are too few measured shapes the sets below get smaller, in this order.
A backward pass uses its forward pass's columns: its coefficients are about twice as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.operators import BACKWARD
from hetplan.model.spec import Architecture, LayerKind, plain_model
from hetplan.model.work import layer_work
from hetplan.predict.law_parts import MeasuredRange, Term, Validation, check_columns
from hetplan.predict.layer.tables import LayerIdentity, LayerTable, MeasuredLayer, MeasuredUpdate
from hetplan.predict.predictor import LayerQuery
from hetplan.profiling.samples import LayerSample


class Column(StrEnum):
    """One physical quantity, per microbatch and tensor-parallel rank.

    Its coefficient in a law is seconds per unit of it.
    """

    CONSTANT = "constant"
    """1: launches, the host's time, fixed costs of a layer."""
    FLOPS = "flops"
    """Operations of the forward pass, 2 per multiply-add."""
    MATRIX_FLOPS = "matrix_flops"
    """Operations of the products with weights."""
    ATTENTION_FLOPS = "attention_flops"
    """Operations of scores and context, causal."""
    ELEMENTWISE_BYTES = "elementwise_bytes"
    """Bytes that everything but the matrix products reads and writes."""
    WEIGHT_BYTES = "weight_bytes"
    """Bytes of the weights that matrix products read, or of an embedding's table: its backward
    pass writes a gradient as large, however few tokens were looked up."""
    SCORE_BYTES = "score_bytes"
    """Bytes of the attention scores of a layer that keeps them in memory: heads * tokens * length
    elements. Only laws of such layers have it (`predict.layer.weak_prior`)."""
    PARAMETERS = "parameters"
    """Parameters that an optimizer updates."""


_TRANSFORMER_SETS = (
    (
        Column.CONSTANT,
        Column.MATRIX_FLOPS,
        Column.ATTENTION_FLOPS,
        Column.ELEMENTWISE_BYTES,
        Column.WEIGHT_BYTES,
    ),
    (Column.CONSTANT, Column.MATRIX_FLOPS, Column.ATTENTION_FLOPS, Column.ELEMENTWISE_BYTES),
    (Column.CONSTANT, Column.FLOPS, Column.ELEMENTWISE_BYTES),
    (Column.CONSTANT, Column.FLOPS),
    (Column.FLOPS,),
)
_HEAD_SETS = (
    (Column.CONSTANT, Column.MATRIX_FLOPS, Column.ELEMENTWISE_BYTES),
    (Column.CONSTANT, Column.MATRIX_FLOPS),
    (Column.MATRIX_FLOPS,),
)
_EMBEDDING_SETS = (
    (Column.CONSTANT, Column.ELEMENTWISE_BYTES, Column.WEIGHT_BYTES),
    (Column.CONSTANT, Column.ELEMENTWISE_BYTES),
    (Column.ELEMENTWISE_BYTES,),
)
OPTIMIZER_SETS: tuple[tuple[Column, ...], ...] = (
    (Column.CONSTANT, Column.PARAMETERS),
    (Column.PARAMETERS,),
)
"""Column sets of an optimizer's update, richest first."""


def column_sets(layer: LayerKind) -> tuple[tuple[Column, ...], ...]:
    """Column sets for a layer of this kind, richest first; the last one needs a single point."""
    if layer is LayerKind.TRANSFORMER:
        return _TRANSFORMER_SETS
    return _HEAD_SETS if layer is LayerKind.HEAD else _EMBEDDING_SETS


@dataclass(frozen=True, slots=True)
class LayerColumns:
    """Values of every column that a layer's passes use, for one shape."""

    matrix_flops: float
    attention_flops: float
    elementwise_bytes: float
    weight_bytes: float
    score_bytes: float = 0.0

    def value(self, column: str) -> float:
        """Value of one column, a `Column` value."""
        if column == "constant":
            return 1.0
        if column == "flops":
            return self.matrix_flops + self.attention_flops
        result: float = getattr(self, column)
        return result


def measured_layer(
    shape: LayerSample | LayerIdentity,
    vocabulary: int,
    *,
    layer: str,
    precision: str,
    phase: str,
    microbatch_size: int,
) -> LayerQuery:
    """What a measured time is the answer to, in a one-layer model of its shape.

    A sample does not say how many positions a GPT model learns; its sequence length stands in.
    """
    model = plain_model(
        name="measured",
        architecture=Architecture(shape.architecture),
        num_layers=1,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=vocabulary,
        max_sequence_length=shape.sequence_length,
    )
    return LayerQuery(
        model=model,
        layer=LayerKind(layer),
        microbatch_size=microbatch_size,
        sequence_length=shape.sequence_length,
        tp=shape.tp,
        precision=Precision(precision),
        is_backward=phase == BACKWARD,
    )


def layer_columns(query: LayerQuery) -> LayerColumns:
    """Column values of one layer on one tensor-parallel rank; both passes have the same."""
    model, layer, tp = query.model, query.layer, query.tp
    microbatch_size, sequence_length = query.microbatch_size, query.sequence_length
    bytes_per_element = query.precision.bytes_per_element
    work = layer_work(model, layer, microbatch_size, sequence_length, tp)
    weights = work.weight_elements
    if layer is LayerKind.EMBEDDING:
        weights += float(model.vocabulary_matrix(tp))
    scores = 0.0
    if layer is LayerKind.TRANSFORMER:
        heads = model.common_layer(sequence_length).attention.num_heads
        scores = heads / tp * microbatch_size * float(sequence_length) ** 2
    return LayerColumns(
        work.matrix_flops,
        work.attention_flops,
        work.elementwise_elements * bytes_per_element,
        weights * bytes_per_element,
        scores * bytes_per_element,
    )


ALL_LAYERS = "all"
"""Layer of an optimizer's law: an update's time goes by parameters, whichever layer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLaw:
    """Time of one phase of one kind of layer on one kind of device."""

    device: str
    precision: str
    layer: str
    """A `LayerKind` value, or `ALL_LAYERS`."""
    phase: str
    """`forward`, `backward` or `optimizer:<name>`."""
    terms: tuple[Term, ...]
    ranges: tuple[MeasuredRange, ...]
    """Measured ranges of the quantities that `range_names` lists, in its order."""
    log_halfwidth: float
    """Half-width of the 90 % interval inside the measured ranges."""
    calibration: str
    """Which errors set the interval, in words."""
    rows: int
    points: int
    """Rows with different columns."""
    validation: Validation
    notes: tuple[str, ...] = ()
    """Columns that were dropped, rows that were not steady."""
    tables: tuple[LayerTable, ...] = ()
    """Measured times of the very layers that were measured, where leaving sizes out shows that
    going between them is better than the sum of columns; else empty."""
    table_log_halfwidth: float = 0.0
    """Half-width of the 90 % interval of a time between two of a table's."""
    measured: tuple[MeasuredLayer, ...] = ()
    """The very layers that were measured, where they answer for themselves."""
    measured_updates: tuple[MeasuredUpdate, ...] = ()
    """The very updates that were measured, of an optimizer's law."""

    def sum_of_columns(self, columns: LayerColumns) -> float:
        """Seconds by the terms alone, without tables and measured layers."""
        return sum(term.coefficient * columns.value(term.column) for term in self.terms)

    def update_seconds(self, parameters: float) -> float:
        """Seconds of an optimizer's update of so many parameters, by the terms alone."""
        return sum(
            term.coefficient * (parameters if term.column == Column.PARAMETERS else 1.0)
            for term in self.terms
        )

    def __post_init__(self) -> None:
        check_columns(self.terms, Column)
        names = tuple(measured.quantity for measured in self.ranges)
        if names != range_names(self.layer):
            raise InputError(
                f"a law of layer {self.layer} has ranges of {', '.join(names) or 'nothing'}; it "
                f"needs {', '.join(range_names(self.layer))}: fit again"
            )


def range_names(layer: str) -> tuple[str, ...]:
    """Quantities whose measured ranges a law of this layer keeps."""
    if layer == ALL_LAYERS:
        return ("parameters",)
    names = ("hidden", "sequence", "microbatch", "tp")
    return names if layer == LayerKind.TRANSFORMER.value else (*names, "vocabulary")
