"""SimuMax's tables of efficiency by shape as times of single operators.

An efficiency is operations over time over a nominal rate, so with that rate it is a time. What
SimuMax counts as operations (simu_tools/efficency_test of github.com/MooreThreads/SimuMax):

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

from dataclasses import dataclass

from evaluation.accuracy.json_values import PRECISION_WORDS
from hetplan.job.spec import Precision
from hetplan.model.operators import OperatorClass
from hetplan.profiling.samples import OperatorPhase, OperatorSample

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What was measured, and the operations that SimuMax counts."""

    operator: OperatorClass
    phase: OperatorPhase
    batch: int
    m: int
    n: int
    k: int
    inputs: Precision
    output: Precision
    operations: float


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
    return OperatorSample(
        device=device,
        operator=found.operator.value,
        phase=found.phase.value,
        precision=found.inputs.value,
        output_precision=found.output.value,
        batch=found.batch,
        m=found.m,
        n=found.n,
        k=found.k,
        median_seconds=seconds,
        p10_seconds=seconds,
        p90_seconds=seconds,
        repeats=_REPEATS[operation],
        outliers=0,
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
    return PRECISION_WORDS[keys[name].lower()]


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
