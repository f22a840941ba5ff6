"""Which arguments of Megatron-LM say what a model computes with its weights?

Read in Megatron-LM d98e8a64: megatron/training/arguments.py, megatron/training/argument_utils.py
(gpt_config_from_args), megatron/core/models/common/embeddings/rotary_pos_embedding.py, megatron/
core/transformer/{transformer_config,multi_latent_attention,mlp}.py and megatron/core/transformer/
moe/{moe_utils,router}.py; its parser and validators accept what is emitted here. What a model does
not say stays Megatron-LM's own (`numerics_remarks`); what it says and no argument can is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.model.layers import Attention, Experts, LatentAttention, Mlp
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind, ScoreFunction
from hetplan.model.spec import ModelSpec

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


def numerics_remarks(model: ModelSpec, trainer: str = "Megatron-LM") -> tuple[str, ...]:
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
            f"The model does not say {', '.join(own)}: {trainer}'s own, in brackets, stand. Say "
            "them in the model file."
        )
    if experts is not None and router is not None and router.loss_coefficient:
        remarks.append(
            f"--moe-aux-loss-coeff {router.loss_coefficient!r} is the model's number as it stands. "
            "Megatron-LM adds a loss per layer and divides it by the experts of a token; the "
            "Transformers library takes one over all layers and does not divide."
        )
    return tuple(remarks)
