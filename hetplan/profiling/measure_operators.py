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
from hetplan.profiling.grid import GridPoint
from hetplan.profiling.layer_slices import DTYPES
from hetplan.profiling.operator_bodies import Place, operator_body, operator_shapes
from hetplan.profiling.profiler import NO_TIMING, Profiler, Shape
from hetplan.profiling.samples import OperatorSample
from hetplan.profiling.timing import Timing, measure

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
    """Every operator of the layers at these points, each shape once, cheapest first.

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
                unit = OperatorUnit(
                    operator=operator,
                    precision=point.precision,
                    architecture=point.model.architecture,
                )
                found.setdefault((frozenset(unit_shapes(unit)), unit.architecture), unit)
    return tuple(sorted(found.values(), key=lambda unit: unit.cost))


def unit_shapes(unit: OperatorUnit) -> tuple[Shape, ...]:
    """Shapes of the operator's samples, in the order of its passes."""
    return tuple(
        _sample(unit, phase, "", NO_TIMING).shape for phase in operator_shapes(unit.operator)
    )


def _sample(unit: OperatorUnit, phase: str, device: str, timing: Timing) -> OperatorSample:
    op = unit.operator
    m, n, k = operator_shapes(op)[phase]
    # A loss in float32 says so by its output; gradients of weights are as wide as the weights here.
    is_wide = op.operator is OperatorClass.LOSS and op.float32_copy
    output = Precision.FLOAT32 if is_wide else unit.precision
    return OperatorSample(
        device=device,
        operator=op.operator.value,
        phase=phase,
        precision=unit.precision.value,
        output_precision=output.value,
        batch=op.batch,
        m=m,
        n=n,
        k=k,
        median_seconds=timing.median_seconds,
        p10_seconds=timing.p10_seconds,
        p90_seconds=timing.p90_seconds,
        repeats=timing.repeats,
        outliers=timing.outliers,
    )


class OperatorProfiler(Profiler[OperatorUnit, OperatorSample]):
    """Measures operators on one device."""

    def work(self, unit: OperatorUnit) -> tuple[str, float]:
        """Operators of one class have rates that are alike."""
        return unit.operator.operator.value, unit.cost

    def shapes(self, unit: OperatorUnit) -> set[Shape]:
        """Shapes of the operator's passes."""
        return set(unit_shapes(unit))

    def measure_unit(self, unit: OperatorUnit) -> tuple[OperatorSample, ...]:
        """One sample per pass of the operator."""
        place = Place(
            device=self.backend.device(),
            dtype=DTYPES[unit.precision],
            architecture=unit.architecture,
        )
        body = operator_body(unit.operator, place)
        timings = measure(body, self.backend, self.limits, clock=self._clock)
        self.check_clock(unit, timings)
        return tuple(
            _sample(unit, phase, self.device, timing)
            for phase, timing in zip(operator_shapes(unit.operator), timings, strict=True)
        )
