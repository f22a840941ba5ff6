"""How long one layer takes on one device, for every layer kind and every point of a grid.

Forward and backward are timed one after the other on the layer alone, with fresh random inputs and
no communication; backward computes gradients of the weights and, but for the embedding, of the
input. Gradients of weights are kept from pass to pass: they are added to, as from the second
microbatch of a step on. The head includes the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hetplan.job.spec import Optimizer
from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.profiling.backends import Backend
from hetplan.profiling.grid import GridPoint
from hetplan.profiling.layer_slices import DTYPES, INITIAL_STD, layer_inputs, time_layer
from hetplan.profiling.layers import Head, HeadWithLoss, allocate_layer
from hetplan.profiling.profiler import NO_TIMING, Profiler, Shape
from hetplan.profiling.samples import LayerSample, Phase
from hetplan.profiling.timing import Timing, TimingLimits, measure
from hetplan.profiling.updating import FlatParameters

if TYPE_CHECKING:
    from hetplan.profiling.pacing import PacedKind, Pacer

# One layer and as many as a stage holds: an update of few parameters runs from the cache.
UPDATE_COPIES = (1, 8)
# Elements of the largest update: 16 bytes each with AdamW in float32, so 4 GiB.
MAX_UPDATE = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One layer kind at one grid point."""

    point: GridPoint
    kind: LayerKind
    with_updates: bool = False
    """Whether the optimizer's updates of the layer are measured too."""

    def __str__(self) -> str:
        """The unit without its device, as in `transformer hidden 256 microbatch 2 tp 1`."""
        point = self.point
        update = " and updates" if self.with_updates else ""
        return (
            f"{self.kind.value}{update} hidden {point.model.hidden_size} sequence "
            f"{point.sequence_length} microbatch {point.microbatch_size} tp {point.tp} "
            f"{point.precision.value}"
        )


def units(grid: Sequence[GridPoint]) -> tuple[Unit, ...]:
    """Every unit of the grid, cheapest first.

    Updates depend on the parameters alone, so they are measured at the smallest microbatch.
    """
    smallest: dict[tuple[object, ...], int] = {}
    for point in grid:
        size = smallest.setdefault(_without_microbatch(point), point.microbatch_size)
        smallest[_without_microbatch(point)] = min(size, point.microbatch_size)
    every = [
        Unit(
            point=point,
            kind=kind,
            with_updates=kind is LayerKind.TRANSFORMER
            and point.microbatch_size == smallest[_without_microbatch(point)],
        )
        for point in grid
        for kind in TRAINED_KINDS
    ]
    return tuple(sorted(every, key=lambda unit: unit.point.flops(unit.kind)))


def has_pace(pace: PacedKind, unit: Unit) -> bool:
    """Whether the pace has both times of the unit."""
    phases = {
        entry.phase
        for entry in pace.entries
        if (entry.layer, entry.microbatch_size, entry.tp)
        == (unit.kind, unit.point.microbatch_size, unit.point.tp)
    }
    return {Phase.FORWARD, Phase.BACKWARD} <= phases


def _without_microbatch(point: GridPoint) -> tuple[object, ...]:
    return (point.model, point.sequence_length, point.tp, point.precision)


class LayerProfiler(Profiler[Unit, LayerSample]):
    """Measures layers on one device."""

    def __init__(
        self,
        backend: Backend,
        *,
        device: str,
        limits: TimingLimits | None = None,
        optimizers: Sequence[Optimizer] = tuple(Optimizer),
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(backend, device=device, limits=limits, clock=clock)
        self.optimizers, self.pacer = tuple(optimizers), pacer

    def work(self, unit: Unit) -> tuple[str, float]:
        """Layers of one kind have rates that are alike."""
        return unit.kind.value, unit.point.flops(unit.kind)

    def shapes(self, unit: Unit) -> set[Shape]:
        """Shapes of both passes and of the updates."""
        return {
            self._sample(unit, phase, NO_TIMING, copies=copies).shape
            for phase, copies in (
                (Phase.FORWARD, 1),
                (Phase.BACKWARD, 1),
                *((_update_phase(optimizer), copies) for optimizer, copies in self.updates(unit)),
            )
        }

    def updates(self, unit: Unit) -> tuple[tuple[Optimizer, int], ...]:
        """Optimizers, and of how many layers at once, whose updates belong to the unit."""
        if not unit.with_updates:
            return ()
        parameters = unit.point.model.parameters(unit.kind, unit.point.tp)
        return tuple(
            (optimizer, copies)
            for optimizer in self.optimizers
            for copies in UPDATE_COPIES
            if copies == 1 or copies * parameters <= MAX_UPDATE
        )

    def measure_unit(self, unit: Unit) -> tuple[LayerSample, ...]:
        """Samples of both passes and of the updates."""
        point, device = unit.point, self.backend.device()
        arguments, gradient = layer_inputs(
            unit.kind.value,
            (point.microbatch_size, point.sequence_length),
            point.model.hidden_size,
            point.model.vocab_size,
            point.precision.value,
            device,
        )
        timed = tuple(
            time_layer(
                self._layer(unit), arguments, gradient, self.backend, self.limits, self._clock
            )
        )
        self.check_clock(unit, [timing for timing, _, _ in timed])
        samples = [
            self._sample(unit, phase, timing, kept=kept, peak=peak)
            for phase, (timing, kept, peak) in zip(
                (Phase.FORWARD, Phase.BACKWARD), timed, strict=True
            )
        ]
        samples += [
            self._update(unit, optimizer, copies) for optimizer, copies in self.updates(unit)
        ]
        return tuple(samples)

    def _layer(self, unit: Unit) -> nn.Module:
        point = unit.point
        layer = allocate_layer(
            point.model,
            unit.kind,
            tp=point.tp,
            tp_rank=0,
            group=None,
            dtype=DTYPES[point.precision],
            device=self.backend.device(),
        )
        with torch.no_grad():
            # Values only have to be ordinary numbers: no kernel's time depends on them otherwise.
            for parameter in layer.parameters():
                parameter.normal_(0.0, INITIAL_STD)
        if isinstance(layer, Head):
            layer = HeadWithLoss(layer)
        if self.pacer is not None:
            layer = self.pacer.wrap(layer, unit.kind, point.microbatch_size, point.tp)
        return layer

    def _update(self, unit: Unit, optimizer: Optimizer, copies: int) -> LayerSample:
        """The update of this many layers' parameters, as the trainer does it: one vector."""
        point = unit.point
        count = copies * point.model.parameters(unit.kind, point.tp)
        device, dtype = self.backend.device(), DTYPES[point.precision]
        values = torch.randn(count, device=device, dtype=dtype) * INITIAL_STD
        flat = FlatParameters(nn.ParameterList([nn.Parameter(values)]), optimizer)
        flat.gradients.normal_(0.0, INITIAL_STD)

        def one_pass(mark: Callable[[], None]) -> None:
            mark()
            flat.update()
            mark()

        (timing,) = measure(one_pass, self.backend, self.limits, clock=self._clock)
        peak = 0.0
        if self.backend.reset_peak_memory():
            flat.update()
            self.backend.synchronise()
            peak = self.backend.peak_memory_bytes()
        return self._sample(unit, _update_phase(optimizer), timing, peak=peak, copies=copies)

    def _sample(
        self,
        unit: Unit,
        phase: str,
        timing: Timing,
        *,
        kept: float = 0.0,
        peak: float = 0.0,
        copies: int = 1,
    ) -> LayerSample:
        point, model = unit.point, unit.point.model
        return LayerSample(
            device=self.device,
            architecture=model.architecture.value,
            layer=unit.kind.value,
            phase=str(phase),
            precision=point.precision.value,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            sequence_length=point.sequence_length,
            microbatch_size=point.microbatch_size,
            tp=point.tp,
            copies=copies,
            median_seconds=timing.median_seconds,
            p10_seconds=timing.p10_seconds,
            p90_seconds=timing.p90_seconds,
            repeats=timing.repeats,
            outliers=timing.outliers,
            steady=timing.steady,
            activation_bytes=kept,
            peak_memory_bytes=peak,
            clock_hertz=self.backend.clock_hertz(),
        )


def _update_phase(optimizer: Optimizer) -> str:
    return f"{Phase.OPTIMIZER}:{optimizer}"
