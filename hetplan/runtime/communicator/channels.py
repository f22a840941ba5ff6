"""Through which backend do the ranks of a group talk, and how much do they send?

A channel is a torch.distributed group and a count of what this rank has sent in it. Bytes are
counted where they are sent: a message to its receiver, a sum as a ring in the order of the group's
ranks, each sending 2 (n - 1) / n of the message to the next (as `hetplan.cost.traffic` counts it;
what gloo and NCCL really choose they do not tell).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.cost.network.link_names import TrafficClass
from hetplan.runtime.communicator import staging
from hetplan.runtime.communicator.works import Work

# torch 2.13 renamed both and warns of the older names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One message of this rank, to or from another one."""

    tensor: Tensor
    """Contiguous."""
    peer: int
    tag: int
    """Tells apart what two ranks send each other at the same time."""


SentBytes = defaultdict[tuple[TrafficClass, int], float]
"""What one rank has sent: bytes by what for and the rank that they went to."""


class Channel:
    """A group of ranks, seen from one of them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        sent: SentBytes,
        *,
        staged: bool,
    ) -> None:
        """`sent`: where this rank's bytes are counted, those of its other channels too; `staged`:
        the backend moves the host's memory and the tensors are an accelerator's.
        """
        self.group, self.ranks, self._rank = group, tuple(ranks), rank
        self._sent, self.staged = sent, staged

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Work]:
        """Start these transfers together, sends first; their works in this order."""
        for each in sends:
            self._sent[TrafficClass.PIPELINE, each.peer] += each.tensor.nbytes
        if self.staged:
            return [
                *(self._staged_transfer(each, staging.send, dist.isend) for each in sends),
                *(self._staged_transfer(each, staging.receive, dist.irecv) for each in receives),
            ]
        operations = [
            dist.P2POp(dist.isend, each.tensor, each.peer, self.group, each.tag) for each in sends
        ] + [
            dist.P2POp(dist.irecv, each.tensor, each.peer, self.group, each.tag)
            for each in receives
        ]
        if not operations:
            return []
        return list(dist.batch_isend_irecv(operations))

    def _staged_transfer(
        self,
        parcel: Parcel,
        move: Callable[[Tensor, staging.Start], None],
        start: Callable[..., Work | None],
    ) -> Work:
        def one(buffer: Tensor) -> Work:
            # None where this rank is not in the group, which it is.
            return start(buffer, parcel.peer, group=self.group, tag=parcel.tag) or staging.Done()

        return staging.Background(lambda: move(parcel.tensor, one))

    def start_sum(self, tensor: Tensor, traffic: TrafficClass | None) -> Work:
        """Begin to sum the tensors of all ranks of the group, in place.

        `traffic`: what for; None: not counted.
        """
        if traffic is not None:
            self.count_sum(tensor.nbytes, traffic)
        if self.staged:
            staging.reduce(tensor, self._start_sum)
            return staging.Done()
        return self._start_sum(tensor)

    def _start_sum(self, tensor: Tensor) -> Work:
        work: Work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def scatter_sum(self, tensor: Tensor, into: Tensor) -> None:
        """Sum the tensors of all ranks; each gets one part of as many as there are ranks."""
        self._ring(tensor.nbytes, 1, TrafficClass.DATA_PARALLEL)
        self._on_host(tensor, into, _reduce_scatter)

    def gather(self, tensor: Tensor, into: Tensor) -> None:
        """All ranks' tensors, one after the other in the order of the group."""
        self._ring(into.nbytes, 1, TrafficClass.DATA_PARALLEL)
        self._on_host(tensor, into, _all_gather)

    def _on_host(self, tensor: Tensor, into: Tensor, call: Callable[..., object]) -> None:
        if not self.staged:
            call(into, tensor, group=self.group)
            return
        found = torch.empty(into.shape, dtype=into.dtype)
        call(found, tensor.cpu(), group=self.group)
        into.copy_(found)

    def count_sum(self, message_bytes: float, traffic: TrafficClass) -> None:
        """Count a sum that is made without this object."""
        self._ring(message_bytes, 2, traffic)

    def _ring(self, message_bytes: float, rounds: int, traffic: TrafficClass) -> None:
        count = len(self.ranks)
        after = self.ranks[(self.ranks.index(self._rank) + 1) % count]
        self._sent[traffic, after] += rounds * message_bytes * (count - 1) / count


def open_channel(
    ranks: Sequence[int],
    rank: int,
    sent: SentBytes,
    *,
    backend: str,
    timeout: timedelta,
    staged: bool = False,
) -> Channel | None:
    """A channel among these ranks; None where `rank` is none of them.

    Every rank of the default process group must call it, in the same order of channels.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    return Channel(group, ranks, rank, sent, staged=staged) if rank in ranks else None
