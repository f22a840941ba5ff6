"""What an estimate says about a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device of a stage."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    """All microbatches in flight."""
    temporary_bytes: float
    """Buffers of one layer's work and of communication."""
    available_bytes: float
    """What the device has, less the job's reserve."""

    @property
    def total_bytes(self) -> float:
        """Everything the stage needs on one device."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.temporary_bytes
        )

    @property
    def fits(self) -> bool:
        """Whether the device has room."""
        return self.total_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Times of one stage for one step, in seconds, and its memory."""

    island: str
    device: str
    transformer_layers: int
    forward_seconds: float
    """One microbatch, tensor-parallel communication included."""
    backward_seconds: float
    """One microbatch, recomputation and communication included."""
    tensor_parallel_seconds: float
    """Communication inside the two figures above, per microbatch."""
    busy_seconds: float
    """All forward and backward passes of the step."""
    wait_seconds: float
    """The plan's `pipeline_seconds` less busy time: bubble and exposed transfers."""
    reduction_seconds: float
    """Gradient reduction after the stage's last backward pass."""
    optimizer_seconds: float
    memory: MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """p10, mean and p90 of a time in seconds, by sampling the predictor's errors."""

    p10_seconds: float
    mean_seconds: float
    p90_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted cost of one step of a plan."""

    step_seconds: float
    """With every prediction at its central value."""
    interval: Interval
    pipeline_seconds: float
    """Until every stage has left the pipeline: its last backward pass has ended and, with
    rendezvous sends, its last gradient has left."""
    num_microbatches: int
    tokens_per_second: float
    stages: tuple[StageEstimate, ...]
    peak_memory_bytes: float
    """Largest total over the stages."""
    sources: tuple[str, ...]
    """Where predictions came from: `measured`, `datasheet`."""
    warnings: tuple[str, ...]
    """Extrapolations and anything else a reader must know before trusting the number."""

    @property
    def fits(self) -> bool:
        """Whether every stage fits in memory."""
        return all(stage.memory.fits for stage in self.stages)
