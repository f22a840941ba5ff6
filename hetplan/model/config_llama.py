"""Models that are built like Llama, dense or with experts, from the keys of a config.json.

`_FAMILIES` is the table: one row per `model_type` with its defaults and what it has beside a plain
Llama. Every default is that of the family's configuration class in transformers 5.23,
`transformers/models/<model_type>/configuration_<model_type>.py`; which matrices and norms a family
has is in `modeling_<model_type>.py` beside it, and a test counts them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from hetplan.model.config_values import (
    ConfigValues,
    Numerics,
    Shape,
    activation_of,
    epsilon_of,
    even_heads,
    experts_of,
    rotary_numerics,
)
from hetplan.model.layers import Attention, Experts, Mlp, Norm, TransformerLayer
from hetplan.model.numerics import Router, ScoreFunction

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """Which layers have the window of the key sliding_window."""

    default: int | None = 4096
    switched: bool = False
    """Windows are off unless use_sliding_window is true."""
    slides: Callable[[int, int], bool] | None = None
    """Whether layer i (from 0) has it, by i and a number, where layer_types is missing; None: every
    layer has it."""
    number: int = 0
    number_keys: tuple[str, ...] = ()
    """Where the number comes from; empty: from the family alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """Experts in the place of MLPs."""

    number: int
    per_token: int
    ffn: int
    ffn_key: str = "moe_intermediate_size"
    shared: int = 0
    """Default of shared_expert_intermediate_size; 0: the family has no shared expert."""
    everywhere: bool = False
    """Otherwise every decoder_sparse_step-th layer has them that mlp_only_layers does not name, and
    a number of 0 means none."""
    normalized: bool | None = None
    """Whether the weights of a token's experts add up to 1; None: by the key norm_topk_prob."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of a family that is built like Llama, and where it differs."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int | None
    """Where the key is missing; None: as many as query heads. A null always means that."""
    positions: int
    tied: bool = False
    head_dim: int | None = None
    """Where the key is missing; None: hidden_size / num_attention_heads."""
    qkv_bias: bool | None = None
    """Fixed by the family; None: by the key attention_bias, the output projection's as well."""
    qkv_bias_key: str = ""
    """A key that overrules `qkv_bias`."""
    qk_norm: bool = False
    mlp_bias: bool = False
    """The family has a key mlp_bias."""
    num_norms: int = 2
    epsilon: float = 1e-6
    rotary_base: float | None = 10000.0
    """None: layers have different ones."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and default."""
    windows: _Windows | None = None
    experts: _Experts | None = None


_GELU = ("hidden_activation", "gelu_pytorch_tanh")
_FROM_LAYER = _Windows(
    switched=True, slides=lambda i, first: i >= first, number=28, number_keys=("max_window_layers",)
)
_EVEN_LAYERS = replace(_FROM_LAYER, slides=lambda i, first: i % 2 == 0 and i < first)
_ALTERNATING = _Windows(slides=lambda i, every: (i + 1) % every != 0, number=2)
_FIVE_OF_SIX = replace(
    _ALTERNATING,
    number=6,
    number_keys=("sliding_window_pattern", "_sliding_window_pattern"),
)

_FAMILIES = {
    # vocab, hidden, ffn, layers, heads, kv_heads, positions
    "llama": _Family(32000, 4096, 11008, 32, 32, None, 2048, mlp_bias=True),
    "mistral": _Family(
        *(32000, 4096, 14336, 32, 32, 8, 131072), qkv_bias=False, windows=_Windows()
    ),
    "qwen2": _Family(*(151936, 4096, 22016, 32, 32, 32, 32768), qkv_bias=True, windows=_FROM_LAYER),
    "qwen3": _Family(
        *(151936, 4096, 22016, 32, 32, 32, 32768),
        head_dim=128,
        qk_norm=True,
        windows=_FROM_LAYER,
    ),
    "gemma": _Family(
        *(256000, 3072, 24576, 28, 16, 16, 8192),
        tied=True,
        head_dim=256,
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "gemma2": _Family(
        *(256000, 2304, 9216, 26, 8, 4, 8192),
        tied=True,
        head_dim=256,
        num_norms=4,
        activation=_GELU,
        windows=_ALTERNATING,
    ),
    "gemma3_text": _Family(
        *(262208, 2304, 9216, 26, 8, 4, 131072),
        tied=True,
        head_dim=256,
        qk_norm=True,
        num_norms=4,
        rotary_base=None,
        activation=_GELU,
        windows=_FIVE_OF_SIX,
    ),
    "mixtral": _Family(
        *(32000, 4096, 14336, 32, 32, 8, 131072),
        qkv_bias=False,
        epsilon=1e-5,
        rotary_base=1e6,
        windows=_Windows(default=None),
        # modeling_mixtral.py, MixtralTopKRouter: softmax over all, the best divided by their sum.
        experts=_Experts(
            number=8,
            per_token=2,
            ffn=14336,
            ffn_key="intermediate_size",
            everywhere=True,
            normalized=True,
        ),
    ),
    "qwen2_moe": _Family(
        *(151936, 2048, 5632, 24, 16, 16, 32768),
        qkv_bias=True,
        qkv_bias_key="qkv_bias",
        windows=_EVEN_LAYERS,
        experts=_Experts(number=60, per_token=4, ffn=1408, shared=5632),
    ),
    "qwen3_moe": _Family(
        *(151936, 2048, 6144, 24, 32, 4, 32768),
        qk_norm=True,
        windows=_Windows(switched=True),
        experts=_Experts(number=128, per_token=8, ffn=768),
    ),
}


def _read(base: _Family, values: ConfigValues) -> Shape:
    hidden = values.count("hidden_size", default=base.hidden)
    count = values.layers("num_hidden_layers", default=base.layers)
    attention = _attention(values, base, hidden)
    dense = Mlp(
        ffn_hidden_size=values.count("intermediate_size", default=base.ffn),
        gated=True,
        bias=base.mlp_bias and values.flag("mlp_bias", default=False),
    )
    values.refuse("use_bidirectional_attention", "only causal attention is counted")
    numerics = _numerics(values, base)
    mlps: tuple[Mlp | Experts, ...] = (dense,) * count
    if base.experts is not None:
        mlps = _mlps(values, base.experts, dense, count)
        numerics = replace(numerics, router=_router(values, base.experts))
    windows = _windows(values, base.windows, count)
    layers = {
        (window, mlp): TransformerLayer(
            attention=replace(attention, window=window),
            mlp=mlp,
            norm=Norm.RMS_NORM,
            num_norms=base.num_norms,
        )
        for window, mlp in dict.fromkeys(zip(windows, mlps, strict=True))
    }
    return Shape(
        hidden_size=hidden,
        vocab_size=values.count("vocab_size", default=base.vocab),
        positions=values.count("max_position_embeddings", default=base.positions),
        layers=tuple(layers[key] for key in zip(windows, mlps, strict=True)),
        tied=values.flag("tie_word_embeddings", default=base.tied),
        numerics=numerics,
    )


def _attention(values: ConfigValues, base: _Family, hidden: int) -> Attention:
    heads = values.count("num_attention_heads", default=base.heads)
    missing = heads if base.kv_heads is None else base.kv_heads
    kv_heads = values.count_or_none("num_key_value_heads", default=missing) or heads
    if heads % kv_heads:
        values.fault(
            "num_key_value_heads",
            f"{kv_heads} does not divide num_attention_heads {heads}",
            beside=("num_attention_heads",),
        )
        kv_heads = heads
    head_dim = values.count_or_none("head_dim", default=base.head_dim)
    if head_dim is None:
        head_dim = even_heads(values, hidden, heads)
    bias = base.qkv_bias is None and values.flag("attention_bias", default=False)
    qkv_bias = bias if base.qkv_bias is None else base.qkv_bias
    if base.qkv_bias_key:
        qkv_bias = values.flag(base.qkv_bias_key, default=qkv_bias)
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        output_bias=bias,
        qk_norm=base.qk_norm,
    )


def _numerics(values: ConfigValues, base: _Family) -> Numerics:
    key, default = base.activation
    activation = activation_of(values, key, default)
    epsilon = epsilon_of(values, "rms_norm_eps", base.epsilon)
    if base.rotary_base is None:
        return Numerics(norm_epsilon=epsilon, activation=activation)
    return rotary_numerics(
        values, norm_epsilon=epsilon, activation=activation, base=base.rotary_base
    )


def _windows(values: ConfigValues, base: _Windows | None, count: int) -> tuple[int | None, ...]:
    """Window of every layer."""
    if base is None:
        return (None,) * count
    window = values.count_or_none("sliding_window", default=base.default)
    if base.switched and not values.flag("use_sliding_window", default=False):
        window = None
    if base.slides is None:
        return (window,) * count
    number = base.number
    if base.number_keys:
        number = values.count(*base.number_keys, default=number, least=0 if base.switched else 1)
    types = values.words("layer_types", count, (SLIDING, FULL))
    if types is None:
        types = tuple(SLIDING if base.slides(i, number) else FULL for i in range(count))
    return tuple(window if kind == SLIDING else None for kind in types)


def _mlps(
    values: ConfigValues, base: _Experts, dense: Mlp, count: int
) -> tuple[Mlp | Experts, ...]:
    """MLP or experts of every layer."""
    names = ("num_experts", "num_local_experts")
    names = names[::-1] if base.everywhere else names
    number = values.count(*names, default=base.number, least=int(base.everywhere))
    per_token = values.count("num_experts_per_tok", default=base.per_token)
    ffn = values.count(base.ffn_key, default=base.ffn)
    shared = 0
    if base.shared:
        key = "shared_expert_intermediate_size"
        shared = values.count(key, default=base.shared, least=0)
    step, only = 1, frozenset[int]()
    if not base.everywhere:
        step = values.count("decoder_sparse_step", default=1)
        only = values.indices("mlp_only_layers", count)
    if not number:
        return (dense,) * count
    experts = experts_of(
        values, num_experts=number, per_token=per_token, ffn=ffn, shared=shared, shared_gate=True
    )
    return tuple(experts if i not in only and (i + 1) % step == 0 else dense for i in range(count))


def _router(values: ConfigValues, base: _Experts) -> Router:
    normalized = base.normalized
    if normalized is None:
        # modeling_qwen2_moe.py and modeling_qwen3_moe.py.
        normalized = values.flag("norm_topk_prob", default=False)
    return Router(
        score_function=ScoreFunction.SOFTMAX,
        normalized=normalized,
        loss_coefficient=values.number("router_aux_loss_coef", default=0.001, zero=True),
    )


LLAMA_FAMILIES: dict[str, Callable[[ConfigValues], Shape]] = {
    model_type: partial(_read, family) for model_type, family in _FAMILIES.items()
}
"""How each `model_type` is read."""
