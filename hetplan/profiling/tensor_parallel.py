"""How the tensor-parallel ranks of one layer talk: sums over the group, forward and backward.

A column-parallel matrix product takes a replicated input, so the gradient of that input is summed
over the group (`copy_to_group`); a row-parallel one leaves partial outputs, so they are summed
(`sum_over_group`). Without a group neither does anything: a slice is then measured alone.
Form: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, communication: Communication
    ) -> Tensor:
        largest = logits.detach().amax(dim=-1, keepdim=True).float()
        communication.all_reduce(largest, dist.ReduceOp.MAX)
        softmax = logits.float() - largest
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        target_logit = softmax.gather(-1, local) * mine.unsqueeze(-1)
        softmax.exp_()
        sums = torch.stack((softmax.sum(dim=-1, keepdim=True), target_logit))
        communication.all_reduce(sums)
        softmax.div_(sums[0])
        ctx.save_for_backward(softmax, local, mine)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, mine = ctx.saved_tensors
        # The softmax is needed once only; autograd refuses a second backward pass over it.
        softmax.scatter_add_(-1, local, -mine.unsqueeze(-1).to(softmax.dtype))
        softmax.mul_(gradients[0] / mine.numel())
        return softmax.to(ctx.dtype), None, None, None


def group_cross_entropy(
    logits: Tensor, targets: Tensor, *, tp_rank: int, communication: Communication
) -> Tensor:
    """Mean loss of logits [b, s, vocab/tp] against targets [b, s] in [0, vocab).

    Computed in float32. Equal on all ranks of the group. Without a group the slice counts as the
    whole vocabulary, except that targets outside of it contribute no target logit.
    """
    first = tp_rank * logits.shape[-1]
    loss: Tensor = _CrossEntropy.apply(logits, targets, first, communication)  # type: ignore[no-untyped-call]
    return loss
