"""What the keys of a config.json say about norms, MLPs, rotary positions and routers.

Every default is that of the family's configuration class in transformers 5.23, as in the modules
beside this one; keys of rotary positions are those of `modeling_rope_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.model.config_values import ConfigValues
from hetplan.model.numerics import (
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""transformers/activations.py, ACT2FN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What of it a family's keys say; fields as in `hetplan.model.spec.ModelSpec`."""

    norm_epsilon: float
    activation: Activation
    rotary_base: float | None = None
    rotary_fraction: float | None = None
    rotary_scaling: RotaryScaling | None = None
    router: Router | None = None


def activation_of(values: ConfigValues, key: str, default: str) -> Activation:
    """The function that this key names."""
    found = values.at(key)
    return _ACTIVATIONS.get(default if found is None else str(found), Activation.OTHER)


def rotary_numerics(
    values: ConfigValues,
    *,
    epsilon: float,
    epsilon_key: str = "rms_norm_eps",
    activation: Activation,
    base: float = 10000.0,
    base_keys: tuple[str, ...] = ("rope_theta",),
    fraction: float | None = None,
    fraction_key: str = "partial_rotary_factor",
    router: Router | None = None,
) -> Numerics:
    """Of a family with one set of rotary positions for all layers; the numbers are its defaults."""
    settings = _rotary_settings(values)
    stated = values.number(*base_keys, default=base)
    part = values.number(fraction_key, default=fraction)
    if settings is not None:
        stated = settings.number("rope_theta", default=stated)
        part = settings.number("partial_rotary_factor", default=part)
    if part is not None and part > 1:
        values.fault(fraction_key, f"found {part:g}; at most 1 is rotated")
        part = None
    scaling = None if settings is None else _scaling(values, settings)
    if settings is not None:
        values.faults += settings.faults
    return Numerics(
        norm_epsilon=values.number(epsilon_key, default=epsilon) or epsilon,
        activation=activation,
        rotary_base=stated,
        rotary_fraction=None if part == 1 else part,
        rotary_scaling=scaling,
        router=router,
    )


def _rotary_settings(values: ConfigValues) -> ConfigValues | None:
    """The mapping of rotary settings; transformers takes rope_scaling where there are both."""
    for key in ("rope_scaling", "rope_parameters"):
        found = values.at(key)
        if isinstance(found, dict) and found:
            return ConfigValues(values.document, (*values.place, key))
    return None


def _scaling(values: ConfigValues, settings: ConfigValues) -> RotaryScaling | None:
    word = settings.at("rope_type") or settings.at("type") or "default"
    if word == "default":
        return None
    known = {kind.value: kind for kind in RotaryScalingKind}
    kind = known.get(str(word), RotaryScalingKind.OTHER)
    original = settings.count_or_none("original_max_position_embeddings", default=None)
    if original is None and kind is not RotaryScalingKind.OTHER:
        # modeling_rope_utils.py, standardize_rope_params.
        original = values.count_or_none("max_position_embeddings", default=None)
    return RotaryScaling(
        kind=kind,
        factor=settings.number("factor", default=None),
        original_length=original,
        low_frequency_factor=settings.number("low_freq_factor", default=None),
        high_frequency_factor=settings.number("high_freq_factor", default=None),
        beta_fast=settings.number("beta_fast", default=None),
        beta_slow=settings.number("beta_slow", default=None),
        mscale=settings.number("mscale", default=None, zero=True),
        mscale_all_dim=settings.number("mscale_all_dim", default=None, zero=True),
    )


def mixtral_router(values: ConfigValues) -> Router:
    """modeling_mixtral.py, MixtralTopKRouter: softmax over all, the best divided by their sum."""
    return Router(
        score_function=ScoreFunction.SOFTMAX,
        normalized=True,
        loss_coefficient=values.number("router_aux_loss_coef", default=0.001, zero=True),
    )


def qwen_router(values: ConfigValues) -> Router:
    """modeling_qwen2_moe.py and modeling_qwen3_moe.py: as Mixtral's, divided where the key says."""
    return Router(
        score_function=ScoreFunction.SOFTMAX,
        normalized=values.flag("norm_topk_prob", default=False),
        loss_coefficient=values.number("router_aux_loss_coef", default=0.001, zero=True),
    )


def deepseek_router(values: ConfigValues, *, third: bool) -> Router:
    """modeling_deepseek_v2.py and modeling_deepseek_v3.py; the loss is of DeepSeek's own files.

    Version 2 ranks groups by their best expert and normalises nothing; version 3 by their best two,
    and always corrects the choice by a bias.
    """
    grouped = third or values.at("topk_method") == "group_limited_greedy"
    groups = values.count_or_none("n_group", default=8 if third else None)
    chosen = values.count_or_none("topk_group", default=4 if third else None)
    if not grouped or groups is None or chosen is None or groups == chosen:
        groups = chosen = None
    elif chosen > groups:
        message = f"found {chosen}, more than the {groups} groups there are"
        values.fault("topk_group", message, beside=("n_group",))
        groups = chosen = None
    return Router(
        score_function=ScoreFunction.SIGMOID if third else ScoreFunction.SOFTMAX,
        normalized=third and values.flag("norm_topk_prob", default=True),
        scaling_factor=values.number("routed_scaling_factor", default=2.5 if third else 1.0),
        num_groups=groups,
        groups_per_token=chosen,
        group_experts=None if groups is None else 2 if third else 1,
        correction_bias=third,
        loss_coefficient=values.number("aux_loss_alpha", default=None, zero=True),
        loss_per_sequence=None if values.at("seq_aux") is None else bool(values.at("seq_aux")),
    )
