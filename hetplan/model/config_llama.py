"""Models that are built like Llama, dense or with experts, from the keys of a config.json.

Every default is that of the family's configuration class in transformers 5.23,
`transformers/models/<model_type>/configuration_<model_type>.py`; which matrices and norms a family
has is in `modeling_<model_type>.py` beside it, and a test counts them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetplan.model.config_values import (
    ConfigValues,
    Numerics,
    Shape,
    activation_of,
    even_heads,
    experts_of,
    mixtral_router,
    qwen_router,
    rotary_numerics,
)
from hetplan.model.layers import Attention, Experts, Mlp, Norm, TransformerLayer
from hetplan.model.numerics import Router

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class _Llama:
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
    qk_norm: bool = False
    mlp_bias: bool = False
    """The family has a key mlp_bias."""
    num_norms: int = 2
    epsilon: float = 1e-6
    rotary_base: float | None = 10000.0
    """None: layers have different ones."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and default."""


_OF_LLAMA = {
    # vocab, hidden, ffn, layers, heads, kv_heads, positions
    "llama": _Llama(32000, 4096, 11008, 32, 32, None, 2048, mlp_bias=True),
    "mistral": _Llama(32000, 4096, 14336, 32, 32, 8, 131072, qkv_bias=False),
    "qwen2": _Llama(151936, 4096, 22016, 32, 32, 32, 32768, qkv_bias=True),
    "qwen3": _Llama(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128, qk_norm=True),
    "gemma": _Llama(
        256000,
        3072,
        24576,
        28,
        16,
        16,
        8192,
        tied=True,
        head_dim=256,
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "gemma2": _Llama(
        256000,
        2304,
        9216,
        26,
        8,
        4,
        8192,
        tied=True,
        head_dim=256,
        num_norms=4,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    "gemma3_text": _Llama(
        262208,
        2304,
        9216,
        26,
        8,
        4,
        131072,
        tied=True,
        head_dim=256,
        qk_norm=True,
        num_norms=4,
        rotary_base=None,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    "mixtral": _Llama(
        32000, 4096, 14336, 32, 32, 8, 131072, qkv_bias=False, epsilon=1e-5, rotary_base=1e6
    ),
    "qwen2_moe": _Llama(151936, 2048, 5632, 24, 16, 16, 32768, qkv_bias=True),
    "qwen3_moe": _Llama(151936, 2048, 6144, 24, 32, 4, 32768, qk_norm=True),
}


def _llama(values: ConfigValues, base: _Llama) -> tuple[Shape, TransformerLayer, int]:
    """(the shape without its layers, the layer with full attention and dense MLP, layers)."""
    hidden = values.count("hidden_size", default=base.hidden)
    layers = values.layers("num_hidden_layers", default=base.layers)
    heads, kv_heads, head_dim = _heads(values, base, hidden)
    attention_bias = base.qkv_bias is None and values.flag("attention_bias", default=False)
    qkv_bias = attention_bias if base.qkv_bias is None else base.qkv_bias
    mlp_bias = base.mlp_bias and values.flag("mlp_bias", default=False)
    values.refuse("use_bidirectional_attention", "only causal attention is counted")
    layer = TransformerLayer(
        attention=Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            output_bias=attention_bias,
            qk_norm=base.qk_norm,
        ),
        mlp=Mlp(
            ffn_hidden_size=values.count("intermediate_size", default=base.ffn),
            gated=True,
            bias=mlp_bias,
        ),
        norm=Norm.RMS_NORM,
        num_norms=base.num_norms,
    )
    shape = Shape(
        hidden_size=hidden,
        vocab_size=values.count("vocab_size", default=base.vocab),
        positions=values.count("max_position_embeddings", default=base.positions),
        layers=(),
        tied=values.flag("tie_word_embeddings", default=base.tied),
        numerics=_numerics(values, base),
    )
    return shape, layer, layers


def _numerics(values: ConfigValues, base: _Llama) -> Numerics:
    key, default = base.activation
    activation = activation_of(values, key, default)
    if base.rotary_base is None:
        epsilon = values.number("rms_norm_eps", default=base.epsilon) or base.epsilon
        return Numerics(norm_epsilon=epsilon, activation=activation)
    return rotary_numerics(
        values, epsilon=base.epsilon, activation=activation, base=base.rotary_base
    )


def _routed(shape: Shape, router: Router) -> Shape:
    return replace(shape, numerics=replace(shape.numerics, router=router))


def _heads(values: ConfigValues, base: _Llama, hidden: int) -> tuple[int, int, int]:
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
    return heads, kv_heads, head_dim


def _with_window(layer: TransformerLayer, window: int | None) -> TransformerLayer:
    if window is None or not isinstance(layer.attention, Attention):
        return layer
    return replace(layer, attention=replace(layer.attention, window=window))


def _chosen(
    layer: TransformerLayer, window: int | None, count: int, types: tuple[str, ...]
) -> tuple[TransformerLayer, ...]:
    sliding = _with_window(layer, window)
    return tuple(sliding if types[i] == SLIDING else layer for i in range(count))


def _window_in_use(values: ConfigValues) -> int | None:
    """The window of the families that have a key to switch it on, which is off by default."""
    window = values.count_or_none("sliding_window", default=4096)
    return window if values.flag("use_sliding_window", default=False) else None


def _plain(model_type: str) -> Callable[[ConfigValues], Shape]:
    """llama, gemma: every layer sees everything before it."""

    def read(values: ConfigValues) -> Shape:
        shape, layer, count = _llama(values, _OF_LLAMA[model_type])
        return replace(shape, layers=(layer,) * count)

    return read


def _mistral(values: ConfigValues) -> Shape:
    shape, layer, count = _llama(values, _OF_LLAMA["mistral"])
    window = values.count_or_none("sliding_window", default=4096)
    return replace(shape, layers=(_with_window(layer, window),) * count)


def _qwen(model_type: str) -> Callable[[ConfigValues], Shape]:
    """qwen2, qwen3: the layers from max_window_layers on have a window, where one is used."""

    def read(values: ConfigValues) -> Shape:
        shape, layer, count = _llama(values, _OF_LLAMA[model_type])
        window = _window_in_use(values)
        first = values.count("max_window_layers", default=28, least=0)
        types = values.words("layer_types", count, (SLIDING, FULL))
        if types is None:
            types = tuple(SLIDING if i >= first else FULL for i in range(count))
        return replace(shape, layers=_chosen(layer, window, count, types))

    return read


def _gemma(model_type: str, pattern: int) -> Callable[[ConfigValues], Shape]:
    """gemma2, gemma3: every `pattern`th layer sees everything, the others have a window."""

    def read(values: ConfigValues) -> Shape:
        shape, layer, count = _llama(values, _OF_LLAMA[model_type])
        window = values.count_or_none("sliding_window", default=4096)
        every = pattern
        if model_type == "gemma3_text":
            names = ("sliding_window_pattern", "_sliding_window_pattern")
            every = values.count(*names, default=pattern)
        types = values.words("layer_types", count, (SLIDING, FULL))
        if types is None:
            types = tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(count))
        return replace(shape, layers=_chosen(layer, window, count, types))

    return read


def _mixtral(values: ConfigValues) -> Shape:
    base = _OF_LLAMA["mixtral"]
    shape, layer, count = _llama(values, base)
    window = values.count_or_none("sliding_window", default=None)
    experts = experts_of(
        values,
        num_experts=values.count("num_local_experts", "num_experts", default=8),
        per_token=values.count("num_experts_per_tok", default=2),
        ffn=values.count("intermediate_size", default=base.ffn),
    )
    sparse = replace(_with_window(layer, window), mlp=experts)
    return _routed(replace(shape, layers=(sparse,) * count), mixtral_router(values))


def _sparse_layers(
    values: ConfigValues, dense: TransformerLayer, experts: Experts | None, count: int
) -> tuple[TransformerLayer, ...]:
    """Qwen's MoE: layer i has experts where its step comes and mlp_only_layers does not name it."""
    step = values.count("decoder_sparse_step", default=1)
    only = values.indices("mlp_only_layers", count)
    if experts is None:
        return (dense,) * count
    sparse = replace(dense, mlp=experts)
    return tuple(sparse if i not in only and (i + 1) % step == 0 else dense for i in range(count))


def _qwen3_moe(values: ConfigValues) -> Shape:
    shape, layer, count = _llama(values, _OF_LLAMA["qwen3_moe"])
    window = _window_in_use(values)
    num_experts = values.count("num_experts", "num_local_experts", default=128, least=0)
    ffn = values.count("moe_intermediate_size", default=768)
    per_token = values.count("num_experts_per_tok", default=8)
    experts = (
        experts_of(values, num_experts=num_experts, per_token=per_token, ffn=ffn)
        if num_experts
        else None
    )
    layers = _sparse_layers(values, _with_window(layer, window), experts, count)
    return _routed(replace(shape, layers=layers), qwen_router(values))


def _qwen2_moe(values: ConfigValues) -> Shape:
    shape, layer, count = _llama(values, _OF_LLAMA["qwen2_moe"])
    if isinstance(layer.attention, Attention):
        bias = values.flag("qkv_bias", default=True)
        layer = replace(layer, attention=replace(layer.attention, qkv_bias=bias))
    window = _window_in_use(values)
    first = values.count("max_window_layers", default=28, least=0)
    types = values.words("layer_types", count, (SLIDING, FULL))
    if types is None:
        types = tuple(SLIDING if i % 2 == 0 and i < first else FULL for i in range(count))
    num_experts = values.count("num_experts", default=60, least=0)
    ffn = values.count("moe_intermediate_size", default=1408)
    per_token = values.count("num_experts_per_tok", default=4)
    shared = values.count("shared_expert_intermediate_size", default=5632, least=0)
    experts = None
    if num_experts:
        experts = experts_of(
            values,
            num_experts=num_experts,
            per_token=per_token,
            ffn=ffn,
            shared=shared,
            shared_gate=True,
        )
    sparse = _sparse_layers(values, layer, experts, count)
    layers = tuple(
        _with_window(each, window) if kind == SLIDING else each
        for each, kind in zip(sparse, types, strict=True)
    )
    return _routed(replace(shape, layers=layers), qwen_router(values))


LLAMA_FAMILIES: dict[str, Callable[[ConfigValues], Shape]] = {
    "llama": _plain("llama"),
    "mistral": _mistral,
    "qwen2": _qwen("qwen2"),
    "qwen3": _qwen("qwen3"),
    "gemma": _plain("gemma"),
    "gemma2": _gemma("gemma2", 2),
    "gemma3_text": _gemma("gemma3_text", 6),
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""How each `model_type` is read."""
