"""Operator times that Aceso's profiler wrote (unit/layer_times.csv) as operator samples.

The table names operators of a Megatron layer; shapes follow from the model, the microbatch size b
and the tensor-parallel degree t. With s tokens per sequence, M = b * s rows, hidden size h, a heads
of d = h / a and a vocabulary of V words:

    enc-attention-qkv, enc-MLP-GEMM-1    [M, h] x [h, 3h/t] and [M, h] x [h, 4h/t]; the first holds
                                         copies of its result besides and is not used
    enc-attention-dense, enc-MLP-GEMM-2  [M, h/t] x [h/t, h] and [M, 4h/t] x [4h/t, h]
    enc-attention-score, -context        b*a/t products [s, d] x [d, s] and [s, s] x [s, d]
    enc-attention-softmax, -dropout      b*a/t*s rows of s
    layernorm, post-*-dropout, gelu      M rows of h; gelu of 4h/t; bias, dropout and addition of
                                         post-*-dropout are three kernels
    encoder-embedding                    M rows of h out of V
    gpt-post-process                     logits [M, h] x [h, V] and cross-entropy, in one time: a
                                         loss with k = h

What the table does not say of itself (README of the reference folder; rates of the rows):
`bwd_us` of the four products and of the logits holds the gradient of their input alone, so it is
that phase here and there is no sample of a weights' gradient. m, n, k are those of the product that
ran: the input's gradient of [M, h] x [h, 3h/t] is [M, 3h/t] x [3h/t, h]. At t > 1 the forward of a
row-parallel product, the backward of a column-parallel one, the embedding's forward and the loss
contain communication. A time of 1e7 us marks a run out of memory. Variant `algo` 1 cuts the
products the other way and repeats the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.unit_notes import Notes, provenance, read_rows
from hetplan.errors import Fault, InputError
from hetplan.lint.known import precision_of
from hetplan.lint.rows import LayerRow
from hetplan.model.operators import ADDITION_APART, OperatorClass
from hetplan.profiling.samples import OperatorPhase, OperatorSample, ProfileSet

FILE = Path("unit") / "layer_times.csv"
TOOL = "Aceso's profiler (eth-easl/sailor)"
SEQUENCE = 2048  # of all three models; act_mb of the scores is b * a * s * s * 2 bytes with it
_FAILED_SECONDS = 9.0  # the mark is 10 s; the slowest real row takes 4.4 s

_SHAPES = {
    # Hidden size, heads, vocabulary: from act_mb of the scores and weights_mb of the logits of the
    # table itself. GPT-Neo was measured with 32 heads and a vocabulary of 128256 (its own: 20 and
    # 50257).
    "OPT-350": (1024, 16, 50272),
    "GPT-Neo-2.7": (2560, 32, 128256),
    "OPT-30": (7168, 56, 50272),
}
_COLUMN_PARALLEL = ("enc-attention-qkv", "enc-MLP-GEMM-1")
_ROW_PARALLEL = ("enc-attention-dense", "enc-MLP-GEMM-2")
_PRODUCTS = (*_COLUMN_PARALLEL, *_ROW_PARALLEL)
_EMBEDDING, _LOSS = "encoder-embedding", "gpt-post-process"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """One pass of one operator."""

    operator: OperatorClass
    phase: OperatorPhase
    batch: int = 1
    m: int
    n: int
    k: int = 0


def read_operators(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per device of the table; rows that are not used are counted in the notes."""
    material = read_rows(folder / FILE, notes)
    if material is None:
        return ()
    by_device: dict[str, list[LayerRow]] = {}
    for row in material.layers:
        if "Aceso" in row.source:
            by_device.setdefault(row.device, []).append(row)
        elif row.operation == "layer":
            notes.unused["layer_times.csv: Sailor's layers, read from sailor/ instead"] += 1
        else:
            notes.unused[f"layer_times.csv: {row.device} says no kind of device"] += 1
    return tuple(_population(label, rows, notes) for label, rows in by_device.items())


def _population(label: str, rows: Sequence[LayerRow], notes: Notes) -> ProfileSet:
    device = notes.kind(label)
    samples = [sample for row in rows for sample in _samples(row, device, notes)]
    words = (
        "float16 and float32 (TF32 where the device has it: A100, GH200, RTX 3090); unfused "
        "attention with dropout; bias, dropout and addition in three kernels; no gradient of "
        "weights of a matrix product; one time each, whose spread is not said"
    )
    return ProfileSet(
        layers=(),
        links=(),
        operators=tuple(samples),
        provenance=(provenance(device, label, tool=TOOL, file=str(FILE), words=words),),
    )


def _samples(row: LayerRow, device: str, notes: Notes) -> Iterator[OperatorSample]:
    """Samples of both passes of a row, where they can be used."""
    if row.variant not in ("", "0"):
        notes.unused[_VARIANT] += 1
        return
    if row.operation == "final-layernorm":
        notes.unused[_FINAL_NORM] += 1
        return
    for is_forward in (True, False):
        seconds = row.forward_seconds if is_forward else row.backward_seconds
        reason = _unusable(row, seconds, is_forward=is_forward)
        if reason or seconds is None:
            notes.unused[reason] += 1
        else:
            yield _sample(row, device, _shape(row, is_forward=is_forward), seconds)


_PASSES = "layer_times.csv, single passes"
_VARIANT = (
    "layer_times.csv: algo 1, the product cut the other way (at tp > 1 with communication); its "
    "other operators repeat those of algo 0"
)
_FINAL_NORM = (
    "layer_times.csv: final-layernorm, which holds a transposition (twice as long as a layer's "
    "norm from microbatch 2 on)"
)


# Aceso's operator of it cuts its result apart with split_tensor_along_last_dim(mixed_x_layer, 3,
# contiguous_split_chunks=True), which copies it; Megatron-LM's attention (megatron/model/
# transformer.py) does so without the copy. Backward puts three gradients together again. The rows
# say the same: [16384, 7168] x [7168, 21504] takes 1.2 ms more than the other products' rate asks
# for, 4 bytes per element of its result at 1.15 TB/s.
_COPIED = (
    f"{_PASSES}: query-key-value product, in one time with copies of its result that trainers do "
    "not make"
)


def _unusable(row: LayerRow, seconds: float | None, *, is_forward: bool) -> str:
    """Why a pass is not used; empty: it is."""
    if seconds is None or seconds <= 0:
        return f"{_PASSES}: no time"
    if seconds >= _FAILED_SECONDS:
        return f"{_PASSES}: 1e7 us, the mark of a run out of memory"
    if row.operation == "enc-attention-qkv":
        return _COPIED
    reduced = _ROW_PARALLEL if is_forward else _COLUMN_PARALLEL
    if row.tp > 1 and row.operation in reduced:
        return f"{_PASSES}: product at tp > 1 with the tensor-parallel communication in it"
    if row.tp > 1 and (row.operation == _LOSS or (row.operation == _EMBEDDING and is_forward)):
        return f"{_PASSES}: {row.operation} at tp > 1 with the tensor-parallel communication in it"
    return ""


def _shape(row: LayerRow, *, is_forward: bool) -> _Shape:
    hidden, heads, vocabulary = _dimensions(row)
    name, tp = row.operation, row.tp
    if heads % tp:
        raise _wrong(row, "tp", f"found {tp}; it does not divide the {heads} heads of {row.model}")
    tokens = row.microbatch_size * SEQUENCE
    whole = OperatorPhase.FORWARD if is_forward else OperatorPhase.BACKWARD
    if name in _PRODUCTS:
        return _product(name, tokens, hidden, tp, is_forward=is_forward)
    batch, width = row.microbatch_size * heads // tp, hidden // heads
    if name == "enc-attention-score":
        score = OperatorClass.ATTENTION_SCORE
        return _Shape(operator=score, phase=whole, batch=batch, m=SEQUENCE, n=SEQUENCE, k=width)
    if name == "enc-attention-context":
        context = OperatorClass.ATTENTION_CONTEXT
        return _Shape(operator=context, phase=whole, batch=batch, m=SEQUENCE, n=width, k=SEQUENCE)
    if name == _EMBEDDING:
        embedding, words = OperatorClass.EMBEDDING, vocabulary // tp
        return _Shape(operator=embedding, phase=whole, m=tokens, n=hidden, k=words)
    if name == _LOSS:
        # Backward as of the other products: 57.9 ms at hidden 7168 and 16384 tokens, where one
        # product takes about 41 and two would take 81.
        passes = OperatorPhase.FORWARD if is_forward else OperatorPhase.INPUT_GRADIENT
        loss = OperatorClass.LOSS
        return _Shape(operator=loss, phase=passes, m=tokens, n=vocabulary // tp, k=hidden)
    inner = 4 * hidden // tp
    others = {
        "enc-attention-softmax": (OperatorClass.SOFTMAX, batch * SEQUENCE, SEQUENCE, 0),
        "enc-attention-dropout": (OperatorClass.ATTENTION_DROPOUT, batch * SEQUENCE, SEQUENCE, 0),
        "enc-1st-layernorm": (OperatorClass.NORM, tokens, hidden, 0),
        "enc-2nd-layernorm": (OperatorClass.NORM, tokens, hidden, 0),
        "enc-MLP-gelu": (OperatorClass.ACTIVATION, tokens, inner, inner),
        # Three kernels: 17 bytes per element of float16, where one would move 7.
        "enc-post-attention-dropout": (OperatorClass.ADDITION, tokens, hidden, ADDITION_APART),
        "enc-post-MLP-dropout": (OperatorClass.ADDITION, tokens, hidden, ADDITION_APART),
    }
    if name not in others:
        raise _wrong(row, "op", f"found operator {name[:60]!a}; known are those of this table")
    operator, m, n, k = others[name]
    return _Shape(operator=operator, phase=whole, m=m, n=n, k=k)


def _product(name: str, tokens: int, hidden: int, tp: int, *, is_forward: bool) -> _Shape:
    """A product with weights, or the gradient of its input."""
    inputs, outputs = {
        "enc-attention-qkv": (hidden, 3 * hidden // tp),
        "enc-attention-dense": (hidden // tp, hidden),
        "enc-MLP-GEMM-1": (hidden, 4 * hidden // tp),
        "enc-MLP-GEMM-2": (4 * hidden // tp, hidden),
    }[name]
    product = OperatorClass.MATRIX_PRODUCT
    if is_forward:
        forward = OperatorPhase.FORWARD
        return _Shape(operator=product, phase=forward, m=tokens, n=outputs, k=inputs)
    gradient = OperatorPhase.INPUT_GRADIENT
    return _Shape(operator=product, phase=gradient, m=tokens, n=inputs, k=outputs)


def _dimensions(row: LayerRow) -> tuple[int, int, int]:
    if row.model not in _SHAPES:
        names = ", ".join(_SHAPES)
        raise _wrong(row, "model", f"found model {row.model[:60]!a}; shapes are known of {names}")
    return _SHAPES[row.model]


def _wrong(row: LayerRow, column: str, message: str) -> InputError:
    place = row.place
    return InputError(Fault(file=place.file, line=place.line, field=column, message=message))


def _sample(row: LayerRow, device: str, shape: _Shape, seconds: float) -> OperatorSample:
    precision = precision_of(row.precision)
    if not precision:
        raise _wrong(row, "dtype", f"found {row.precision[:60]!a}; fp16, bf16 or fp32 is due")
    return OperatorSample(
        device=device,
        operator=shape.operator.value,
        phase=shape.phase.value,
        precision=precision,
        # Megatron-LM's cross-entropy works on a float32 copy of the logits.
        output_precision="float32" if shape.operator is OperatorClass.LOSS else precision,
        batch=shape.batch,
        m=shape.m,
        n=shape.n,
        k=shape.k,
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=1,
        outliers=0,
    )
