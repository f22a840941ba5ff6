"""DeepSeek-V2 and V3 from the keys of a config.json: latent attention, dense first layers, experts.

Every default is that of the configuration class in transformers 5.23,
`transformers/models/deepseek_v3/configuration_deepseek_v3.py` and the same of v2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetplan.model.config_numerics import activation_of, deepseek_router, rotary_numerics
from hetplan.model.config_shape import Shape, experts_of
from hetplan.model.config_values import ConfigValues
from hetplan.model.layers import Experts, LatentAttention, Mlp, Norm, TransformerLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deepseek:
    """Defaults in which the two versions differ."""

    vocab: int
    hidden: int
    ffn: int
    expert_ffn: int
    layers: int
    heads: int
    experts: int
    shared: int
    per_token: int | None
    first_dense: int
    positions: int
    mlp_bias: bool
    """The family has a key mlp_bias; its experts have none, its shared experts do."""
    mtp_layers: int


_DEEPSEEK_V2 = _Deepseek(
    vocab=102400,
    hidden=4096,
    ffn=11008,
    expert_ffn=1407,
    layers=32,
    heads=32,
    experts=64,
    shared=2,
    per_token=None,
    first_dense=0,
    positions=2048,
    mlp_bias=True,
    mtp_layers=0,
)
_DEEPSEEK_V3 = _Deepseek(
    vocab=129280,
    hidden=7168,
    ffn=18432,
    expert_ffn=2048,
    layers=61,
    heads=128,
    experts=256,
    shared=1,
    per_token=8,
    first_dense=3,
    positions=4096,
    mlp_bias=False,
    mtp_layers=1,
)


def _deepseek(base: _Deepseek) -> Callable[[ConfigValues], Shape]:
    """deepseek_v2, deepseek_v3: latent attention, dense first layers, shared experts."""

    def read(values: ConfigValues) -> Shape:
        hidden = values.count("hidden_size", default=base.hidden)
        count = values.layers("num_hidden_layers", default=base.layers)
        dense = _deepseek_dense(values, base)
        experts = _deepseek_experts(values, base)
        first = values.count_or_none("first_k_dense_replace", default=base.first_dense, least=0)
        # Of DeepSeek's own modeling file; transformers passes over it, and published files say 1.
        step = values.count("moe_layer_freq", default=1)
        sparse = dense if experts is None else replace(dense, mlp=experts)
        layers = tuple(
            sparse if i >= (first or 0) and i % step == 0 else dense for i in range(count)
        )
        mtp = 0
        if base.mtp_layers:
            names = ("num_nextn_predict_layers", "num_mtp_layers")
            mtp = values.count_or_none(*names, default=base.mtp_layers, least=0) or 0
        return Shape(
            hidden_size=hidden,
            vocab_size=values.count("vocab_size", default=base.vocab),
            positions=values.count("max_position_embeddings", default=base.positions),
            layers=layers,
            tied=values.flag("tie_word_embeddings", default=False),
            num_mtp_layers=mtp,
            numerics=rotary_numerics(
                values,
                epsilon=1e-6,
                activation=activation_of(values, "hidden_act", "silu"),
                router=deepseek_router(values, third=base is _DEEPSEEK_V3),
            ),
        )

    return read


def _deepseek_dense(values: ConfigValues, base: _Deepseek) -> TransformerLayer:
    heads = values.count("num_attention_heads", default=base.heads)
    kv_heads = values.count_or_none("num_key_value_heads", default=None)
    if kv_heads is not None and kv_heads != heads:
        values.fault(
            "num_key_value_heads",
            f"found {kv_heads}; latent attention has a key for each of its {heads} query heads",
            beside=("num_attention_heads",),
        )
    return TransformerLayer(
        attention=LatentAttention(
            num_heads=heads,
            query_rank=values.count_or_none("q_lora_rank", default=1536),
            kv_rank=values.count("kv_lora_rank", default=512),
            nope_head_dim=values.count("qk_nope_head_dim", default=128),
            rope_head_dim=values.count("qk_rope_head_dim", default=64),
            value_head_dim=values.count("v_head_dim", default=128),
            bias=values.flag("attention_bias", default=False),
        ),
        mlp=Mlp(
            ffn_hidden_size=values.count("intermediate_size", default=base.ffn),
            gated=True,
            bias=base.mlp_bias and values.flag("mlp_bias", default=False),
        ),
        norm=Norm.RMS_NORM,
    )


def _deepseek_experts(values: ConfigValues, base: _Deepseek) -> Experts | None:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    routed = values.count_or_none(*names, default=base.experts, least=0)
    ffn = values.count("moe_intermediate_size", default=base.expert_ffn)
    shared = values.count_or_none("n_shared_experts", default=base.shared, least=0) or 0
    per_token = values.count_or_none("num_experts_per_tok", default=base.per_token)
    if not routed:
        return None
    if per_token is None:
        values.fault("num_experts_per_tok", "is missing; say how many experts a token goes to")
        return None
    if base.mlp_bias and values.flag("mlp_bias", default=False):
        values.fault("mlp_bias", "found true; biases of shared experts alone are not counted")
    return experts_of(values, num_experts=routed, per_token=per_token, ffn=ffn, shared=shared * ffn)


DEEPSEEK_FAMILIES: dict[str, Callable[[ConfigValues], Shape]] = {
    "deepseek_v2": _deepseek(_DEEPSEEK_V2),
    "deepseek_v3": _deepseek(_DEEPSEEK_V3),
}
"""How each `model_type` is read."""
