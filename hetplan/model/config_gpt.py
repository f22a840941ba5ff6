"""GPT-2, GPT-NeoX and OPT from the keys of a config.json: LayerNorm, biases, plain MLP.

Every default is that of the family's configuration class in transformers 5.23,
`transformers/models/<model_type>/configuration_<model_type>.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetplan.model.config_numerics import Numerics, activation_of, rotary_numerics
from hetplan.model.config_shape import Shape, even_heads
from hetplan.model.config_values import ConfigValues
from hetplan.model.layers import Attention, Mlp, Norm, TransformerLayer


def _gpt2(values: ConfigValues) -> Shape:
    hidden = values.count("n_embd", "hidden_size", default=768)
    heads = values.count("n_head", "num_attention_heads", default=12)
    count = values.layers("n_layer", "num_hidden_layers", default=12)
    positions = values.count("n_positions", "max_position_embeddings", default=1024)
    inner = values.count_or_none("n_inner", default=None)
    values.refuse("add_cross_attention", "an encoder beside the model is not counted")
    layer = _biased(values, hidden, heads, inner or 4 * hidden, bias=True)
    return Shape(
        hidden_size=hidden,
        vocab_size=values.count("vocab_size", default=50257),
        positions=positions,
        layers=(layer,) * count,
        tied=values.flag("tie_word_embeddings", default=True),
        learned_positions=positions,
        numerics=Numerics(
            norm_epsilon=values.number("layer_norm_epsilon", default=1e-5) or 1e-5,
            activation=activation_of(values, "activation_function", "gelu_new"),
        ),
    )


def _biased(
    values: ConfigValues, hidden: int, heads: int, ffn: int, *, bias: bool
) -> TransformerLayer:
    """A layer of GPT-2's kind."""
    return TransformerLayer(
        attention=Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=even_heads(values, hidden, heads),
            qkv_bias=bias,
            output_bias=bias,
            rotary=False,
        ),
        mlp=Mlp(ffn_hidden_size=ffn, gated=False, bias=bias),
        norm=Norm.LAYER_NORM,
    )


def _gpt_neox(values: ConfigValues) -> Shape:
    hidden = values.count("hidden_size", default=6144)
    heads = values.count("num_attention_heads", default=64)
    ffn = values.count("intermediate_size", default=24576)
    layer = _biased(values, hidden, heads, ffn, bias=True)
    bias = values.flag("attention_bias", default=True)
    if isinstance(layer.attention, Attention):
        attention = replace(layer.attention, qkv_bias=bias, output_bias=bias, rotary=True)
        parallel = values.flag("use_parallel_residual", default=True)
        layer = replace(layer, attention=attention, parallel_residual=parallel)
    count = values.layers("num_hidden_layers", default=44)
    return Shape(
        hidden_size=hidden,
        vocab_size=values.count("vocab_size", default=50432),
        positions=values.count("max_position_embeddings", default=2048),
        layers=(layer,) * count,
        tied=values.flag("tie_word_embeddings", default=False),
        numerics=rotary_numerics(
            values,
            epsilon=1e-5,
            epsilon_key="layer_norm_eps",
            activation=activation_of(values, "hidden_act", "gelu"),
            base_keys=("rotary_emb_base", "rope_theta"),
            fraction=0.25,
            fraction_key="rotary_pct",
        ),
    )


def _opt(values: ConfigValues) -> Shape:
    hidden = values.count("hidden_size", default=768)
    heads = values.count("num_attention_heads", default=12)
    ffn = values.count("ffn_dim", default=3072)
    bias = values.flag("enable_bias", default=True)
    scaled = values.flag("layer_norm_elementwise_affine", default=True)
    layer = _biased(values, hidden, heads, ffn, bias=bias)
    if not scaled:
        layer = replace(layer, norm=Norm.UNSCALED)
    count = values.layers("num_hidden_layers", default=12)
    positions = values.count("max_position_embeddings", default=2048)
    before = values.flag("do_layer_norm_before", default=True)
    removed = values.flag("_remove_final_layer_norm", default=False)
    return Shape(
        hidden_size=hidden,
        vocab_size=values.count("vocab_size", default=50272),
        positions=positions,
        layers=(layer,) * count,
        tied=values.flag("tie_word_embeddings", default=True),
        # modeling_opt.py: OPTLearnedPositionalEmbedding keeps 2 rows that no token uses.
        learned_positions=positions + 2,
        embedding_size=values.count_or_none("word_embed_proj_dim", default=None),
        final_norm=before and not removed,
        # modeling_opt.py leaves torch's own epsilon to its LayerNorms.
        numerics=Numerics(
            norm_epsilon=1e-5, activation=activation_of(values, "activation_function", "relu")
        ),
    )


GPT_FAMILIES: dict[str, Callable[[ConfigValues], Shape]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}
"""How each `model_type` is read."""
