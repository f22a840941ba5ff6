"""What an estimate says about a plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Component(StrEnum):
    """What a part of a step's time is spent on."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    PADDING = "padded vocabulary"
    """Of the head's compute, what the padding of the vocabulary adds."""
    IMBALANCE = "expert imbalance"
    """What the busiest expert-parallel rank has more than the mean, compute and transfers."""
    CLOCKS = "sustained clock"
    """What compute takes longer at the sustained clock, or under a power cap."""
    STRAGGLERS = "stragglers"
    """What the slowest of the ranks that wait for each other takes longer than the mean one."""
    SLOWED = "slowed by overlap"
    """What compute takes longer while communication runs beside it."""
    TENSOR_PARALLEL = "tp"
    COPIED_HEADS = "copied kv heads"
    """Key-value heads that several ranks hold: their part of the compute beyond an even share, and
    the sums of their gradients."""
    CONTEXT_PARALLEL = "cp"
    EXPERT_PARALLEL = "ep"
    BUBBLE = "bubble"
    """A stage has nothing to do: no microbatch is due that only a transfer keeps away."""
    PIPELINE = "pp"
    """Transfers between stages."""
    DATA_PARALLEL = "dp"
    """Gradient reduction."""
    GATHERING = "parameter gathering"
    EMBEDDING = "embedding"
    """Sum of a tied matrix's gradients."""
    NORM = "gradient norm"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    """Of the update, what the optimizer state in host memory adds."""
    OUTER = "averaging of sites"
    """Of local steps: what averaging the sites adds to each of them in the mean."""
    DATA_LOADING = "data loading"
    OTHER_STAGES = "other stages"
    """Waits at the end of the step for stages that are not done yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSeconds:
    """One component of a step."""

    component: Component
    seconds: float
    """Of the step's time."""
    hidden_seconds: float = 0.0
    """More of it, beside other components."""
    note: str = ""
    """Why it is zero, where it could have been something."""


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
    buffer_bytes: float = 0.0
    """What belongs to no microbatch: placeholders, workspaces."""
    reserve_factor: float = 1.0
    """What the allocator takes from the device over what it hands out."""
    runtime_bytes: float = 0.0
    """What driver and communication library take outside of the allocator; 0: not counted."""
    host_bytes: float = 0.0
    """What an offloaded optimizer keeps in host memory for this device."""
    host_available_bytes: float | None = None
    """The device's part of its node's host memory; None: unknown, taken as enough."""

    @property
    def total_bytes(self) -> float:
        """Everything the stage needs on one device."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.temporary_bytes
            + self.buffer_bytes
        )

    @property
    def reserved_bytes(self) -> float:
        """What the device gives: all of the above as the allocator takes it, and the runtime."""
        return self.total_bytes * self.reserve_factor + self.runtime_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has room, and its host."""
        return self.total_bytes <= self.available_bytes and self.host_fits

    @property
    def host_fits(self) -> bool:
        """Whether the host has room for what is offloaded, as far as its memory is known."""
        room = self.host_available_bytes
        return room is None or self.host_bytes <= room


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
    pipeline: int = 0
    components: tuple[ComponentSeconds, ...] = ()
    """Every component of the stage's step; they add up to the step."""
    extrapolating: tuple[str, ...] = ()
    """Which of the times above rest on sizes outside of what was measured: `forward`, `backward`,
    `reduction`, `optimizer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """p10, mean and p90 of a time in seconds, by sampling the predictor's errors."""

    p10_seconds: float
    mean_seconds: float
    p90_seconds: float


class StepRange(NamedTuple):
    """The interval of a step as people are told it."""

    low_seconds: float
    high_seconds: float
    share: str
    """`90 %`: how often a step lies within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseSeconds:
    """The part of a step that predictions of one cause say, waits for it included."""

    cause: str
    """Device kind, or link (`predict.causes.link_cause`)."""
    part: str
    """Of a device kind: the class of operators or kind of layer, as far as it is predicted apart.
    Empty where everything of the cause is one."""
    seconds: float
    log_halfwidth: float
    """Of its 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindUse:
    """What a plan makes of the devices of one kind (`hetplan.cost.model_flops`)."""

    device: str
    devices: int
    model_flops: float
    """Of one step on all of them, recomputation left out."""
    recomputed_flops: float
    flops_per_second: float
    """Model FLOPs per second and device."""
    mfu: float | None
    """Over the dense peak in the products' number format; None where none is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted cost of one step of a plan."""

    step_seconds: float
    """With every prediction at its central value, and the mean of the slowest rank where the
    spread of a kind's devices is known."""
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
    components: tuple[ComponentSeconds, ...] = ()
    """The step along its critical path: the stage that the others wait for, then, where the norm
    of all gradients is taken, the stage that updates last. They add up to `step_seconds`."""
    p5_seconds: float | None = None
    """Lower end of the step's 90 % interval; None in files of an older hetplan."""
    p95_seconds: float | None = None
    """Upper end."""
    own_log_halfwidth: float | None = None
    """Half-width of the 90 % interval by the predictions alone, whatever measured runs say."""
    interval_note: str = ""
    """What the interval stands on."""
    causes: tuple[CauseSeconds, ...] = ()
    """What the step is made of by whose errors move it; they add up to it, data loading left out.
    """
    mfu: float | None = None
    """Model FLOPs over what all devices of the plan could do in the step at their dense peaks; None
    where a peak is not known, and in files of an older hetplan."""
    flops_per_second: float = 0.0
    """Model FLOPs per second and device; 0 in files of an older hetplan, as the next."""
    least_seconds: float = 0.0
    """Step at the best rate that anybody sustained on these devices: no interval begins earlier."""
    kinds: tuple[KindUse, ...] = ()
    """The same by device kind."""

    @property
    def fits(self) -> bool:
        """Whether every stage fits in memory."""
        return all(stage.memory.fits for stage in self.stages)

    @property
    def step_range(self) -> StepRange:
        """The 90 % interval; of older files the 80 % one."""
        if self.p5_seconds is not None and self.p95_seconds is not None:
            return StepRange(self.p5_seconds, self.p95_seconds, "90 %")
        return StepRange(self.interval.p10_seconds, self.interval.p90_seconds, "80 %")

    def stage_name(self, index: int) -> str:
        """`stage 3`, or `pipeline 1, stage 3`, of the stage at this place of `stages`."""
        pipeline = self.stages[index].pipeline
        first = next(at for at, each in enumerate(self.stages) if each.pipeline == pipeline)
        several = self.stages[-1].pipeline > 0
        return (f"pipeline {pipeline}, " if several else "") + f"stage {index - first}"
