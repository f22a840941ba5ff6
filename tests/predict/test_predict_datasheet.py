"""The datasheet law: formulas by hand, wide intervals, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predict_samples import DEVICE, gpt, query

from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.operators import Kernels
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.predict.datasheet import (
    ATTENTION_EFFICIENCY,
    BACKWARD_WORK,
    ELEMENTWISE_EFFICIENCY_BACKWARD,
    ELEMENTWISE_EFFICIENCY_FORWARD,
    LAUNCH_LOG_HALFWIDTH,
    LAUNCH_SECONDS_BACKWARD,
    LAUNCH_SECONDS_FORWARD,
    MATRIX_EFFICIENCY,
    MATRIX_LOG_HALFWIDTH,
    WEIGHT_GRADIENT_TRAFFIC,
    KernelCosts,
    kernel_costs,
)
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.predictor import Prediction

ON_PAPER = FittedPredictor.datasheet_only()


def ask(
    phase: str, layer: LayerKind = LayerKind.TRANSFORMER, *, hidden: int = 2048, tp: int = 1,
    precision: Precision = Precision.BFLOAT16, microbatch: int = 2,
    architecture: Architecture = Architecture.GPT,
) -> Prediction:  # fmt: skip
    asked = query(
        gpt(hidden, architecture), layer, microbatch=microbatch, tp=tp, precision=precision,
        backward=phase == "backward",
    )  # fmt: skip
    return ON_PAPER.layer(DEVICE, asked)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_gpt_layer_by_hand(phase: str) -> None:
    h, tokens = 2048, 2 * 2048
    matrix = 2 * tokens * 12 * h * h / (300e12 * MATRIX_EFFICIENCY)
    attention = 2 * tokens * 2048 * h / (300e12 * ATTENTION_EFFICIENCY)
    forward = phase == "forward"
    streaming = ELEMENTWISE_EFFICIENCY_FORWARD if forward else ELEMENTWISE_EFFICIENCY_BACKWARD
    elementwise = tokens * 20 * h * 2 / (2e12 * streaming)
    launch = 10 * (LAUNCH_SECONDS_FORWARD if forward else LAUNCH_SECONDS_BACKWARD)
    work = 1 if forward else BACKWARD_WORK
    gradients = 0 if forward else WEIGHT_GRADIENT_TRAFFIC * 12 * h * h * 2 / (2e12 * streaming)
    if not forward:
        # Gradients are added at two forks (3 h each) and summed for biases (9 h); the additions'
        # own passes, 4 h twice, have no kernel without dropout.
        gradients += tokens * (6 + 9 - 8) * h * 2 / (2e12 * streaming)
    prediction = ask(phase)
    expected = launch + work * (matrix + attention + elementwise) + gradients
    assert prediction.seconds == pytest.approx(expected)
    assert prediction.source == "datasheet"
    assert prediction.extrapolating == ()


def test_the_interval_is_the_products_for_large_layers_and_the_launches_for_small_ones() -> None:
    large = ask("forward", hidden=16384, microbatch=8)
    small = ask("forward", hidden=64, microbatch=1)
    assert large.log_halfwidth == pytest.approx(MATRIX_LOG_HALFWIDTH, abs=0.05)
    assert small.log_halfwidth == pytest.approx(LAUNCH_LOG_HALFWIDTH, abs=0.1)


def test_a_device_of_unknown_memory_bandwidth_is_refused() -> None:
    unknown = replace(DEVICE, memory_bandwidth_bytes_per_second=0.0)
    with pytest.raises(InputError, match="testium-1 has no memory bandwidth"):
        ON_PAPER.optimizer_update(unknown, Optimizer.SGD, 1e9, Precision.FLOAT32)
    with pytest.raises(InputError, match="no memory bandwidth"):
        ON_PAPER.layer(unknown, query(2048, LayerKind.EMBEDDING))


def test_updates_by_memory_traffic() -> None:
    def update(optimizer: Optimizer, precision: Precision, device: object = DEVICE) -> Prediction:
        return ON_PAPER.optimizer_update(device, optimizer, 1e9, precision)  # type: ignore[arg-type]

    adam = update(Optimizer.ADAMW, Precision.FLOAT32)
    # Fused kernels were measured at 33.5 to 42.7 bytes per parameter; others take up to twice that.
    low, high = 33.5e9 / 2e12, 42.7e9 / 2e12
    assert low < adam.seconds < high
    half = 2.718281828**adam.log_halfwidth
    assert adam.seconds / half <= low
    assert adam.seconds * half >= 1.4 * high
    assert update(Optimizer.SGD, Precision.FLOAT32).seconds < adam.seconds
    assert update(Optimizer.ADAMW, Precision.BFLOAT16).seconds > adam.seconds
    faster = replace(DEVICE, memory_bandwidth_bytes_per_second=4e12)
    assert update(Optimizer.ADAMW, Precision.FLOAT32, faster).seconds == pytest.approx(
        adam.seconds / 2
    )


# ---- other kernels than the default ones, byte by byte

B, S, H, HEADS, VOCAB, TP = 2, 512, 256, 8, 1000, 2
TOKENS = B * S
SCORES = B * HEADS / TP * S * S
SHAPE = plain_model(
    name="gpt",
    architecture=Architecture.GPT,
    num_layers=2,
    hidden_size=H,
    ffn_hidden_size=4 * H,
    num_attention_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=H // HEADS,
    vocab_size=VOCAB,
    max_sequence_length=S,
)
UNFUSED = Kernels(fused_attention=False)


def costs(
    kind: LayerKind, kernels: Kernels, *, backward: bool, element: int = 2, shape: ModelSpec = SHAPE
) -> KernelCosts:
    precision = Precision.FLOAT32 if element == 4 else Precision.FLOAT16
    return kernel_costs(
        query(shape, kind, microbatch=B, sequence=S, tp=TP, precision=precision, kernels=kernels,
              backward=backward)
    )  # fmt: skip


# Backward passes of default kernels: of the additions 8 h elements per token are counted by
# `layer_work` and none are moved; two forks add gradients (3 h each), the biases of products with
# 3 h, h, 4 h and h columns are summed, those before attention and MLP cut by tp.
GRADIENTS = TOKENS * H * 2 * (2 * 3 - 8 + (3 + 4) / TP + 2)
SQUARE = 2 * 2 * TOKENS * S * H / TP
DROPPED = Kernels(hidden_dropout=True)
CUT = Kernels(sequence_parallel=True)


@pytest.mark.parametrize(
    ("layer", "kernels", "forward", "backward"),
    [
        # Scores and probabilities, each written and read, of two bytes; backward seven times.
        (
            LayerKind.TRANSFORMER,
            UNFUSED,
            (SCORES * 4 * 2, 2, SQUARE),
            (SCORES * 7 * 2 + GRADIENTS, 4, SQUARE),
        ),
        # Their dropout reads and writes them, and a mask.
        (
            LayerKind.TRANSFORMER,
            replace(UNFUSED, attention_dropout=True),
            (SCORES * (8 + 5), 3, SQUARE),
            (SCORES * (14 + 5) + GRADIENTS, 5, SQUARE),
        ),
        # Masks of both additions; backward those are kernels of their own.
        (
            LayerKind.TRANSFORMER,
            DROPPED,
            (2 * TOKENS * H, 0, 0),
            (2 * TOKENS * H + GRADIENTS + 8 * TOKENS * H * 2, 0, 0),
        ),
        (LayerKind.EMBEDDING, DROPPED, (TOKENS * H * 5, 1, 0), (TOKENS * H * 5, 1, 0)),
        # Two norms and two additions read and write, 8 h per token, all of it cut in halves; of the
        # gradients' sums 6 h at the forks and the 2 h of row-cut biases, and twice the norms.
        (
            LayerKind.TRANSFORMER,
            CUT,
            (-8 * TOKENS * H * 2 / 2, 0, 0),
            (GRADIENTS - (8 + 6 + 2) * TOKENS * H * 2 / 2, 0, 0),
        ),
    ],
)  # fmt: skip
def test_other_kernels_cost_so_much_more(
    layer: LayerKind,
    kernels: Kernels,
    forward: tuple[float, int, float],
    backward: tuple[float, int, float],
) -> None:
    for passed, (moved, launches, square) in ((False, forward), (True, backward)):
        found = costs(layer, kernels, backward=passed)
        assert found == KernelCosts(moved_bytes=moved, launches=launches, square_flops=square)
