"""Times of single operators (unit/layer_times.csv, unit/gemm_efficiency.csv) as operator samples.

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

gemm_efficiency.csv holds SimuMax's efficiencies by shape, each with the nominal rate that it was
computed with, so each is a time. Rows that differ only by a key that changes no work are several
measurements of one shape.

What SimuMax counts as operations (simu_tools/efficency_test of github.com/MooreThreads/SimuMax):

    matmul        2 b m n k
    group_matmul  2 ng M N K, every stage
    sdp_fwd       2 batch heads seq^2 (qk + v)    the full square, though the kernel is causal
    sdp_bwd       5 batch heads seq^2 (qk + v)    five products, one of them recomputed

The layout of a product says its pass: TN forward, NN gradient of the input, NT gradient of the
weights, of which out_dtype is the format; m, n, k are always those of the product itself. The
stages of group_matmul all name M, N, K of the forward product.

`repeats` counts the runs in a row that the same scripts make, warm-up included, because repeats
times seconds is how long the device was busy, and so whether it had come down to the clock that it
sustains: 25 + 75 of a product, 10 + 40 of a grouped one, 20 of attention (each waited for).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evaluation.accuracy.unit_data import MICROSECOND, Notes, Row, each_row, population, read_rows
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Precision
from hetplan.model.operators import ADDITION_APART, OperatorClass
from hetplan.profiling.samples import (
    OperatorPhase,
    OperatorSample,
    ProfileSet,
)

OPERATORS_FILE = Path("unit") / "layer_times.csv"
ACESO = "Aceso's profiler (eth-easl/sailor)"
SEQUENCE = 2048  # of all three models; act_mb of the scores is b * a * s * s * 2 bytes with it
_FAILED_SECONDS = 9.0  # the mark is 10 s; the slowest real row takes 4.4 s

_MODEL_SIZES = {
    # Hidden size, heads, vocabulary: from act_mb of the scores and weights_mb of the logits of the
    # table itself. GPT-Neo was measured with 32 heads and a vocabulary of 128256 (its own: 20 and
    # 50257).
    "OPT-350": (1024, 16, 50272),
    "GPT-Neo-2.7": (2560, 32, 128256),
    "OPT-30": (7168, 56, 50272),
}
_COLUMN_PARALLEL = ("enc-MLP-GEMM-1",)
_ROW_PARALLEL = ("enc-attention-dense", "enc-MLP-GEMM-2")
_EMBEDDING, _LOSS = "encoder-embedding", "gpt-post-process"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One pass of one operator."""

    operator: OperatorClass
    phase: OperatorPhase
    batch: int = 1
    m: int
    n: int
    k: int = 0
    inputs: Precision = Precision.BFLOAT16
    output: Precision = Precision.BFLOAT16
    operations: float = 0.0
    """As SimuMax counts them."""

    def sample(self, device: str, seconds: float, *, repeats: int = 1) -> OperatorSample:
        """A sample of one time."""
        return OperatorSample(
            device=device,
            operator=self.operator.value,
            phase=self.phase.value,
            precision=self.inputs.value,
            output_precision=self.output.value,
            batch=self.batch,
            m=self.m,
            n=self.n,
            k=self.k,
            median_seconds=seconds,
            p10_seconds=seconds,
            p90_seconds=seconds,
            repeats=repeats,
            outliers=0,
        )


def read_operators(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per device of the table; rows that are not used are counted in the notes."""
    words = ("source", "dtype", "gpu", "model", "op", "algo")
    table = read_rows(
        folder / OPERATORS_FILE,
        notes,
        words=words,
        needed=("fwd_us", "mbs", "tp"),
        others=("bwd_us",),
    )
    ours = table["source"].str.contains("Aceso")
    if not ours.all():
        others = "layer_times.csv: Sailor's layers, read from sailor/ instead, or no kind of device"
        notes.unused[others] += int((~ours).sum())
    return tuple(
        _operator_population(str(label), each_row(rows), notes)
        for label, rows in table[ours].groupby("gpu", sort=False)
    )


def _operator_population(label: str, rows: Iterable[Row], notes: Notes) -> ProfileSet:
    device = notes.kind(label)
    return population(
        device,
        label,
        tool=ACESO,
        file=OPERATORS_FILE,
        operators=[sample for row in rows for sample in _samples(row, device, notes)],
        words="float16 and float32 (TF32 where the device has it: A100, GH200, RTX 3090); unfused "
        "attention with dropout; bias, dropout and addition in three kernels; no gradient of "
        "weights of a matrix product; one time each, whose spread is not said",
    )


def _samples(row: Row, device: str, notes: Notes) -> Iterator[OperatorSample]:
    """Samples of both passes of a row, where they can be used."""
    if row.algo not in ("", "0"):
        notes.unused[_VARIANT] += 1
        return
    if row.op == "final-layernorm":
        notes.unused[_FINAL_NORM] += 1
        return
    for is_forward in (True, False):
        seconds = MICROSECOND * (row.fwd_us if is_forward else row.bwd_us)
        reason = _unusable(row, seconds, is_forward=is_forward)
        if reason:
            notes.unused[reason] += 1
        else:
            yield _operator_pass(row, is_forward=is_forward).sample(device, seconds)


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


def _unusable(row: Row, seconds: float, *, is_forward: bool) -> str:
    """Why a pass is not used; empty: it is."""
    if not seconds > 0:
        return f"{_PASSES}: no time"
    if seconds >= _FAILED_SECONDS:
        return f"{_PASSES}: 1e7 us, the mark of a run out of memory"
    if row.op == "enc-attention-qkv":
        return _COPIED
    reduced = _ROW_PARALLEL if is_forward else _COLUMN_PARALLEL
    if row.tp > 1 and row.op in reduced:
        return f"{_PASSES}: product at tp > 1 with the tensor-parallel communication in it"
    if row.tp > 1 and (row.op == _LOSS or (row.op == _EMBEDDING and is_forward)):
        return f"{_PASSES}: {row.op} at tp > 1 with the tensor-parallel communication in it"
    return ""


def _operator_pass(row: Row, *, is_forward: bool) -> _Pass:
    precision = _PRECISION_WORDS.get(row.dtype)
    if precision is None:
        raise _wrong(row, "dtype", f"found {row.dtype[:60]!a}; fp16, bf16 or fp32 is due")
    if row.model not in _MODEL_SIZES:
        names = ", ".join(_MODEL_SIZES)
        raise _wrong(row, "model", f"found model {row.model[:60]!a}; shapes are known of {names}")
    hidden, heads, vocabulary = _MODEL_SIZES[row.model]
    name, tp = row.op, int(row.tp)
    if heads % tp:
        raise _wrong(row, "tp", f"found {tp}; it does not divide the {heads} heads of {row.model}")
    tokens, inner = int(row.mbs) * SEQUENCE, 4 * hidden // tp
    batch, width = int(row.mbs) * heads // tp, hidden // heads
    product = OperatorClass.MATRIX_PRODUCT
    operator, *sizes = {
        # Operator, batch, m, n, k; of products m, n and k of the forward pass.
        "enc-attention-dense": (product, 1, tokens, hidden, hidden // tp),
        "enc-MLP-GEMM-1": (product, 1, tokens, inner, hidden),
        "enc-MLP-GEMM-2": (product, 1, tokens, hidden, inner),
        "enc-attention-score": (OperatorClass.ATTENTION_SCORE, batch, SEQUENCE, SEQUENCE, width),
        "enc-attention-context": (
            OperatorClass.ATTENTION_CONTEXT, batch, SEQUENCE, width, SEQUENCE,
        ),
        "enc-attention-softmax": (OperatorClass.SOFTMAX, 1, batch * SEQUENCE, SEQUENCE, 0),
        "enc-attention-dropout": (
            OperatorClass.ATTENTION_DROPOUT, 1, batch * SEQUENCE, SEQUENCE, 0,
        ),
        "enc-1st-layernorm": (OperatorClass.NORM, 1, tokens, hidden, 0),
        "enc-2nd-layernorm": (OperatorClass.NORM, 1, tokens, hidden, 0),
        "enc-MLP-gelu": (OperatorClass.ACTIVATION, 1, tokens, inner, inner),
        # Three kernels: 17 bytes per element of float16, where one would move 7.
        "enc-post-attention-dropout": (OperatorClass.ADDITION, 1, tokens, hidden, ADDITION_APART),
        "enc-post-MLP-dropout": (OperatorClass.ADDITION, 1, tokens, hidden, ADDITION_APART),
        _EMBEDDING: (OperatorClass.EMBEDDING, 1, tokens, hidden, vocabulary // tp),
        _LOSS: (OperatorClass.LOSS, 1, tokens, vocabulary // tp, hidden),
    }.get(name, (None,))  # fmt: skip
    if operator is None:
        raise _wrong(row, "op", f"found operator {name[:60]!a}; known are those of this table")
    batch, m, n, k = sizes
    phase = OperatorPhase.FORWARD
    if not is_forward:
        # Backward of the logits is one product: 57.9 ms at hidden 7168 and 16384 tokens, where one
        # takes about 41 and two would take 81.
        alone = operator in (product, OperatorClass.LOSS)
        phase = OperatorPhase.INPUT_GRADIENT if alone else OperatorPhase.BACKWARD
        if operator is product:
            n, k = k, n
    # Megatron-LM's cross-entropy works on a float32 copy of the logits.
    output = Precision.FLOAT32 if operator is OperatorClass.LOSS else precision
    return _Pass(
        operator=operator, phase=phase, batch=batch, m=m, n=n, k=k, inputs=precision, output=output
    )


def _wrong(row: Row, column: str, message: str) -> InputError:
    file = str(OPERATORS_FILE)
    return InputError(Fault(file=file, line=row.Index + 2, field=column, message=message))


_PRECISION_WORDS = {
    "bf16": Precision.BFLOAT16,
    "bfloat16": Precision.BFLOAT16,
    "fp16": Precision.FLOAT16,
    "float16": Precision.FLOAT16,
    "fp32": Precision.FLOAT32,
    "float32": Precision.FLOAT32,
}
_LAYOUTS = {
    "TN": OperatorPhase.FORWARD,
    "NN": OperatorPhase.INPUT_GRADIENT,
    "NT": OperatorPhase.WEIGHT_GRADIENT,
}
_STAGES = {
    "fwd": OperatorPhase.FORWARD,
    "bwd_grad_act": OperatorPhase.INPUT_GRADIENT,
    "bwd_grad_w": OperatorPhase.WEIGHT_GRADIENT,
}
"""Passes of a product, and of a grouped one, by the words of the tables."""
_REPEATS = {"matmul": 100, "group_matmul": 50, "sdp_fwd": 20, "sdp_bwd": 20}
"""Of every operation that is read (the module's docstring)."""
_ATTENTION = ("sdp_fwd", "sdp_bwd")
_BACKWARD_PRODUCTS = 5.0  # of causal attention, against the forward's two (the module's docstring)
_FORWARD_PRODUCTS = 2.0  # scores and context
# A product does what is counted, so it can exceed 1 only by as much as the clock exceeds that of
# the nominal rate: no device's boost is a quarter above it. Half of what is counted of attention is
# not done: it reaches 1.2 in the published tables and cannot reach 2.
_MAX_EFFICIENCY, _MAX_OF_ATTENTION = 1.25, 2.0


def efficiency_sample(row: Row, device: str) -> OperatorSample | str:
    """The time of one shape of a table, `key=value` pairs; a text says why there is none.

    Inputs are in bfloat16 where the shape does not say a format, as SimuMax measures.
    """
    operation, efficiency = row.op, row.efficiency
    most = _MAX_OF_ATTENTION if operation in _ATTENTION else _MAX_EFFICIENCY
    if efficiency > most:
        return (
            f"{operation}: an efficiency of {efficiency:g} is impossible (at most {most:g}): more "
            "operations than the device can do, so its nominal rate or its count is wrong"
        )
    if not efficiency > 0:
        return f"{operation}: an efficiency of {efficiency:g} is none"
    if operation not in _REPEATS:
        return f"{operation}: no operator of a layer in 16 or 32 bits"
    pairs = (part.partition("=") for part in row.shape.split(","))
    keys = {name.strip(): value.strip() for name, _, value in pairs}
    try:
        found = _MEASURED[operation](keys)
    except (KeyError, ValueError) as error:
        return f"{operation}: a shape that cannot be read ({str(error)[:60]})"
    seconds = found.operations / (efficiency * row.peak_tflops * 1e12)
    return found.sample(device, seconds, repeats=_REPEATS[operation])


def _format(keys: dict[str, str], name: str, default: Precision) -> Precision:
    return _PRECISION_WORDS[keys[name].lower()] if name in keys else default


def _product(keys: dict[str, str]) -> _Pass:
    phase = _LAYOUTS[keys["layout"]]
    batch, m, n, k = (int(keys[name]) for name in ("b", "m", "n", "k"))
    if phase is OperatorPhase.WEIGHT_GRADIENT:
        k *= batch  # the batch is summed over with the tokens
    else:
        m *= batch  # all of the batch meets the same weights: it is rows
    return _Pass(
        operator=OperatorClass.MATRIX_PRODUCT,
        phase=phase,
        batch=1,
        m=m,
        n=n,
        k=k,
        inputs=_format(keys, "dtype", Precision.BFLOAT16),
        output=_format(keys, "out_dtype", Precision.BFLOAT16),
        operations=2.0 * m * n * k,
    )


def _grouped(keys: dict[str, str]) -> _Pass:
    phase = _STAGES[keys["stage"]]
    groups, rows, columns, inner = (int(keys[name]) for name in ("ng", "M", "N", "K"))
    output = _format(keys, "out_dtype", Precision.BFLOAT16)
    m, n, k = rows, columns, inner
    if phase is OperatorPhase.INPUT_GRADIENT:
        n, k = inner, columns
    elif phase is OperatorPhase.WEIGHT_GRADIENT:
        m, n, k = columns, inner, rows
        output = _format(keys, "main_grad_dtype", output)
    return _Pass(
        operator=OperatorClass.GROUPED_PRODUCT,
        phase=phase,
        batch=groups,
        m=m,
        n=n,
        k=k,
        inputs=_format(keys, "dtype", Precision.BFLOAT16),
        output=output,
        operations=2.0 * groups * m * n * k,
    )


def _attention(keys: dict[str, str], *, is_forward: bool) -> _Pass:
    names = ("batch", "head_num", "seq_len", "qk_head_dim", "v_head_dim")
    batch, heads, tokens, keys_width, values_width = (int(keys[name]) for name in names)
    products = _FORWARD_PRODUCTS if is_forward else _BACKWARD_PRODUCTS
    width = keys_width + values_width
    return _Pass(
        operator=OperatorClass.FUSED_ATTENTION,
        phase=OperatorPhase.FORWARD if is_forward else OperatorPhase.BACKWARD,
        batch=batch * heads,
        m=tokens,
        n=tokens,
        k=-(-width // 2),  # one product over the keys' width and one over the values'
        operations=products * batch * heads * float(tokens) ** 2 * width,
    )


_MEASURED: dict[str, Callable[[dict[str, str]], _Pass]] = {
    "matmul": _product,
    "group_matmul": _grouped,
    "sdp_fwd": partial(_attention, is_forward=True),
    "sdp_bwd": partial(_attention, is_forward=False),
}
PRODUCTS_FILE = Path("unit") / "gemm_efficiency.csv"
SIMUMAX = "SimuMax efficiency tables"


def read_products(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per device of the table."""
    needed, words = ("efficiency", "peak_tflops"), ("gpu", "op", "shape")
    table = read_rows(folder / PRODUCTS_FILE, notes, words=words, needed=needed)
    by_device: dict[str, list[OperatorSample]] = {}
    for row in each_row(table):
        found = efficiency_sample(row, notes.kind(row.gpu))
        if isinstance(found, str):
            notes.unused[f"gemm_efficiency.csv: {found}"] += 1
        else:
            by_device.setdefault(row.gpu, []).append(found)
    return tuple(
        population(
            notes.kind(label),
            label,
            tool=SIMUMAX,
            file=PRODUCTS_FILE,
            operators=samples,
            words="bfloat16; products by Transformer Engine, gradients of weights accumulated into "
            "their output; attention causal, in shapes of the full square; one time per shape, "
            "whose spread is not said",
        )
        for label, samples in by_device.items()
    )
