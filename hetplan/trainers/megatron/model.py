"""Which of Megatron-LM's arguments make a model, and which models have none?

Read in Megatron-LM d98e8a64: megatron/training/arguments.py and argument_utils.py
(gpt_config_from_args), gpt_builders.py, megatron/core/models/gpt/gpt_layer_specs.py,
megatron/core/models/common/embeddings/rotary_pos_embedding.py, megatron/core/transformer/
{transformer_config,multi_latent_attention,mlp}.py and moe/{moe_utils,router}.py. The parser and
the validators accept what is emitted here. What a model does not say stays Megatron-LM's own
(`numerics_remarks`); what it says and no argument can is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from hetplan.errors import Fault
from hetplan.job.spec import ExpertDispatcher, Job, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind, ScoreFunction
from hetplan.model.spec import ModelSpec

VOCAB_MULTIPLE = 128
"""--make-vocab-size-divisible-by; as in `hetplan.plans.targets`."""
_FIELD = "inputs.model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What the layers of an expressible model are made of."""

    attention: Attention | LatentAttention
    """Of all layers, without windows."""
    windows: tuple[int | None, ...]
    """Of every layer, those that cover the sequence left out."""
    dense: Mlp | None
    """None where every layer has experts."""
    experts: Experts | None
    with_experts: tuple[bool, ...]
    """Of every layer."""
    norm: Norm


def model_parts(model: ModelSpec, sequence_length: int) -> ModelParts:
    """The parts of a model without `model_faults`; of others the first of each kind."""
    layers = _layers(model, sequence_length)
    mlps = [layer.mlp for layer in layers]
    return ModelParts(
        attention=_without_window(layers[0]),
        windows=tuple(layer.window for layer in layers),
        dense=next((mlp for mlp in mlps if isinstance(mlp, Mlp)), None),
        experts=next((mlp for mlp in mlps if isinstance(mlp, Experts)), None),
        with_experts=tuple(isinstance(mlp, Experts) for mlp in mlps),
        norm=layers[0].norm,
    )


def _layers(model: ModelSpec, sequence_length: int) -> list[TransformerLayer]:
    return [
        layer for run in model.layer_runs for layer in [run.layer.at(sequence_length)] * run.count
    ]


def _without_window(layer: TransformerLayer) -> Attention | LatentAttention:
    attention = layer.attention
    return replace(attention, window=None) if isinstance(attention, Attention) else attention


def grouped_experts(job: Job) -> bool:
    """Whether experts run as one grouped product (--moe-grouped-gemm).

    It wants devices from NVIDIA's Ampere on (arguments.py, validate_args), as bfloat16 does.
    """
    return job.precision is Precision.BFLOAT16


def model_arguments(model: ModelSpec, job: Job) -> tuple[tuple[str, ...], ...]:
    """Flags of a model without `model_faults`, all but the vocabulary's."""
    parts = model_parts(model, job.sequence_length)
    return (
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden_size)),
        *_attention_arguments(parts),
        *_mlp_arguments(parts, job),
        ("--normalization", "RMSNorm" if parts.norm is Norm.RMS_NORM else "LayerNorm"),
        *_position_arguments(model, parts, job.sequence_length),
        *_bias_arguments(parts),
        *numerics_arguments(model),
        *(() if model.tied_embeddings else (("--untie-embeddings-and-output-weights",),)),
        *((("--mtp-num-layers", str(model.num_mtp_layers)),) if model.num_mtp_layers else ()),
    )


def _attention_arguments(parts: ModelParts) -> Iterator[tuple[str, ...]]:
    attention = parts.attention
    yield "--num-attention-heads", str(attention.num_heads)
    if isinstance(attention, LatentAttention):
        yield ("--multi-latent-attention",)
        # Validation divides hidden by heads where it is left out.
        yield "--kv-channels", str(attention.value_head_dim)
        if attention.query_rank is not None:
            yield "--q-lora-rank", str(attention.query_rank)
        yield "--kv-lora-rank", str(attention.kv_rank)
        yield "--qk-head-dim", str(attention.nope_head_dim)
        yield "--qk-pos-emb-head-dim", str(attention.rope_head_dim)
        yield "--v-head-dim", str(attention.value_head_dim)
        # The latents' own norms (multi_latent_attention.py: q_layernorm, kv_layernorm).
        yield ("--qk-layernorm",)
        return
    yield "--kv-channels", str(attention.head_dim)
    if attention.num_kv_heads != attention.num_heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(attention.num_kv_heads)
    if attention.qk_norm:
        yield ("--qk-layernorm",)
    yield from _window_arguments(parts.windows)


def _window_arguments(windows: tuple[int | None, ...]) -> Iterator[tuple[str, ...]]:
    """Tokens to the left and right of a token that it sees, and the layers that have a window.

    transformer/utils.py, is_layer_window_attention: 1 in the list is a layer with the window.
    """
    size = next((window for window in windows if window is not None), None)
    if size is None:
        return
    yield "--window-size", f"{size - 1},0"
    if None in windows:
        yield "--window-attn-skip-freq", pattern_text([window is not None for window in windows])


def _mlp_arguments(parts: ModelParts, job: Job) -> Iterator[tuple[str, ...]]:
    dense, experts = parts.dense, parts.experts
    if dense is not None:
        yield "--ffn-hidden-size", str(dense.ffn_hidden_size)
    elif experts is not None:
        yield "--ffn-hidden-size", str(experts.expert_ffn_hidden_size)
    gated = dense.gated if dense is not None else experts is not None and experts.gated
    if gated:
        yield ("--swiglu",)
    if experts is None:
        return
    yield "--num-experts", str(experts.num_experts)
    yield "--moe-router-topk", str(experts.experts_per_token)
    yield "--moe-ffn-hidden-size", str(experts.expert_ffn_hidden_size)
    if not all(parts.with_experts):
        yield "--moe-layer-freq", pattern_text(parts.with_experts)
    if experts.shared_ffn_hidden_size:
        yield "--moe-shared-expert-intermediate-size", str(experts.shared_ffn_hidden_size)
    if experts.shared_gate:
        yield ("--moe-shared-expert-gate",)
    settings = trainer_settings(job)
    if settings.expert_dispatcher is ExpertDispatcher.DEEPEP:
        yield "--moe-token-dispatcher-type", "flex"
        yield "--moe-flex-dispatcher-backend", "deepep"
    else:
        yield "--moe-token-dispatcher-type", settings.expert_dispatcher.value
    if settings.shared_expert_overlap and experts.shared_ffn_hidden_size:
        yield ("--moe-shared-expert-overlap",)
    if grouped_experts(job):
        yield ("--moe-grouped-gemm",)
        # Permutation is priced as one kernel (moe/moe_utils.py).
        yield ("--moe-permute-fusion",)


def pattern_text(holds: Iterable[bool]) -> str:
    """Ones and zeros as Megatron's patterns: `([0]*3+[1]*58)` (arguments.py, moe_freq_type)."""
    runs = [(int(value), len(list(run))) for value, run in groupby(holds)]
    return "(" + "+".join(f"[{value}]*{count}" for value, count in runs) + ")"


def _position_arguments(
    model: ModelSpec, parts: ModelParts, sequence_length: int
) -> Iterator[tuple[str, ...]]:
    rotary = isinstance(parts.attention, LatentAttention) or parts.attention.rotary
    if rotary:
        yield "--position-embedding-type", "rope"
    else:
        kind = "learned_absolute" if model.learned_positions else "none"
        yield "--position-embedding-type", kind
    longest = model.learned_positions or max(model.max_sequence_length, sequence_length)
    yield "--max-position-embeddings", str(longest)


def _biases(parts: ModelParts) -> tuple[bool, bool, bool]:
    """(queries, keys and values; attention output; MLP)."""
    attention = parts.attention
    mlp = any(part.bias for part in (parts.dense, parts.experts) if part is not None)
    if isinstance(attention, LatentAttention):
        return attention.bias, attention.bias, mlp
    return attention.qkv_bias, attention.output_bias, mlp


def _bias_arguments(parts: ModelParts) -> Iterator[tuple[str, ...]]:
    """Every matrix has a bias unless --disable-bias-linear; that leaves those of q, k and v."""
    qkv, output, _ = _biases(parts)
    if not output:
        yield ("--disable-bias-linear",)
        if qkv:
            yield ("--add-qkv-bias",)


# ---- what has no flag


def missing_flags(
    model: ModelSpec, job: Job, missing: tuple[str, ...], where: str
) -> Iterator[Fault]:
    """Faults of a model without `model_faults` that needs flags which an older Megatron-LM lacks.

    `where`: that Megatron-LM, as it stands behind "in".
    """
    found = [entry[0] for entry in model_arguments(model, job) if entry[0] in missing]
    for flag in found:
        message = f"{model.name} needs {flag}, which has no effect in {where}"
        yield Fault(field=_FIELD, message=f"{message}: emit for target megatron")


def model_faults(model: ModelSpec, job: Job) -> Iterator[Fault]:
    """Everything in a model that Megatron-LM has no argument for, or none that was verified."""
    layers = _layers(model, job.sequence_length)
    parts = model_parts(model, job.sequence_length)
    found = (
        *_unlike_faults(layers),
        *_layer_faults(layers[0]),
        *_part_faults(parts),
        *_end_faults(model, parts, job.sequence_length),
        *numerics_faults(model),
    )
    for message in found:
        yield Fault(field=_FIELD, message=f"{model.name} has {message}")


def _unlike_faults(layers: list[TransformerLayer]) -> Iterator[str]:
    """Layers may differ in dense or expert MLPs and in one window; in nothing else."""
    kinds = {
        replace(layer, mlp=layers[0].mlp, attention=_without_window(layer)) for layer in layers
    }
    if len(kinds) > 1:
        yield (
            "layers that differ in more than their window and dense or expert MLPs; Megatron-LM's "
            "arguments say the rest once for all layers (--hybrid-layer-pattern is not emitted)"
        )
    if len({layer.mlp for layer in layers if isinstance(layer.mlp, Mlp)}) > 1:
        yield "dense MLPs of several widths; --ffn-hidden-size is one for all layers"
    if len({layer.mlp for layer in layers if isinstance(layer.mlp, Experts)}) > 1:
        yield "several kinds of experts; --num-experts and its like are one for all layers"
    if len({layer.window for layer in layers if layer.window is not None}) > 1:
        yield "windows of several sizes; --window-size is one for all layers"


def _layer_faults(layer: TransformerLayer) -> Iterator[str]:
    if layer.parallel_residual:
        yield "a parallel residual (attention and MLP on one input); Megatron-LM's layers have none"
    elif layer.num_norms != 2:
        yield f"{layer.num_norms} norms per layer; Megatron-LM's layers have 2"
    if layer.norm is Norm.UNSCALED:
        yield "norms without weights; --normalization is LayerNorm or RMSNorm"
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        if attention.bias:
            yield (
                "biases on the projections to the latents; Megatron-LM's latent attention has none"
            )
        if layer.norm is not Norm.RMS_NORM:
            yield "latent attention with LayerNorm; the latents' norms are then LayerNorms as well"
    elif attention.qk_norm and layer.norm is not Norm.RMS_NORM:
        yield "RMSNorms of queries and keys with LayerNorm; --qk-layernorm makes LayerNorms then"


def _part_faults(parts: ModelParts) -> Iterator[str]:
    qkv, output, mlp = _biases(parts)
    latent = isinstance(parts.attention, LatentAttention)
    if not latent and (output != mlp or (output and not qkv)):
        yield (
            f"biases on {_listed(qkv, output, mlp)}; Megatron-LM has them on all matrices, on "
            "queries, keys and values alone (--add-qkv-bias), or on none"
        )
    experts, dense = parts.experts, parts.dense
    if experts is not None and experts.bias:
        yield "biases in its experts, with which Megatron-LM was not verified"
    elif experts is not None and (output or mlp):
        yield (
            "experts without biases beside biases on attention output or dense MLPs; "
            "--disable-bias-linear is for all of them"
        )
    if experts is not None and dense is not None and experts.gated != dense.gated:
        yield "gated experts and plain MLPs, or the other way round; --swiglu is for both"


def _listed(qkv: bool, output: bool, mlp: bool) -> str:
    names = (("queries, keys and values", qkv), ("attention output", output), ("the MLP", mlp))
    return " and ".join(name for name, has in names if has) or "nothing"


def _end_faults(model: ModelSpec, parts: ModelParts, sequence_length: int) -> Iterator[str]:
    if model.final_norm is not parts.norm:
        kind = "no" if model.final_norm is None else f"a {model.final_norm}"
        yield f"{kind} final norm and {parts.norm} in its layers; --normalization is for both"
    if model.embedding_size is not None and model.embedding_size != model.hidden_size:
        yield (
            f"an embedding of width {model.embedding_size} and a projection to "
            f"{model.hidden_size}; Megatron-LM has none"
        )
    if model.head_bias:
        yield "a bias in its head; GPTModel's output layer has none"
    rotary = isinstance(parts.attention, LatentAttention) or parts.attention.rotary
    learned = model.learned_positions
    if rotary and learned:
        yield "rotary and learned positions; --position-embedding-type is one of them"
    if learned and learned < sequence_length:
        yield f"{learned} learned positions for sequences of {sequence_length}"
    if not model.num_mtp_layers:
        return
    if not rotary and learned:
        # arguments.py, "MTP validation".
        yield "multi-token prediction with learned positions; Megatron-LM has it with rotary ones"
    last = model.layer_runs[-1].layer
    if model.mtp_layer is not None and model.mtp_layer != last:
        # gpt_builders.py: the layer inside is one like the last of the stage.
        yield "multi-token prediction layers unlike its last layer; Megatron-LM repeats that one"


# ---- what a model computes with its weights

Argument = tuple[str, ...]

_LLAMA3 = (8.0, 1.0, 4.0, 8192)
"""RotaryEmbedding._apply_scaling: (factor, low, high, original length). gpt_config_from_args passes
--use-rope-scaling on and not --rope-scaling-factor, so the factor is GPTModelConfig's 8."""
_YARN = (4096, 32.0, 1.0)
"""MLATransformerConfig: (original length, beta_fast, beta_slow), for which there is no argument."""


def numerics_arguments(model: ModelSpec) -> Iterator[Argument]:
    """Flags of a model without `numerics_faults`: norms, MLP, rotary positions, router."""
    attention = model.layer_runs[0].layer.attention
    if model.norm_epsilon is not None:
        yield "--norm-epsilon", repr(model.norm_epsilon)
    if model.activation is Activation.GELU and _gelu_is_fused(model):
        # transformer/mlp.py: the fusion, on by default, is the tanh form.
        yield ("--no-bias-gelu-fusion",)
    if isinstance(attention, LatentAttention) or attention.rotary:
        yield from _rotary_arguments(model, attention)
    experts = _experts(model)
    if experts is not None:
        yield from _router_arguments(model, experts)


def _experts(model: ModelSpec) -> Experts | None:
    mlps = (run.layer.mlp for run in model.layer_runs)
    return next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)


def _gelu_is_fused(model: ModelSpec) -> bool:
    """arguments.py switches the fusion off where matrices have no biases."""
    mlp = model.layer_runs[0].layer.mlp
    return isinstance(mlp, Mlp) and mlp.bias


def _rotary_arguments(
    model: ModelSpec, attention: Attention | LatentAttention
) -> Iterator[Argument]:
    if model.rotary_base is not None:
        yield "--rotary-base", str(int(model.rotary_base))
    if model.rotary_fraction not in (None, 1):
        yield "--rotary-percent", repr(model.rotary_fraction)
    scaling = model.rotary_scaling
    if isinstance(attention, LatentAttention):
        yield from _latent_rotation(scaling)
    elif scaling is not None and scaling.kind is RotaryScalingKind.LLAMA3:
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", repr(scaling.factor)
    elif scaling is not None and scaling.factor is not None:
        yield "--rotary-seq-len-interpolation-factor", str(int(scaling.factor))


def _latent_rotation(scaling: RotaryScaling | None) -> Iterator[Argument]:
    """Latent attention takes YaRN where nothing is said (MLATransformerConfig.rope_type)."""
    if scaling is None:
        yield "--rope-type", "rope"
    else:
        yield "--rope-type", "yarn"
        yield "--rotary-scaling-factor", repr(scaling.factor)
        yield "--mscale", repr(1.0 if scaling.mscale is None else scaling.mscale)
        yield "--mscale-all-dim", repr(scaling.mscale_all_dim or 0.0)
    # Plain rotation has no fusion (MLATransformerConfig); YaRN's asks for a kernel.
    yield ("--no-rope-fusion",)


def _router_arguments(model: ModelSpec, experts: Experts) -> Iterator[Argument]:
    """moe_utils.py, topk_routing_with_score_function.

    A softmax over the best logits is the softmax over all of them divided by the best ones' sum;
    one expert per token has weight 1 then, and Megatron-LM refuses that (transformer_config.py).
    """
    router = model.router
    normalized = None if router is None else router.normalized
    sigmoid = router is not None and router.score_function is ScoreFunction.SIGMOID
    if sigmoid:
        yield "--moe-router-score-function", "sigmoid"
    elif normalized is False or (normalized is None and experts.experts_per_token == 1):
        yield ("--moe-router-pre-softmax",)
    if router is None:
        return
    if router.scaling_factor not in (None, 1):
        yield "--moe-router-topk-scaling-factor", repr(router.scaling_factor)
    if router.num_groups is not None and router.num_groups != router.groups_per_token:
        yield "--moe-router-num-groups", str(router.num_groups)
        yield "--moe-router-group-topk", str(router.groups_per_token)
    if router.correction_bias:
        yield ("--moe-router-enable-expert-bias",)
    if router.loss_per_sequence:
        yield "--moe-router-load-balancing-type", "seq_aux_loss"
    if router.loss_coefficient is not None:
        yield "--moe-aux-loss-coeff", repr(router.loss_coefficient)


# ---- what has no argument


def numerics_faults(model: ModelSpec) -> Iterator[str]:
    """What the model says and Megatron-LM cannot be told; each goes on after `NAME has`."""
    yield from _activation_faults(model)
    attention = model.layer_runs[0].layer.attention
    if isinstance(attention, LatentAttention) or attention.rotary:
        yield from _rotary_faults(model, latent=isinstance(attention, LatentAttention))
    experts = _experts(model)
    if experts is not None:
        yield from _router_faults(model, experts)


def _activation_faults(model: ModelSpec) -> Iterator[str]:
    activation, mlp = model.activation, model.layer_runs[0].layer.mlp
    if activation is None:
        return
    if mlp.gated:
        if activation is not Activation.SILU:
            yield f"a gate with {activation}; Megatron-LM's --swiglu has silu"
    elif activation not in (Activation.GELU, Activation.GELU_TANH):
        yield f"an MLP with {activation} and without a gate; Megatron-LM's has gelu"
    elif activation is Activation.GELU_TANH and not _gelu_is_fused(model):
        yield "gelu_tanh in MLPs without biases, where Megatron-LM has the exact gelu"


def _rotary_faults(model: ModelSpec, *, latent: bool) -> Iterator[str]:
    base = model.rotary_base
    if base is not None and base != int(base):
        yield f"a rotary base of {base:g}; --rotary-base is a whole number"
    if latent and model.rotary_fraction not in (None, 1):
        yield f"{model.rotary_fraction:g} of each head rotated, not verified with latent attention"
    scaling = model.rotary_scaling
    if scaling is None:
        return
    kind, leave_out = scaling.kind, "leave rotary_scaling out to train without it"
    if kind is RotaryScalingKind.YARN and latent:
        if scaling.factor is None:
            yield f"YaRN without a factor; say it, or {leave_out}"
        found = (scaling.original_length, scaling.beta_fast, scaling.beta_slow)
        if any(own != there for own, there in zip(found, _YARN, strict=True) if own is not None):
            yield (
                f"YaRN with (original length, beta_fast, beta_slow) {found}; pretrain_gpt.py has "
                f"{_YARN} and no arguments for them: {leave_out}"
            )
    elif kind is RotaryScalingKind.LLAMA3 and not latent:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        values = (scaling.factor, low, high, scaling.original_length)
        if any(own != there for own, there in zip(values, _LLAMA3, strict=True)):
            yield (
                f"Llama 3's stretching with (factor, low, high, original length) {values}; "
                f"pretrain_gpt.py has {_LLAMA3} (it passes over --rope-scaling-factor): {leave_out}"
            )
    elif kind is RotaryScalingKind.LINEAR and not latent:
        factor = scaling.factor
        if factor is None or factor != int(factor):
            yield (
                f"positions stretched by {factor}; --rotary-seq-len-interpolation-factor is a "
                f"whole number: {leave_out}"
            )
    else:
        where = "latent attention" if latent else "plain attention"
        yield f"{kind} stretching of rotary positions in {where}; not verified: {leave_out}"


def _router_faults(model: ModelSpec, experts: Experts) -> Iterator[str]:
    router, taken = model.router, experts.experts_per_token
    if router is None:
        return
    sigmoid = router.score_function is ScoreFunction.SIGMOID
    if sigmoid and router.normalized is False and taken > 1:
        yield "a sigmoid router whose weights are not normalized; Megatron-LM's are"
    if not sigmoid and router.normalized and taken == 1:
        yield "one expert per token with weight 1; Megatron-LM asks for its softmax"
    if not sigmoid and router.correction_bias:
        # transformer_config.py.
        yield "a correction bias beside a softmax router; Megatron-LM has it with sigmoid"
    groups, chosen = router.num_groups, router.groups_per_token
    if groups is None or chosen is None or groups == chosen:
        return
    best = taken // chosen
    if experts.num_experts % groups or taken % chosen:
        yield (
            f"{groups} groups, {chosen} per token; they must divide {experts.num_experts} experts "
            f"and the {taken} per token"
        )
    elif router.group_experts not in (None, best):
        # moe_utils.py, group_limited_topk.
        yield (
            f"groups ranked by their best {router.group_experts} experts; Megatron-LM takes "
            f"{taken} / {chosen} = {best}"
        )
    elif not sigmoid and router.normalized and best > 1:
        yield "groups ranked by probabilities; Megatron-LM's normalized softmax adds logits up"


# ---- what was not said


def numerics_remarks(model: ModelSpec) -> tuple[str, ...]:
    """What stays the trainer's own, and what the source's number may mean otherwise."""
    attention = model.layer_runs[0].layer.attention
    rotary = isinstance(attention, LatentAttention) or attention.rotary
    experts = _experts(model)
    router = model.router
    own = [
        *(["norm_epsilon (--norm-epsilon 1e-5)"] if model.norm_epsilon is None else ()),
        *(["rotary_base (--rotary-base 10000)"] if rotary and model.rotary_base is None else ()),
        *(["activation (silu behind a gate, else gelu)"] if model.activation is None else ()),
    ]
    if experts is not None and (router is None or router.score_function is None):
        own.append("router.score_function (softmax)")
    if experts is not None and (router is None or router.loss_coefficient is None):
        own.append("router.loss_coefficient (--moe-aux-loss-coeff 0)")
    remarks = []
    if own:
        remarks.append(
            f"The model does not say {', '.join(own)}: Megatron-LM's own, in brackets, stand. "
            "Say them in the model file."
        )
    if experts is not None and router is not None and router.loss_coefficient:
        remarks.append(
            f"--moe-aux-loss-coeff {router.loss_coefficient!r} is the model's number as it stands. "
            "Megatron-LM adds a loss per layer and divides it by the experts of a token; the "
            "Transformers library takes one over all layers and does not divide."
        )
    return tuple(remarks)
