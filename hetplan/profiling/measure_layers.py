"""How long one layer takes on one device, for every layer kind and every point of a grid.

Forward and backward are timed one after the other on the layer alone, with fresh random inputs and
no communication; backward computes gradients of the weights and, but for the embedding, of the
input. Gradients of weights are kept from pass to pass: they are added to, as from the second
microbatch of a step on. The head includes the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from hetplan.job.spec import Optimizer
from hetplan.model.spec import TRAINED_KINDS, LayerKind, ModelSpec
from hetplan.profiling.backends import Backend
from hetplan.profiling.grid import GridPoint
from hetplan.profiling.samples import LAYER_SHAPE, Phase, Shape
from hetplan.profiling.timing import ACCELERATOR_LIMITS, CPU_LIMITS
from hetplan.profiling.work import Work, layer_keys, layer_work

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
        """As in `transformer hidden 256 sequence 1024 microbatch 2 tp 1 float32`."""
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


def unit_work(unit: Unit, device: str, backend: Backend, pacer: Pacer | None = None) -> Work:
    """How the unit is measured; its samples are of the kind `device`, whose time a pacer plays."""

    def wrap(layer: nn.Module) -> nn.Module:
        if pacer is None:
            return layer
        return pacer.wrap(layer, unit.kind, unit.point.microbatch_size, unit.point.tp)

    limits = ACCELERATOR_LIMITS if backend.is_accelerator else CPU_LIMITS
    return layer_work(_row(unit) | {"device": device}, backend, limits, wrap)


def unit_shapes(unit: Unit) -> tuple[Shape, ...]:
    """`LayerSample.shape` of each of the unit's samples."""
    return tuple(tuple(keys[name] for name in LAYER_SHAPE) for keys in layer_keys(_row(unit)))


def _row(unit: Unit) -> dict[str, Any]:
    return unit_columns(unit) | model_columns(unit.point.model)


def model_columns(model: ModelSpec) -> dict[str, Any]:
    """What of a layer's columns its model says."""
    return {"architecture": model.architecture.value} | {
        name: getattr(model, name)
        for name in (
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_sequence_length",
        )
    }


def unit_columns(unit: Unit) -> dict[str, Any]:
    """What of a layer's columns its unit says, and the updates that are measured with it."""
    return {
        "layer": unit.kind.value,
        "sequence_length": unit.point.sequence_length,
        "microbatch_size": unit.point.microbatch_size,
        "tp": unit.point.tp,
        "precision": unit.point.precision.value,
        "updates": [[optimizer.value, copies] for optimizer, copies in updates(unit)],
    }


def updates(unit: Unit) -> tuple[tuple[Optimizer, int], ...]:
    """Optimizers, and of how many layers at once, whose updates belong to the unit."""
    if not unit.with_updates:
        return ()
    parameters = unit.point.model.parameters(unit.kind, unit.point.tp)
    return tuple(
        (optimizer, copies)
        for optimizer in Optimizer
        for copies in UPDATE_COPIES
        if copies == 1 or copies * parameters <= MAX_UPDATE
    )
