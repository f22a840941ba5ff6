"""Layers as sums of operators: against the truth, order of answers, stand-ins that say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predict_operators import (
    BYTES_PER_SECOND,
    FLOOR,
    FLOPS_PER_SECOND,
    HIDDEN,
    LAUNCH,
    operator_grid,
    operator_sample,
)
from predict_samples import DEVICE, gpt, layer_grid, provenance, query

from hetplan.job.spec import Precision
from hetplan.model.operators import (
    Kernels,
    Operator,
    OperatorClass,
    operator_bytes,
    operator_flops,
)
from hetplan.model.spec import LayerKind
from hetplan.predict.datasheet import ELEMENTWISE_EFFICIENCY_BACKWARD
from hetplan.predict.fit import fit
from hetplan.predict.layer.composed import GRADIENTS_NOTE, LAUNCH_PART, WAIT_PART
from hetplan.predict.operator.answer import WEIGHT_GRADIENT_OVER_FORWARD
from hetplan.predict.predictor import Prediction
from hetplan.profiling.samples import ProfileSet

UNFUSED = Kernels(fused_attention=False, attention_dropout=True, hidden_dropout=True)


def predictor(samples, layers=()):
    return fit(ProfileSet(layers=layers, links=(), operators=samples, provenance=(provenance(),)))


def ask(found, hidden=2560, *, backward=False, microbatch=4, tp=1, kernels=UNFUSED, **more):
    asked = query(
        hidden,
        more.get("layer", LayerKind.TRANSFORMER),
        microbatch=microbatch,
        tp=tp,
        precision=more.get("precision", Precision.BFLOAT16),
        kernels=kernels,
        backward=backward,
    )
    return found.layer(DEVICE, asked)


def test_a_layer_is_the_sum_of_its_operators() -> None:
    found = ask(predictor(operator_grid()))
    seconds, launches = 0.0, 0
    for op in query(2560, microbatch=4, kernels=UNFUSED).operators():
        seconds += op.count * (
            operator_flops(op, "forward") / FLOPS_PER_SECOND
            + operator_bytes(op, "forward", 2) / BYTES_PER_SECOND
        )
        launches += op.count
    assert found.source == "measured"
    assert found.seconds == pytest.approx(seconds + launches * LAUNCH, rel=0.03)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.seconds)
    names = {part.name for part in found.parts}
    assert {"matrix_product", "softmax", "norm", "addition", LAUNCH_PART} <= names
    assert 0.0 < found.log_halfwidth < 0.2


def test_more_work_takes_no_less_time_and_slices_less() -> None:
    found = predictor(operator_grid())
    for backward in (False, True):
        by_size = [ask(found, microbatch=b, backward=backward).seconds for b in (1, 2, 3, 4, 8, 16)]
        assert by_size == sorted(by_size)
        by_tp = [ask(found, tp=t, backward=backward).seconds for t in (1, 2, 4, 8)]
        assert by_tp == sorted(by_tp, reverse=True)


def test_weight_gradients_that_were_not_measured_come_from_forward_and_say_so() -> None:
    found = ask(predictor(operator_grid()), backward=True)
    notes = " ".join(found.extrapolating)
    assert "weight gradient not measured: from matrix product forward" in notes
    assert "input gradient not measured" not in notes
    parts = {part.name: part.seconds for part in found.parts}
    forward = {part.name: part.seconds for part in ask(predictor(operator_grid())).parts}
    ratio = parts["matrix_product"] / forward["matrix_product"]
    assert ratio == pytest.approx(1.0 + WEIGHT_GRADIENT_OVER_FORWARD, rel=0.05)


def test_input_gradients_of_constant_numbers_are_not_believed() -> None:
    fast = tuple(
        replace(sample, median_seconds=max(FLOOR, 0.85 * sample.median_seconds))
        if sample.phase == "input_gradient"
        else sample
        for sample in operator_grid()
    )
    found = ask(predictor(fast), backward=True)
    assert found.seconds == pytest.approx(
        ask(predictor(operator_grid()), backward=True).seconds, rel=0.03
    )
    assert "input gradient not measured" in " ".join(found.extrapolating)


def test_fused_attention_from_unfused_says_so() -> None:
    found = predictor(operator_grid())
    fused, unfused = ask(found, kernels=Kernels()), ask(found)
    assert fused.seconds < unfused.seconds
    assert any("fused attention not measured" in note for note in fused.extrapolating)
    assert fused.log_halfwidth > unfused.log_halfwidth


def test_a_measured_shape_is_looked_up() -> None:
    odd = operator_sample(OperatorClass.MATRIX_PRODUCT, m=8192, n=7680, k=2560, seconds=0.05)
    plain = operator_grid()
    found = ask(predictor((*plain, odd, odd, odd)))
    parts = {part.name: part.seconds for part in found.parts}
    assert parts["matrix_product"] > 0.049


def test_order_of_answers() -> None:
    layers = tuple(layer_grid(noise=0.01, seed=1, phase="forward", tps=(1,)))
    whole = predictor(operator_grid(), layers)
    assert ask(whole).parts == ()
    assert ask(whole, backward=True).parts != ()
    assert ask(whole, precision=Precision.FLOAT32).source in ("datasheet", "related")
    memory_only = tuple(s for s in operator_grid() if s.operator == "norm")
    assert ask(predictor(memory_only)).source != "measured"


def test_losses_backward_goes_without_its_product() -> None:
    rows = [
        operator_sample(
            OperatorClass.LOSS,
            phase,
            m=2048 * b,
            n=50000,
            k=h,
            output="float32",
            seconds=2.0 * 2048 * b * 50000 * h / FLOPS_PER_SECOND
            + 2048 * b * 50000 * (38 if phase == "forward" else 14) / BYTES_PER_SECOND,
        )
        for phase in ("forward", "input_gradient")
        for b in (1, 2, 4, 8)
        for h in HIDDEN
    ]
    found = predictor((*operator_grid(), *rows))
    kernels = replace(UNFUSED, fused_loss=False)
    for backward, each in ((False, 38), (True, 14)):
        head = ask(found, layer=LayerKind.HEAD, backward=backward, kernels=kernels)
        parts = {part.name: part.seconds for part in head.parts}
        logits = 8192 * gpt(2560).vocabulary_slice(1)
        assert parts["loss"] == pytest.approx(logits * each / BYTES_PER_SECOND, rel=0.1)
        fused = ask(found, layer=LayerKind.HEAD, backward=backward)
        assert {p.name: p.seconds for p in fused.parts}["loss"] < parts["loss"]


SMALL = {"microbatch": 1, "tp": 4}


def seconds(found: Prediction) -> dict[str, float]:
    return {part.name: part.seconds for part in found.parts}


def test_waits_for_the_host_are_a_part_of_their_own() -> None:
    slow = predictor(operator_grid(floor=400e-6))
    small, large = seconds(ask(slow, 512, **SMALL)), seconds(ask(slow, 7168, **SMALL))
    quick = seconds(ask(predictor(operator_grid(floor=0)), 512, **SMALL))
    # Thirteen launches of a Megatron layer, whatever little they do.
    assert sum(small.values()) >= 10 * 300e-6
    assert small[WAIT_PART] > 0
    assert WAIT_PART not in quick
    assert WAIT_PART not in large
    # What launches cost the device does not depend on how far the host is behind.
    assert small.get(LAUNCH_PART, 0.0) == pytest.approx(large.get(LAUNCH_PART, 0.0), rel=0.05)
    whole = ask(slow, 512, **SMALL)
    assert sum(small.values()) == pytest.approx(whole.seconds)


def test_float32_sums_are_in_the_time_where_weight_gradients_were_measured() -> None:
    plain = operator_grid()
    weights = tuple(
        replace(sample, phase="weight_gradient", output_precision="float32")
        for sample in plain
        if sample.operator == "matrix_product" and sample.phase == "forward"
    )
    for samples, expected in ((plain, False), ((*plain, *weights), True)):
        found = predictor(samples)
        assert ask(found, 2560, backward=True, **SMALL).float32_sums is expected
        assert ask(found, 2560, **SMALL).float32_sums is False


def test_backward_passes_hold_what_autograd_adds() -> None:
    found = ask(predictor(operator_grid()), 2560, backward=True, **SMALL)
    parts, ops = seconds(found), gradients(2560)
    for name in ("gradient_addition", "bias_gradient"):
        moved = sum(op.count * operator_bytes(op, "backward", 2) for op in ops[name])
        # At the rate of the other passes over memory, which is the truth of the grid.
        assert parts[name] == pytest.approx(moved / BYTES_PER_SECOND, rel=0.05)
    assert found.extrapolating.count(GRADIENTS_NOTE) == 1
    forward = ask(predictor(operator_grid()), 2560, **SMALL)
    assert not {"gradient_addition", "bias_gradient"} & set(seconds(forward))
    assert GRADIENTS_NOTE not in forward.extrapolating


def test_without_passes_measured_the_datasheet_prices_them() -> None:
    products = tuple(
        sample
        for sample in operator_grid()
        if sample.operator in ("matrix_product", "attention_score", "attention_context")
    )
    parts, ops = seconds(ask(predictor(products), 2560, backward=True, **SMALL)), gradients(2560)
    moved = sum(op.count * operator_bytes(op, "backward", 2) for op in ops["gradient_addition"])
    rate = DEVICE.memory_bandwidth_bytes_per_second * ELEMENTWISE_EFFICIENCY_BACKWARD
    assert parts["gradient_addition"] == pytest.approx(moved / rate)


def gradients(hidden: int) -> dict[str, list[Operator]]:
    found: dict[str, list[Operator]] = {}
    for op in query(hidden, microbatch=1, tp=4, kernels=UNFUSED).gradient_operators():
        found.setdefault(op.operator, []).append(op)
    return found
