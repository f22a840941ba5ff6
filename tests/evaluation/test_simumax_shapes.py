"""Efficiencies by shape become times of the operators that ran."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from importers_peer_files import simumax_data

from evaluation.accuracy.simumax_shapes import efficiency_sample
from hetplan.importers import simumax
from hetplan.importers.records import ImportContext
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


def test_a_weight_gradient_keeps_its_output_format() -> None:
    single, half = product("NT", output="fp32"), product("NT", output="bf16")
    assert (single.precision, single.output_precision) == ("bfloat16", "float32")
    assert (half.precision, half.output_precision) == ("bfloat16", "bfloat16")


def test_a_batch_of_a_product_with_weights_is_rows_and_of_a_gradient_summed_over() -> None:
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
        ("matmul", "b=1, m=1, k=1, layout=TN", 0.5, "cannot be read"),
        ("matmul", "b=1, m=0, k=1, n=1, layout=TN", 0.5, "cannot be read"),
        ("matmul", "b=1, m=1.5, k=1, n=1, layout=TN", 0.5, "cannot be read"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN, out_dtype=fp4", 0.5, "cannot be read"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN", 0.0, "efficiency of 0"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN", -0.5, "efficiency of -0.5"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN", 1e3, "efficiency of 1000 is impossible"),
        ("matmul", "b=1, m=1, k=1, n=1, layout=TN", 1.26, "impossible (at most 1.25)"),
        ("group_matmul", "ng=1, M=1, N=1, K=1, stage=fwd", 9.9, "impossible (at most 1.25)"),
        ("sdp_fwd", ATTENTION, 2.01, "impossible (at most 2)"),
        ("sdp_bwd", ATTENTION, 9.9, "impossible (at most 2)"),
        ("sdp_bwd", ATTENTION, math.inf, "impossible"),
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


def test_a_causal_kernel_counted_full_may_exceed_one() -> None:
    # FlashAttention-3 says up to 0.75 of an H100's peak (arXiv 2407.08608): counted full, 1.5.
    assert sample("sdp_fwd", ATTENTION, 1.3).median_seconds > 0


@given(st.text(max_size=60), st.floats(), st.floats())
def test_no_text_breaks_it(shape: str, efficiency: float, peak: float) -> None:
    for operation in ("matmul", "group_matmul", "sdp_fwd"):
        found = efficiency_sample(
            device="x",
            operation=operation,
            shape=shape,
            efficiency=efficiency,
            peak_flops_per_second=peak,
        )
        assert isinstance(found, str | OperatorSample)


def test_a_system_file_gives_samples_of_its_shapes() -> None:
    data: dict = simumax_data()  # type: ignore[type-arg]
    shape = "b=1, m=64, k=32, n=16, layout=TN, accumulate=False, out_dtype=bf16"
    operations = data["accelerator"]["op"]
    operations["matmul"]["accurate_efficient_factor"] = {shape: 0.5}
    # Without a rate of its own an operation has the default one.
    attention = (
        "batch=1, seq_len=8, head_num=2, kv_head_num=2, qk_head_dim=4, v_head_dim=4, "
        "qkv_contiguous=True"
    )
    operations["sdp_fwd"] = {"accurate_efficient_factor": {attention: 0.25}}
    imported = simumax.parse(json.dumps(data), ImportContext(file="x.json", device="mine"))
    assert [each.operator for each in imported.operators] == ["matrix_product", "fused_attention"]
    first, second = imported.operators
    assert first.device == "mine"
    assert first.median_seconds == pytest.approx(2 * 64 * 32 * 16 / (0.5 * 180e12))
    assert second.median_seconds == pytest.approx(4 * 2 * 8 * 8 * 4 / (0.25 * 100e12))
    assert not imported.skipped
    assert any("computed from the operations" in note for note in imported.notes)
