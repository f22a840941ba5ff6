"""From a Hugging Face config.json to a ModelSpec: families, their keys, faults.

The Llama family, dense or with experts, has a file of its own (`config_llama`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path as FilePath

from hetplan.errors import InputError
from hetplan.files.nodes import Path
from hetplan.files.quantities import value_of
from hetplan.files.reading import Document
from hetplan.model.config_llama import LLAMA_FAMILIES
from hetplan.model.config_values import (
    ConfigValues,
    Numerics,
    Shape,
    activation_of,
    deepseek_router,
    epsilon_of,
    even_heads,
    experts_of,
    rotary_numerics,
)
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    Mlp,
    Norm,
    TransformerLayer,
    runs_of,
)
from hetplan.model.spec import ModelSpec


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
            norm_epsilon=epsilon_of(values, "layer_norm_epsilon", 1e-5),
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
            norm_epsilon=epsilon_of(values, "layer_norm_eps", 1e-5),
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
    vocab=102400, hidden=4096, ffn=11008, expert_ffn=1407, layers=32, heads=32, experts=64,
    shared=2, per_token=None, first_dense=0, positions=2048, mlp_bias=True, mtp_layers=0,
)  # fmt: skip
_DEEPSEEK_V3 = _Deepseek(
    vocab=129280, hidden=7168, ffn=18432, expert_ffn=2048, layers=61, heads=128, experts=256,
    shared=1, per_token=8, first_dense=3, positions=4096, mlp_bias=False, mtp_layers=1,
)  # fmt: skip


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
            numerics=replace(
                rotary_numerics(
                    values,
                    norm_epsilon=epsilon_of(values, "rms_norm_eps", 1e-6),
                    activation=activation_of(values, "hidden_act", "silu"),
                ),
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


FAMILIES: dict[str, Callable[[ConfigValues], Shape]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    **LLAMA_FAMILIES,
    "deepseek_v2": _deepseek(_DEEPSEEK_V2),
    "deepseek_v3": _deepseek(_DEEPSEEK_V3),
}
"""How each `model_type` is read."""

_CLASSES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Model types by the class in `architectures`, for files without `model_type`."""


def is_huggingface(document: Document) -> bool:
    """Whether the file is a model's config.json and not one of hetplan's own files."""
    root = document.root
    return (
        isinstance(root, dict)
        and "schema" not in root
        and ("model_type" in root or "architectures" in root)
    )


def model_of_config(document: Document) -> ModelSpec:
    """The model that a config.json describes; one InputError with every fault otherwise."""
    place = _text_part(document)
    model_type = _model_type(document, place)
    values = ConfigValues(document, place)
    try:
        shape = FAMILIES[model_type](values)
        values.raise_faults()
        return _spec(_name(document), values, shape)
    except InputError as error:
        # A value refused its own fields: the reader's faults say where, if it has any.
        values.raise_faults()
        if any(fault.file for fault in error.faults):
            raise
        raise InputError(document.fault(place, str(error))) from error


def _spec(name: str, values: ConfigValues, shape: Shape) -> ModelSpec:
    runs = runs_of(iter(shape.layers))
    return value_of(
        ModelSpec,
        shape.numerics,
        name=name,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_sequence_length=_sequence_length(values, shape.positions),
        layer_runs=runs,
        final_norm=shape.layers[0].norm if shape.final_norm else None,
        learned_positions=shape.learned_positions,
        embedding_size=None if shape.embedding_size == shape.hidden_size else shape.embedding_size,
        tied_embeddings=shape.tied,
        num_mtp_layers=shape.num_mtp_layers,
        # DeepSeek's prediction layers have the index after the last layer, so they are like it.
        mtp_layer=shape.layers[-1] if shape.num_mtp_layers else None,
        # A file may name experts that none of its layers has.
        router=shape.numerics.router if _has_experts(shape) else None,
    )


def _has_experts(shape: Shape) -> bool:
    return any(isinstance(layer.mlp, Experts) for layer in dict.fromkeys(shape.layers))


def _text_part(document: Document) -> Path:
    """Where the language model is described: in `text_config` of a model that also sees."""
    if not isinstance(document.at("text_config"), dict):
        return ()
    return ("text_config",)


def _model_type(document: Document, place: Path) -> str:
    path = (*place, "model_type")
    found = document.at(*path)
    if found is None and place:  # the part may leave it to the whole, as in gemma3
        path = ("model_type",)
        found = document.at(*path)
    if found is None or (isinstance(found, str) and found not in (*FAMILIES, "gemma3")):
        # A model type of its own may stand over a known class: Kimi K2 is a DeepseekV3ForCausalLM.
        classes = document.at("architectures")
        known = [
            _CLASSES[name]
            for name in (classes if isinstance(classes, list) else ())
            if isinstance(name, str) and name in _CLASSES
        ]
        if known:
            return known[0]
        if found is None:
            path = ("architectures",)
            found = classes[0] if isinstance(classes, list) and classes else classes
    if found == "gemma3":
        if not place:
            message = "a gemma3 file describes its language model in text_config, which is missing"
            raise InputError(document.fault(path, message))
        return "gemma3_text"
    if isinstance(found, str) and found in FAMILIES:
        return found
    word = str(found)[:60]
    near = get_close_matches(word.lower(), list(FAMILIES), n=3, cutoff=0.5)
    raise InputError(
        document.fault(
            path,
            f"found {word!a}, a model that hetplan does not know"
            + (f"; nearest: {', '.join(near)}" if near else "")
            + f"; known: {', '.join(FAMILIES)}; describe another one in hetplan's own form "
            "(configs/models)",
        )
    )


def _sequence_length(values: ConfigValues, positions: int) -> int:
    """`max_position_embeddings`, or the length that YaRN and its like stretch the original to.

    Files differ in whether max_position_embeddings is the stretched length already (DeepSeek) or
    the original one (Qwen2.5): the longer of the two is meant. Llama 3's is always stretched, and
    its factor is not the one of the lengths: Llama 3.2 has 32 over 8,192 and ends at 131,072.
    """
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.at(key)
        if not isinstance(scaling, dict) or "llama3" in (
            scaling.get("rope_type"),
            scaling.get("type"),
        ):
            continue
        original = _number(scaling.get("original_max_position_embeddings"))
        positions = max(positions, int(original * _number(scaling.get("factor"))))
    return min(positions, 10**9)


def _number(value: object) -> float:
    """The value where it is a sensible number, else 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 10**9:
        return 0.0
    return float(value)


def _name(document: Document) -> str:
    """A name from the file's own, or from its folder's where the file is just config.json."""
    file = FilePath(document.file)
    stated = document.at("_name_or_path")
    stem = file.stem if file.stem.lower() != "config" else file.resolve().parent.name
    word = (stated.rstrip("/").rpartition("/")[2] if isinstance(stated, str) else "") or stem
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-._")[:100]
    return clean or str(document.at("model_type") or "model")[:100]
