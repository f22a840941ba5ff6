"""What one rank sends and receives for the messages between stages of its pipeline.

A message (direction, hop, microbatch) of the schedule is, for one rank, a few parcels: parts of the
samples that it computes, to or from ranks of the other side.

Every tensor-parallel rank of a stage has the whole activations of its samples (and the whole sum of
the gradient of its inputs), so any of them can send a sample, and each rank of the other side needs
its own samples once. Of the ranks that have a sample the one at the same relative place in its
tensor-parallel group sends it: with equal degrees on both sides that is the rank of the same
position, and nobody sends what nobody needs (`transfers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetplan.cost.replay.programs import Message, ends_of_hop
from hetplan.runtime.communicator.channels import Channel, Parcel
from hetplan.runtime.communicator.staging import Work
from hetplan.runtime.placement import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """What this rank sends to, or receives from, one other stage for each message."""

    peer: int
    start: int
    """First sample, counted in what this rank computes."""
    stop: int


class Messages:
    """The mailbox of one rank."""

    def __init__(
        self,
        boundaries: Sequence[Channel],
        place: RankPlace,
        places: Sequence[RankPlace],
        *,
        num_microbatches: int,
        like: Tensor,
    ) -> None:
        """`boundaries`: between each two neighbours of the pipeline; `like`: the activations of
        this rank's samples of a microbatch, in shape and kind.
        """
        self._place, self._like = place, like
        self._num_microbatches = num_microbatches
        stages: dict[int, list[Holder]] = {}
        for member in places:
            if member.pipeline == place.pipeline:
                stages.setdefault(member.position, []).append(holder_of(member))
        self._num_stages = len(stages)
        # From the last stage back to the first one there is no boundary in the plan: what serves
        # the slowest of those in between serves this too.
        slowest = next((member for member in boundaries if member.staged), boundaries[0])
        self._channels = {
            (left, right): boundaries[min(left, right)] if abs(left - right) == 1 else slowest
            for left in stages
            for right in stages
        }
        self._to: dict[int, list[_Side]] = {}
        self._from: dict[int, list[_Side]] = {}
        here = place.position
        for other in {(here - 1) % len(stages), (here + 1) % len(stages)} - {here}:
            sent = transfers(stages[here], stages[other])
            received = transfers(stages[other], stages[here])
            self._to[other] = [self._side(t, t.target) for t in sent if t.source == place.rank]
            self._from[other] = [
                self._side(t, t.source) for t in received if t.target == place.rank
            ]
        self._posted: tuple[list[tuple[Message, Tensor]], list[tuple[Message, Tensor]]] = ([], [])
        self._leaving: dict[Message, tuple[Tensor, list[Work]]] = {}
        self._arriving: dict[Message, tuple[Tensor, list[Work]]] = {}

    def send(self, message: Message, tensor: Tensor) -> None:
        """From the next `start` on."""
        self._posted[0].append((message, tensor.contiguous()))

    def receive(self, message: Message) -> None:
        """From the next `start` on."""
        self._posted[1].append((message, torch.empty_like(self._like)))

    def start(self) -> None:
        """Start everything that was posted since the last time, together."""
        sent, received = self._posted
        if not sent and not received:
            return
        self._posted = ([], [])
        out = [
            (message, parcel)
            for message, tensor in sent
            for parcel in self._parcels(message, tensor, self._to, 1)
        ]
        into = [
            (message, parcel)
            for message, tensor in received
            for parcel in self._parcels(message, tensor, self._from, 0)
        ]
        for message, tensor in sent:
            self._leaving[message] = (tensor, [])
        for message, tensor in received:
            self._arriving[message] = (tensor, [])
        for channel in dict.fromkeys(self._through(entry) for entry, _ in (*out, *into)):
            mine = [entry for entry in out if self._through(entry[0]) is channel]
            its = [entry for entry in into if self._through(entry[0]) is channel]
            works = channel.post([entry for _, entry in mine], [entry for _, entry in its])
            books = [self._leaving[entry][1] for entry, _ in mine]
            books += [self._arriving[entry][1] for entry, _ in its]
            # Where the backend makes one transfer of all of them, each waits for all.
            single = len(works) == len(books)
            for at, book in enumerate(books):
                book.extend(works[at : at + 1] if single else works)

    def _through(self, message: Message) -> Channel:
        return self._channels[ends_of_hop(message, self._num_stages)]

    def wait_sent(self, message: Message) -> None:
        """Until it has left; nothing where this rank had no part in it."""
        _wait(self._leaving.pop(message)[1])

    def wait_received(self, message: Message) -> Tensor:
        """The samples of this rank."""
        tensor, works = self._arriving.pop(message)
        _wait(works)
        return tensor

    @property
    def leaving(self) -> tuple[Message, ...]:
        """Those whose sending was started and not waited for."""
        return tuple(self._leaving)

    def receivers(self, message: Message) -> tuple[int, ...]:
        """Ranks that this rank sends its part of the message to."""
        return tuple(side.peer for side in self._to[ends_of_hop(message, self._num_stages)[1]])

    def senders(self, message: Message) -> tuple[int, ...]:
        """Ranks that it gets its samples of the message from."""
        return tuple(side.peer for side in self._from[ends_of_hop(message, self._num_stages)[0]])

    def _side(self, transfer: Transfer, peer: int) -> _Side:
        first = self._place.first_sample
        return _Side(peer=peer, start=transfer.start - first, stop=transfer.stop - first)

    def _parcels(
        self, message: Message, tensor: Tensor, sides: dict[int, list[_Side]], end: int
    ) -> list[Parcel]:
        direction, hop, microbatch = message
        other = ends_of_hop(message, self._num_stages)[end]
        tag = (hop * 2 + direction) * self._num_microbatches + microbatch
        return [
            Parcel(tensor=tensor[side.start : side.stop], peer=side.peer, tag=tag)
            for side in sides[other]
        ]


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One rank of a stage and the samples of a microbatch that it computes."""

    rank: int
    first: int
    """First sample, counted in the pipeline's microbatch."""
    count: int
    tp: int
    tp_index: int


def holder_of(place: RankPlace) -> Holder:
    """The samples of a rank of a plan."""
    return Holder(
        rank=place.rank,
        first=place.first_sample,
        count=place.microbatch_size,
        tp=place.tp,
        tp_index=place.tp_index,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Samples `start` to `stop` of a microbatch, from one rank to another."""

    source: int
    target: int
    start: int
    stop: int


def transfers(senders: Sequence[Holder], receivers: Sequence[Holder]) -> tuple[Transfer, ...]:
    """All messages of one microbatch from one side of a boundary to the other.

    Receiver by receiver, each one's samples in order. Both sides must hold the same samples, each
    at every tensor-parallel position of its group.
    """
    groups: dict[tuple[int, int, int], dict[int, Holder]] = {}
    for sender in senders:
        # Ranks of one tensor-parallel group hold the same samples and no other group does.
        groups.setdefault((sender.first, sender.count, sender.tp), {})[sender.tp_index] = sender
    ordered = sorted(groups.items())
    return tuple(transfer for receiver in receivers for transfer in _to(receiver, ordered))


def _to(
    receiver: Holder, groups: Sequence[tuple[tuple[int, int, int], dict[int, Holder]]]
) -> Iterator[Transfer]:
    for (first, count, tp), members in groups:
        start = max(first, receiver.first)
        stop = min(first + count, receiver.first + receiver.count)
        if start < stop:
            sender = members[receiver.tp_index * tp // receiver.tp]
            yield Transfer(source=sender.rank, target=receiver.rank, start=start, stop=stop)
