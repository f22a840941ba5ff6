"""How long the operators of a model's layers take on one device, each alone.

Shapes are those of the layers at every point of a grid (`hetplan.model.operators`); equal
ones are measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.job.spec import Precision
from hetplan.model.operators import (
    BACKWARD,
    DEFAULT_KERNELS,
    FORWARD,
    Kernels,
    Operator,
    OperatorClass,
    layer_operators,
    operator_bytes,
    operator_flops,
)
from hetplan.model.spec import TRAINED_KINDS, Architecture, LayerKind
from hetplan.profiling.backends import Backend
from hetplan.profiling.bodies import operator_passes
from hetplan.profiling.grid import GridPoint
from hetplan.profiling.samples import OPERATOR_SHAPE, Shape
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS
from hetplan.profiling.work import Work, operator_work

# Operations that take about as long as moving one byte on current accelerators (312 TFLOP/s over
# 1.6 TB/s on an A100); only for the order, cheapest first.
_FLOPS_PER_BYTE = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorUnit:
    """One operator of one shape, with all its passes."""

    operator: Operator
    precision: Precision
    architecture: Architecture

    def __str__(self) -> str:
        """As in `matrix_product 1 x [4096, 1024, 3072] bfloat16`."""
        op = self.operator
        return f"{op.operator} {op.batch} x [{op.m}, {op.n}, {op.k}] {self.precision.value}"

    @property
    def cost(self) -> float:
        """Operations of both passes, memory traffic counted as operations."""
        width = self.precision.bytes_per_element
        return sum(
            operator_flops(self.operator, phase)
            + _FLOPS_PER_BYTE * operator_bytes(self.operator, phase, width)
            for phase in (FORWARD, BACKWARD)
        )


def operator_units(
    grid: Sequence[GridPoint], kernels: Callable[[LayerKind], Kernels] | None = None
) -> tuple[OperatorUnit, ...]:
    """Every operator of the layers at these points, each shape once, cheapest first; routers' small
    passes are none.

    `kernels` of a kind of layer; None: the default ones everywhere.
    """
    found: dict[tuple[object, ...], OperatorUnit] = {}
    for point in grid:
        for kind in TRAINED_KINDS:
            for operator in layer_operators(
                point.model,
                kind,
                microbatch_size=point.microbatch_size,
                sequence_length=point.sequence_length,
                tp=point.tp,
                kernels=DEFAULT_KERNELS if kernels is None else kernels(kind),
            ):
                if operator.operator is OperatorClass.ROUTER:
                    continue  # dozens of kernels that cost their launch (`predict.datasheet`)
                unit = OperatorUnit(
                    operator=operator,
                    precision=point.precision,
                    architecture=point.model.architecture,
                )
                found.setdefault((frozenset(unit_shapes(unit)), unit.architecture), unit)
    return tuple(sorted(found.values(), key=lambda unit: unit.cost))


def unit_shapes(unit: OperatorUnit) -> tuple[Shape, ...]:
    """`OperatorSample.shape` of the operator's samples, in the order of its passes."""
    passes = operator_passes(unit.operator, unit.precision.value)
    return tuple(tuple(keys[name] for name in OPERATOR_SHAPE) for keys in passes)


def unit_work(unit: OperatorUnit, device: str, backend: Backend) -> Work:
    """How the operator is measured; its samples are of the kind `device`."""
    limits = ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS
    architecture, precision = unit.architecture.value, unit.precision.value
    return operator_work(unit.operator, precision, architecture, device, backend, limits)
