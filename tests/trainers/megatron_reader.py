"""What Megatron-core's own code makes of an emitted launch, read without the emitter's help.

The flags are those of Megatron-LM d98e8a64 (its parser has 839; here those that an emitted launch
may have, with the type and number of values that they have there). Layout, configuration, ranks and
microbatches are worked out by the wheel of megatron-core.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

with warnings.catch_warnings():
    # Importing warns about missing accelerator libraries.
    warnings.simplefilter("ignore")
    import torch
    import torch.nn.functional as functions
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )


def _words(text: str) -> list[str]:
    return text.split()


_NUMBERS = _words(
    """
    num-layers hidden-size num-attention-heads kv-channels num-query-groups ffn-hidden-size
    num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size
    q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mtp-num-layers
    max-position-embeddings tensor-model-parallel-size pipeline-model-parallel-size
    context-parallel-size expert-model-parallel-size expert-tensor-parallel-size micro-batch-size
    global-batch-size seq-length recompute-num-layers num-distributed-optimizer-instances
    distributed-timeout-minutes vocab-size padded-vocab-size make-vocab-size-divisible-by
    train-iters eval-iters eval-interval log-interval timing-log-level seed save-interval
    rotary-base moe-router-num-groups moe-router-group-topk rotary-seq-len-interpolation-factor
"""
)
_FRACTIONS = _words(
    """
    attention-dropout hidden-dropout lr clip-grad sgd-momentum optimizer-offload-fraction
    norm-epsilon rotary-percent rotary-scaling-factor rope-scaling-factor mscale mscale-all-dim
    moe-router-topk-scaling-factor moe-aux-loss-coeff
"""
)
_CHOICES = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "none"),
    "rope-type": ("rope", "yarn"),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-router-load-balancing-type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "optimizer": ("adam", "sgd"),
    "lr-decay-style": ("constant", "linear", "cosine"),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "fp4-format": ("e2m1",),
    "transformer-impl": ("local", "transformer_engine"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "cross-entropy-fusion-impl": ("native", "te"),
    "tokenizer-type": ("NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"),
    "distributed-backend": ("nccl", "gloo"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
}
_TEXTS = _words(
    """
    pipeline-model-parallel-layout window-size window-attn-skip-freq moe-layer-freq
    nccl-communicator-config-path tokenizer-model split save load
"""
)
_LISTS = ("recompute-modules", "cp-comm-type", "data-path")
_SWITCHES = _words(
    """
    swiglu group-query-attention qk-layernorm multi-latent-attention no-rope-fusion
    disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights moe-grouped-gemm
    moe-permute-fusion
    moe-shared-expert-gate sequence-parallel use-tp-pp-dp-mapping overlap-grad-reduce
    overlap-param-gather tp-comm-overlap no-overlap-p2p-communication bf16 fp16
    accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 cross-entropy-loss-fusion
    no-gradient-accumulation-fusion use-distributed-optimizer optimizer-cpu-offload
    use-precision-aware-optimizer mock-data no-barrier-with-level-1-timing log-throughput
    use-rope-scaling no-bias-gelu-fusion moe-router-pre-softmax moe-router-enable-expert-bias
"""
)

# Settings whose names in the configuration are those of the flags.
_SAME = _words(
    """
    num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size normalization
    qk_layernorm tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    sequence_parallel pipeline_model_parallel_layout mtp_num_layers hidden_dropout
    attention_dropout recompute_granularity recompute_method recompute_num_layers
    recompute_modules bf16 fp16
"""
)
_SAME_OF_EXPERTS = _words(
    """
    moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_token_dispatcher_type moe_grouped_gemm moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    moe_router_enable_expert_bias
"""
)
_SAME_OF_LATENT = _words(
    """
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
"""
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _FRACTIONS:
        parser.add_argument(f"--{name}", type=float)
    for name, choices in _CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _LISTS:
        parser.add_argument(f"--{name}", nargs="+")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRank:
    """Where Megatron puts a rank, and the layers that it builds there."""

    stage: int
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    layers: tuple[tuple[int, ...], ...]
    """Transformer layers of each chunk, from 0."""
    embedding: bool
    head: bool
    mtp: tuple[int, ...]
    """Multi-token prediction layers of each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRun:
    """What Megatron makes of a launch."""

    arguments: argparse.Namespace
    ranks: tuple[MegatronRank, ...]
    num_microbatches: int
    padded_vocab_size: int
    virtual_stages: int


def read_run(
    arguments: Sequence[Sequence[str]], world_size: int, *, added_tokens: int = 0
) -> MegatronRun:
    """The run of these arguments; raises whatever Megatron-core raises.

    `added_tokens`: what the mock tokenizer of older versions adds to --vocab-size.
    """
    args, unknown = _parser().parse_known_args([word for entry in arguments for word in entry])
    if unknown:
        raise ValueError(f"unrecognized arguments: {unknown}")
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    ep = args.expert_model_parallel_size or 1
    etp = args.expert_tensor_parallel_size or tp
    if world_size % (tp * pp * cp) or world_size % (etp * ep * pp):
        # parallel_state.initialize_model_parallel, which needs torch.distributed.
        raise RuntimeError(f"world size {world_size} is not divisible by the model's")
    dp, expert_dp = world_size // (tp * pp * cp), world_size // (etp * ep * pp)
    config = _config(args, ep, etp)
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = parallel_state.RankGenerator(tp=etp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order)
    if dense.get_ranks("pp") != expert.get_ranks("pp"):
        raise RuntimeError("expert and dense pipelines differ")  # asserted there as well
    places = {name: _positions(dense, name) for name in ("tp", "cp", "dp", "pp")}
    of_experts = {name: _positions(expert, name) for name in ("tp", "ep")}
    stages = [_stage(config, stage) for stage in range(pp)]
    multiple = args.make_vocab_size_divisible_by * tp
    padded = -(-(args.vocab_size + added_tokens) // multiple) * multiple
    return MegatronRun(
        arguments=args,
        ranks=tuple(
            MegatronRank(
                stage=places["pp"][rank],
                tp=places["tp"][rank],
                cp=places["cp"][rank],
                dp=places["dp"][rank],
                ep=of_experts["ep"][rank],
                etp=of_experts["tp"][rank],
                **stages[places["pp"][rank]],
            )
            for rank in range(world_size)
        ),
        num_microbatches=ConstantNumMicroBatchesCalculator(
            args.global_batch_size, args.micro_batch_size, dp, False, 1
        ).get(),
        padded_vocab_size=args.padded_vocab_size or padded,
        virtual_stages=config.virtual_pipeline_model_parallel_size or 1,
    )


def _positions(generator: Any, name: str) -> dict[int, int]:
    """Position of every rank in its group of this kind."""
    return {rank: at for group in generator.get_ranks(name) for at, rank in enumerate(group)}


def _pattern(text: str | None) -> Any:
    """`([0]*3+[1]*58)` as a list, as Megatron-LM evaluates it."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.strip("()").split("+"):
        value, count = part.split("*")
        found += [int(value.strip("[]"))] * int(count)
    return found


def _config(args: argparse.Namespace, ep: int, etp: int) -> Any:
    """The configuration that core_transformer_config_from_args makes, where it matters here."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    kwargs: dict[str, Any] = {name: getattr(args, name) for name in _SAME} | {
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "gated_linear_unit": args.swiglu,
        "activation_func": functions.silu if args.swiglu else functions.gelu,
        "bias_activation_fusion": args.swiglu
        or not (args.disable_bias_linear or args.no_bias_gelu_fusion),
        "layernorm_epsilon": args.norm_epsilon or 1e-5,
        "add_bias_linear": not args.disable_bias_linear,
        "add_qkv_bias": args.add_qkv_bias or not args.disable_bias_linear,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "cp_comm_type": args.cp_comm_type[0] if args.cp_comm_type else "p2p",
        "overlap_p2p_comm": not args.no_overlap_p2p_communication,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    if args.window_size:
        left, right = args.window_size.split(",")
        kwargs["window_size"] = (int(left), int(right))
        kwargs["window_attn_skip_freq"] = _pattern(args.window_attn_skip_freq)
    if args.num_experts:
        kwargs |= {name: getattr(args, name) for name in _SAME_OF_EXPERTS} | {
            "num_moe_experts": args.num_experts,
            "moe_layer_freq": _pattern(args.moe_layer_freq) or 1,
            "moe_router_score_function": args.moe_router_score_function or "softmax",
            "moe_router_load_balancing_type": args.moe_router_load_balancing_type or "aux_loss",
            "moe_aux_loss_coeff": args.moe_aux_loss_coeff or 0.0,
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not args.multi_latent_attention:
            return TransformerConfig(**kwargs)
        return MLATransformerConfig(
            **kwargs,
            **{name: getattr(args, name) for name in _SAME_OF_LATENT},
            multi_latent_attention=True,
            rotary_base=args.rotary_base or 10000,
            rotary_scaling_factor=args.rotary_scaling_factor or 1.0,
            mscale=1.0 if args.mscale is None else args.mscale,
            mscale_all_dim=args.mscale_all_dim or 0.0,
            apply_rope_fusion=not args.no_rope_fusion,
        )


def _stage(config: Any, stage: int) -> dict[str, Any]:
    """What one stage builds, by the layout's own counting."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        if config.pipeline_model_parallel_size > 1:
            raise RuntimeError("a pipeline without a layout is cut evenly, whatever the plan says")
        return {
            "layers": (tuple(range(config.num_layers)),),
            "embedding": True,
            "head": True,
            "mtp": (config.mtp_num_layers or 0,),
        }
    virtual = config.virtual_pipeline_model_parallel_size or 1
    # Asked by the counting below; there is no process group here.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual if virtual > 1 else None)
    try:
        chunks = layout.layout[stage]
        return {
            "layers": tuple(
                tuple(layout.get_layer_id_list(vp_stage=chunk, pp_rank=stage))
                for chunk in range(virtual)
            ),
            "embedding": LayerType.embedding in chunks[0],
            "head": LayerType.loss in chunks[-1],
            "mtp": tuple(chunk.count(LayerType.mtp) for chunk in chunks),
        }
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
