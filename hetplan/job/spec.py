"""What is asked: batch, sequence, precision, target and the limits of the search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from hetplan.errors import InputError

MAX_TOKENS = 10**18
"""Tokens of the longest training run: 10,000 times what the largest published ones took."""
MAX_SECONDS = 1e9
"""No step waits 30 years for its data; means over far larger numbers overflow."""
MAX_SEED = 2**31 - 1
MAX_DEPTH = 1000
"""More microbatches beyond a schedule's own than any device has memory for."""
SHARES_TOLERANCE = 1e-6
"""How far the sum of all lengths' shares may be from 1: thirds have no exact text."""


class Precision(StrEnum):
    """Number format of weights, activations and matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def bytes_per_element(self) -> int:
        """4 for float32, 2 otherwise."""
        return 4 if self is Precision.FLOAT32 else 2


class ProductFormat(StrEnum):
    """Number format of a layer's products where it is narrower than the job's precision."""

    FLOAT8 = "float8"
    """One scale per tensor, current or delayed."""
    MXFP8 = "mxfp8"
    """8 bits, one scale per 32 elements (OCP Microscaling Formats 1.0)."""
    NVFP4 = "nvfp4"
    """4 bits, one scale per 16 elements and one per tensor (arXiv 2509.25149)."""

    @property
    def rate(self) -> str:
        """The rate of a device kind that it needs, one of `hetplan.cluster.devices.DTYPES`."""
        return "float4" if self is ProductFormat.NVFP4 else "float8"


class Optimizer(StrEnum):
    """Update rule; it decides the optimizer state per parameter and the update's time."""

    ADAMW = "adamw"
    SGD = "sgd"


class Objective(StrEnum):
    """What the search makes as small as it can."""

    STEP_TIME = "step_time"
    COST_PER_TOKEN = "cost_per_token"
    """Money; every device that may be used needs a price."""


MIN_QUANTILE, MAX_QUANTILE = 0.5, 0.99
"""From the median to what the draws of an interval still resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Choices the user has made; the search keeps them. None leaves a choice free."""

    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    microbatch_size: int | None = None
    recompute: bool | None = None
    embedding_on: str | None = None
    """Island (or device kind) that must hold the embedding, which is the first stage."""
    head_on: str | None = None
    """Island (or device kind) that must hold the head, which is the last stage."""
    cp: int | None = None
    ep: int | None = None
    virtual_stages: int | None = None
    """Chunks of layers per stage; 1: not interleaved."""
    sequence_parallel: bool | None = None
    """Where tp is above 1."""
    sharded_optimizer: bool | None = None
    pipelines: int | None = None
    """Copies of the model, each over its own devices."""
    same_degrees: bool | None = None
    """True: all stages have one tp, dp and microbatch size, and each lies on one island."""
    depth: int | None = None
    """Most microbatches that a stage keeps in flight beyond its schedule's own, with sends that do
    not wait for their receivers; 0: none, and sends wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbids:
    """What the plan must not use."""

    islands: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes as `island/number`, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthShare:
    """How many of the sequences have one length."""

    length: int
    """Tokens."""
    share: float
    """Part of all sequences, above 0 and at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Settings of the trainer that change what a step costs; None: as the target has them."""

    fused_attention: bool | None = None
    """One causal attention kernel; otherwise scores are written to memory."""
    attention_dropout: bool | None = None
    hidden_dropout: bool | None = None
    fused_loss: bool | None = None
    """Cross-entropy in one pass over the logits."""
    scattered_sends: bool | None = None
    """Without sequence parallelism a stage sends each rank's 1 / tp of the activations, which the
    receivers gather (arXiv 2104.04473, section 4.1)."""
    fused_accumulation: bool | None = None
    """Products add the weights' gradients to their sum; otherwise a pass of its own does."""
    blocking_sends: bool | None = None
    """Sends and receives follow each other, each holding both stages, in the order of DeepSpeed's
    pipeline; otherwise what two neighbours exchange moves both ways at once."""
    context_exchange: bool | None = None
    """Context parallelism by all-to-all of heads (arXiv 2309.14509) instead of ring attention."""
    gradient_precision: Precision | None = None
    """Format in which gradients are kept and reduced."""
    product_format: ProductFormat | None = None
    """Format of the transformer layers' products with weights, but for routers; None: the job's
    precision. Weights, activations, gradients, attention and the head keep that precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job."""

    name: str
    global_batch_size: int
    """Sequences per optimizer step."""
    sequence_length: int
    precision: Precision
    optimizer: Optimizer
    target: str
    """Trainer that will run the plan; a key of `hetplan.plans.targets.TARGETS`."""
    gap: float = 0.01
    """Relative distance to the best plan at which the search may stop."""
    objective: Objective = Objective.STEP_TIME
    quantile: float | None = None
    """Quantile of the predicted step that is compared, from 0.5 to 0.99; None: the estimate."""
    time_limit_seconds: float | None = None
    total_tokens: int | None = None
    """Length of the training run, for its duration; None leaves that out."""
    memory_reserve_fraction: float = 0.1
    """Part of a device's memory that plans leave free for fragmentation and communication."""
    seed: int = 0
    sequence_lengths: tuple[LengthShare, ...] = ()
    """Lengths of the sequences where they differ, none above `sequence_length`; empty: all have
    `sequence_length`."""
    packing: bool = False
    """Short sequences are put together into ones of `sequence_length`, attending to themselves
    only; otherwise they are padded to it."""
    expert_load_factor: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean of all."""
    gradient_clipping: bool | None = None
    """Whether gradients are clipped by their global norm; None: as the target does by default."""
    data_loading_seconds: float = 0.0
    """Seconds of each step that the devices wait for their data."""
    checkpoint_interval_steps: int | None = None
    """Steps from one checkpoint to the next; None: no checkpoints are counted."""
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    pin: Pins = field(default_factory=Pins)
    forbid: Forbids = field(default_factory=Forbids)

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.gap < 1:
            raise InputError(f"gap is {self.gap}; it is a fraction from 0 to below 1")
        if self.quantile is not None and not MIN_QUANTILE <= self.quantile <= MAX_QUANTILE:
            raise InputError(
                f"quantile is {self.quantile}; it must be from {MIN_QUANTILE} to {MAX_QUANTILE}"
            )
        if not 0 <= self.memory_reserve_fraction < 1:
            raise InputError(
                f"memory_reserve_fraction is {self.memory_reserve_fraction}; "
                "it is a fraction from 0 to below 1"
            )
        if not 1 <= self.expert_load_factor < math.inf:
            raise InputError(
                f"expert_load_factor is {self.expert_load_factor}; it is the most over the mean, "
                "at least 1"
            )
        if not 0 <= self.data_loading_seconds <= MAX_SECONDS:
            raise InputError(
                f"data_loading_seconds is {self.data_loading_seconds}; it must be at least 0 and "
                f"at most {MAX_SECONDS:g}"
            )
        if self.total_tokens is not None and not 1 <= self.total_tokens <= MAX_TOKENS:
            raise InputError(
                f"total_tokens is {self.total_tokens}; it must be from 1 to {MAX_TOKENS:,}"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}")
        steps = self.checkpoint_interval_steps
        if steps is not None and steps < 1:
            raise InputError(f"checkpoint_interval_steps is {steps}; it must be at least 1")
        self._check_lengths()

    def _check_lengths(self) -> None:
        for each in self.sequence_lengths:
            if not 1 <= each.length <= self.sequence_length:
                raise InputError(
                    f"sequence_lengths has a length of {each.length}; it must be from 1 to "
                    f"sequence_length {self.sequence_length}"
                )
            if not 0 < each.share <= 1:
                raise InputError(f"length {each.length} has a share of {each.share}; above 0 to 1")
        total = math.fsum(each.share for each in self.sequence_lengths)
        if self.sequence_lengths and abs(total - 1.0) > SHARES_TOLERANCE:
            raise InputError(f"the shares of sequence_lengths sum to {total}; they are parts of 1")
