"""Layers as sums of operators: against the truth, order of answers, stand-ins that say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from predict_operators import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    LAUNCH,
    operator_grid,
)
from predict_samples import DEVICE, layer_grid, provenance, query

from hetplan.job.spec import Precision
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.operators import (
    Kernels,
    Operator,
    operator_bytes,
    operator_flops,
)
from hetplan.model.spec import LayerKind
from hetplan.predict.datasheet import (
    LAUNCH_SECONDS_FORWARD,
    SMALL_KERNEL_SECONDS,
    SMALL_LAUNCH_SECONDS,
)
from hetplan.predict.fit import fit
from hetplan.predict.layer.composed import GRADIENTS_NOTE, LAUNCH_PART, WAIT_PART
from hetplan.predict.operator.answer import DERIVED_LOG_HALFWIDTH, WEIGHT_GRADIENT_OVER_FORWARD
from hetplan.predict.predictor import LayerQuery, Prediction
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


def test_gradients_from_forward_are_no_surer_than_that() -> None:
    """Exact rows: a forward product is as sure as they are, a gradient as sure as the rule."""
    exact = predictor(tuple(each for each in operator_grid() if each.phase == "forward"))
    forward, backward = (
        next(
            part.log_halfwidth
            for part in ask(exact, backward=each).parts
            if part.name == "matrix_product"
        )
        for each in (False, True)
    )
    assert forward < DERIVED_LOG_HALFWIDTH
    assert backward == pytest.approx(DERIVED_LOG_HALFWIDTH)


def test_order_of_answers() -> None:
    layers = tuple(layer_grid(noise=0.01, seed=1, phase="forward", tps=(1,)))
    whole = predictor(operator_grid(), layers)
    assert ask(whole).parts == ()
    assert ask(whole, backward=True).parts != ()
    assert ask(whole, precision=Precision.FLOAT32).source in ("datasheet", "related")
    memory_only = tuple(s for s in operator_grid() if s.operator == "norm")
    assert ask(predictor(memory_only)).source != "measured"


SMALL = {"microbatch": 1, "tp": 4}


def seconds(found: Prediction) -> dict[str, float]:
    return {part.name: part.seconds for part in found.parts}


def test_small_layers_take_what_the_host_needs_to_launch_them() -> None:
    """However little they do, and twice as long on a host of half the speed."""
    found = predictor(operator_grid(floor=0))
    operators = sum(op.count for op in query(512, microbatch=1, kernels=UNFUSED).operators())
    host = operators * LAUNCH_SECONDS_FORWARD
    for tp in (4, 8):
        assert ask(found, 512, microbatch=1, tp=tp).seconds == pytest.approx(host)
    slow = replace(UNFUSED, host_launch_seconds=2.0 * LAUNCH_SECONDS_FORWARD)
    assert ask(found, 512, kernels=slow, **SMALL).seconds == pytest.approx(2.0 * host)


def test_waits_for_the_host_are_a_part_of_their_own() -> None:
    slow = predictor(operator_grid(floor=400e-6))
    small, large = seconds(ask(slow, 512, **SMALL)), seconds(ask(slow, 7168, **SMALL))
    quick = seconds(ask(predictor(operator_grid(floor=0)), 512, **SMALL))
    # Thirteen launches of a Megatron layer, whatever little they do.
    assert sum(small.values()) >= 10 * 300e-6
    assert small[WAIT_PART] > 0
    # A profiler that saw no floor ran ahead; a trainer still launches every operator.
    launches = 13 * LAUNCH_SECONDS_FORWARD
    assert sum(quick.values()) == pytest.approx(launches, rel=0.2)
    assert sum(quick.values()) < sum(small.values())
    assert WAIT_PART not in large
    # What launches cost the device does not depend on how far the host is behind.
    assert small.get(LAUNCH_PART, 0.0) == pytest.approx(large.get(LAUNCH_PART, 0.0), rel=0.05)
    whole = ask(slow, 512, **SMALL)
    assert sum(small.values()) == pytest.approx(whole.seconds)


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


def gradients(hidden: int) -> dict[str, list[Operator]]:
    found: dict[str, list[Operator]] = {}
    for op in query(hidden, microbatch=1, tp=4, kernels=UNFUSED).gradient_operators():
        found.setdefault(op.operator, []).append(op)
    return found


def experts_query(kernels: Kernels, *, backward: bool = False, **sizes: int) -> LayerQuery:
    """A layer of 64 small experts, two of which a token meets."""
    asked = query(1024, kernels=kernels, backward=backward, **sizes)
    layer = replace(
        asked.model.common_layer(),
        mlp=Experts(num_experts=64, experts_per_token=2, expert_ffn_hidden_size=64),
    )
    runs = (LayerRun(count=asked.model.num_layers, layer=layer),)
    return replace(asked, model=replace(asked.model, layer_runs=runs))


def host_seconds(op: Operator) -> float:
    """One launch per operator, one per expert of a grouped product, short ones of a router."""
    if op.operator == "router":
        return op.count * SMALL_LAUNCH_SECONDS
    return op.count * (op.batch if op.operator == "grouped_product" else 1) * LAUNCH_SECONDS_FORWARD


def device_seconds(op: Operator) -> float:
    launch = SMALL_KERNEL_SECONDS if op.operator == "router" else LAUNCH
    moved = operator_bytes(op, "forward", 2) / BYTES_PER_SECOND
    return op.count * (operator_flops(op, "forward") / FLOPS_PER_SECOND + moved + launch)


def test_experts_are_launched_one_by_one() -> None:
    laws, few = predictor(operator_grid(floor=0)), {"microbatch": 1, "sequence": 128}
    asked = experts_query(UNFUSED, **few)
    host = sum(map(host_seconds, asked.operators()))
    assert host > 2 * 64 * LAUNCH_SECONDS_FORWARD
    assert laws.layer(DEVICE, asked).seconds == pytest.approx(host)
    # A grouped product of one launch: the device's work is what is left.
    once = experts_query(replace(UNFUSED, host_counts=False), **few)
    assert laws.layer(DEVICE, once).seconds < 0.6 * host
    backward = experts_query(UNFUSED, backward=True, **few)
    assert seconds(laws.layer(DEVICE, backward))[WAIT_PART] > 0


def test_a_dispatch_waits_for_the_host() -> None:
    """The device works long on attention; the host cannot launch the experts meanwhile."""
    laws = predictor(operator_grid(floor=0))
    asked = experts_query(UNFUSED, microbatch=16)
    ops = asked.operators()
    after = [op for op in ops if op.dispatched]
    before = [op for op in ops if not op.dispatched]
    on_device = sum(map(device_seconds, ops))
    assert sum(map(host_seconds, ops)) < on_device
    exposed = sum(map(host_seconds, after)) - sum(map(device_seconds, after))
    assert exposed > 0
    found = laws.layer(DEVICE, asked)
    assert seconds(found)[WAIT_PART] == pytest.approx(exposed, rel=0.1)
    whole = sum(map(device_seconds, before)) + sum(map(host_seconds, after))
    assert found.seconds == pytest.approx(whole, rel=0.05)
    # Without counts on the host it launches ahead, so the device is never idle.
    ahead = experts_query(replace(UNFUSED, host_counts=False), microbatch=16)
    assert WAIT_PART not in seconds(laws.layer(DEVICE, ahead))
