"""The transformer layers that hetplan measures and trains, whole or as tensor-parallel slices.

The same modules are timed by the profiler (a slice alone, without a group) and trained by the
reference trainer (slices of one layer over a group), so that a measured time is the time of what
runs. Matrices are cut as in Shoeybi et al., arXiv 1909.08053: queries, keys, values, up and gate
by columns, output and down projections by rows, embedding and head by vocabulary.

A column-parallel matrix product takes a replicated input, so the gradient of that input is summed
over the group (`copy_to_group`); a row-parallel one leaves partial outputs, so they are summed
(`sum_over_group`). Without a group neither does anything: a slice is then measured alone.

Every layer exposes its weights by name as attributes; `Embedding.weight` and `Head.weight` are
the vocabulary matrices [ceil(vocab / tp), h], which a trainer may tie. Where the model ties them,
both start from the same values.

Symbols: b microbatch, s sequence, h hidden, d head dimension, a query heads, k key-value heads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.model.layers import Experts, LatentAttention, Mlp
from hetplan.model.numerics import Router, ScoreFunction
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.profiling.bodies import ONLY_GPT, CrossEntropy, LayerBody, norm, rotate
from hetplan.profiling.weights import (
    EXPERT_PREFIX,
    Cut,
    ParameterSlice,
    initial_value,
    kv_block,
    parameter_slices,
)


def build_layer(
    model: ModelSpec,
    position: int,
    *,
    cut: Cut,
    group: dist.ProcessGroup | None,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Layer:
    """Layer `position` of `model.layers`, or a rank's slice of it, ready to train.

    The weights depend on (seed, position) alone. `group` is the tensor-parallel group, or None
    for no communication. Where the rank holds some of the experts only, `expert_communication` and
    `expert_counts` have to be set. Embedding: tokens [b, s] ->
    [b, s, h]; transformer layer: [b, s, h] -> [b, s, h]; head: [b, s, h] -> logits
    [b, s, ceil(vocab / tp)].
    """
    if not 0 <= position < len(model.layers):
        raise InputError(
            f"layer position is {position}; model {model.name} has 0 to {len(model.layers) - 1}"
        )
    kind = model.layers[position]
    slices = parameter_slices(model, position, cut)
    layer = _TYPES[kind](
        model, position, slices, cut=cut, group=group, dtype=dtype, device=torch.device(device)
    )
    tied = kind is LayerKind.HEAD and model.tied_embeddings
    with torch.no_grad():
        for part in slices:
            # A tied head starts from the embedding's matrix, which is position 0's.
            origin = 0 if tied and part.name == "weight" else position
            layer.get_parameter(part.name).copy_(initial_value(part, seed=seed, position=origin))
    return layer


class Communication:
    """A tensor-parallel group, or none, and the time spent talking in it.

    `seconds` lets the pacer tell communication from computation. It is the time of the calls, so
    it is the communication's own time only where calls block (gloo on a CPU).
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.seconds = 0.0

    def all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        """Reduce `tensor` over the group in place, by sum unless told otherwise."""
        if self.group is None:
            return
        started = time.perf_counter()
        dist.all_reduce(tensor, op=operation or dist.ReduceOp.SUM, group=self.group)
        self.seconds += time.perf_counter() - started

    def all_to_all(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for each rank of the group, in its order; the rows that came from each."""
        if self.group is None:
            return tensor
        started = time.perf_counter()
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        self.exchange(result, tensor, received, sent)
        self.seconds += time.perf_counter() - started
        return result

    def exchange(self, into: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        """The transfer itself."""
        dist.all_to_all_single(into, tensor.contiguous(), received, sent, group=self.group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communication: Communication) -> Tensor:
        ctx.communication = communication
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.communication.all_reduce(total)
        return total, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, communication: Communication, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.communication, ctx.sent, ctx.received = communication, sent, received
        return communication.all_to_all(tensor, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        found = ctx.communication.all_to_all(gradients[0], ctx.received, ctx.sent)
        return found, None, None, None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communication: Communication) -> Tensor:
        total = tensor.contiguous()
        if total is tensor:
            ctx.mark_dirty(tensor)
        communication.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumReplicas(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, communication: Communication, start: int, copy: int, copies: int
    ) -> Tensor:
        ctx.communication, ctx.start, ctx.copy, ctx.copies = communication, start, copy, copies
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        shared = gradient[ctx.start :]
        # One place per key-value head; each rank adds what its own query heads contributed.
        places = torch.zeros((ctx.copies, *shared.shape), dtype=shared.dtype, device=shared.device)
        places[ctx.copy] = shared
        ctx.communication.all_reduce(places)
        gradient[ctx.start :] = places[ctx.copy]
        return gradient, None, None, None, None


def copy_to_group(tensor: Tensor, communication: Communication) -> Tensor:
    """The same tensor; its gradient is summed over the group."""
    if communication.group is None:
        return tensor
    result: Tensor = _CopyToGroup.apply(tensor, communication)  # type: ignore[no-untyped-call]
    return result


def rows_to_ranks(
    tensor: Tensor, communication: Communication, *, sent: list[int], received: list[int]
) -> Tensor:
    """`Communication.all_to_all`; gradients go the same way back."""
    if communication.group is None:
        return tensor
    result: Tensor = _AllToAll.apply(tensor, communication, sent, received)  # type: ignore[no-untyped-call]
    return result


def sum_over_group(tensor: Tensor, communication: Communication) -> Tensor:
    """Sum of the ranks' tensors (in place of the argument); its gradient passes unchanged."""
    if communication.group is None:
        return tensor
    result: Tensor = _SumOverGroup.apply(tensor, communication)  # type: ignore[no-untyped-call]
    return result


def sum_replicas(
    weight: Tensor, communication: Communication, *, start: int, copy: int, copies: int
) -> Tensor:
    """The same weight, whose rows from `start` on several ranks hold alike.

    There are `copies` different such blocks and this rank holds block `copy`; the gradient of a
    block is summed over the ranks that hold it.
    """
    if communication.group is None:
        return weight
    result: Tensor = _SumReplicas.apply(weight, communication, start, copy, copies)  # type: ignore[no-untyped-call]
    return result


def cross_entropy(
    logits: Tensor, targets: Tensor, *, tp_rank: int, communication: Communication
) -> Tensor:
    """Mean loss of logits [b, s, vocab/tp] against targets [b, s] in [0, vocab).

    Computed in float32. Equal on all ranks of the group. Without a group the slice counts as the
    whole vocabulary, except that targets outside of it contribute no target logit.
    """

    def all_reduce(tensor: Tensor, largest: bool) -> None:
        communication.all_reduce(tensor, dist.ReduceOp.MAX if largest else None)

    first = tp_rank * logits.shape[-1]
    loss: Tensor = CrossEntropy.apply(logits, targets, first, all_reduce)  # type: ignore[no-untyped-call]
    return loss


class Layer(LayerBody):
    """One rank's slice of a layer, with the group that it communicates in."""

    def __init__(
        self,
        model: ModelSpec,
        position: int,
        slices: Sequence[ParameterSlice],
        *,
        cut: Cut,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model, self.position, self.tp, self.tp_rank = model, position, cut.tp, cut.tp_rank
        self.is_gpt = model.architecture is Architecture.GPT
        self.attention = attention = model.layer_runs[0].layer.attention
        self.query, self.head_dim = attention.slice_sizes(cut.tp)[0], attention.rotated_head_dim
        inner = model.kind_at(position) is LayerKind.TRANSFORMER
        mlp = model.layer_at(position).mlp if inner else None
        self.num_experts = mlp.num_experts if isinstance(mlp, Experts) else 0
        self.held = cut.experts.of(self.num_experts)
        self.communication = Communication(group)
        self.expert_communication = Communication(None)
        """Of the ranks that share the layer's routed experts."""
        self.expert_counts: list[int] = []
        """Experts of each of these ranks, in the order of the group; empty: this one has all."""
        for part in slices:
            empty = torch.empty(part.shape, dtype=dtype, device=device)
            self.register_parameter(part.name, nn.Parameter(empty))
        if not self.is_gpt:
            for name in ONLY_GPT:
                self.register_parameter(name, None)

    def replicated(self, x: Tensor) -> Tensor:
        """The tensor itself; its gradient is summed over the group."""
        return copy_to_group(x, self.communication)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the group; its gradient passes unchanged."""
        return sum_over_group(x, self.communication)

    def shared_kv(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter, whose replicated part sums its gradient."""
        attention = self.attention
        if parameter is None or isinstance(attention, LatentAttention):
            return parameter
        copies = attention.num_kv_heads
        if self.tp <= copies:
            return parameter
        return sum_replicas(
            parameter,
            self.communication,
            start=self.query,
            copy=kv_block(attention, self.tp, self.tp_rank),
            copies=copies,
        )

    def row_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A product of the rank's rows, summed over the group."""
        if self.communication.group is None:
            return functional.linear(x, weight, bias)
        total = self.summed(functional.linear(x, weight))
        # The bias is replicated: it is added once, after the sum.
        return total if bias is None else total + bias


class Embedding(Layer):
    """Tokens [b, s] -> [b, s, h]."""

    weight: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors of the tokens, with learned positions added where the architecture has them."""
        if tokens.shape[1] > self.model.max_sequence_length:
            raise InputError(
                f"a sequence has {tokens.shape[1]} tokens; model {self.model.name} has "
                f"max_sequence_length {self.model.max_sequence_length}"
            )
        return self.embedding(tokens)


class TransformerLayer(Layer):
    """[b, s, h] -> [b, s, h]."""

    def forward(self, x: Tensor) -> Tensor:
        """One pre-norm transformer layer."""
        return self.transformer(x)

    def attend(self, y: Tensor) -> Tensor:
        """Attention of whole keys and values, or of latent ones."""
        if isinstance(self.attention, LatentAttention):
            return self._latent(y, self.attention)
        return super().attend(y)

    def _latent(self, y: Tensor, sizes: LatentAttention) -> Tensor:
        """Latent attention (arXiv 2405.04434, equations 9 to 19); every rank has whole latents."""
        own: Any = self
        b, s, _ = y.shape
        kv = functional.linear(y, own.kv_latent_weight)
        kv, key = torch.split(kv, [sizes.kv_rank, sizes.rope_head_dim], dim=-1)
        queries = y
        if sizes.query_rank is not None:
            queries = functional.linear(y, own.query_latent_weight)
            queries = norm(queries, own.query_latent_norm_weight, None)
        widths = [queries.shape[-1], sizes.kv_rank, sizes.rope_head_dim]
        latents = torch.cat((queries, norm(kv, own.kv_latent_norm_weight, None), key), dim=-1)
        queries, kv, key = torch.split(self.replicated(latents), widths, dim=-1)
        q, q_rotated = self._heads(functional.linear(queries, own.query_weight), self.head_dim)
        k, v = self._heads(functional.linear(kv, own.kv_weight), sizes.value_head_dim)
        tables = self._rotary(y)
        q_rotated = rotate(q_rotated.transpose(1, 2), *tables).transpose(1, 2)
        key = rotate(key, *tables).unsqueeze(2).expand(-1, -1, q.shape[2], -1)
        q, k = torch.cat((q, q_rotated), dim=-1), torch.cat((k, key), dim=-1)
        # With one width torch's kernel for CPUs writes no scores; zeros change nothing. Otherwise
        # values are copied so that the keys beside them are freed.
        width = v.shape[-1]
        missing = q.shape[-1] - width if y.device.type == "cpu" else 0
        v = functional.pad(v, (0, missing)) if missing > 0 else v.contiguous()
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        context = context[..., :width].transpose(1, 2).reshape(b, s, -1)
        return self.row_product(context, own.out_weight, None)

    def _heads(self, x: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Heads [b, s, heads, d] of projections [b, s, heads d], cut before their `last` part."""
        split = x.view(*x.shape[:2], self.attention.num_heads // self.tp, -1)
        return split[..., :-last], split[..., -last:]

    def mlp(self, y: Tensor) -> Tensor:
        """Dense, or the experts that a router chooses for every token."""
        experts = self.model.layer_at(self.position).mlp
        if isinstance(experts, Mlp):
            return super().mlp(y)
        own: Any = self
        # The router is the same on every rank; only what its weights multiply is partial.
        chosen, weights = route(functional.linear(y, own.router_weight), experts, self.model.router)
        y = self.replicated(y)
        partial = self._routed(y.flatten(0, 1), chosen, self.replicated(weights), experts)
        partial = partial.view_as(y)
        if experts.shared is not None:
            shared = gated_mlp(y, own.gate_weight, own.up_weight, own.down_weight)
            partial = partial + shared
        return self.summed(partial)

    def _routed(self, tokens: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Sums of the experts' results [t, h] of tokens [t, h], each by its weights [t, k].

        A copy of every token goes to each of its experts, which may be another rank's, and back:
        `chosen` [t, k] are their numbers. On the way copies lie in the order of their experts; an
        expert's then come from rank after rank.
        """
        group, count, held = self.expert_communication, self.num_experts, len(self.held)
        order = chosen.flatten().argsort(stable=True)
        copies = tokens[order // experts.experts_per_token]
        wanted = torch.bincount(chosen.flatten(), minlength=count)
        shares = self.expert_counts or [count]
        met = group.all_to_all(wanted, shares, [held] * len(shares)).view(len(shares), held)
        sent = [int(part.sum()) for part in torch.split(wanted, shares)]
        received = [int(part) for part in met.sum(1)]
        copies = rows_to_ranks(copies, group, sent=sent, received=received)
        numbers = torch.arange(held, device=met.device).repeat(len(shares))
        by_expert = numbers.repeat_interleave(met.flatten()).argsort(stable=True)
        parts = torch.split(copies[by_expert], met.sum(0).tolist())
        results = torch.cat([self._expert(*each) for each in zip(self.held, parts, strict=True)])
        results = results[by_expert.argsort()]
        back = rows_to_ranks(results, group, sent=received, received=sent)
        return (back[order.argsort()].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        names = (f"{EXPERT_PREFIX}{number}_{name}_weight" for name in ("gate", "up", "down"))
        return gated_mlp(x, *map(self.get_parameter, names))


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated MLP of these matrices."""
    inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    return functional.linear(inner, down)


def route(logits: Tensor, experts: Experts, router: Router | None) -> tuple[Tensor, Tensor]:
    """The numbers [t, k] of every token's experts, and their weights, of logits [b, s, experts].

    Without a word of the model: softmax, and the weights add up to 1 (arXiv 2401.04088).
    """
    scores = logits.flatten(0, 1).float()
    sigmoid = router is not None and router.score_function is ScoreFunction.SIGMOID
    scores = scores.sigmoid() if sigmoid else scores.softmax(-1)
    weights, chosen = scores.topk(experts.experts_per_token)
    if router is None or router.normalized is not False:
        weights = weights / weights.sum(-1, keepdim=True)
    if router is not None and router.scaling_factor is not None:
        weights = weights * router.scaling_factor
    return chosen, weights.to(logits.dtype)


class Head(Layer):
    """[b, s, h] -> logits [b, s, ceil(vocab / tp)]: final norm and output projection."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the rank's part of the vocabulary; padding has the least finite value."""
        logits = self.logits(x)
        real = self.model.vocab_size - self.tp_rank * self.weight.shape[0]
        if real < self.weight.shape[0]:
            # Out of the softmax, and without a gradient: padded rows stay zero.
            logits[..., max(0, real) :].fill_(torch.finfo(logits.dtype).min)
        return logits


_TYPES: dict[LayerKind, type[Layer]] = {
    LayerKind.EMBEDDING: Embedding,
    LayerKind.TRANSFORMER: TransformerLayer,
    LayerKind.HEAD: Head,
}


class HeadWithLoss(nn.Module):
    """A head and its loss as one module, which is what is measured, and paced, as `head`."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head
        self.communication = head.communication

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of [b, s, h] against targets [b, s]; a scalar."""
        return cross_entropy(
            self.head(x), targets, tp_rank=self.head.tp_rank, communication=self.communication
        )
