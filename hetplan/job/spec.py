"""What is asked: batch, sequence, precision, target and the limits of the search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import Field

from hetplan.errors import InputError
from hetplan.files.quantities import (
    SPOKEN_COUNT,
    Count,
    CountOrZero,
    FileForm,
    Fraction,
    Name,
    NodeName,
    Positive,
    Ratio,
    SpokenEnum,
    check_limits,
    spoken_count_schema,
)
from hetplan.job.run import Run

MAX_TOKENS = 10**18
"""Tokens of the longest training run: 10,000 times what the largest published ones took."""
MAX_SECONDS = 1e9
"""No step waits 30 years for its data; means over far larger numbers overflow."""
MAX_SEED = 2**31 - 1
MAX_DEPTH = 1000
"""More microbatches beyond a schedule's own than any device has memory for."""
SHARES_TOLERANCE = 1e-6
"""How far the sum of all lengths' shares may be from 1: thirds have no exact text."""


Quantile: TypeAlias = Annotated[float, Field(ge=0.5, le=0.99)]
"""From the median to what the draws of an interval still resolve."""
Part: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole that may be all of it."""
Tokens: TypeAlias = Annotated[
    int, Field(ge=1, le=MAX_TOKENS), SPOKEN_COUNT, spoken_count_schema(MAX_TOKENS)
]
"""A whole number, or text as in `2T`."""
Seed: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SEED)]


class Precision(SpokenEnum):
    """Number format of weights, activations and matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @classmethod
    def spoken(cls) -> dict[str, str]:
        """As trainers' flags have them."""
        return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}

    @property
    def bytes_per_element(self) -> int:
        """4 for float32, 2 otherwise."""
        return 4 if self is Precision.FLOAT32 else 2


class ExpertDispatcher(StrEnum):
    """How tokens get to the ranks of their experts and back."""

    ALLTOALL = "alltoall"
    """A copy for each of a token's experts, by the library's all_to_all."""
    DEEPEP = "deepep"
    """A copy for each rank that has experts of a token; between nodes one for each node, which the
    receiver hands on inside it (DeepEP, HybridEP)."""
    ALLGATHER = "allgather"
    """All tokens to all ranks, results summed by a reduce_scatter."""


class ProductFormat(SpokenEnum):
    """Number format of a layer's products where it is narrower than the job's precision."""

    FLOAT8 = "float8"
    """One scale per tensor, current or delayed."""
    MXFP8 = "mxfp8"
    """8 bits, one scale per 32 elements (OCP Microscaling Formats 1.0)."""
    NVFP4 = "nvfp4"
    """4 bits, one scale per 16 elements and one per tensor (arXiv 2509.25149)."""

    @classmethod
    def spoken(cls) -> dict[str, str]:
        """As trainers' flags have them."""
        return {"fp8": "float8"}

    @property
    def rate(self) -> str:
        """The rate of a device kind that it needs, one of `hetplan.cluster.devices.DTYPES`."""
        return "float4" if self is ProductFormat.NVFP4 else "float8"


class CollectiveAlgorithm(StrEnum):
    """How a library sums over a group's ranks."""

    RING = "ring"
    TREE = "tree"


class Optimizer(SpokenEnum):
    """Update rule; it decides the optimizer state per parameter and the update's time."""

    ADAMW = "adamw"
    SGD = "sgd"

    @classmethod
    def spoken(cls) -> dict[str, str]:
        """Megatron-LM's `--optimizer adam` is AdamW; without decay the two cost the same."""
        return {"adam": "adamw"}


class Objective(SpokenEnum):
    """What the search makes as small as it can."""

    STEP_TIME = "step_time"
    COST_PER_TOKEN = "cost_per_token"
    """Money; every device that may be used needs a price."""
    DAYS = "days"
    """The whole run with all that it loses (docs/days.md); total_tokens says how long it is."""
    ENERGY_PER_TOKEN = "energy_per_token"
    """At the meter; every device that may be used needs a known power."""
    ROBUST = "robust"
    """The step in the worst tenth of all draws of what varies (`vary`)."""

    @classmethod
    def spoken(cls) -> dict[str, str]:
        """Short names; tokens of a step are given."""
        return {"cost": "cost_per_token", "energy": "energy_per_token", "time": "step_time"}


class RecomputeModule(StrEnum):
    """Part of a transformer layer that selective recomputation runs again."""

    CORE_ATTENTION = "core_attn"
    """Scores and context, without the projections (arXiv 2205.05198, section 5)."""
    MLP = "mlp"
    """The dense MLP."""
    EXPERTS = "moe"
    """Router, experts and their transfers."""
    NORMS = "layernorm"
    """Norm outputs."""
    ACTIVATION = "moe_act"
    """The product between up and down projection, of MLPs and experts."""


class Sharding(StrEnum):
    """What the ranks of a sharding group split among themselves (arXiv 1910.02054)."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """Optimizer state: ZeRO-1, Megatron-LM's distributed optimizer."""
    GRADIENTS = "gradients"
    """Gradients as well: ZeRO-2."""
    PARAMETERS = "parameters"
    """Parameters as well: ZeRO-3, fully sharded data parallel."""


SPLIT_WEIGHTS = (Sharding.GRADIENTS, Sharding.PARAMETERS)
"""What is reduced, and with parameters gathered, in the passes of every microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins(FileForm):
    """Choices that the search must keep; what is left out stays free."""

    tp: Count | None = None
    """Tensor-parallel degree."""
    dp: Count | None = None
    """Data-parallel degree."""
    pp: Count | None = None
    """Pipeline stages."""
    microbatch_size: Count | None = None
    """Sequences per microbatch and data-parallel rank."""
    recompute: bool | None = None
    """Full recomputation of transformer layers."""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1)] | None = None
    """Parts of transformer layers that are recomputed."""
    embedding_on: Name | None = None
    """Island or kind of the first stage."""
    head_on: Name | None = None
    """Island or kind of the last stage."""
    cp: Count | None = None
    """Context-parallel degree."""
    ep: Count | None = None
    """Expert-parallel degree."""
    virtual_stages: Count | None = None
    """Chunks of layers per stage; 1: not interleaved."""
    sequence_parallel: bool | None = None
    """Tensor-parallel ranks share what lies between products."""
    sharded_optimizer: bool | None = None
    """Whether data-parallel ranks share the optimizer state."""
    sharding: Sharding | None = None
    """What data-parallel ranks share: ZeRO-1, 2 or 3."""
    optimizer_offload: Part | None = None
    """Part of the optimizer state kept and updated in host memory; 0: none."""
    pipelines: Count | None = None
    """Copies of the model, each with devices and a share of the batch."""
    same_degrees: bool | None = None
    """One tp, dp and microbatch size for all stages. Each lies on one island."""
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    """Most microbatches in flight beyond the schedule's own. Sends do not wait for their receivers;
    0: none, and sends wait."""
    schedule: Name | None = None
    """Order of passes. Left out: 1f1b and interleaved-1f1b; zb-h1, zbv and dualpipev are searched
    only where they are pinned, as their lower bounds are weak."""

    @property
    def shares(self) -> bool | None:
        """Whether data-parallel ranks share anything; None: free."""
        if self.sharded_optimizer is None and self.sharding is not None:
            return self.sharding is not Sharding.NONE
        return self.sharded_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbids(FileForm):
    """Islands and nodes that stay out of the plan."""

    islands: tuple[Name, ...] = ()
    """Names of islands."""
    nodes: tuple[NodeName, ...] = ()
    """Nodes as island/number, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthShare(FileForm):
    """How many of the sequences have one length."""

    length: Count
    """Tokens, at most sequence_length."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Part of all sequences; the shares of all lengths sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation(FileForm):
    """What varies over time: the bandwidth of a link, or the speed of devices."""

    of: Annotated[tuple[Name, ...], Field(min_length=1, max_length=2)]
    """Two regions or two islands; or a device kind, or an island."""
    spread: Fraction | None = None
    """One draw in twenty is lower by more than this part."""
    samples: tuple[Positive, ...] = ()
    """Instead of spread, at least ten that were measured; their median stands for the cluster's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions(FileForm):
    """Settings of the trainer that change what a step costs; left out: as the target does."""

    fused_attention: bool | None = None
    """One causal attention kernel; otherwise scores are written to memory."""
    tuned_attention: bool | None = None
    """That kernel is the device's fastest (Transformer Engine's, FlashAttention 3); otherwise
    PyTorch's scaled_dot_product_attention."""
    attention_dropout: bool | None = None
    """Dropout of the attention's probabilities."""
    hidden_dropout: bool | None = None
    """Dropout after embedding, attention and MLP."""
    fused_loss: bool | None = None
    """Cross-entropy in one pass over the logits; otherwise of a float32 copy of them."""
    fused_elementwise: bool | None = None
    """Norms, rotary positions and gated activations are a kernel each. Written by hand, or by
    torch.compile; otherwise PyTorch's separate operators, partly in float32."""
    summed_overlap: bool | None = None
    """Overlap also hides what follows a sum of several products; otherwise
    single products alone (PyTorch's asynchronous tensor parallelism)."""
    scattered_sends: bool | None = None
    """Without sequence parallelism every rank sends 1 / tp of the activations. The receivers gather
    them; otherwise every rank sends all of them."""
    fused_accumulation: bool | None = None
    """Products add weight gradients to those of earlier microbatches; otherwise a
    pass of its own does."""
    blocking_sends: bool | None = None
    """Sends and receives follow each other, each holding both stages;
    otherwise what two neighbours exchange moves both ways at once."""
    context_exchange: bool | None = None
    """Context parallelism by all-to-all of heads instead of ring attention."""
    overlap_grad_reduce: bool | None = None
    """Gradients are reduced beside the last microbatch's backward pass."""
    overlap_param_gather: bool | None = None
    """Updated parameters are gathered beside the first microbatch's forward pass; goes with
    overlap_grad_reduce."""
    tp_comm_overlap: bool | None = None
    """Tensor-parallel collectives run beside neighbouring products. Stages must be sequence
    parallel."""
    expert_dispatcher: ExpertDispatcher | None = None
    """How tokens get to their experts."""
    shared_expert_overlap: bool | None = None
    """Shared experts compute beside the exchange of tokens."""
    collective_algorithm: CollectiveAlgorithm | None = None
    """Algorithm of all_reduce in device memory. Sums that were measured on a link stay as they are.
    Left out: the library chooses."""
    mixed_libraries: bool | None = None
    """NCCL, RCCL and others train together, as in patched trainers."""
    gradient_precision: Precision | None = None
    """Format in which gradients are kept and reduced. It is float32, or that of the weights."""
    product_format: ProductFormat | None = None
    """Narrower format of the transformer layers' products with weights; the devices must have its
    rate. Left out: the job's precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisation(FileForm):
    """Local steps of each region by itself, averaged now and then (DiLoCo, arXiv 2311.08105).

    The terms are those of torchft and torchtitan.
    """

    sync_steps: Count
    """Steps from one averaging of a weight to its next."""
    extra_tokens: Annotated[float, Field(ge=0, le=10)]
    """Part of total_tokens needed more for the same loss. It has no default."""
    num_fragments: Count = 1
    """Parts of the layers that are averaged in turn; it divides sync_steps."""
    fragment_sync_delay: CountOrZero = 0
    """Steps beside which averaging runs; fewer than sync_steps / num_fragments."""
    fragment_update_alpha: Part = 0.0
    """Part of its own weights that a region keeps."""
    precision: Precision = Precision.FLOAT32
    """Number format in which differences are sent."""
    outer_lr: Positive = 0.7
    """Of the outer SGD with Nesterov momentum; torchtitan's, as the next."""
    outer_momentum: Fraction = 0.9
    """Its momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings(FileForm):
    """What a job file and a `Job` say alike."""

    name: Name
    """In reports."""
    global_batch_size: Count
    """Sequences per optimizer step."""
    sequence_length: Count
    """Tokens per sequence."""
    precision: Precision
    """Number format of weights, activations and matrix products."""
    optimizer: Optimizer
    """Update rule."""
    objective: Objective = Objective.STEP_TIME
    """What is made as small as it can be. step_time, days of the whole run, cost_per_token where
    there are prices, energy_per_token, or robust."""
    quantile: Quantile | None = None
    """Quantile of the predicted step that is compared. Left out: the estimate itself."""
    gap: Fraction = 0.01
    """Stop where no plan is faster by more than this fraction of the step."""
    total_tokens: Tokens | None = None
    """Tokens of the whole run."""
    memory_reserve_fraction: Fraction = 0.1
    """Part of every device's memory that plans leave free. Fragmentation and communication take
    it."""
    seed: Seed = 0
    """Start of every random choice; the same seed gives the same plan."""
    sequence_lengths: tuple[LengthShare, ...] = ()
    """Lengths, where they differ; left out: all have sequence_length."""
    packing: bool = False
    """Short sequences share rows, each attending only to itself; otherwise every one is padded to
    sequence_length."""
    expert_load_factor: Ratio = 1.0
    """Tokens of the busiest expert-parallel rank over the mean. Its experts and exchanges take as
    many times as long, and all wait for it. Left out: 1, equal loads."""
    gradient_clipping: bool | None = None
    """Whether gradients are clipped by their global norm. Left out: as the target does."""
    checkpoint_interval_steps: Count | None = None
    """Steps from one checkpoint to the next. Left out: as often as costs least (docs/days.md)."""
    vary: tuple[Variation, ...] = ()
    """What varies over time, for objective robust."""
    cpu_cores_per_device: Count | None = None
    """Host cores for each device. Loader workers and communication threads take them. Left out:
    cores limit no plan."""
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    """Settings of the trainer that change what a step costs."""
    synchronisation: Synchronisation | None = None
    """Allows local steps between regions (docs/days.md). Left out: all devices update together."""
    pin: Pins = field(default_factory=Pins)
    """Choices that the search must keep."""
    forbid: Forbids = field(default_factory=Forbids)
    """What the plan must not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobSettings):
    """One training job."""

    target: str
    """Trainer that will run the plan; a key of `hetplan.plans.targets.TARGETS`."""
    time_limit_seconds: float | None = None
    """Longest search; None: until the gap is reached."""
    data_loading_seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 0.0
    """Seconds of each step that the devices wait for their data."""
    run: Run = field(default_factory=Run)
    """What the run meets beside its steps."""

    def __post_init__(self) -> None:
        check_limits(self)
        for at, varies in enumerate(self.vary):
            check_limits(varies)
            if any(not 0.0 < sample < math.inf for sample in varies.samples):
                raise InputError(f"vary[{at}]: samples must be above 0")
        for each in self.sequence_lengths:
            if not 1 <= each.length <= self.sequence_length:
                raise InputError(
                    f"sequence_lengths has a length of {each.length}; it must be from 1 to "
                    f"sequence_length {self.sequence_length}"
                )
            check_limits(each)
        total = math.fsum(each.share for each in self.sequence_lengths)
        if self.sequence_lengths and abs(total - 1.0) > SHARES_TOLERANCE:
            raise InputError(f"the shares of sequence_lengths sum to {total}; they are parts of 1")
