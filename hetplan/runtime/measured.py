"""Measurements of a training run: its steps, and where each rank's time went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: int
    """Counted from 0, from the first step of the training: a run that goes on from a checkpoint
    begins with the number of steps that were done."""
    seconds: float
    """Longest time of a rank from the barrier before the step to the end of its update."""
    loss: float
    """Mean over the tokens of the global batch, before the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasure:
    """Where one rank's step time went: medians over the steps that count."""

    rank: int
    device: int
    device_kind: str
    stage: int
    dp_index: int
    tp_index: int
    step_seconds: float
    busy_seconds: float
    """All forward and backward passes, communication of the tensor-parallel group included."""
    tensor_parallel_seconds: float
    """Communication inside the figure above; 0 on accelerators, where it is not told apart."""
    wait_seconds: float
    """From the begin of the step until the rank leaves the pipeline, less busy time. An estimate's
    wait goes on until every stage has left it, so late stages have the larger estimate."""
    reduction_seconds: float
    """Gradient reduction after the last backward pass, waiting for the others included."""
    optimizer_seconds: float
    paced_passes: int
    """Passes of all counted steps that were slowed down on purpose; 0 without a pace."""
    overruns: int
    """Those of them whose real work took longer than the pace."""
    peak_memory_bytes: float
    """Growth of the process (on an accelerator: of its allocator) since before the model was
    built, at its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """What one rank sends to another one for one purpose."""

    source: int
    target: int
    traffic: str
    """A `hetplan.cost.network.segments.TrafficClass` value."""
    bytes_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What all ranks measured together."""

    steps: tuple[StepRecord, ...]
    ranks: tuple[RankMeasure, ...]
    sent: tuple[SentBytes, ...] = ()
    """As the trainer counts it (`hetplan.runtime.communicator.channels`), the norm of the gradients
    left out; empty where a trainer does not count."""
