"""Channels: groups of ranks with their backend, and counts of what a rank sends in them.

A channel is a torch.distributed group and a count of what this rank has sent in it. Bytes are
counted where they are sent: a message to its receiver, so also the messages of a sum level by level
(`communicator.by_levels`). A sum that the backend makes counts as a ring in the order of the
group's ranks, each sending 2 (n - 1) / n of the message to the next (as `hetplan.cost.traffic`
counts it; what gloo and NCCL really choose they do not tell).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.cluster.spec import Transport
from hetplan.cost.network.segments import TrafficClass
from hetplan.runtime.communicator import staging
from hetplan.runtime.communicator.by_levels import LevelSum
from hetplan.runtime.communicator.levels import GroupSum, Levels
from hetplan.runtime.communicator.staging import Work
from hetplan.runtime.placement import RankPlace

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
        levels: Levels | None = None,
    ) -> None:
        """`sent`: where this rank's bytes are counted, those of its other channels too; `staged`:
        the backend moves the host's memory and the tensors are an accelerator's; `levels`: how the
        ranks lie, where they sum level by level; None: the backend sums.
        """
        self.group, self.ranks, self.rank = group, tuple(ranks), rank
        self._sent, self.staged = sent, staged
        self._levels, self._tags = levels, 0

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Work]:
        """Start these transfers together, sends first; their works in this order."""
        for parcel in sends:
            self._sent[TrafficClass.PIPELINE, parcel.peer] += parcel.tensor.nbytes
        if self.staged:
            return [
                *(self._staged_transfer(parcel, staging.send, dist.isend) for parcel in sends),
                *(
                    self._staged_transfer(parcel, staging.receive, dist.irecv)
                    for parcel in receives
                ),
            ]
        operations = [
            dist.P2POp(dist.isend, parcel.tensor, parcel.peer, self.group, parcel.tag)
            for parcel in sends
        ] + [
            dist.P2POp(dist.irecv, parcel.tensor, parcel.peer, self.group, parcel.tag)
            for parcel in receives
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

    def sum_of(self, tensor: Tensor, traffic: TrafficClass | None) -> Sum:
        """The sum of the tensors of all ranks of the group, in place, as often as it is started.

        Contiguous, equally long on all ranks, which make their sums in the same order. `traffic`:
        what for; None: not counted.
        """
        return Sum(self, tensor, traffic, self._by_levels(tensor))

    def start_sum(self, tensor: Tensor, traffic: TrafficClass | None) -> Work:
        """Begin such a sum, which is made once."""
        return self.sum_of(tensor, traffic).start()

    def _by_levels(self, tensor: Tensor) -> LevelSum | None:
        if self._levels is None:
            return None
        level_sum = LevelSum(
            tensor,
            group=self.group,
            ranks=self.ranks,
            rank=self.rank,
            levels=self._levels,
            first_tag=self._tags,
            staged=self.staged,
        )
        self._tags += level_sum.tags
        return level_sum

    def backend_sum(self, tensor: Tensor) -> Work:
        """Begin a sum by the backend; not counted."""
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

    def exchange_rows(
        self, into: Tensor, tensor: Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Send rows of the tensor to the ranks of the group, in its order; `into` gets theirs."""
        row = tensor[:1].nbytes if tensor.numel() else 0
        sizes = {to: float(row * count) for to, count in zip(self.ranks, sent, strict=True)}
        del sizes[self.rank]
        self.count_sent(sizes, TrafficClass.EXPERT_PARALLEL)

        def call(into: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
            dist.all_to_all_single(into, tensor, received, sent, group=group)

        self._on_host(tensor.contiguous(), into, call)

    def _on_host(self, tensor: Tensor, into: Tensor, call: Callable[..., object]) -> None:
        if not self.staged:
            call(into, tensor, group=self.group)
            return
        result = torch.empty(into.shape, dtype=into.dtype)
        call(result, tensor.cpu(), group=self.group)
        into.copy_(result)

    def count_sum(self, message_bytes: float, traffic: TrafficClass) -> None:
        """Count a sum that is made without this object."""
        self._ring(message_bytes, 2, traffic)

    def count_sent(self, sizes: Mapping[int, float], traffic: TrafficClass) -> None:
        """Count bytes by the rank that they go to."""
        for peer, size in sizes.items():
            self._sent[traffic, peer] += size

    def _ring(self, message_bytes: float, rounds: int, traffic: TrafficClass) -> None:
        count = len(self.ranks)
        after = self.ranks[(self.ranks.index(self.rank) + 1) % count]
        self._sent[traffic, after] += rounds * message_bytes * (count - 1) / count


class Sum:
    """A tensor of one rank that is summed with those of the other ranks of a channel."""

    def __init__(
        self,
        channel: Channel,
        tensor: Tensor,
        traffic: TrafficClass | None,
        by_levels: LevelSum | None,
    ) -> None:
        self._channel, self._tensor, self._traffic = channel, tensor, traffic
        self._by_levels = by_levels

    def expect(self) -> None:
        """Let the next sum's messages come in from now on, where it is made of messages."""
        if self._by_levels is not None:
            self._by_levels.expect()

    def start(self) -> Work:
        """Begin; the sum replaces the tensor when the work is done."""
        if self._by_levels is None:
            if self._traffic is not None:
                self._channel.count_sum(self._tensor.nbytes, self._traffic)
            return self._channel.backend_sum(self._tensor)
        if self._traffic is not None:
            self._channel.count_sent(self._by_levels.sent_bytes(), self._traffic)
        return self._by_levels.start()


def open_channel(
    ranks: Sequence[int],
    rank: int,
    sent: SentBytes,
    *,
    backend: str,
    timeout: timedelta,
    staged: bool = False,
    levels: Levels | None = None,
) -> Channel | None:
    """A channel among these ranks; None where `rank` is none of them.

    Every rank of the default process group must call it, in the same order of channels.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    if rank not in ranks:
        return None
    return Channel(group, ranks, rank, sent, staged=staged, levels=levels)


# ---- the channels of one rank: whom it reduces with, sends to and waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of one rank; None where the rank would be alone."""

    tensor: Channel | None
    expert: Channel | None
    """Ranks that share the routed experts of a layer."""
    boundaries: tuple[Channel, ...]
    """All ranks of the rank's pipeline, for messages over each of its boundaries; one channel
    where their transports are served alike."""
    channels: tuple[Channel, ...]
    """The groups of the gradients' reduction that this rank is in."""
    everyone: Channel | None
    """All ranks of the plan."""
    control: dist.ProcessGroup
    """The same over gloo: barriers and measurements, never inside a timed step."""

    sent: SentBytes
    """What this rank has sent so far, barriers and measurements left out."""

    def channel(self, ranks: tuple[int, ...]) -> Channel | None:
        """The channel among these ranks; None where this is none of them."""
        return next((candidate for candidate in self.channels if candidate.ranks == ranks), None)


def backend_of(transport: str, collectives: str) -> str:
    """The torch.distributed backend for a transport of the plan: gloo where it is host-staged."""
    return "gloo" if transport == Transport.HOST_STAGED.value else collectives


def needs_staging(backend: str, collectives: str) -> bool:
    """Whether the backend does not move the memory of the ranks' devices."""
    return backend == "gloo" and collectives != "gloo"


def _boundary_groups(
    places: Sequence[RankPlace], transports: Sequence[tuple[str, ...]]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """All ranks of a pipeline once for each of its boundaries, with the boundary's transport."""
    for pipeline in dict.fromkeys(place.pipeline for place in places):
        stages = [place for place in places if place.pipeline == pipeline]
        ranks = tuple(place.rank for place in stages)
        last = max(place.position for place in stages)
        for transport in transports[pipeline] if transports else ("",) * last:
            yield ranks, transport


def open_groups(
    places: Sequence[RankPlace],
    rank: int,
    *,
    collectives: str,
    timeout: timedelta,
    transports: Sequence[tuple[str, ...]] = (),
    reduction_groups: Sequence[tuple[tuple[int, ...], str]] = (),
    sums: Sequence[GroupSum] = (),
) -> Groups | None:
    """The groups of this rank; None where it has no place in the plan.

    Every rank of the default process group must call it, those without a place too: torch numbers
    groups in the order in which all processes make them. `collectives` is the torch.distributed
    backend that moves the memory of the ranks' devices; `transports` are those of the boundaries
    of each pipeline, `reduction_groups` those of `Reduction.groups`; `sums` says which of them sum
    level by level, where gloo serves them.
    """
    sent = SentBytes(float)
    levels = {group.ranks: group.levels for group in sums}

    @cache
    def opened(ranks: tuple[int, ...], backend: str) -> Channel | None:
        """The channel among these ranks; None where this is none of them, or the only one."""
        if len(ranks) == 1:
            return None
        return open_channel(
            ranks,
            rank,
            sent,
            backend=backend,
            timeout=timeout,
            staged=needs_staging(backend, collectives),
            levels=levels.get(ranks) if backend == "gloo" else None,
        )

    def own(groups: Iterable[tuple[tuple[int, ...], str]]) -> list[Channel]:
        """Open all of these groups (ranks, transport); the channels of which this rank is one."""
        channels = (opened(ranks, backend_of(each, collectives)) for ranks, each in groups)
        return [channel for channel in channels if channel is not None]

    members = tuple(place.rank for place in places)
    control = open_channel(members, rank, sent, backend="gloo", timeout=timeout)
    tensor = own((place.tp_ranks, "") for place in places)
    expert = own((place.expert_ranks, "") for place in places)
    boundaries = own(_boundary_groups(places, transports))
    channels = own(reduction_groups)
    everyone = opened(members, backend_of("", collectives))
    if control is None:
        return None
    return Groups(
        tensor=tensor[0] if tensor else None,
        expert=expert[0] if expert else None,
        boundaries=tuple(boundaries),
        channels=tuple(dict.fromkeys(channels)),
        everyone=everyone,
        control=control.group,
        sent=sent,
    )
