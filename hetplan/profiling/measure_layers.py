"""How long and how large the layers of a model are on one device, measured as they are trained.

One unit of work is one layer kind at one grid point: forward with autograd recording, backward
with the gradients of input and weights (added to those that are there, as from the second
microbatch of a step on), the optimizer's update, and their memory. A slice is measured alone,
without communication. `head` includes the loss. Units go from cheap to expensive, until the
budget is spent; every finished unit is handed over at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from hetplan.errors import ProfileError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.profiling.backends import Backend
from hetplan.profiling.grid import GridPoint
from hetplan.profiling.layers import Head, HeadWithLoss, allocate_layer
from hetplan.profiling.samples import LayerSample, Phase
from hetplan.profiling.timing import Timing, TimingLimits, expected_seconds, measure
from hetplan.profiling.updating import FlatParameters
from hetplan.profiling.weights import INITIAL_STD

if TYPE_CHECKING:
    from hetplan.profiling.pacing import PacedKind, Pacer

DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.FLOAT16: torch.float16,
}

# One layer and as many as a stage holds: an update of few parameters runs from the cache.
UPDATE_COPIES = (1, 8)
# Elements of the largest update: 16 bytes each with AdamW in float32, so 4 GiB.
MAX_UPDATE = 1 << 28

Shape: TypeAlias = tuple[str | int, ...]
"""What two samples of the same thing have in common: `LayerSample.shape`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One layer kind at one grid point."""

    point: GridPoint
    kind: LayerKind
    with_updates: bool = False
    """Whether the optimizer's updates of the layer are measured too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One finished unit."""

    unit: Unit
    samples: tuple[LayerSample, ...]
    finished: int
    total: int
    left_seconds: float
    """Estimate for the units that are left, within the budget."""


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


class LayerProfiler:
    """Measures units on one backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        device: str,
        limits: TimingLimits,
        optimizers: Sequence[Optimizer] = tuple(Optimizer),
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend, self.device, self.limits = backend, device, limits
        self.optimizers, self.pacer = tuple(optimizers), pacer
        self._clock = clock

    def run(
        self,
        work: Sequence[Unit],
        *,
        measured: Collection[Shape] = (),
        budget_seconds: float = float("inf"),
        on_begin: Callable[[Unit], None] | None = None,
        on_failure: Callable[[Unit, Exception], None] | None = None,
    ) -> Iterator[Progress]:
        """Measure the units that are not in `measured`, cheapest first, within the budget.

        A unit that is expected to end after the budget is not begun, and so are none after it:
        they are more expensive. Results are yielded one unit at a time. With `on_failure` a unit
        that the device refuses (out of memory, no such kernel) is told to it and passed over.
        """
        started = self._clock()
        missing = [unit for unit in work if self.shapes(unit) - set(measured)]
        costs = _Costs(self.limits)
        for index, unit in enumerate(missing):
            spent = self._clock() - started
            if index and spent + costs.seconds(unit) > budget_seconds:
                return
            begun = self._clock()
            if on_begin is not None:
                on_begin(unit)
            try:
                samples = self.measure_unit(unit)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                if on_failure is None:
                    raise
                on_failure(unit, error)
                continue
            costs.note(unit, samples, self._clock() - begun)
            spent = self._clock() - started
            left = costs.left_seconds(missing[index + 1 :], budget_seconds - spent)
            yield Progress(
                unit=unit,
                samples=samples,
                finished=index + 1,
                total=len(missing),
                left_seconds=left,
            )

    def shapes(self, unit: Unit) -> set[Shape]:
        """What the samples of a unit will measure."""
        timing = Timing(
            median_seconds=0.0, p10_seconds=0.0, p90_seconds=0.0, repeats=0, outliers=0, steady=True
        )
        passes = [self._sample(unit, phase, timing) for phase in (Phase.FORWARD, Phase.BACKWARD)]
        updates = [
            self._sample(unit, _update_phase(optimizer), timing, copies=copies)
            for optimizer, copies in self._updates(unit)
        ]
        return {sample.shape for sample in (*passes, *updates)}

    def _updates(self, unit: Unit) -> tuple[tuple[Optimizer, int], ...]:
        """Which updates of how many layers at once belong to the unit."""
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
        """One sample per phase of the unit."""
        layer = self._layer(unit)
        arguments, gradient = self._inputs(unit)

        def one_pass(mark: Callable[[], None]) -> None:
            for argument in arguments:
                argument.grad = None
            mark()
            result = layer(*arguments)
            mark()
            result.backward(gradient)
            mark()

        forward, backward = measure(one_pass, self.backend, self.limits, clock=self._clock)
        for timing in (forward, backward):
            if timing.median_seconds <= 0:
                raise ProfileError(f"the clock of {self.device} did not advance during {unit}")
        kept, forward_peak, backward_peak = self._memory(layer, arguments, gradient)
        samples = [
            self._sample(unit, Phase.FORWARD, forward, kept=kept, peak=forward_peak),
            self._sample(unit, Phase.BACKWARD, backward, peak=backward_peak),
        ]
        samples += [
            self._update(unit, optimizer, copies) for optimizer, copies in self._updates(unit)
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

    def _inputs(self, unit: Unit) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What the layer takes, and the gradient of its result (None for the scalar loss)."""
        point, device = unit.point, self.backend.device()
        shape = (point.microbatch_size, point.sequence_length)
        tokens = torch.randint(0, point.model.vocab_size, shape, device=device)
        stream = torch.randn(
            (*shape, point.model.hidden_size), dtype=DTYPES[point.precision], device=device
        )
        if unit.kind is LayerKind.EMBEDDING:
            return (tokens,), stream
        if unit.kind is LayerKind.HEAD:
            return (stream.requires_grad_(), tokens), None
        return (stream.requires_grad_(),), torch.randn_like(stream)

    def _memory(
        self, layer: nn.Module, arguments: tuple[Tensor, ...], gradient: Tensor | None
    ) -> tuple[float, float, float]:
        """Bytes kept for backward, and the peaks of forward and backward (0: not told)."""
        parameters = {each.untyped_storage().data_ptr() for each in layer.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        for argument in arguments:
            argument.grad = None
        forward_peak = backward_peak = 0.0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            watched = self.backend.reset_peak_memory()
            result = layer(*arguments)
            self.backend.synchronise()
            if watched:
                forward_peak = self.backend.peak_memory_bytes()
        watched = self.backend.reset_peak_memory()
        result.backward(gradient)
        self.backend.synchronise()
        if watched:
            backward_peak = self.backend.peak_memory_bytes()
        return float(sum(kept.values())), forward_peak, backward_peak

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


class _Costs:
    """How long units are expected to take, learnt from those that were measured."""

    def __init__(self, limits: TimingLimits) -> None:
        self._limits = limits
        self._rates: dict[LayerKind, list[float]] = {}
        self._ratios: list[float] = []
        self._last_seconds = 0.0

    def note(self, unit: Unit, samples: Sequence[LayerSample], wall_seconds: float) -> None:
        """Learn the rate of a unit's passes and how its wall time compares to the rule."""
        pass_seconds = sum(
            sample.median_seconds
            for sample in samples
            if sample.phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        rate = unit.point.flops(unit.kind) / pass_seconds
        self._rates.setdefault(unit.kind, []).append(rate)
        self._last_seconds = wall_seconds
        self._ratios.append(wall_seconds / expected_seconds(self._limits, pass_seconds))

    def seconds(self, unit: Unit) -> float:
        """Expected wall time of a unit; needs one noted unit. The latest are the most alike."""
        rates = self._rates.get(unit.kind)
        if rates is None:
            # Nothing of this kind yet: it is next in line, so about as long as the last.
            return self._last_seconds
        pass_seconds = unit.point.flops(unit.kind) / statistics.median(rates[-5:])
        ratio = statistics.median(self._ratios[-5:])
        return ratio * expected_seconds(self._limits, pass_seconds)

    def left_seconds(self, missing: Sequence[Unit], budget_seconds: float) -> float:
        """Expected wall time of these units in this order, as far as the budget goes."""
        total = 0.0
        for unit in missing:
            cost = self.seconds(unit)
            if total + cost > budget_seconds:
                break
            total += cost
        return total
