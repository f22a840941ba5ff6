"""The trainers' habits that decide how much memory a device needs, and the layout of a stage.

Habits are data: `trainer_memory` has those of every target, `job_memory` what a job's trainer
options make of them. Sources: Megatron-LM
(megatron/core/tensor_parallel/layers.py and cross_entropy.py, megatron/core/fusions), Transformer
Engine (pytorch/module/base.py: one placeholder per shape of a weight; pytorch/cross_entropy.py;
pytorch/cpp_extensions/gemm.py: workspaces), torch.distributed.pipelining (torch 2.13) for the
native trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision, TrainerOptions
from hetplan.job.trainer import TRAINER_DEFAULTS, trainer_settings_of
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import NO_RECOMPUTE, LayerRange, Recompute, Sharding
from hetplan.plans.targets import target

MEBIBYTE = 2**20
FLOAT32_BYTES = Precision.FLOAT32.bytes_per_element
RESERVED_OVER_ALLOCATED = 1.040
"""Median of 43 runs on B200 (SimuMax v1.2's reports, reserved over allocated; 1.028 to 1.093)."""


class Loss(StrEnum):
    """How the cross entropy treats the logits, and so what it keeps of them."""

    TORCH = "torch"
    """torch's own: logits and their softmax are kept, and later the gradient is beside them."""
    FLOAT32_COPY = "float32 copy"
    """hetplan's own: a float32 softmax is kept; the logits, and where they have 16 bits a wide copy
    of them, lie beside it while it is made."""
    VOCAB_PARALLEL = "vocabulary parallel"
    """Megatron-LM's: a float32 softmax is kept, made in place of a float32 copy (of float32 logits
    themselves); 16-bit logits, and later their gradient, lie beside it."""
    IN_PLACE = "in place"
    """Transformer Engine's: the gradient is written over the logits while the loss is made."""

    def bytes_per_logit(self, element_bytes: int) -> tuple[float, float]:
        """(kept until the backward pass, more than that at the worst moment)."""
        e = float(element_bytes)
        narrow = element_bytes < FLOAT32_BYTES
        return {
            Loss.TORCH: (2 * e, e),
            Loss.FLOAT32_COPY: (4.0, e + (4.0 if narrow else 0.0)),
            Loss.VOCAB_PARALLEL: (4.0, e if narrow else 0.0),
            Loss.IN_PLACE: (e, 0.0),
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """What one trainer keeps, beyond what the model's mathematics asks for."""

    gradient_bytes: int | None
    """Per parameter; None: as wide as the parameter."""
    master_bytes: int
    """Per parameter that is not float32: its float32 copy, and that of its gradient if any."""
    loss: Loss
    gated_columns: float
    """Elements kept per column of a gated MLP: gate, up and product; and the activated gate where
    the activation is not fused."""
    plain_columns: float
    """Elements kept per column of a plain MLP: before and after the activation; 1 for ReLU, whose
    result tells its gradient."""
    norm_statistics: bool
    """Norms keep one float32 per token (LayerNorm two), attention the logarithm of its sums."""
    context_exchange: bool = False
    """Context parallelism by all-to-all (arXiv 2309.14509), which keeps the attention's result
    before and after the exchange; otherwise ring attention (arXiv 2310.01889), which has every
    block's keys, values and result until it puts them together."""
    normed_copies: int = 0
    """RMSNorm keeps its result before the scale as well."""
    packed_projection: bool = False
    """Values are a view of the packed projection, which is kept beside rotated queries and keys."""
    grouped_copies: int = 0
    """Copies of the attention's result beyond one where key-value heads are shared."""
    dropout_masks: int = 0
    """Masks of one byte per element of [b, s, h] in a layer."""
    fused_attention: bool = True
    """No scores are kept; otherwise their softmax, one element for each."""
    attention_dropout: bool = False
    """Unfused: of every score also its dropped probability and a mask of one byte (arXiv
    2205.05198, section 4.1); a fused kernel draws the mask again."""
    fused_weight_gradients: bool
    """Gradients of matrices are added where they are kept; otherwise each exists once more while
    its layer runs backward."""
    placeholder_gradients: bool
    """A tensor of every shape of a weight stands in for its gradient, for all steps."""
    frees_as_it_goes: bool
    """What a layer kept is free once its backward pass is over."""
    keeps_output: bool
    """A stage keeps what it sent until its backward pass."""
    receive_buffers: bool
    """A buffer per microbatch and neighbour is there for what is received: for all of the step,
    or, where sends do not wait, for those in flight."""
    update_bytes: float
    """Per parameter, allocated while AdamW updates, when no activations are left."""
    workspace_bytes: float = 0.0
    """Of the matrix library."""
    experts_workspace_bytes: float = 0.0
    """More of it for grouped products."""


NATIVE = TrainerMemory(
    gradient_bytes=None,
    master_bytes=2 * FLOAT32_BYTES,
    loss=Loss.FLOAT32_COPY,
    gated_columns=4.0,
    plain_columns=2.0,
    norm_statistics=True,
    # as saved by the layers of hetplan.profiling.layers (torch 2.13, CPU).
    normed_copies=1,
    packed_projection=True,
    grouped_copies=1,
    fused_weight_gradients=False,
    placeholder_gradients=False,
    frees_as_it_goes=True,
    keeps_output=True,
    receive_buffers=True,
    # torch's AdamW, one tensor: a root and a quotient of its size in float32.
    update_bytes=2 * FLOAT32_BYTES,
)

MEGATRON = TrainerMemory(
    gradient_bytes=FLOAT32_BYTES,
    master_bytes=FLOAT32_BYTES,
    loss=Loss.VOCAB_PARALLEL,
    gated_columns=3.0,
    plain_columns=2.0,
    norm_statistics=True,
    fused_weight_gradients=True,
    placeholder_gradients=True,
    frees_as_it_goes=True,
    keeps_output=False,
    receive_buffers=False,
    update_bytes=0.0,
    # Transformer Engine's and torch's own for cuBLAS, 32 MiB each from Hopper on; four more for
    # grouped products.
    workspace_bytes=64.0 * MEBIBYTE,
    experts_workspace_bytes=128.0 * MEBIBYTE,
)

TORCHTITAN = replace(
    NATIVE,
    # With pipelines FSDP2 keeps 16-bit parameters and float32 sums of their gradients whole until
    # the last microbatch (torchtitan's parallelism.fsdp_reshard_after_forward is then off by
    # default; torch/distributed/fsdp/_fully_shard/_fsdp_param.py, unsharded_accumulated_grad); the
    # float32 parameters that the optimizer updates are sharded with its moments.
    gradient_bytes=FLOAT32_BYTES,
    master_bytes=FLOAT32_BYTES,
    # wq, wk and wv are three matrices.
    packed_projection=False,
    # optimizer.implementation: fused.
    update_bytes=0.0,
)

_HABITS = (
    ("native", NATIVE),
    ("megatron", MEGATRON),
    ("flagscale", MEGATRON),
    ("torchtitan", TORCHTITAN),
    ("any", MEGATRON),
)


def trainer_memory(target_name: str) -> TrainerMemory:
    """Habits of a target; an InputError for one whose habits are not known."""
    name = target(target_name).name
    found = dict(_HABITS).get(name)
    if found is not None:
        return found
    known = ", ".join(each for each, _ in _HABITS)
    raise InputError(f"memory of target {name} is not known; known: {known}")


def job_memory(job: Job) -> TrainerMemory:
    """Habits of the job's target under the job's trainer options; InputErrors as for both."""
    return _job_memory(job.target, job.precision, job.trainer)


@lru_cache(maxsize=256)
def _job_memory(target_name: str, precision: Precision, asked: TrainerOptions) -> TrainerMemory:
    habits = trainer_memory(target_name)
    settings = trainer_settings_of(target_name, precision, asked)
    if not TRAINER_DEFAULTS[target_name].choices:
        return habits
    gradients = settings.gradient_precision.bytes_per_element
    # Megatron-LM's optimizer works on a float32 copy of narrower gradients
    # (megatron/core/optimizer/optimizer.py, _copy_model_grads_to_main_grads).
    copies = 0.0 if gradients == FLOAT32_BYTES else float(FLOAT32_BYTES)
    return replace(
        habits,
        gradient_bytes=gradients,
        loss=Loss.IN_PLACE if settings.fused_loss else habits.loss,
        # After the attention, after the MLP (arXiv 2205.05198, section 4.1).
        dropout_masks=2 if settings.hidden_dropout else 0,
        fused_attention=settings.fused_attention,
        context_exchange=settings.context_exchange,
        fused_weight_gradients=settings.fused_accumulation,
        placeholder_gradients=habits.placeholder_gradients and settings.fused_accumulation,
        attention_dropout=settings.attention_dropout,
        update_bytes=habits.update_bytes + copies,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """Everything about one stage, and a rank's place in it, that decides its memory."""

    chunks: tuple[LayerRange, ...]
    """One layer range per virtual stage."""
    shape: Shape
    num_microbatches: int
    schedule: str = "1f1b"
    stage: int = 0
    num_stages: int = 1
    warmup: tuple[int, ...] | None = None
    """Microbatches in flight of every stage, for 1f1b; None: its own."""
    early_sends: bool = False
    """Whether sends do not wait for their receivers."""
    recompute: Recompute = NO_RECOMPUTE
    sharding: Sharding = Sharding.NONE
    shards: int = 1
    """Ranks that split what `sharding` says."""
    expert_shards: int | None = None
    """The same for routed experts' weights; None: `shards` less the ranks that hold other experts,
    shards * tp / (ep * etp), at least 1."""
    offload: float = 0.0
    """Part of the optimizer state in host memory."""

    def __post_init__(self) -> None:
        shape = self.shape
        degrees = shape.tp, shape.cp, shape.ep, shape.etp, shape.dp, shape.microbatch_size
        if min(*degrees, self.shards, self.num_microbatches, self.num_stages) < 1:
            raise InputError("degrees, shards, microbatches and stages of a layout begin at 1")
        if not 0 <= self.stage < self.num_stages:
            raise InputError(f"stage {self.stage} of {self.num_stages} stages; they count from 0")
        if self.warmup is not None and len(self.warmup) != self.num_stages:
            raise InputError(f"{len(self.warmup)} warm-up depths for {self.num_stages} stages")
        if not 0 <= self.offload <= 1:
            raise InputError(f"offload is {self.offload}; it is a part, from 0 to 1")

    @property
    def in_flight(self) -> int:
        """Microbatches of which the stage keeps activations at most, under 1f1b."""
        own = self.num_stages - self.stage
        depth = own if self.warmup is None else self.warmup[self.stage]
        return min(depth, self.num_microbatches)

    @property
    def routed_shards(self) -> int:
        """Ranks that split the routed experts' weights."""
        if self.expert_shards is not None:
            return self.expert_shards
        return max(1, self.shards * self.shape.tp // (self.shape.ep * self.shape.etp))
