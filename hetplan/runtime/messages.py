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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetplan.cost.replay.programs import Message, ends_of_hop
from hetplan.runtime.communicator.channels import Channel, Parcel
from hetplan.runtime.communicator.staging import Work
from hetplan.runtime.placement import RankPlace


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
        stages: dict[int, list[RankPlace]] = {}
        for member in places:
            if member.pipeline == place.pipeline:
                stages.setdefault(member.position, []).append(member)
        self._num_stages = len(stages)
        # From the last stage back to the first one there is no boundary in the plan: what serves
        # the slowest of those in between serves this too.
        slowest = next((member for member in boundaries if member.staged), boundaries[0])
        self._channels = {
            (left, right): boundaries[min(left, right)] if abs(left - right) == 1 else slowest
            for left in stages
            for right in stages
        }
        self._to: dict[int, list[Transfer]] = {}
        self._from: dict[int, list[Transfer]] = {}
        here = place.position
        for other in {(here - 1) % len(stages), (here + 1) % len(stages)} - {here}:
            sent = transfers(stages[here], stages[other])
            received = transfers(stages[other], stages[here])
            self._to[other] = [transfer for transfer in sent if transfer.source == place.rank]
            self._from[other] = [transfer for transfer in received if transfer.target == place.rank]
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
            for parcel in self._parcels(message, tensor, sends=True)
        ]
        into = [
            (message, parcel)
            for message, tensor in received
            for parcel in self._parcels(message, tensor, sends=False)
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
        stage = ends_of_hop(message, self._num_stages)[1]
        return tuple(transfer.target for transfer in self._to[stage])

    def senders(self, message: Message) -> tuple[int, ...]:
        """Ranks that it gets its samples of the message from."""
        stage = ends_of_hop(message, self._num_stages)[0]
        return tuple(transfer.source for transfer in self._from[stage])

    def _parcels(self, message: Message, tensor: Tensor, *, sends: bool) -> list[Parcel]:
        direction, hop, microbatch = message
        source, target = ends_of_hop(message, self._num_stages)
        tag = (hop * 2 + direction) * self._num_microbatches + microbatch
        first = self._place.first_sample
        return [
            Parcel(
                tensor=tensor[transfer.start - first : transfer.stop - first],
                peer=transfer.target if sends else transfer.source,
                tag=tag,
            )
            for transfer in (self._to[target] if sends else self._from[source])
        ]


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Samples `start` to `stop` of a pipeline's microbatch, from one rank to another."""

    source: int
    target: int
    start: int
    stop: int


def transfers(senders: Sequence[RankPlace], receivers: Sequence[RankPlace]) -> tuple[Transfer, ...]:
    """All messages of one microbatch from one side of a boundary to the other.

    Receiver by receiver, each one's samples in order. Both sides must hold the same samples, each
    at every tensor-parallel position of its group.
    """
    # Ranks of one tensor-parallel group hold the same samples and no other group does.
    groups: dict[int, dict[int, RankPlace]] = {}
    for sender in senders:
        groups.setdefault(sender.first_sample, {})[sender.tp_index] = sender
    sent = []
    for receiver in receivers:
        for _, members in sorted(groups.items()):
            sender = members[receiver.tp_index * len(members) // receiver.tp]
            start = max(sender.first_sample, receiver.first_sample)
            stop = min(sender.last_sample, receiver.last_sample)
            if start < stop:
                sent.append(
                    Transfer(source=sender.rank, target=receiver.rank, start=start, stop=stop)
                )
    return tuple(sent)
