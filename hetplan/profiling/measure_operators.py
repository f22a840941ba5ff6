"""How long the operators of a model's layers take on one device, each alone.

Shapes are those of the layers at every point of a grid (`hetplan.model.operators`); equal
ones are measured once. Operators go from cheap to expensive until the budget is spent, and every
finished one is handed over at once. What a device refuses (no memory, no such kernel) is told and
passed over. Times are taken as those of layers are: `hetplan.profiling.timing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hetplan.errors import ProfileError
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
from hetplan.profiling.grid import GridPoint
from hetplan.profiling.measure_layers import DTYPES
from hetplan.profiling.operator_bodies import Place, operator_body, operator_phases, phase_shape
from hetplan.profiling.samples import OperatorPhase, OperatorSample
from hetplan.profiling.timing import Timing, TimingLimits, measure

OperatorShape: TypeAlias = tuple[str | int, ...]
"""What two samples of the same thing have in common: `OperatorSample.shape`."""

# Operations that take about as long as moving one byte on current accelerators (312 TFLOP/s over
# 1.6 TB/s on an A100); only for the order, cheapest first.
_FLOPS_PER_BYTE = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorUnit:
    """One operator of one shape, with all its passes."""

    operator: Operator
    precision: Precision
    architecture: Architecture

    @property
    def cost(self) -> float:
        """Operations of both passes, memory traffic counted as operations."""
        width = self.precision.bytes_per_element
        return sum(
            operator_flops(self.operator, phase)
            + _FLOPS_PER_BYTE * operator_bytes(self.operator, phase, width)
            for phase in (FORWARD, BACKWARD)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProgress:
    """One finished operator."""

    unit: OperatorUnit
    samples: tuple[OperatorSample, ...]
    finished: int
    total: int
    left_seconds: float
    """Estimate for those that are left, within the budget."""


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


def unit_shapes(unit: OperatorUnit) -> tuple[OperatorShape, ...]:
    """What the samples of the operator will measure, in the order of its passes."""
    nothing = Timing(
        median_seconds=0.0, p10_seconds=0.0, p90_seconds=0.0, repeats=0, outliers=0, steady=True
    )
    return tuple(
        _sample(unit, phase, "", nothing).shape for phase in operator_phases(unit.operator)
    )


def _sample(
    unit: OperatorUnit, phase: OperatorPhase, device: str, timing: Timing
) -> OperatorSample:
    op = unit.operator
    m, n, k = phase_shape(op, phase)
    # A loss in float32 says so by its output; gradients of weights are as wide as the weights here.
    is_wide = op.operator is OperatorClass.LOSS and op.float32_copy
    output = Precision.FLOAT32 if is_wide else unit.precision
    return OperatorSample(
        device=device,
        operator=op.operator.value,
        phase=phase.value,
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


class OperatorProfiler:
    """Measures operators on one backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        device: str,
        limits: TimingLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend, self.device, self.limits = backend, device, limits
        self._clock = clock

    def run(
        self,
        work: Sequence[OperatorUnit],
        *,
        measured: Collection[OperatorShape] = (),
        budget_seconds: float = float("inf"),
        on_failure: Callable[[OperatorUnit, Exception], None] | None = None,
    ) -> Iterator[OperatorProgress]:
        """Measure those that are not in `measured`, within the budget.

        One that would end after the budget if it took as long as the last is not begun, and none
        after it. With `on_failure` an operator that the device refuses is told to it and passed
        over.
        """
        started = self._clock()
        missing = [unit for unit in work if set(unit_shapes(unit)) - set(measured)]
        last = 0.0
        for index, unit in enumerate(missing):
            begun = self._clock()
            if index and begun - started + last > budget_seconds:
                return
            try:
                samples = self.measure_unit(unit)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                if on_failure is None:
                    raise
                on_failure(unit, error)
                continue
            last = self._clock() - begun
            spent = self._clock() - started
            yield OperatorProgress(
                unit=unit,
                samples=samples,
                finished=index + 1,
                total=len(missing),
                left_seconds=min(
                    last * (len(missing) - index - 1), max(0.0, budget_seconds - spent)
                ),
            )

    def measure_unit(self, unit: OperatorUnit) -> tuple[OperatorSample, ...]:
        """One sample per pass of the operator."""
        place = Place(
            device=self.backend.device(),
            dtype=DTYPES[unit.precision],
            architecture=unit.architecture,
        )
        timings = measure(
            operator_body(unit.operator, place), self.backend, self.limits, clock=self._clock
        )
        phases = operator_phases(unit.operator)
        for timing in timings:
            if timing.median_seconds <= 0:
                raise ProfileError(f"the clock of {self.device} did not advance during {unit}")
        return tuple(
            _sample(unit, phase, self.device, timing)
            for phase, timing in zip(phases, timings, strict=True)
        )
