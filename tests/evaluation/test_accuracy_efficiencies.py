"""Efficiencies by shape become times of the operators that ran."""

from __future__ import annotations

import math

import pytest

from evaluation.accuracy.unit_operators import efficiency_sample
from hetplan.profiling.samples import OperatorSample

PEAK = 312e12
ATTENTION = "batch=2, seq_len=8, head_num=2, kv_head_num=2, qk_head_dim=4, v_head_dim=4"


def sample(operation: str, shape: str, efficiency: float = 0.5) -> OperatorSample:
    found = efficiency_sample(
        device="x200",
        operation=operation,
        shape=shape,
        efficiency=efficiency,
        peak_flops_per_second=PEAK,
    )
    assert isinstance(found, OperatorSample), found
    return found


def product(layout: str, *, batch: int = 1, output: str = "bf16") -> OperatorSample:
    shape = f"b={batch}, m=4096, k=512, n=1024, layout={layout}, accumulate=False"
    return sample("matmul", f"{shape}, out_dtype={output}")


@pytest.mark.parametrize(
    ("layout", "phase"),
    [("TN", "forward"), ("NN", "input_gradient"), ("NT", "weight_gradient")],
)
def test_the_layout_says_the_pass_and_the_sizes_are_those_of_the_product(
    layout: str, phase: str
) -> None:
    found = product(layout)
    assert (found.operator, found.phase, found.batch) == ("matrix_product", phase, 1)
    assert (found.m, found.n, found.k) == (4096, 1024, 512)
    assert found.median_seconds == pytest.approx(2 * 4096 * 1024 * 512 / (0.5 * PEAK))
    assert found.repeats == 100


def test_batch_is_rows_or_summed_over() -> None:
    forward, gradient = product("TN", batch=3), product("NT", batch=3)
    assert (forward.batch, forward.m, forward.k) == (1, 3 * 4096, 512)
    assert (gradient.batch, gradient.m, gradient.k) == (1, 4096, 3 * 512)
    assert forward.median_seconds == pytest.approx(gradient.median_seconds)


def test_stages_of_grouped_products_name_the_forward_sizes() -> None:
    keys = "ng=40, M=616, N=3072, K=5120, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32"
    forward = sample("group_matmul", f"{keys}, stage=fwd")
    inputs = sample("group_matmul", f"{keys}, stage=bwd_grad_act")
    weights = sample("group_matmul", f"{keys}, stage=bwd_grad_w")
    assert (forward.batch, forward.m, forward.n, forward.k) == (40, 616, 3072, 5120)
    assert (inputs.m, inputs.n, inputs.k) == (616, 5120, 3072)
    assert (weights.m, weights.n, weights.k) == (3072, 5120, 616)
    assert forward.output_precision == inputs.output_precision == "bfloat16"
    assert weights.output_precision == "float32"
    assert forward.median_seconds == inputs.median_seconds == weights.median_seconds


def test_attention_counts_the_full_square_and_five_products_backward() -> None:
    keys = "batch=2, seq_len=4096, head_num=8, kv_head_num=2, qk_head_dim=192, v_head_dim=128"
    forward, backward = sample("sdp_fwd", keys), sample("sdp_bwd", keys)
    assert (forward.operator, forward.phase) == ("fused_attention", "forward")
    assert (forward.batch, forward.m, forward.n, forward.k) == (16, 4096, 4096, 160)
    # Two products of a square, one over 192 and one over 128, each two operations per element.
    assert forward.median_seconds == pytest.approx(2 * 16 * 4096**2 * 320 / (0.5 * PEAK))
    assert backward.median_seconds / forward.median_seconds == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("operation", "shape", "efficiency", "reason"),
    [
        ("fp8_matmul", "b=1, m=1, k=1, n=1, layout=TN", 0.5, "no operator of a layer"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TT", 0.5, "cannot be read"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN", 0.0, "efficiency of 0"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN", 1.26, "impossible (at most 1.25)"),
        ("sdp_fwd", ATTENTION, 2.01, "impossible (at most 2)"),
        ("sdp_bwd", ATTENTION, math.nan, "efficiency of nan is none"),
    ],
)
def test_what_is_no_time_says_why(
    operation: str, shape: str, efficiency: float, reason: str
) -> None:
    found = efficiency_sample(
        device="x200",
        operation=operation,
        shape=shape,
        efficiency=efficiency,
        peak_flops_per_second=PEAK,
    )
    assert isinstance(found, str)
    assert reason in found
