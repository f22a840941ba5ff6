"""Runs units of work on one device, cheapest first, within a time budget.

A unit is what is measured at once: a layer at one shape, or an operator. Every finished unit is
handed over before the next begins, so that a kill loses one unit at most.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from hetplan.errors import ProfileError
from hetplan.profiling.backends import Backend
from hetplan.profiling.samples import LayerSample, OperatorSample, Phase
from hetplan.profiling.timing import (
    ACCELERATOR_LIMITS,
    CPU_LIMITS,
    TimingLimits,
    expected_seconds,
)

Shape: TypeAlias = tuple[str | int, ...]
"""What two samples of the same thing have in common: the `shape` of a sample."""

UnitT = TypeVar("UnitT")
SampleT = TypeVar("SampleT", LayerSample, OperatorSample)

_RECENT = 5
"""Units whose rates predict the next: the latest are the most alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Generic[UnitT, SampleT]):
    """One finished unit."""

    unit: UnitT
    samples: tuple[SampleT, ...]
    finished: int
    total: int
    left_seconds: float
    """Estimate for the units that are left, within the budget."""


class Profiler(ABC, Generic[UnitT, SampleT]):
    """Measures units on one device."""

    def __init__(
        self,
        backend: Backend,
        *,
        device: str,
        limits: TimingLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend, self.device, self._clock = backend, device, clock
        self.limits = limits or (ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS)

    @abstractmethod
    def shapes(self, unit: UnitT) -> set[Shape]:
        """Shapes of the samples that the unit will give."""

    @abstractmethod
    def measure_unit(self, unit: UnitT) -> tuple[SampleT, ...]:
        """One sample per phase of the unit."""

    @abstractmethod
    def work(self, unit: UnitT) -> tuple[str, float]:
        """Sort of work whose rate is alike, and how much of it the unit's passes do."""

    def run(
        self,
        units: Sequence[UnitT],
        *,
        measured: Collection[Shape] = (),
        budget_seconds: float = float("inf"),
        on_failure: Callable[[UnitT, Exception], None] | None = None,
    ) -> Iterator[Progress[UnitT, SampleT]]:
        """Measure the units that are not in `measured`, in their order, within the budget.

        A unit that is expected to end after the budget is not begun, and so are none after it:
        units go from cheap to expensive. With `on_failure` a unit that the device refuses (out of
        memory, no such kernel) is reported to it and passed over.
        """
        started = self._clock()
        missing = [unit for unit in units if self.shapes(unit) - set(measured)]
        costs = _Costs(self.limits, self.work)
        for index, unit in enumerate(missing):
            begun = self._clock()
            if index and begun - started + costs.seconds(unit) > budget_seconds:
                return
            try:
                samples = self.measure_unit(unit)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                if on_failure is None:
                    raise
                on_failure(unit, error)
                continue
            costs.note(unit, samples, self._clock() - begun)
            left = budget_seconds - (self._clock() - started)
            yield Progress(
                unit=unit,
                samples=samples,
                finished=index + 1,
                total=len(missing),
                left_seconds=costs.left_seconds(missing[index + 1 :], left),
            )

    def check_clock(self, unit: UnitT, samples: Sequence[SampleT]) -> None:
        """A ProfileError where the device's clock did not advance."""
        if any(sample.median_seconds <= 0 for sample in samples):
            raise ProfileError(f"the clock of {self.device} did not advance during {unit}")


class _Costs(Generic[UnitT]):
    """How long units are expected to take, learnt from those that were measured."""

    def __init__(self, limits: TimingLimits, work: Callable[[UnitT], tuple[str, float]]) -> None:
        self._limits, self._work = limits, work
        self._rates: dict[str, list[float]] = {}
        self._ratios: list[float] = []
        self._last_seconds = 0.0

    def note(
        self,
        unit: UnitT,
        samples: Sequence[LayerSample] | Sequence[OperatorSample],
        wall_seconds: float,
    ) -> None:
        """Learn the rate of a unit's passes and how its wall time compares to the rule."""
        pass_seconds = sum(
            sample.median_seconds
            for sample in samples
            if not sample.phase.startswith(Phase.OPTIMIZER)
        )
        sort, work = self._work(unit)
        self._rates.setdefault(sort, []).append(work / pass_seconds)
        self._last_seconds = wall_seconds
        self._ratios.append(wall_seconds / expected_seconds(self._limits, pass_seconds))

    def seconds(self, unit: UnitT) -> float:
        """Expected wall time of a unit; before any of its sort: that of the last unit."""
        sort, work = self._work(unit)
        rates = self._rates.get(sort)
        if rates is None:
            return self._last_seconds
        pass_seconds = work / statistics.median(rates[-_RECENT:])
        ratio = statistics.median(self._ratios[-_RECENT:])
        return ratio * expected_seconds(self._limits, pass_seconds)

    def left_seconds(self, missing: Sequence[UnitT], budget_seconds: float) -> float:
        """Expected wall time of these units in this order, as far as the budget goes."""
        total = 0.0
        for unit in missing:
            cost = self.seconds(unit)
            if total + cost > budget_seconds:
                break
            total += cost
        return total
