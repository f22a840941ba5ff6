"""Which values do megatron-core's parameters start from, so that a run can be compared with
hetplan's own trainer?

Both start from the full weights of `hetplan.profiling.weights`, drawn from (seed, position, name).
megatron-core lays them out otherwise (files of 0.16.1, under megatron/core):

    transformer/attention.py    queries, keys and values of a layer are one matrix, key-value head
                                by key-value head: its queries, its key, its value; cut in `tp`
                                equal parts of rows, also where tp exceeds the key-value heads
    transformer/mlp.py          gate above up in one matrix, each cut on its own
    tensor_parallel/layers.py   the vocabulary in `tp` equal parts of the padded size

The other matrices are cut as hetplan's (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.profiling.weights import initial_value, parameter_slices

_ROWS, _COLUMNS = 0, 1
# hetplan's name, megatron-core's, dimension that is cut; None: every rank has the whole.
_SAME = (
    ("attention_norm_weight", "input_layernorm.weight", None),
    ("attention_norm_bias", "input_layernorm.bias", None),
    ("out_weight", "self_attention.linear_proj.weight", _COLUMNS),
    ("out_bias", "self_attention.linear_proj.bias", None),
    ("mlp_norm_weight", "pre_mlp_layernorm.weight", None),
    ("mlp_norm_bias", "pre_mlp_layernorm.bias", None),
    ("up_bias", "mlp.linear_fc1.bias", _ROWS),
    ("down_weight", "mlp.linear_fc2.weight", _COLUMNS),
    ("down_bias", "mlp.linear_fc2.bias", None),
)


def layer_values(
    model: ModelSpec, position: int, *, tp: int, tp_rank: int, seed: int
) -> dict[str, Tensor]:
    """Parameters of the transformer layer at this position, by their names inside a
    TransformerLayer, as rank `tp_rank` of `tp` holds them; float32 on the CPU.
    """
    full = _full(model, LayerKind.TRANSFORMER, position, seed)

    def mine(value: Tensor, dim: int | None) -> Tensor:
        return value if dim is None else value.tensor_split(tp, dim)[tp_rank]

    values = {theirs: mine(full[ours], dim) for ours, theirs, dim in _SAME if ours in full}
    for suffix in ("weight", "bias"):
        if f"qkv_{suffix}" in full:
            fused = _by_group(full[f"qkv_{suffix}"], model)
            values[f"self_attention.linear_qkv.{suffix}"] = mine(fused, _ROWS)
    up = mine(full["up_weight"], _ROWS)
    gate = [mine(full["gate_weight"], _ROWS)] if "gate_weight" in full else []
    values["mlp.linear_fc1.weight"] = torch.cat([*gate, up])
    return values


def embedding_values(
    model: ModelSpec, *, padded_vocab_size: int, tp: int, tp_rank: int, seed: int
) -> dict[str, Tensor]:
    """Parameters of a LanguageModelEmbedding."""
    full = _full(model, LayerKind.EMBEDDING, 0, seed)
    matrix = _vocabulary(full["weight"], padded_vocab_size, tp, tp_rank)
    values = {"word_embeddings.weight": matrix}
    if "position_weight" in full:
        values["position_embeddings.weight"] = full["position_weight"]
    return values


def head_values(
    model: ModelSpec, *, padded_vocab_size: int, tp: int, tp_rank: int, seed: int
) -> dict[str, Tensor]:
    """Final norm and output projection, by their names inside a GPTModel."""
    last = len(model.layers) - 1
    full = _full(model, LayerKind.HEAD, last, seed)
    matrix = full["weight"]
    if model.tied_embeddings:
        # A tied head starts from the embedding's matrix.
        matrix = _full(model, LayerKind.EMBEDDING, 0, seed)["weight"]
    values = {
        "decoder.final_layernorm.weight": full["norm_weight"],
        "output_layer.weight": _vocabulary(matrix, padded_vocab_size, tp, tp_rank),
    }
    if "norm_bias" in full:
        values["decoder.final_layernorm.bias"] = full["norm_bias"]
    return values


def stage_values(
    model: ModelSpec,
    layers: range,
    *,
    padded_vocab_size: int,
    tp: int,
    tp_rank: int,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    """(name inside a GPTModel, value) of everything that holds these positions of the model.

    The head of a model with tied embeddings has its own name here also where the embedding is in
    the same stage and megatron-core has one parameter for both.
    """
    transformer = 0
    for position in layers:
        kind = model.layers[position]
        if kind is LayerKind.EMBEDDING:
            found = embedding_values(
                model, padded_vocab_size=padded_vocab_size, tp=tp, tp_rank=tp_rank, seed=seed
            )
            prefix = "embedding."
        elif kind is LayerKind.HEAD:
            found = head_values(
                model, padded_vocab_size=padded_vocab_size, tp=tp, tp_rank=tp_rank, seed=seed
            )
            prefix = ""
        else:
            found = layer_values(model, position, tp=tp, tp_rank=tp_rank, seed=seed)
            prefix = f"decoder.layers.{transformer}."
            transformer += 1
        for name, value in found.items():
            yield prefix + name, value


def _full(model: ModelSpec, kind: LayerKind, position: int, seed: int) -> dict[str, Tensor]:
    """Whole parameters of a layer by hetplan's names."""
    return {
        part.name: initial_value(part, seed=seed, position=position)
        for part in parameter_slices(model, kind, tp=1, tp_rank=0)
    }


def _by_group(fused: Tensor, model: ModelSpec) -> Tensor:
    """Rows [queries, keys, values] as [queries of group 0, key 0, value 0, queries of 1...]."""
    groups = model.num_kv_heads
    query, key, value = torch.split(fused, [model.attention_size, model.kv_size, model.kv_size])
    parts = [part.view(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _vocabulary(matrix: Tensor, padded_vocab_size: int, tp: int, tp_rank: int) -> Tensor:
    """The rank's rows; padding is zero."""
    missing = padded_vocab_size - len(matrix)
    padded = torch.cat((matrix, matrix.new_zeros(missing, matrix.shape[1])))
    return padded.tensor_split(tp)[tp_rank]
