"""What a launch says of its model beyond shapes: epsilons, functions, positions, routers.

Only what stands in the launch; what it leaves out the trainer has its own of, as a model file that
leaves it out. Flags: megatron/training/arguments.py and megatron/core/models/common/embeddings/
rotary_pos_embedding.py (8192, 1 and 4 are constants there) of Megatron-LM d98e8a64.
"""

from __future__ import annotations

from dataclasses import replace

from hetplan.importers.launches.flags import (
    flag,
    fraction_of,
    is_set,
    number_of,
    word_of,
)
from hetplan.importers.launches.values import LaunchText
from hetplan.model.layers import Experts
from hetplan.model.numerics import (
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)
from hetplan.model.spec import ModelSpec

_LLAMA3_FACTOR = 8.0
"""--rope-scaling-factor where it is left out."""


def with_numerics(model: ModelSpec, text: LaunchText, *, rotary: bool) -> ModelSpec:
    """The model with everything of this kind that the launch says."""
    fraction = _given(text, "rotary-percent")
    experts = any(isinstance(run.layer.mlp, Experts) for run in model.layer_runs)
    return replace(
        model,
        norm_epsilon=_given(text, "norm-epsilon", "layernorm-epsilon"),
        activation=_activation(text),
        rotary_base=_given(text, "rotary-base") if rotary else None,
        rotary_fraction=fraction if rotary and fraction != 1.0 else None,
        rotary_scaling=_scaling(text) if rotary else None,
        router=_router(text) if experts else None,
    )


def _given(text: LaunchText, *names: str) -> float | None:
    return None if flag(text, *names) is None else fraction_of(text, 0.0, *names)


def _activation(text: LaunchText) -> Activation | None:
    if is_set(text, "swiglu"):
        return Activation.SILU
    if is_set(text, "openai-gelu"):
        return Activation.GELU_TANH
    if is_set(text, "squared-relu", "quick-geglu"):
        return Activation.OTHER
    # transformer/mlp.py: the fusion is the tanh form.
    return Activation.GELU if is_set(text, "no-bias-gelu-fusion") else None


def _scaling(text: LaunchText) -> RotaryScaling | None:
    if is_set(text, "use-rope-scaling"):
        return RotaryScaling(
            kind=RotaryScalingKind.LLAMA3,
            factor=fraction_of(text, _LLAMA3_FACTOR, "rope-scaling-factor"),
            original_length=8192,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
        )
    latent = is_set(text, "multi-latent-attention")
    # MLATransformerConfig: yarn unless --rope-type says rope.
    if latent and word_of(text, "yarn", "rope-type") == "yarn":
        factor = _given(text, "rotary-scaling-factor")
        if factor is not None:
            return RotaryScaling(
                kind=RotaryScalingKind.YARN,
                factor=factor,
                # Constants of MLATransformerConfig, and defaults of arguments.py.
                original_length=4096,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=fraction_of(text, 1.0, "mscale"),
                mscale_all_dim=fraction_of(text, 0.0, "mscale-all-dim"),
            )
    stretched = number_of(text, None, "rotary-seq-len-interpolation-factor")
    if stretched is not None and not latent:
        return RotaryScaling(kind=RotaryScalingKind.LINEAR, factor=float(stretched))
    return None


def _router(text: LaunchText) -> Router | None:
    """None where no flag speaks of it."""
    score = word_of(text, "", "moe-router-score-function")
    known = score in tuple(ScoreFunction)
    balancing = flag(text, "moe-router-load-balancing-type")
    kinds = () if balancing is None else balancing.values
    groups = number_of(text, None, "moe-router-num-groups")
    per_token = number_of(text, None, "moe-router-group-topk")
    found = Router(
        score_function=ScoreFunction(score) if known else None,
        # A softmax before the choice is one over all experts, which the chosen do not add up to.
        normalized=False if is_set(text, "moe-router-pre-softmax") and score != "sigmoid" else None,
        scaling_factor=_given(text, "moe-router-topk-scaling-factor"),
        num_groups=groups if per_token is not None else None,
        groups_per_token=per_token if groups is not None else None,
        correction_bias=is_set(text, "moe-router-enable-expert-bias") or None,
        loss_coefficient=_given(text, "moe-aux-loss-coeff"),
        loss_per_sequence=True if "seq_aux_loss" in kinds else None,
    )
    return found if found != Router() else None
