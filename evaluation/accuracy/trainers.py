"""Habits of a run's trainer that no row says: kernels, formats, what is overlapped.

What is written here is how a publication says that it trained, or what its trainer's code does. It
was written by people who had seen how far off the runs are, so it is no blind choice, as
docs/accuracy.md says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from evaluation.accuracy import bridge
from evaluation.accuracy.rows import RunRow
from hetplan.job.spec import Precision, ProductFormat, TrainerOptions
from hetplan.plans.plan import OverlapSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Habits of one source's runs."""

    sources: tuple[str, ...]
    """Beginnings of `RunRow.source`."""
    options: TrainerOptions
    gradient_clipping: bool | None
    """None: as the target does."""
    precision: Precision | None = None
    """Where the rows' own `dtype` is known to be wrong."""
    notes: tuple[str, ...] = ()
    overlap: OverlapSettings | None = None
    """What it overlaps where there is something to overlap; None: nothing but ring attention."""
    sequence_parallel: bool | None = None
    """Where rows do not say; None: they do."""


_MEGATRON_2021 = TrainerOptions(
    fused_attention=False,
    attention_dropout=True,
    hidden_dropout=True,
    fused_loss=False,
    scattered_sends=True,
    fused_accumulation=False,
    gradient_precision=Precision.FLOAT16,
)
"""Megatron-LM of April 2021 and the trainers that grew out of it; each below says what differs."""

TRAINERS = (
    Trainer(
        sources=("vtrain",),
        # Megatron-DeepSpeed of 2023, megatron/model/transformer.py: baddbmm, fused scale, mask and
        # softmax, dropout of probabilities and of both outputs (--attention-dropout 0.1 and
        # --hidden-dropout 0.1 by default); vocab-parallel cross-entropy on a float32 copy; p2p
        # communication scatters and gathers; fp16 gradients are added up and reduced as fp16.
        options=_MEGATRON_2021,
        gradient_clipping=True,
    ),
    Trainer(
        sources=("megatron-sc21",),
        # Megatron-LM of April 2021 (arXiv 2104.04473, section 4): the same kernels, scatter and
        # gather of sends (section 4.1), fp16 gradients that autograd adds up.
        options=_MEGATRON_2021,
        gradient_clipping=True,
    ),
    Trainer(
        sources=("korthikanti",),
        # arXiv 2205.05198, section 4: unfused attention with dropout masks of probabilities and
        # hidden states. 18 bytes of parameters, gradients and state per parameter (its figure 1):
        # gradients are kept in float32, to which the products of 2022's Megatron-LM add theirs
        # (--no-gradient-accumulation-fusion switches that off).
        options=replace(
            _MEGATRON_2021, fused_accumulation=True, gradient_precision=Precision.FLOAT32
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("simumax",),
        # SimuMax v1.2, docs/b200: Megatron-core with Transformer Engine (fused attention, no
        # dropout), cross-entropy fusion, gradients accumulated and reduced in float32; context
        # parallelism by all-to-all (--cp-comm-type a2a; its unit table has whole sequences and
        # heads / (tp cp)).
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            context_exchange=True,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("sailor",),
        # Sailor's fork of Megatron-DeepSpeed, float32 without autocast: unfused attention; pipeline
        # engine with blocking sends and receives, each rank its part of the tensor, which the
        # receivers put together (deepspeed/pipe_engine.py: PartitionedTensor); float32 gradients.
        options=replace(_MEGATRON_2021, blocking_sends=True, gradient_precision=Precision.FLOAT32),
        gradient_clipping=True,
        precision=Precision.FLOAT32,
        notes=("rows say fp16; float32 by their profiles and 4-byte transfers",),
    ),
    Trainer(
        sources=("flagperf",),
        # Megatron-core 0.6 and a FlagScale of 2023 (llama3_8B/megatron/pretrain_llama3.sh and
        # aquila2_7b/flagscale/flagscale_main.sh of training/benchmarks): flash attention, no
        # dropout, optimizer state sharded, no overlap flags; vocab-parallel cross-entropy on a
        # float32 copy, float32 gradients with fused accumulation. Rows of PaddleNLP: `_as_the_row`.
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=False,
            fused_accumulation=True,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("mindspeed",),
        # MindSpeed-LLM's scripts (from memory, not read again): use-flash-attn, use-fused-rmsnorm,
        # attention and hidden dropout 0, no-gradient-accumulation-fusion; Megatron's cross-entropy
        # on a float32 copy, float32 gradients. Overlap as each row lists its flags (`_as_the_row`).
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=False,
            fused_accumulation=False,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
        overlap=OverlapSettings(),
    ),
    Trainer(
        sources=("primus", "amd-rocm"),
        # Primus with the Megatron backend: Transformer Engine's fused attention, no dropout,
        # float32 gradients with fused accumulation (assumed); its pages: overlap_grad_reduce=false.
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
    ),
    Trainer(
        sources=("nemo",),
        # NVIDIA-NeMo/Megatron-Bridge: Transformer Engine, no dropout, fused cross-entropy
        # (scripts/performance/utils/overrides.py), gradients added up and reduced as bfloat16
        # (grad_reduce_in_fp32 = False in configs/llama, configs/qwen and perf_recipes/_common.py),
        # sequence parallelism wherever tp > 1 (overrides.py), reduction and gathering overlapped
        # wherever optimizer state is sharded, sends with virtual stages, tensor parallelism by
        # userbuffers (src/megatron/bridge/training/comm_overlap.py, configs/llama, configs/qwen).
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            gradient_precision=Precision.BFLOAT16,
        ),
        gradient_clipping=True,
        notes=(
            "recompute is not published: none is assumed, as most public recipes have it",
            "overlap and experts' dispatcher are not published: as the public recipes have them",
        ),
        overlap=OverlapSettings(reduction=True, gathering=True, tensor_parallel=True, send=True),
        sequence_parallel=True,
    ),
    Trainer(
        sources=("mlperf",),
        # NVIDIA's submissions train with NeMo: Transformer Engine without dropout, distributed
        # optimizer with `overlap_grad_sync` and `overlap_param_sync`, `grad_sync_dtype` bf16, sends
        # beside compute with virtual stages (`overlap_p2p_comm`); rows say TP_COMM_OVERLAP.
        options=TrainerOptions(
            fused_attention=True,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=True,
            fused_accumulation=True,
            gradient_precision=Precision.BFLOAT16,
        ),
        gradient_clipping=True,
        notes=("overlap and bfloat16 gradients are not in the rows: as NeMo's configurations say",),
        overlap=OverlapSettings(reduction=True, gathering=True, tensor_parallel=True, send=True),
        sequence_parallel=True,
    ),
    Trainer(
        sources=("torchtitan",),
        # torchtitan: scaled_dot_product_attention (not `tuned_attention`), loss over a float32 copy
        # (components/loss.py), parameters gathered in bfloat16 and gradients reduced in float32
        # layer by layer beside compute (FSDP2 prefetches the next layer), gradients clipped; tensor
        # parallelism with sequence parallelism, overlapped where a row says `async`.
        options=TrainerOptions(
            fused_attention=True,
            tuned_attention=False,
            attention_dropout=False,
            hidden_dropout=False,
            fused_loss=False,
            fused_accumulation=False,
            summed_overlap=False,
            gradient_precision=Precision.FLOAT32,
        ),
        gradient_clipping=True,
        overlap=OverlapSettings(reduction=True, gathering=True, tensor_parallel=True),
        sequence_parallel=True,
    ),
)

_PADDLE = TrainerOptions(
    fused_attention=True,
    attention_dropout=False,
    hidden_dropout=False,
    fused_loss=False,
    fused_accumulation=False,
    gradient_precision=Precision.FLOAT16,
)
"""FlagPerf's configs of PaddleNLP: use_flash_attention, fp16 at O2; amp_master_grad (so gradients
stay 16 bit) and enable_linear_fused_grad_add are not set and off by default. Assumed, not read in
its code: the loss takes a float32 copy of the logits. Llama's norms (`use_fused_rms_norm = 0` but
for 13B), rotary positions and gates are Paddle's separate operators; GPT has kernels of its own for
its norms and GELU."""


UNKNOWN_TRAINER = Trainer(sources=(), options=TrainerOptions(), gradient_clipping=None)


def trainer_of(row: RunRow) -> Trainer:
    """The habits of a row's source; a target's defaults where nothing is known of it."""
    name = row.source.lower()
    for trainer in TRAINERS:
        if name.startswith(trainer.sources):
            return _as_the_row(row, trainer)
    return UNKNOWN_TRAINER


def _as_the_row(row: RunRow, trainer: Trainer) -> Trainer:
    """What rows of one source differ in: PaddleNLP among FlagPerf's, flags of MindSpeed's, recipes.

    NeMo's recipes have tensor-parallel overlap off for NVFP4 and for Qwen3 on H100
    (`tp_comm_overlap` of llama3_70b_pretrain_config_gb200, qwen3_235b_a22b_pretrain_config_h100).
    """
    if "-paddle" in row.source_ref:
        # GPT drops out .1 (training/benchmarks/gpt3_6.7B/paddle/config/_base.py), Llama nothing.
        gpt = row.model.lower().startswith("gpt")
        options = replace(_PADDLE, attention_dropout=gpt, hidden_dropout=gpt, fused_elementwise=gpt)
        return replace(trainer, options=options)
    if "mindspeed" in trainer.sources:
        said = OverlapSettings(
            reduction="overlap-grad-reduce" in row.other,
            gathering="overlap-param-gather" in row.other,
        )
        return replace(trainer, overlap=said)
    overlap = trainer.overlap
    if overlap is None:
        return trainer
    if row.product_format is ProductFormat.NVFP4 or (row.num_experts and "H100" in row.gpu):
        overlap = replace(overlap, tensor_parallel=False)
    if row.source.lower().startswith("torchtitan"):
        # Rows that do not say `compile`: FP8 and asynchronous TP (all of 2025-06) need it.
        compiled = "compile" in row.other or (row.tp or 1) > 1 or row.product_format is not None
        options = replace(trainer.options, fused_elementwise=compiled)
        trainer = replace(trainer, options=options)
        overlap = replace(overlap, tensor_parallel="async" in row.other)
    if not row.num_experts or not row.source.lower().startswith(bridge.SOURCES):
        return replace(trainer, overlap=overlap)
    dispatcher, beside = bridge.experts_of_recipe(row)
    return replace(
        trainer,
        overlap=replace(overlap, expert_parallel=beside),
        options=replace(trainer.options, expert_dispatcher=dispatcher),
    )
