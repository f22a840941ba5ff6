"""Operators are measured as they run: right shapes, right passes, each once, within a budget."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from profiling_models import GPT, LLAMA
from profiling_samples import invoke
from test_measure_layers import grid
from torch.utils.flop_counter import FlopCounterMode

from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    Kernels,
    Operator,
    OperatorClass,
    layer_operators,
    operator_flops,
)
from hetplan.model.spec import TRAINED_KINDS, Architecture
from hetplan.profiling.bodies import Place, operator_body, operator_shapes
from hetplan.profiling.measure_operators import operator_units, unit_shapes
from hetplan.profiling.store import read_store

UNFUSED = Kernels(
    fused_attention=False, attention_dropout=True, hidden_dropout=True, fused_loss=False
)
CPU = Place(device=torch.device("cpu"), dtype=torch.float32, architecture=Architecture.GPT)


def operator(kind: OperatorClass, m: int, n: int, k: int = 0, **others) -> Operator:
    return Operator(operator=kind, what="test", m=m, n=n, k=k, **others)


EVERY = (
    operator(OperatorClass.MATRIX_PRODUCT, 6, 8, 4),
    operator(OperatorClass.GROUPED_PRODUCT, 6, 8, 4, batch=3),
    operator(OperatorClass.ATTENTION_SCORE, 6, 6, 4, batch=3),
    operator(OperatorClass.ATTENTION_CONTEXT, 6, 4, 6, batch=3),
    operator(OperatorClass.FUSED_ATTENTION, 6, 6, 4, batch=3),
    operator(OperatorClass.SOFTMAX, 12, 6),
    operator(OperatorClass.SOFTMAX, 7, 4),
    operator(OperatorClass.ATTENTION_DROPOUT, 12, 6),
    operator(OperatorClass.NORM, 6, 8),
    operator(OperatorClass.ACTIVATION, 6, 8, 8),
    operator(OperatorClass.ACTIVATION, 6, 8, 16),
    operator(OperatorClass.ADDITION, 6, 8),
    operator(OperatorClass.ADDITION, 6, 8, 1),
    operator(OperatorClass.ADDITION, 6, 8, 3),
    operator(OperatorClass.ROTATION, 6, 8),
    operator(OperatorClass.ROUTING, 6, 8),
    operator(OperatorClass.EMBEDDING, 6, 8, 16),
    operator(OperatorClass.LOSS, 6, 16),
    operator(OperatorClass.LOSS, 6, 16, float32_copy=True),
)


def test_every_class_but_the_optimizer_and_the_backward_only_ones_is_there() -> None:
    # A framework adds the first two to a layer's backward pass.
    not_measured_alone = {
        OperatorClass.GRADIENT_ADDITION,
        OperatorClass.BIAS_GRADIENT,
        OperatorClass.OPTIMIZER,
        OperatorClass.ROUTER,
    }
    assert {op.operator for op in EVERY} == set(OperatorClass) - not_measured_alone


@pytest.mark.parametrize("architecture", Architecture)
def test_every_operator_runs_and_marks_each_of_its_passes(architecture) -> None:
    for op in EVERY:
        marks = []
        for dtype in (torch.float32, torch.bfloat16):
            body = operator_body(op, replace(CPU, dtype=dtype, architecture=architecture))
            for _ in range(2):
                body(lambda: marks.append(None))  # noqa: B023 (called at once)
        assert len(marks) == 4 * (len(operator_shapes(op)) + 1), op


@pytest.mark.parametrize(
    "op",
    [op for op in EVERY if op.operator in (
        OperatorClass.MATRIX_PRODUCT, OperatorClass.GROUPED_PRODUCT,
        OperatorClass.ATTENTION_SCORE, OperatorClass.ATTENTION_CONTEXT,
    )],
    ids=lambda op: op.operator,
)  # fmt: skip
def test_products_do_as_many_operations_as_the_model_counts(op) -> None:
    counted = []
    with FlopCounterMode(display=False) as counter:
        operator_body(op, CPU)(lambda: counted.append(counter.get_total_flops()))
    passes = [after - before for before, after in pairwise(counted)]
    assert sum(passes) == operator_flops(op, FORWARD) + operator_flops(op, BACKWARD)
    assert passes[0] == operator_flops(op, FORWARD)


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("kernels", [Kernels(), UNFUSED], ids=["fused", "unfused"])
def test_samples_name_the_shapes_that_a_layer_runs(model, kernels) -> None:
    (point,) = grid(model, microbatch_sizes=(2,), tp_degrees=(2,))
    work = operator_units((point,), lambda kind: kernels)
    found = {shape for unit in work for shape in unit_shapes(unit)}
    for kind in TRAINED_KINDS:
        for op in layer_operators(
            model, kind, microbatch_size=2, sequence_length=16, tp=2, kernels=kernels
        ):
            wide = op.operator is OperatorClass.LOSS and op.float32_copy
            output = "float32" if wide else point.precision.value
            key = (op.operator, FORWARD, point.precision, output, op.batch, op.m, op.n, op.k)
            assert key in found
            if op.operator is OperatorClass.MATRIX_PRODUCT:
                assert (*key[:1], "input_gradient", *key[2:6], op.k, op.n) in found
                assert (*key[:1], "weight_gradient", *key[2:5], op.n, op.k, op.m) in found


SMALL = ("--device", "cpu", "--hidden", "64", "--seq", "16", "--vocab", "32", "--tp", "1")


def test_the_command_measures_keeps_and_goes_on(tmp_path) -> None:
    ask = ("operators", *SMALL, "--microbatch", "1", "--store", tmp_path)
    first = invoke(*ask, "--budget", "0.001")
    assert "samples are missing; the same command goes on" in first.output
    held = read_store(tmp_path).operators
    assert held
    second = invoke(*ask, "--json")
    assert '"operators": [' in second.output
    every = read_store(tmp_path).operators
    assert every[: len(held)] == held
    assert len({each.shape for each in every}) == len(every)
    assert {each.operator for each in every} == {
        "matrix_product", "fused_attention", "norm", "activation", "addition", "embedding", "loss",
    }  # fmt: skip
    assert all(each.measured_on for each in every)
    third = invoke(*ask)
    assert "0 samples measured" in third.output
    assert read_store(tmp_path).operators == every
    (population,) = {path.parent for path in tmp_path.rglob("operators.csv")}
    assert (population / "provenance.json").exists()
