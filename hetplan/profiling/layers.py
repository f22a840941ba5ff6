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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.profiling.bodies import ONLY_GPT, CrossEntropy, LayerBody
from hetplan.profiling.weights import initial_value, kv_block, parameter_slices


def build_layer(
    model: ModelSpec,
    position: int,
    *,
    tp: int,
    tp_rank: int,
    group: dist.ProcessGroup | None,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Layer `position` of `model.layers`, or rank `tp_rank`'s slice of it, ready to train.

    The weights depend on (seed, position) alone. `group` is the tensor-parallel group, or None
    for no communication. Embedding: tokens [b, s] -> [b, s, h]; transformer layer: [b, s, h] ->
    [b, s, h]; head: [b, s, h] -> logits [b, s, ceil(vocab / tp)].
    """
    if not 0 <= position < len(model.layers):
        raise InputError(
            f"layer position is {position}; model {model.name} has 0 to {len(model.layers) - 1}"
        )
    kind = model.layers[position]
    layer = _TYPES[kind](
        model, kind, tp=tp, tp_rank=tp_rank, group=group, dtype=dtype, device=torch.device(device)
    )
    tied = kind is LayerKind.HEAD and model.tied_embeddings
    with torch.no_grad():
        for part in parameter_slices(model, kind, tp=tp, tp_rank=tp_rank):
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
        kind: LayerKind,
        *,
        tp: int,
        tp_rank: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model, self.kind, self.tp, self.tp_rank = model, kind, tp, tp_rank
        self.is_gpt = model.architecture is Architecture.GPT
        self.query, self.head_dim = model.attention_size // tp, model.head_dim
        self.communication = Communication(group)
        for part in parameter_slices(model, kind, tp=tp, tp_rank=tp_rank):
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
        copies = self.model.num_kv_heads
        if parameter is None or self.tp <= copies:
            return parameter
        return sum_replicas(
            parameter,
            self.communication,
            start=self.query,
            copy=kv_block(self.model, self.tp, self.tp_rank),
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
