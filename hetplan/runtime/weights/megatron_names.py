"""Which tensor of a Megatron checkpoint holds which weights, and in which order.

Queries, keys and values are one tensor, group by group: the query heads that share a key-value
head, that key head, that value head (megatron-core 0.16.1, transformer/attention.py,
`get_query_key_value_tensors`). Gate and up are one tensor, gate first (transformer/mlp.py, `glu`).
The vocabulary has rows of zeros up to its padded size. Dimensions in which a tensor is cut by
tensor parallelism: tensor_parallel/layers.py, `sharded_state_dict` of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.runtime.weights.tensors import VOCABULARY, Weight, by_layer


class Joining(Enum):
    """How weights lie in one tensor."""

    ALONE = auto()
    GROUPS = auto()
    """Query heads, key head and value head of every group in turn."""
    STACKED = auto()
    """One behind the other: gate and up."""
    PADDED = auto()
    """Alone, with rows of zeros behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronTensor:
    """One layer's tensor."""

    key: str
    """Its name in the checkpoint, without the layer's number."""
    layer: int | None
    """Its place in the stack of all transformer layers; None: it stands alone."""
    num_layers: int
    weights: tuple[Weight, ...]
    joining: Joining
    groups: int
    """Key-value heads."""
    shape: tuple[int, ...]
    """Of this layer's tensor."""
    cut_dim: int | None
    """Dimension in which tensor parallelism cuts it; None: every rank holds all of it."""

    @property
    def gated(self) -> bool:
        """Whether it is gate and up in one."""
        return self.joining is Joining.STACKED

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the tensor of this name: of the stack, where it is one."""
        return self.shape if self.layer is None else (self.num_layers, *self.shape)

    @property
    def unstacked_key(self) -> str:
        """Its name where layers are not stacked."""
        if self.layer is None:
            return self.key
        return self.key.replace("decoder.layers.", f"decoder.layers.{self.layer}.", 1)

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """The tensor of these weights."""
        if self.joining is Joining.PADDED:
            rows = self.shape[0] - values[0].shape[0]
            return torch.cat((values[0], values[0].new_zeros((rows, *values[0].shape[1:]))))
        if self.joining is Joining.GROUPS:
            grouped = [each.reshape(self.groups, -1, *each.shape[1:]) for each in values]
            return torch.cat(grouped, dim=1).reshape(self.shape)
        return values[0] if len(values) == 1 else torch.cat(list(values))

    def split(self, value: Tensor) -> tuple[Tensor, ...]:
        """The weights of the tensor, in the order of `weights`."""
        rows = [weight.shape[0] for weight in self.weights]
        if self.joining is Joining.PADDED:
            return (value[: rows[0]],)
        if self.joining is Joining.GROUPS:
            grouped = value.reshape(self.groups, -1, *value.shape[1:])
            parts = torch.split(grouped, [each // self.groups for each in rows], dim=1)
            return tuple(
                part.reshape(weight.shape) for part, weight in zip(parts, self.weights, strict=True)
            )
        return torch.split(value, rows)


_LAYER = "decoder.layers."
_QKV, _FC1 = f"{_LAYER}self_attention.linear_qkv.", f"{_LAYER}mlp.linear_fc1."
_PROJ, _FC2 = f"{_LAYER}self_attention.linear_proj.", f"{_LAYER}mlp.linear_fc2."
# Key, weights in order, how they are joined, dimension that is cut.
_TRANSFORMER: tuple[tuple[str, tuple[str, ...], Joining, int | None], ...] = (
    (f"{_QKV}layer_norm_weight", ("attention_norm_weight",), Joining.ALONE, None),
    (f"{_QKV}layer_norm_bias", ("attention_norm_bias",), Joining.ALONE, None),
    (f"{_QKV}weight", ("query_weight", "key_weight", "value_weight"), Joining.GROUPS, 0),
    (f"{_QKV}bias", ("query_bias", "key_bias", "value_bias"), Joining.GROUPS, 0),
    (f"{_PROJ}weight", ("out_weight",), Joining.ALONE, 1),
    (f"{_PROJ}bias", ("out_bias",), Joining.ALONE, None),
    (f"{_FC1}layer_norm_weight", ("mlp_norm_weight",), Joining.ALONE, None),
    (f"{_FC1}layer_norm_bias", ("mlp_norm_bias",), Joining.ALONE, None),
    (f"{_FC1}weight", ("gate_weight", "up_weight"), Joining.STACKED, 0),
    (f"{_FC1}weight", ("up_weight",), Joining.ALONE, 0),
    (f"{_FC1}bias", ("up_bias",), Joining.ALONE, 0),
    (f"{_FC2}weight", ("down_weight",), Joining.ALONE, 1),
    (f"{_FC2}bias", ("down_bias",), Joining.ALONE, None),
)
_EMBEDDING: tuple[tuple[str, tuple[str, ...], Joining, int | None], ...] = (
    ("embedding.word_embeddings.weight", (VOCABULARY,), Joining.PADDED, 0),
    ("embedding.position_embeddings.weight", ("position_weight",), Joining.ALONE, None),
)
_HEAD: tuple[tuple[str, tuple[str, ...], Joining, int | None], ...] = (
    ("decoder.final_layernorm.weight", ("norm_weight",), Joining.ALONE, None),
    ("decoder.final_layernorm.bias", ("norm_bias",), Joining.ALONE, None),
    ("output_layer.weight", (VOCABULARY,), Joining.PADDED, 0),
)
_TABLES = {
    LayerKind.EMBEDDING: _EMBEDDING,
    LayerKind.TRANSFORMER: _TRANSFORMER,
    LayerKind.HEAD: _HEAD,
}


def tensors_of(model: ModelSpec, padded_vocab_size: int) -> tuple[MegatronTensor, ...]:
    """Every tensor of the model, layer by layer."""
    return tuple(
        tensor for layer in by_layer(model) for tensor in _layer(model, layer, padded_vocab_size)
    )


def _layer(
    model: ModelSpec, layer: tuple[Weight, ...], padded_vocab_size: int
) -> Iterator[MegatronTensor]:
    kind, position = model.layers[layer[0].position], layer[0].position
    have = {weight.name: weight for weight in layer}
    left = set(have)
    for key, names, joining, cut_dim in _TABLES[kind]:
        if not left.issuperset(names):
            continue
        left -= set(names)
        weights = tuple(have[name] for name in names)
        rows = sum(weight.shape[0] for weight in weights)
        yield MegatronTensor(
            key=key,
            layer=position - 1 if kind is LayerKind.TRANSFORMER else None,
            num_layers=model.num_layers,
            weights=weights,
            joining=joining,
            groups=model.num_kv_heads,
            shape=(
                padded_vocab_size if joining is Joining.PADDED else rows,
                *weights[0].shape[1:],
            ),
            cut_dim=cut_dim,
        )
    if left:
        raise ValueError(f"no tensor of Megatron's holds {sorted(left)}")


def extra_states(model: ModelSpec) -> tuple[str, ...]:
    """Names of the extra states that the layers ask for when they load.

    Those of the linear layers are asked for by Megatron-core's own (tensor_parallel/layers.py) and
    Transformer Engine's; those of the attention and the final norm by the latter. What is not asked
    for is not read.
    """
    count = model.num_layers
    linear = (_QKV, _PROJ, _FC1, _FC2, f"{_LAYER}self_attention.core_attention.")
    return (
        *(f"{name}_extra_state/shard_{at}_{count}" for name in linear for at in range(count)),
        "decoder.final_layernorm._extra_state/shard_0_1",
    )
