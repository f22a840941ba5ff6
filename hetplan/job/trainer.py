"""What does the trainer of a job really run, where the job leaves it to its target?

Every target has settings of its own and a few that it can run otherwise (names of `TrainerOptions`
fields); nothing else is a choice. Sources:

megatron  Megatron-LM: `--attention-dropout` and `--hidden-dropout` (0.1 unless given; pre-training
          at scale gives 0), Transformer Engine's fused attention (`--attention-backend`), the
          vocabulary-parallel loss over a float32 copy (megatron/core/tensor_parallel/
          cross_entropy.py) unless `--cross-entropy-loss-fusion`, float32 gradients (`--main-grads-
          dtype`, `--accumulate-allreduce-grads-in-fp32`) unless `--grad-reduce-in-bf16`. Its stages
          send whole activations unless sequence parallel; versions of 2021 and those made from them
          (Megatron-DeepSpeed) scatter them (p2p_communication.py,
          `scatter_gather_tensors_in_pipeline`), which Megatron-core does not do. Blocking sends are
          those of DeepSpeed's pipeline engine (deepspeed/runtime/pipe/schedule.py), on which
          Megatron-DeepSpeed can run; context_exchange is `--cp-comm-type a2a`. Tokens go by
          `--moe-token-dispatcher-type` alltoall, allgather (without the flag) or flex with
          `--moe-flex-dispatcher-backend`. A product format is
          `--fp8-format` with `--fp8-recipe` delayed, tensorwise or mxfp8, or `--fp4-format` (Low-
          Precision Training Guide): Transformer Engine's layers, of bfloat16 parameters; routers,
          embedding and head are none of them. What it hides only if told so:
          `--overlap-grad-reduce`, `--overlap-param-gather`, `--tp-comm-overlap`.
native    hetplan's own layers: torch's scaled_dot_product_attention, no dropout, a loss over a
          float32 copy, gradients as wide as the parameters
          (hetplan.profiling.layers); sums over islands by its own messages
          (hetplan.runtime.communicator).
flagscale as megatron, from which it is made; no context parallelism, no engine of DeepSpeed, no
          `--tp-comm-overlap` in what is written for it.
torchtitan torch's scaled_dot_product_attention, no dropout, a loss over a float32 copy
          (components/loss.py), gradients accumulated and reduced in float32
          (training.mixed_precision_reduce). FSDP2 reduces them layer by layer beside compute, and
          gathers parameters likewise. Products in float8 or mxfp8 by torchao. Its layers are
          PyTorch's operators one by one, unless `--compile.enable` (fused_elementwise).
any       as megatron, its exchanges too (`Target.batched_interleaving`).

megatron and torchtitan give init_process_group one backend (megatron/training/initialize.py,
torchtitan/distributed/utils.py), so all devices of a run have one library of collectives. Meshes of
flagscale can send to each other through the hosts' memory; native sends its own messages.

A collective algorithm is NCCL's variable NCCL_ALGO, which RCCL reads, too; native sets none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from hetplan.errors import InputError
from hetplan.job.spec import (
    CollectiveAlgorithm,
    ExpertDispatcher,
    Job,
    Precision,
    ProductFormat,
    TrainerOptions,
)
from hetplan.model.operators import DEFAULT_KERNELS, Kernels
from hetplan.model.spec import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """`TrainerOptions` with every choice made."""

    fused_attention: bool
    tuned_attention: bool
    attention_dropout: bool
    hidden_dropout: bool
    fused_loss: bool
    fused_elementwise: bool
    summed_overlap: bool
    scattered_sends: bool
    fused_accumulation: bool
    blocking_sends: bool
    context_exchange: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    tp_comm_overlap: bool
    shared_expert_overlap: bool
    mixed_libraries: bool
    expert_dispatcher: ExpertDispatcher
    gradient_precision: Precision
    sums_by_messages: bool
    """Over several islands it sums gradients by messages of its own, level by level, where they
    pass through the host's memory (`hetplan.cost.collectives.direct_levels`)."""
    host_counts: bool
    """The host reads how many tokens every expert has (`hetplan.model.operators.Kernels`)."""
    product_format: ProductFormat | None = None
    collective_algorithm: CollectiveAlgorithm | None = None
    """None: the library's choice."""

    def kernels(self, layer: LayerKind) -> Kernels:
        """The kernels of this kind of layer; what it does not have is as in `DEFAULT_KERNELS`."""
        if layer is LayerKind.HEAD:
            return Kernels(fused_loss=self.fused_loss)
        if layer is LayerKind.EMBEDDING:
            return Kernels(hidden_dropout=self.hidden_dropout)
        loss = self.fused_loss if layer is LayerKind.MULTI_TOKEN_PREDICTION else None
        return Kernels(
            fused_attention=self.fused_attention,
            tuned_attention=self.tuned_attention,
            attention_dropout=self.attention_dropout,
            hidden_dropout=self.hidden_dropout,
            fused_loss=DEFAULT_KERNELS.fused_loss if loss is None else loss,
            fused_elementwise=self.fused_elementwise,
            sorts_copies=self.expert_dispatcher is ExpertDispatcher.ALLTOALL,
            host_counts=self.host_counts,
            product_format="" if self.product_format is None else self.product_format.value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDefaults:
    """What one target does by default, and what of it a job can change."""

    own: TrainerOptions
    """No gradient precision: that of the parameters."""
    choices: tuple[str, ...]
    """Fields of `TrainerOptions`; empty: none."""
    sums_by_messages: bool = False
    host_counts: bool = True


_ALL = tuple(each.name for each in fields(TrainerOptions))
_WORDS = ("gradient_precision", "product_format", "expert_dispatcher", "collective_algorithm")
_SWITCHES = tuple(name for name in _ALL if name not in _WORDS)

_MEGATRON = TrainerDefaults(
    own=TrainerOptions(
        fused_attention=True,
        tuned_attention=True,
        attention_dropout=False,
        hidden_dropout=False,
        fused_loss=False,
        fused_elementwise=True,
        summed_overlap=True,
        scattered_sends=False,
        fused_accumulation=True,
        blocking_sends=False,
        context_exchange=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        tp_comm_overlap=False,
        expert_dispatcher=ExpertDispatcher.ALLTOALL,
        shared_expert_overlap=False,
        mixed_libraries=False,
        gradient_precision=Precision.FLOAT32,
    ),
    # Which of its attention kernels runs is the library's choice (`--attention-backend auto`).
    choices=tuple(name for name in _ALL if name not in ("tuned_attention", "summed_overlap")),
)
TRAINER_DEFAULTS: dict[str, TrainerDefaults] = {
    "native": TrainerDefaults(
        own=replace(
            _MEGATRON.own, fused_accumulation=False, gradient_precision=None, mixed_libraries=True
        ),
        choices=(),
        sums_by_messages=True,
        host_counts=False,
    ),
    "megatron": _MEGATRON,
    "flagscale": TrainerDefaults(
        own=replace(_MEGATRON.own, mixed_libraries=True),
        choices=tuple(
            name
            for name in _MEGATRON.choices
            if name
            not in ("blocking_sends", "context_exchange", "tp_comm_overlap", "mixed_libraries")
        ),
    ),
    "torchtitan": TrainerDefaults(
        own=replace(
            _MEGATRON.own,
            tuned_attention=False,
            fused_accumulation=False,
            fused_elementwise=False,
            summed_overlap=False,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        choices=("product_format", "fused_elementwise", "collective_algorithm", "mixed_libraries"),
        host_counts=False,  # torch._grouped_mm
    ),
    # Megatron-LM alone runs tensor-parallel collectives beside products.
    "any": replace(
        _MEGATRON,
        own=replace(_MEGATRON.own, mixed_libraries=True),
        choices=tuple(each for each in _ALL if each not in ("tp_comm_overlap", "mixed_libraries")),
    ),
}
"""By target."""


def mixes_libraries(job: Job) -> bool:
    """Whether devices of several libraries of collectives may be in one run: the target can, or the
    job says that its trainer is patched.
    """
    return TRAINER_DEFAULTS[job.target].own.mixed_libraries or bool(job.trainer.mixed_libraries)


def trainer_settings(job: Job) -> TrainerSettings:
    """What the job's target runs; an InputError where it cannot run what the job asks for."""
    return trainer_settings_of(job.target, job.precision, job.trainer)


@lru_cache(maxsize=256)
def trainer_settings_of(
    target: str, precision: Precision, asked: TrainerOptions
) -> TrainerSettings:
    """What a job with this target, precision and options runs; an InputError likewise."""
    defaults = _defaults(target)
    own = defaults.own
    faults = tuple(_faults(target, precision, asked))
    if faults:
        raise InputError("; ".join(f"trainer.{name}: {message}" for name, message in faults))
    switches = {}
    for name in _SWITCHES:
        value = getattr(asked, name)
        switches[name] = bool(getattr(own, name) if value is None else value)
    return TrainerSettings(
        **switches,
        expert_dispatcher=asked.expert_dispatcher
        or own.expert_dispatcher
        or ExpertDispatcher.ALLTOALL,
        gradient_precision=asked.gradient_precision or own.gradient_precision or precision,
        sums_by_messages=defaults.sums_by_messages,
        host_counts=defaults.host_counts,
        product_format=asked.product_format,
        collective_algorithm=asked.collective_algorithm,
    )


def _defaults(target: str) -> TrainerDefaults:
    if target not in TRAINER_DEFAULTS:
        raise InputError(f"unknown target {target!r}; known targets: {', '.join(TRAINER_DEFAULTS)}")
    return TRAINER_DEFAULTS[target]


def trainer_faults(job: Job) -> Iterator[tuple[str, str]]:
    """(field of `trainer`, message) of everything that the job's target cannot run.

    Nothing for a target that does not exist, which others say.
    """
    if job.target in TRAINER_DEFAULTS:
        yield from _faults(job.target, job.precision, job.trainer)


def _faults(target: str, precision: Precision, asked: TrainerOptions) -> Iterator[tuple[str, str]]:
    found = _defaults(target)
    for name in _ALL:
        value, own = getattr(asked, name), getattr(found.own, name)
        if own is None and name != "collective_algorithm":
            own = precision  # of gradients and of products, where a target has no other
        if value in (None, own) or name in found.choices:
            continue
        has = "the library's choice" if own is None else _text(own)
        yield name, f"{_text(value)}; target {target} always has {has}; leave it out"
    reduces = found.own.overlap_grad_reduce
    if asked.overlap_grad_reduce is not None:
        reduces = asked.overlap_grad_reduce
    if asked.overlap_param_gather and not reduces:
        yield "overlap_param_gather", "true; it goes with overlap_grad_reduce: set both"
    gradients = asked.gradient_precision
    wide = (None, precision, Precision.FLOAT32)
    if gradients not in wide and "gradient_precision" in found.choices:
        yield (
            "gradient_precision",
            f"{gradients} for {precision} parameters; gradients are float32 or as the parameters",
        )
    if asked.product_format is not None and precision is not Precision.BFLOAT16:
        yield (
            "product_format",
            f"{asked.product_format} with {precision} parameters; it goes with bfloat16 ones",
        )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
