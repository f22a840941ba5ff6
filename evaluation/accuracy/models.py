"""Which model was trained in a measured run?

A row of a table of runs has the sizes; what it does not have follows from the family that its name
begins with, and has its source here. A name of no known family is read by its sizes: an inner
width of 4 hidden sizes is a GPT layer (with grouped heads, too: Falcon, StarCoder2 and Nemotron
have such ones), anything else a gated one, and the reader is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evaluation.accuracy.rows import RunRow
from hetplan.errors import InputError
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.spec import Architecture, ModelSpec, plain_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The model of a row, and what was assumed of it."""

    model: ModelSpec
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    num_experts: int


def model_of(row: RunRow) -> RunModel:
    """The model of a row; an InputError says what the row lacks."""
    sizes = _sizes(row)
    name = row.model.lower().replace("_", "-")
    for beginnings, make in _FAMILIES:
        if name.startswith(beginnings):
            return RunModel(model=make(sizes))
    if sizes.num_experts:
        raise InputError(
            f"model {row.model!a} has {sizes.num_experts} experts and is of no known family: how "
            "many a token goes to is not known"
        )
    plain = sizes.ffn_hidden == 4 * sizes.hidden
    note = f"{row.model or 'the model'}: of no known family, read as {'GPT' if plain else 'Llama'}"
    return RunModel(model=(_gpt if plain else _llama)(sizes), notes=(note,))


def _sizes(row: RunRow) -> _Sizes:
    needed = ("layers", "hidden", "ffn_hidden", "heads", "vocab", "seq")
    missing = [name for name in needed if not getattr(row, name)]
    if missing:
        raise InputError(f"the row does not say {', '.join(missing)}")
    return _Sizes(
        name=row.model or "unnamed",
        kv_heads=row.kv_heads or row.heads or 0,
        num_experts=row.num_experts or 0,
        **{name: getattr(row, name) for name in needed},
    )


def _head_dim(sizes: _Sizes) -> int:
    if sizes.hidden % sizes.heads:
        raise InputError(f"heads {sizes.heads} do not divide hidden {sizes.hidden}")
    return sizes.hidden // sizes.heads


def _plain(sizes: _Sizes, architecture: Architecture, *, tied: bool = False) -> ModelSpec:
    if sizes.num_experts:
        raise InputError(f"model {sizes.name!a} is of a dense family and has experts")
    return plain_model(
        name=sizes.name,
        architecture=architecture,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn_hidden,
        num_attention_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=_head_dim(sizes),
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.seq,
        tied_embeddings=tied,
    )


def _gpt(sizes: _Sizes) -> ModelSpec:
    # Megatron-LM's GPT shares the embedding's matrix with the head (arXiv 1909.08053, section 3).
    return _plain(sizes, Architecture.GPT, tied=True)


def _opt(sizes: _Sizes) -> ModelSpec:
    """Sailor's runs of OPT: layers of GPT, of hidden size throughout."""
    return _plain(sizes, Architecture.GPT)


def _llama(sizes: _Sizes) -> ModelSpec:
    return _plain(sizes, Architecture.LLAMA)


def _qwen(sizes: _Sizes) -> ModelSpec:
    if sizes.num_experts:
        return _qwen3_experts(sizes)
    if sizes.name.lower().replace("_", "-").startswith("qwen3"):
        # Query and key norms instead of biases, heads of 128 (arXiv 2505.09388, section 2).
        attention = Attention(
            num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, head_dim=128, qk_norm=True
        )
    else:
        # Biases of queries, keys and values (arXiv 2412.15115, section 2).
        attention = Attention(
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=_head_dim(sizes),
            qkv_bias=True,
        )
    mlp = Mlp(ffn_hidden_size=sizes.ffn_hidden, gated=True)
    return _of_layers(sizes, ((sizes.layers, _rms_layer(attention, mlp)),))


def _qwen3_experts(sizes: _Sizes) -> ModelSpec:
    """Eight experts per token, no shared ones, heads of 128 (arXiv 2505.09388, table 2)."""
    # Inner width of an expert from config.json of Qwen3-235B-A22B and Qwen3-30B-A3B, by hidden.
    widths = {4096: 1536, 2048: 768}
    if sizes.hidden not in widths:
        raise InputError(f"experts' width of a Qwen model of hidden {sizes.hidden} is not known")
    attention = Attention(
        num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, head_dim=128, qk_norm=True
    )
    experts = Experts(
        num_experts=sizes.num_experts,
        experts_per_token=8,
        expert_ffn_hidden_size=widths[sizes.hidden],
    )
    return _of_layers(sizes, ((sizes.layers, _rms_layer(attention, experts)),))


def _mixtral(sizes: _Sizes) -> ModelSpec:
    """Two experts per token, each of the full inner width (arXiv 2401.04088, section 2)."""
    attention = Attention(
        num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, head_dim=_head_dim(sizes)
    )
    experts = Experts(
        num_experts=sizes.num_experts or 8,
        experts_per_token=2,
        expert_ffn_hidden_size=sizes.ffn_hidden,
    )
    return _of_layers(sizes, ((sizes.layers, _rms_layer(attention, experts)),))


def _deepseek(sizes: _Sizes) -> ModelSpec:
    """The first layers dense, the others of experts; by the hidden size, which tells them apart.

    DeepSeek-V2 arXiv 2405.04434 section 3.1.2, V2-Lite its appendix B, V3 arXiv 2412.19437 section
    4.2. A cut-down model keeps one dense layer (SimuMax's benchmark models do).
    """
    # hidden: queries' rank, experts per token, width of an expert, width of the shared ones.
    known: dict[int, tuple[int | None, int, int, int]] = {
        5120: (1536, 6, 1536, 2 * 1536),
        2048: (None, 6, 1408, 2 * 1408),
        7168: (1536, 8, 2048, 2048),
    }
    if sizes.hidden not in known or not sizes.num_experts:
        raise InputError(
            f"model {sizes.name!a} of hidden {sizes.hidden} and {sizes.num_experts} experts is no "
            "DeepSeek-V2, V2-Lite or V3"
        )
    query_rank, per_token, width, shared = known[sizes.hidden]
    attention = LatentAttention(
        num_heads=sizes.heads,
        query_rank=query_rank,
        kv_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        value_head_dim=128,
    )
    dense = _rms_layer(attention, Mlp(ffn_hidden_size=sizes.ffn_hidden, gated=True))
    experts = Experts(
        num_experts=sizes.num_experts,
        experts_per_token=per_token,
        expert_ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
    )
    first = 3 if sizes.hidden == 7168 and sizes.layers == 61 else 1
    if sizes.layers == first:
        return _of_layers(sizes, ((first, dense),))
    return _of_layers(sizes, ((first, dense), (sizes.layers - first, replace(dense, mlp=experts))))


def _rms_layer(attention: Attention | LatentAttention, mlp: Mlp | Experts) -> TransformerLayer:
    return TransformerLayer(attention=attention, mlp=mlp, norm=Norm.RMS_NORM)


def _of_layers(sizes: _Sizes, runs: tuple[tuple[int, TransformerLayer], ...]) -> ModelSpec:
    return ModelSpec(
        name=sizes.name,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        max_sequence_length=sizes.seq,
        layer_runs=tuple(LayerRun(count=count, layer=layer) for count, layer in runs),
        final_norm=Norm.RMS_NORM,
    )


_FAMILIES: tuple[tuple[tuple[str, ...], Callable[[_Sizes], ModelSpec]], ...] = (
    (("deepseek",), _deepseek),
    (("mixtral",), _mixtral),
    (("qwen",), _qwen),
    (("opt",), _opt),
    (("gpt", "megatron", "bloom", "mt-nlg"), _gpt),
    (("llama", "mistral", "yi-", "baichuan"), _llama),
)
"""Beginnings of model names, in lower case."""
