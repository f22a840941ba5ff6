"""The weights of one rank: which it holds, what they start from, how they change.

Every parameter is cut from a full weight whose values depend on the seed, the layer's position
and the weight's name alone. So every tp degree, every partition into stages and every device kind
starts from the same model. Full weights are drawn in float32 on the CPU for that reason.

All parameters of a rank and all their gradients lie one after the other in one vector each; the
layers' own parameters are views, those of routed experts last. So gradients are reduced in one
message, and the update is one pass over memory. Element for element it is what the rule does to
each parameter alone.

In bfloat16 the rule works on a float32 copy of the weights, from which the weights are rounded
after each update; gradients are accumulated and reduced in bfloat16.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.job.spec import Optimizer
from hetplan.model.layers import Attention, Experts, LatentAttention, Mlp
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.profiling.bodies import ADAMW, INITIAL_STD


class ExpertShare(NamedTuple):
    """Which of a layer's routed experts a rank holds, as parts of their number."""

    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)

    def of(self, num_experts: int) -> range:
        """The numbers of these experts; an InputError where they are not whole."""
        low, high = self.start * num_experts, self.stop * num_experts
        if low.denominator != 1 or high.denominator != 1:
            raise InputError(f"{num_experts} experts cannot be dealt out at {self}")
        return range(int(low), int(high))


ALL_EXPERTS = ExpertShare()
EXPERT_PREFIX = "expert_"
"""Of the names of routed experts' parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What of every layer a rank holds."""

    tp: int = 1
    tp_rank: int = 0
    experts: ExpertShare = ALL_EXPERTS
    """Of its routed experts, if it has any."""


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
    expert: int | None = None
    """Number of the routed expert that it belongs to; None: to none."""

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
    head_dim = model.layer_runs[0].layer.attention.rotated_head_dim
    if model.architecture is Architecture.LLAMA and head_dim % 2:
        faults.append(f"head_dim is {head_dim}; rotary positions need an even one")
    if faults:
        raise InputError(*faults)


def kv_block(attention: Attention, tp: int, tp_rank: int) -> int:
    """Which of the min(tp, num_kv_heads) blocks of key-value heads the rank holds."""
    return tp_rank * min(tp, attention.num_kv_heads) // tp


def parameter_slices(model: ModelSpec, position: int, cut: Cut) -> tuple[ParameterSlice, ...]:
    """Every parameter that a rank holds of the layer at this position, in order.

    Those of its routed experts come last.
    """
    tp, tp_rank = cut.tp, cut.tp_rank
    check_slices(model, tp, tp_rank)
    kind = model.kind_at(position)
    if kind is LayerKind.TRANSFORMER:
        layer = model.layer_at(position)
        mlp, latent = layer.mlp, layer.attention
        attention: Iterable[ParameterSlice] = (
            _latent_attention(model, latent, tp, tp_rank)
            if isinstance(latent, LatentAttention)
            else _attention(model, latent, tp, tp_rank)
        )
        norms = _norm("mlp_norm", model)
        if isinstance(mlp, Mlp):
            return (*attention, *norms, *_mlp(model, mlp, tp, tp_rank))
        router = (mlp.num_experts, model.hidden_size)
        return (
            *attention,
            *norms,
            _whole("router_weight", router, std=INITIAL_STD),
            *(_mlp(model, mlp.shared, tp, tp_rank) if mlp.shared else ()),
            *_routed(model, mlp, cut),
        )
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


def _latent_attention(
    model: ModelSpec, attention: LatentAttention, tp: int, tp_rank: int
) -> Iterator[ParameterSlice]:
    """Projections to the latents are whole on every rank, those from them are cut by heads."""
    h, rank = model.hidden_size, attention.query_rank

    def heads(name: str, width: int, columns: int) -> ParameterSlice:
        rows = attention.num_heads // tp * width
        full = (attention.num_heads * width, columns)
        part = WeightPart(
            name=name, full_shape=full, start=tp_rank * rows, length=rows, std=INITIAL_STD
        )
        return ParameterSlice(name=name, parts=(part,))

    yield from _norm("attention_norm", model)
    if rank is not None:
        yield _whole("query_latent_weight", (rank, h), std=INITIAL_STD)
        yield _whole("query_latent_norm_weight", (rank,), mean=1.0)
    yield heads("query_weight", attention.key_head_dim, h if rank is None else rank)
    yield _whole("kv_latent_weight", (attention.latent_size, h), std=INITIAL_STD)
    yield _whole("kv_latent_norm_weight", (attention.kv_rank,), mean=1.0)
    width = attention.nope_head_dim + attention.value_head_dim
    yield heads("kv_weight", width, attention.kv_rank)
    yield _out(model, attention.slice_sizes(tp)[1], tp, tp_rank)


def _out(model: ModelSpec, width: int, tp: int, tp_rank: int) -> ParameterSlice:
    """The output projection, of which a rank has `width` columns."""
    part = WeightPart(
        name="out_weight",
        full_shape=(model.hidden_size, width * tp),
        dim=1,
        start=tp_rank * width,
        length=width,
        std=_residual_std(model),
    )
    return ParameterSlice(name="out_weight", parts=(part,))


def _attention(
    model: ModelSpec, attention: Attention, tp: int, tp_rank: int
) -> tuple[ParameterSlice, ...]:
    h, gpt = model.hidden_size, model.architecture is Architecture.GPT
    query, kv = attention.slice_sizes(tp)
    attention_size, kv_size = attention.slice_sizes(1)
    kv_start = kv_block(attention, tp, tp_rank) * kv
    cuts = (
        ("query", attention_size, tp_rank * query, query),
        ("key", kv_size, kv_start, kv),
        ("value", kv_size, kv_start, kv),
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

    return (
        *_norm("attention_norm", model),
        fused("weight", (h,), INITIAL_STD),
        *((fused("bias", (), 0.0),) if gpt else ()),
        _out(model, query, tp, tp_rank),
        *((_whole("out_bias", (h,)),) if gpt else ()),
        *((_head_norms(attention.head_dim),) if attention.qk_norm else ()),
    )


def _head_norms(head_dim: int) -> ParameterSlice:
    """Scales of the norms of query heads and key heads, one vector."""
    scales = (_whole(f"{name}_norm_weight", (head_dim,), mean=1.0) for name in ("query", "key"))
    return ParameterSlice(
        name="qk_norm_weight", parts=tuple(part for scale in scales for part in scale.parts)
    )


def _routed(model: ModelSpec, mlp: Experts, cut: Cut) -> Iterator[ParameterSlice]:
    """Gate, up and down matrices of every routed expert that a rank holds, cut like an MLP's."""
    for number in cut.experts.of(mlp.num_experts):
        for matrix in _mlp(model, mlp.expert, cut.tp, cut.tp_rank):
            name = f"{EXPERT_PREFIX}{number}_{matrix.name}"
            (part,) = matrix.parts
            yield ParameterSlice(name=name, parts=(replace(part, name=name),), expert=number)


def _mlp(model: ModelSpec, mlp: Mlp, tp: int, tp_rank: int) -> tuple[ParameterSlice, ...]:
    h, f, gpt = model.hidden_size, mlp.ffn_hidden_size, model.architecture is Architecture.GPT
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
        *(() if gpt else (column("gate_weight", (h,), INITIAL_STD),)),
        column("up_weight", (h,), INITIAL_STD),
        *((column("up_bias", (), 0.0),) if gpt else ()),
        ParameterSlice(name="down_weight", parts=(down,)),
        *((_whole("down_bias", (h,)),) if gpt else ()),
    )


SGD_RATE = 0.1
"""Fixed, as `bodies.ADAMW`, so that runs of different plans can be compared."""
RULE_STATES = {Optimizer.ADAMW: ("exp_avg", "exp_avg_sq"), Optimizer.SGD: ()}
"""What each rule keeps of every element, by torch's names."""


def make_rule(optimizer: Optimizer, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The job's update rule; plain SGD without momentum. No parameter is exempt from decay."""
    if optimizer is Optimizer.ADAMW:
        return torch.optim.AdamW(parameters, **ADAMW)  # type: ignore[arg-type]
    return torch.optim.SGD(parameters, lr=SGD_RATE)


def rule_state(rule: torch.optim.Optimizer, vector: Tensor) -> dict[str, Tensor]:
    """What the rule keeps of this vector's elements, by torch's names; zeros before any update.

    What is written into these tensors is the rule's state from then on.
    """
    kept = rule.state[vector]
    if isinstance(rule, torch.optim.AdamW) and not kept:
        # As torch makes them at the first update.
        kept["step"] = torch.tensor(0.0)
        kept["exp_avg"] = torch.zeros_like(vector)
        kept["exp_avg_sq"] = torch.zeros_like(vector)
    return {name: kept[name] for name in RULE_STATES[optimizer_of(rule)]}


def set_updates(rule: torch.optim.Optimizer, vector: Tensor, updates: int) -> None:
    """Let the rule go on as after this many updates, which its bias correction depends on."""
    if rule_state(rule, vector):
        rule.state[vector]["step"].fill_(updates)


def optimizer_of(rule: torch.optim.Optimizer) -> Optimizer:
    """The job's word for a rule of `make_rule`."""
    return Optimizer.ADAMW if isinstance(rule, torch.optim.AdamW) else Optimizer.SGD


class FlatParameters:
    """The parameters of a module as views into one vector, with the rule that updates it."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        experts, dense = list[nn.Parameter](), list[nn.Parameter]()
        for name, parameter in module.named_parameters():
            of_expert = name.rpartition(".")[2].startswith(EXPERT_PREFIX)
            (experts if of_expert else dense).append(parameter)
        parameters = [*dense, *experts]
        self.num_dense = sum(parameter.numel() for parameter in dense)
        """Elements that belong to no routed expert; they come first."""
        like = parameters[0]
        total = sum(parameter.numel() for parameter in parameters)
        self.weights = torch.empty(total, dtype=like.dtype, device=like.device)
        self.gradients = torch.zeros_like(self.weights)
        """Sum of all microbatches' gradients since `clear`."""
        at = 0
        for parameter in parameters:
            stop = at + parameter.numel()
            view = self.weights[at:stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            # Autograd adds into a gradient that is already there.
            parameter.grad = self.gradients[at:stop].view(parameter.shape)
            at = stop
        exact = self.weights.dtype == torch.float32
        self._updated = nn.Parameter(self.weights if exact else self.weights.float())
        self._updated.grad = self.gradients if exact else torch.empty_like(self._updated)
        self._rule = make_rule(optimizer, [self._updated])

    @property
    def updated(self) -> Tensor:
        """The vector that the rule updates: the weights, or their float32 copy."""
        return self._updated

    def state(self) -> dict[str, Tensor]:
        """The rule's state of `updated` (`rule_state`)."""
        return rule_state(self._rule, self._updated)

    def resume(self, updates: int) -> None:
        """Go on as after this many updates with what `updated` and `state` have now."""
        set_updates(self._rule, self._updated, updates)
        self.round()

    def round(self) -> None:
        """Give `weights` what `updated` has."""
        if self._updated.data_ptr() != self.weights.data_ptr():
            self.weights.copy_(self._updated.detach())

    def clear(self) -> None:
        """Set all gradients to zero, before the first microbatch of a step."""
        self.gradients.zero_()

    def update(self) -> None:
        """Apply the rule once."""
        exact = self._updated.data_ptr() == self.weights.data_ptr()
        if not exact and self._updated.grad is not None:
            self._updated.grad.copy_(self.gradients)
        self._rule.step()
        self.round()
