"""What a composed layer says of its waits for the host and of its gradients' sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predict_operators import BYTES_PER_SECOND, operator_grid
from predict_samples import DEVICE, provenance, query

from hetplan.model.operators import Kernels, Operator, operator_bytes
from hetplan.predict.datasheet import ELEMENTWISE_EFFICIENCY_BACKWARD
from hetplan.predict.fit import FittedPredictor, fit
from hetplan.predict.layer.composed import GRADIENTS_NOTE, LAUNCH_PART, WAIT_PART
from hetplan.predict.predictor import Prediction
from hetplan.profiling.samples import OperatorSample, ProfileSet

UNFUSED = Kernels(fused_attention=False, attention_dropout=True, hidden_dropout=True)


def predictor(samples: tuple[OperatorSample, ...]) -> FittedPredictor:
    return fit(ProfileSet(layers=(), links=(), operators=samples, provenance=(provenance(),)))


def ask(found: FittedPredictor, hidden: int, *, backward: bool = False) -> Prediction:
    asked = query(hidden, microbatch=1, tp=4, kernels=UNFUSED, backward=backward)
    return found.layer(DEVICE, asked)


def seconds(found: Prediction) -> dict[str, float]:
    return {part.name: part.seconds for part in found.parts}


def test_waits_for_the_host_are_a_part_of_their_own() -> None:
    slow = predictor(operator_grid(floor=400e-6))
    small, large = seconds(ask(slow, 512)), seconds(ask(slow, 7168))
    quick = seconds(ask(predictor(operator_grid(floor=0)), 512))
    assert small[WAIT_PART] > 0
    assert WAIT_PART not in quick
    assert WAIT_PART not in large
    # What launches cost the device does not depend on how far the host is behind.
    assert small.get(LAUNCH_PART, 0.0) == pytest.approx(large.get(LAUNCH_PART, 0.0), rel=0.05)
    whole = ask(slow, 512)
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
        assert ask(found, 2560, backward=True).float32_sums is expected
        assert ask(found, 2560).float32_sums is False


def test_backward_passes_hold_what_autograd_adds() -> None:
    found = ask(predictor(operator_grid()), 2560, backward=True)
    parts, ops = seconds(found), gradients(2560)
    for name in ("gradient_addition", "bias_gradient"):
        moved = sum(op.count * operator_bytes(op, "backward", 2) for op in ops[name])
        # At the rate of the other passes over memory, which is the truth of the grid.
        assert parts[name] == pytest.approx(moved / BYTES_PER_SECOND, rel=0.05)
    assert found.extrapolating.count(GRADIENTS_NOTE) == 1
    forward = ask(predictor(operator_grid()), 2560)
    assert not {"gradient_addition", "bias_gradient"} & set(seconds(forward))
    assert GRADIENTS_NOTE not in forward.extrapolating


def test_without_passes_measured_the_datasheet_prices_them() -> None:
    products = tuple(
        sample
        for sample in operator_grid()
        if sample.operator in ("matrix_product", "attention_score", "attention_context")
    )
    parts, ops = seconds(ask(predictor(products), 2560, backward=True)), gradients(2560)
    moved = sum(op.count * operator_bytes(op, "backward", 2) for op in ops["gradient_addition"])
    rate = DEVICE.memory_bandwidth_bytes_per_second * ELEMENTWISE_EFFICIENCY_BACKWARD
    assert parts["gradient_addition"] == pytest.approx(moved / rate)


def gradients(hidden: int) -> dict[str, list[Operator]]:
    found: dict[str, list[Operator]] = {}
    for op in query(hidden, microbatch=1, tp=4, kernels=UNFUSED).gradient_operators():
        found.setdefault(op.operator, []).append(op)
    return found
