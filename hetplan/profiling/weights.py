"""Which weights one tensor-parallel rank holds of a layer, and what they start from.

Every parameter is cut from a full weight whose values depend on the seed, the layer's position
and the weight's name alone. So every tp degree, every partition into stages and every device kind
starts from the same model. Full weights are drawn in float32 on the CPU for that reason.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hetplan.errors import InputError
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.profiling.layer_slices import INITIAL_STD


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Rows (`dim` 0) or columns (`dim` 1) `start` to `start + length` of one full weight."""

    name: str
    """Name that seeds the full weight."""
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int
    length: int
    """May reach past the full weight: what lies outside is zero (padding of the vocabulary)."""
    std: float = 0.0
    """Standard deviation of the values; 0 makes all of them `mean`."""
    mean: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = list(self.full_shape)
        shape[self.dim] = self.length
        return tuple(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """One parameter of one rank: parts of full weights, one above the other."""

    name: str
    """Attribute of the layer's module."""
    parts: tuple[WeightPart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])


def check_slices(model: ModelSpec, tp: int, tp_rank: int) -> None:
    """Raise an InputError unless the model can be cut into `tp` slices and `tp_rank` is one."""
    if not 0 <= tp_rank < tp:
        raise InputError(f"tp_rank is {tp_rank}; with tp {tp} it is 0 to {tp - 1}")
    faults = list(model.slicing_faults(tp))
    if model.architecture is Architecture.LLAMA and model.head_dim % 2:
        faults.append(f"head_dim is {model.head_dim}; rotary positions need an even one")
    if faults:
        raise InputError(*faults)


def kv_block(model: ModelSpec, tp: int, tp_rank: int) -> int:
    """Which of the min(tp, num_kv_heads) blocks of key-value heads the rank holds."""
    return tp_rank * min(tp, model.num_kv_heads) // tp


def parameter_slices(
    model: ModelSpec, kind: LayerKind, *, tp: int, tp_rank: int
) -> tuple[ParameterSlice, ...]:
    """Every parameter that rank `tp_rank` of `tp` holds of one layer of this kind, in order."""
    check_slices(model, tp, tp_rank)
    if kind is LayerKind.TRANSFORMER:
        return (*_attention(model, tp, tp_rank), *_mlp(model, tp, tp_rank))
    vocabulary = model.vocabulary_slice(tp)
    matrix = WeightPart(
        name="vocabulary",
        full_shape=(model.vocab_size, model.hidden_size),
        start=tp_rank * vocabulary,
        length=vocabulary,
        std=INITIAL_STD,
    )
    weight = ParameterSlice(name="weight", parts=(matrix,))
    if kind is LayerKind.HEAD:
        return (*_norm("norm", model), weight)
    if model.architecture is Architecture.LLAMA:
        return (weight,)
    positions = (model.max_sequence_length, model.hidden_size)
    return (weight, _whole("position_weight", positions, std=INITIAL_STD))


def initial_value(parameter: ParameterSlice, *, seed: int, position: int) -> Tensor:
    """What the parameter starts from, float32 on the CPU."""
    return torch.cat([_part_value(part, seed, position) for part in parameter.parts])


def _part_value(part: WeightPart, seed: int, position: int) -> Tensor:
    full = torch.full(part.full_shape, part.mean)
    if part.std:
        key = hashlib.sha256(f"{seed}/{position}/{part.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        full.normal_(part.mean, part.std, generator=generator)
    start = min(part.start, part.full_shape[part.dim])
    length = min(part.length, part.full_shape[part.dim] - start)
    value = full.narrow(part.dim, start, length)
    if length == part.length:
        return value
    missing = list(part.shape)
    missing[part.dim] -= length
    return torch.cat((value, torch.zeros(missing)), dim=part.dim)


def _whole(
    name: str, shape: tuple[int, ...], *, std: float = 0.0, mean: float = 0.0
) -> ParameterSlice:
    part = WeightPart(name=name, full_shape=shape, start=0, length=shape[0], std=std, mean=mean)
    return ParameterSlice(name=name, parts=(part,))


def _norm(name: str, model: ModelSpec) -> tuple[ParameterSlice, ...]:
    scale = _whole(f"{name}_weight", (model.hidden_size,), mean=1.0)
    if model.architecture is Architecture.LLAMA:
        return (scale,)
    return (scale, _whole(f"{name}_bias", (model.hidden_size,)))


def _residual_std(model: ModelSpec) -> float:
    # GPT-2: projections onto the residual stream are smaller by the root of the number of them,
    # so that the stream's variance does not grow with depth.
    return INITIAL_STD / math.sqrt(2 * model.num_layers)


def _attention(model: ModelSpec, tp: int, tp_rank: int) -> tuple[ParameterSlice, ...]:
    h, gpt = model.hidden_size, model.architecture is Architecture.GPT
    query, kv, _ = model.slice_sizes(tp)
    kv_start = kv_block(model, tp, tp_rank) * kv
    cuts = (
        ("query", model.attention_size, tp_rank * query, query),
        ("key", model.kv_size, kv_start, kv),
        ("value", model.kv_size, kv_start, kv),
    )

    def fused(suffix: str, tail: tuple[int, ...], std: float) -> ParameterSlice:
        parts = tuple(
            WeightPart(
                name=f"{name}_{suffix}",
                full_shape=(size, *tail),
                start=start,
                length=length,
                std=std,
            )
            for name, size, start, length in cuts
        )
        return ParameterSlice(name=f"qkv_{suffix}", parts=parts)

    out = WeightPart(
        name="out_weight",
        full_shape=(h, model.attention_size),
        dim=1,
        start=tp_rank * query,
        length=query,
        std=_residual_std(model),
    )
    return (
        *_norm("attention_norm", model),
        fused("weight", (h,), INITIAL_STD),
        *((fused("bias", (), 0.0),) if gpt else ()),
        ParameterSlice(name="out_weight", parts=(out,)),
        *((_whole("out_bias", (h,)),) if gpt else ()),
    )


def _mlp(model: ModelSpec, tp: int, tp_rank: int) -> tuple[ParameterSlice, ...]:
    h, f, gpt = model.hidden_size, model.ffn_hidden_size, model.architecture is Architecture.GPT
    ffn = f // tp

    def column(name: str, tail: tuple[int, ...], std: float) -> ParameterSlice:
        part = WeightPart(
            name=name, full_shape=(f, *tail), start=tp_rank * ffn, length=ffn, std=std
        )
        return ParameterSlice(name=name, parts=(part,))

    down = WeightPart(
        name="down_weight",
        full_shape=(h, f),
        dim=1,
        start=tp_rank * ffn,
        length=ffn,
        std=_residual_std(model),
    )
    return (
        *_norm("mlp_norm", model),
        *(() if gpt else (column("gate_weight", (h,), INITIAL_STD),)),
        column("up_weight", (h,), INITIAL_STD),
        *((column("up_bias", (), 0.0),) if gpt else ()),
        ParameterSlice(name="down_weight", parts=(down,)),
        *((_whole("down_bias", (h,)),) if gpt else ()),
    )
