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

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.job.spec import Precision
from hetplan.lint.known import precision_of
from hetplan.lint.rows import EfficiencyRow, Inputs, LayerRow
from hetplan.lint.tables import read_table, table_kind
from hetplan.model.operators import ADDITION_APART, OperatorClass
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorPhase,
    OperatorSample,
    ProfileSet,
    Provenance,
)
from hetplan.version import __version__

KINDS = (
    # vTrain's tables say A100; its runs and paper name 80 GB cards (runs/vtrain_multi_node.csv).
    ("A100", "nvidia-a100-80gb-sxm"),
    ("A100-40", "nvidia-a100-40gb-sxm"),
    ("A100-80", "nvidia-a100-80gb-sxm"),
    ("a100_pcie", "nvidia-a100-80gb-pcie"),  # SimuMax configs/system/a100_pcie.json: mem_gbs 80
    ("b200_bf16_ceperm", "nvidia-b200-180gb-sxm"),
    ("B200", "nvidia-b200-180gb-sxm"),
    ("GH-96", "nvidia-gh200-96gb"),
    ("RTX-2080", "nvidia-rtx-2080-ti-11gb"),  # Sailor's name; products above a 2080's peak
    ("RTX-3090", "nvidia-rtx-3090-24gb"),
    ("Titan-RTX", "nvidia-titan-rtx-24gb"),
    ("V100-16", "nvidia-v100-16gb-sxm"),
)
"""Labels of the tables and the catalogue's kinds that they mean."""


_NEEDED = {
    "layer or operator times": "forward time or no microbatch size (Galvatron's totals of layers)",
    "efficiency by shape": "efficiency",
}
"""Per kind of table, what a row must have to be read at all (`hetplan.lint.tables`)."""


@dataclass(slots=True)
class Notes:
    """What a reader says beside its samples."""

    unused: Counter[str] = field(default_factory=Counter)
    """Rows per reason."""
    words: dict[str, None] = field(default_factory=dict)

    def kind(self, label: str) -> str:
        """The catalogue's kind; the label itself, with a note, where the catalogue has none."""
        found = dict(KINDS).get(label)
        if found is None:
            self.words[f"{label} is no kind of the catalogue: its samples keep that name"] = None
        return found or label

    def lines(self) -> tuple[str, ...]:
        """One line per reason and per word of warning."""
        counted = (
            f"{count} row{'s' if count != 1 else ''} not used: {reason}"
            for reason, count in self.unused.items()
        )
        return (*counted, *self.words)


def read_rows(path: Path, notes: Notes) -> Inputs | None:
    """The table's rows; None, with a note, where there is no such file.

    An InputError with file and line where the file is another table or cells of it are wrong.
    """
    if not path.exists():
        notes.words[f"{path.parent.name}/{path.name} is not there: nothing read from it"] = None
        return None
    text = read_text(path)
    kind = table_kind(text.partition("\n")[0].rstrip("\r"))
    if kind is None:
        message = "the header is of no table of measurements that is known; restore the columns"
        raise InputError(Fault(file=str(path), line=1, message=message))
    material = read_table(str(path), text, kind)
    used = len(material.layers) + len(material.collectives) + len(material.efficiencies)
    missing = sum(1 for line in text.splitlines() if line.strip(", \t")) - 1 - used
    if missing > 0:
        notes.unused[f"{path.name}: no {_NEEDED.get(kind.title, 'value')}"] += missing
    return material


def population(
    device: str,
    label: str,
    *,
    tool: str,
    file: Path | str,
    words: str,
    layers: Sequence[LayerSample] = (),
    operators: Sequence[OperatorSample] = (),
    links: Sequence[LinkSample] = (),
) -> ProfileSet:
    """Samples of one table, and as much of their origin as it says: no date, driver or version."""
    origin = Provenance(
        device=device,
        device_name=label,
        backend="cuda",
        measured_on="",
        hetplan_version=__version__,
        torch_version="",
        driver="",
        threads=0,
        paced="",
        tool=tool,
        command=f"read from {file}",
        notes=words,
    )
    return ProfileSet(
        layers=tuple(layers),
        operators=tuple(operators),
        links=tuple(links),
        provenance=(origin,),
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
_COLUMN_PARALLEL = ("enc-attention-qkv", "enc-MLP-GEMM-1")
_ROW_PARALLEL = ("enc-attention-dense", "enc-MLP-GEMM-2")
_PRODUCTS = (*_COLUMN_PARALLEL, *_ROW_PARALLEL)
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

    def sample(
        self, device: str, seconds: float, *, inputs: str, output: str, repeats: int = 1
    ) -> OperatorSample:
        """A sample of one time."""
        return OperatorSample(
            device=device,
            operator=self.operator.value,
            phase=self.phase.value,
            precision=inputs,
            output_precision=output,
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
    material = read_rows(folder / OPERATORS_FILE, notes)
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
    return tuple(_operator_population(label, rows, notes) for label, rows in by_device.items())


def _operator_population(label: str, rows: Sequence[LayerRow], notes: Notes) -> ProfileSet:
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
            yield _sample(row, device, _operator_shape(row, is_forward=is_forward), seconds)


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


def _operator_shape(row: LayerRow, *, is_forward: bool) -> _Pass:
    hidden, heads, vocabulary = _dimensions(row)
    name, tp = row.operation, row.tp
    if heads % tp:
        raise _wrong(row, "tp", f"found {tp}; it does not divide the {heads} heads of {row.model}")
    tokens = row.microbatch_size * SEQUENCE
    whole = OperatorPhase.FORWARD if is_forward else OperatorPhase.BACKWARD
    if name in _PRODUCTS:
        return _operator_product(name, tokens, hidden, tp, is_forward=is_forward)
    batch, width = row.microbatch_size * heads // tp, hidden // heads
    if name == "enc-attention-score":
        score = OperatorClass.ATTENTION_SCORE
        return _Pass(operator=score, phase=whole, batch=batch, m=SEQUENCE, n=SEQUENCE, k=width)
    if name == "enc-attention-context":
        context = OperatorClass.ATTENTION_CONTEXT
        return _Pass(operator=context, phase=whole, batch=batch, m=SEQUENCE, n=width, k=SEQUENCE)
    if name == _EMBEDDING:
        embedding, words = OperatorClass.EMBEDDING, vocabulary // tp
        return _Pass(operator=embedding, phase=whole, m=tokens, n=hidden, k=words)
    if name == _LOSS:
        # Backward as of the other products: 57.9 ms at hidden 7168 and 16384 tokens, where one
        # product takes about 41 and two would take 81.
        passes = OperatorPhase.FORWARD if is_forward else OperatorPhase.INPUT_GRADIENT
        loss = OperatorClass.LOSS
        return _Pass(operator=loss, phase=passes, m=tokens, n=vocabulary // tp, k=hidden)
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
    return _Pass(operator=operator, phase=whole, m=m, n=n, k=k)


def _operator_product(name: str, tokens: int, hidden: int, tp: int, *, is_forward: bool) -> _Pass:
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
        return _Pass(operator=product, phase=forward, m=tokens, n=outputs, k=inputs)
    gradient = OperatorPhase.INPUT_GRADIENT
    return _Pass(operator=product, phase=gradient, m=tokens, n=inputs, k=outputs)


def _dimensions(row: LayerRow) -> tuple[int, int, int]:
    if row.model not in _MODEL_SIZES:
        names = ", ".join(_MODEL_SIZES)
        raise _wrong(row, "model", f"found model {row.model[:60]!a}; shapes are known of {names}")
    return _MODEL_SIZES[row.model]


def _wrong(row: LayerRow, column: str, message: str) -> InputError:
    place = row.place
    return InputError(Fault(file=place.file, line=place.line, field=column, message=message))


def _sample(row: LayerRow, device: str, shape: _Pass, seconds: float) -> OperatorSample:
    precision = precision_of(row.precision)
    if not precision:
        raise _wrong(row, "dtype", f"found {row.precision[:60]!a}; fp16, bf16 or fp32 is due")
    # Megatron-LM's cross-entropy works on a float32 copy of the logits.
    output = "float32" if shape.operator is OperatorClass.LOSS else precision
    return shape.sample(device, seconds, inputs=precision, output=output)


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
# A millionth is no measurement. A product does what is counted, so it can exceed 1 only by as much
# as the clock exceeds that of the nominal rate: no device's boost is a quarter above it. Half of
# what is counted of attention is not done: it reaches 1.2 in the published tables and cannot reach
# 2. No device does 1e20 operations a second, and none that trains as few as 1e9.
_MIN_EFFICIENCY, _MAX_EFFICIENCY, _MAX_OF_ATTENTION = 1e-6, 1.25, 2.0
_MIN_RATE, _MAX_RATE = 1e9, 1e20
_MAX_COUNT = 1 << 32
"""No size of a matrix is larger; more is a slip."""


def efficiency_sample(
    *,
    device: str,
    operation: str,
    shape: str,
    efficiency: float,
    peak_flops_per_second: float,
    precision: Precision = Precision.BFLOAT16,
) -> OperatorSample | str:
    """The time of one shape of a table; a text says why there is none.

    `shape` as the table writes it, `key=value` pairs. `precision` of the inputs where it does not
    say one (SimuMax measures products and attention in bfloat16).
    """
    most = _MAX_OF_ATTENTION if operation in _ATTENTION else _MAX_EFFICIENCY
    if efficiency > most:
        return (
            f"{operation}: an efficiency of {efficiency:g} is impossible (at most {most:g}): more "
            "operations than the device can do, so its nominal rate or its count is wrong"
        )
    if not efficiency > _MIN_EFFICIENCY:
        return f"{operation}: an efficiency of {efficiency:g} is none"
    if not _MIN_RATE < peak_flops_per_second < _MAX_RATE:
        return f"{operation}: a nominal rate of {peak_flops_per_second:g} per second is none"
    if operation not in _REPEATS:
        return f"{operation}: no operator of a layer in 16 or 32 bits"
    try:
        found = _measured(operation, shape, precision)
    except (KeyError, ValueError) as error:
        return f"{operation}: a shape that cannot be read ({str(error)[:60]})"
    seconds = found.operations / (efficiency * peak_flops_per_second)
    return found.sample(
        device,
        seconds,
        inputs=found.inputs.value,
        output=found.output.value,
        repeats=_REPEATS[operation],
    )


def _measured(operation: str, shape: str, precision: Precision) -> _Pass:
    """What the shape says; a KeyError or ValueError where it lacks a key or has a wrong one."""
    keys = dict(
        (name.strip(), value.strip())
        for name, _, value in (part.partition("=") for part in shape.split(","))
    )
    if operation == "matmul":
        return _product(keys, precision)
    if operation == "group_matmul":
        return _grouped(keys, precision)
    return _attention(keys, precision, is_forward=operation == "sdp_fwd")


def _size(keys: dict[str, str], name: str) -> int:
    value = int(keys[name])
    if not 0 < value < _MAX_COUNT:
        raise ValueError(f"{name}={keys[name]}")
    return value


def _format(keys: dict[str, str], name: str, default: Precision) -> Precision:
    if name not in keys:
        return default
    return _PRECISION_WORDS[keys[name].lower()]


def _product(keys: dict[str, str], precision: Precision) -> _Pass:
    phase = _LAYOUTS[keys["layout"]]
    batch, m, n, k = (_size(keys, name) for name in ("b", "m", "n", "k"))
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
        inputs=_format(keys, "dtype", precision),
        output=_format(keys, "out_dtype", precision),
        operations=2.0 * m * n * k,
    )


def _grouped(keys: dict[str, str], precision: Precision) -> _Pass:
    phase = _STAGES[keys["stage"]]
    groups, rows, columns, inner = (_size(keys, name) for name in ("ng", "M", "N", "K"))
    output = _format(keys, "out_dtype", precision)
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
        inputs=_format(keys, "dtype", precision),
        output=output,
        operations=2.0 * groups * m * n * k,
    )


def _attention(keys: dict[str, str], precision: Precision, *, is_forward: bool) -> _Pass:
    names = ("batch", "head_num", "seq_len", "qk_head_dim", "v_head_dim")
    batch, heads, tokens, keys_width, values_width = (_size(keys, name) for name in names)
    products = _FORWARD_PRODUCTS if is_forward else _BACKWARD_PRODUCTS
    width = keys_width + values_width
    return _Pass(
        operator=OperatorClass.FUSED_ATTENTION,
        phase=OperatorPhase.FORWARD if is_forward else OperatorPhase.BACKWARD,
        batch=batch * heads,
        m=tokens,
        n=tokens,
        k=-(-width // 2),  # one product over the keys' width and one over the values'
        inputs=precision,
        output=precision,
        operations=products * batch * heads * float(tokens) ** 2 * width,
    )


PRODUCTS_FILE = Path("unit") / "gemm_efficiency.csv"
SIMUMAX = "SimuMax efficiency tables"


def read_products(folder: Path, notes: Notes) -> tuple[ProfileSet, ...]:
    """One population per device of the table."""
    material = read_rows(folder / PRODUCTS_FILE, notes)
    if material is None:
        return ()
    by_device: dict[str, list[OperatorSample]] = {}
    for row in material.efficiencies:
        found = efficiency_sample(
            device=notes.kind(row.device),
            operation=row.operation,
            shape=row.shape,
            efficiency=row.efficiency,
            peak_flops_per_second=_peak_of(row),
        )
        if isinstance(found, str):
            notes.unused[f"gemm_efficiency.csv: {found}"] += 1
        else:
            by_device.setdefault(row.device, []).append(found)
    return tuple(_product_population(label, samples, notes) for label, samples in by_device.items())


def _peak_of(row: EfficiencyRow) -> float:
    """The rate of which the row's efficiency is a share; without it there is no time."""
    if row.peak_flops_per_second is None:
        message = "this cell is empty; write the nominal rate in TFLOP/s"
        raise InputError(
            Fault(file=row.place.file, line=row.place.line, field="peak_tflops", message=message)
        )
    return row.peak_flops_per_second


def _product_population(label: str, samples: list[OperatorSample], notes: Notes) -> ProfileSet:
    return population(
        notes.kind(label),
        label,
        tool=SIMUMAX,
        file=PRODUCTS_FILE,
        operators=samples,
        words="bfloat16; products by Transformer Engine, gradients of weights accumulated into "
        "their output; attention causal, in shapes of the full square; one time per shape, whose "
        "spread is not said",
    )
