"""What does a check of a plan's device kinds compute, by name?

The operators of the plan's layers alone, every shape once, the three layers whole, and a step of
the optimizer on a transformer layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.job.trainer import trainer_settings
from hetplan.launchers.numerics_tolerance import CHECKED
from hetplan.launchers.numerics_values import NumericsSetup
from hetplan.model.operators import ADDITION_FUSED, Operator, OperatorClass, layer_operators
from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.search.result import SearchResult

WHOLE = "whole"
"""`what` of a whole layer."""


def checked_operators(
    result: SearchResult, setup: NumericsSetup
) -> Iterator[tuple[LayerKind, int, Operator]]:
    """Operators whose results are not random, of every degree and kind of layer."""
    trainer = trainer_settings(result.inputs.job)
    for tp in setup.tensor_parallel:
        for kind in TRAINED_KINDS:
            for op in layer_operators(
                result.inputs.model,
                kind,
                microbatch_size=setup.microbatch_size,
                sequence_length=setup.sequence_length,
                tp=tp,
                kernels=replace(trainer.kernels(kind), product_format=""),
            ):
                dropped = op.operator is OperatorClass.ADDITION and op.k != ADDITION_FUSED
                if op.operator in CHECKED and not dropped:
                    yield kind, tp, op


def different_operators(
    result: SearchResult, setup: NumericsSetup
) -> Iterator[tuple[int, Operator]]:
    """(tp, operator), of those with one shape the first."""
    seen = set()
    for _, tp, op in checked_operators(result, setup):
        shape = (op.operator, op.batch, op.m, op.n, op.k, op.float32_copy)
        if shape not in seen:
            seen.add(shape)
            yield tp, op


def layer_name(kind: LayerKind) -> str:
    """The `operator` of a whole layer."""
    return f"{kind.value} layer"


def step_name(setup: NumericsSetup) -> str:
    """`what` of a step of the optimizer."""
    return f"{setup.optimizer.value} step"


def work_of(result: SearchResult, setup: NumericsSetup) -> tuple[tuple[str, str, int], ...]:
    """(operator, what, tp) of everything that a whole answer has."""
    layers = dict.fromkeys((kind, tp) for kind, tp, _ in checked_operators(result, setup))
    return (
        *((op.operator.value, op.what, tp) for tp, op in different_operators(result, setup)),
        *((layer_name(kind), WHOLE, tp) for kind, tp in layers),
        *(
            (OperatorClass.OPTIMIZER.value, step_name(setup), tp)
            for kind, tp in layers
            if kind is LayerKind.TRANSFORMER
        ),
    )
