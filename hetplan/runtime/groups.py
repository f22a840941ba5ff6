"""The process groups of one rank: whom it reduces with, sends to and waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hetplan.cluster.spec import Transport
from hetplan.runtime.communicator.channels import Channel, SentBytes, open_channel
from hetplan.runtime.communicator.levels import GroupSum
from hetplan.runtime.placement import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of one rank; None where the rank would be alone."""

    tensor: Channel | None
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


class _Opener:
    """Opens the channels of one rank, each once, in the order of the calls."""

    def __init__(
        self, rank: int, collectives: str, timeout: timedelta, sums: Sequence[GroupSum]
    ) -> None:
        self._rank, self._collectives, self._timeout = rank, collectives, timeout
        self._levels = {group.ranks: group.levels for group in sums}
        self._channels: dict[tuple[tuple[int, ...], str], Channel | None] = {}
        self.sent = SentBytes(float)

    def open(self, ranks: tuple[int, ...], transport: str = "") -> Channel | None:
        """The channel among these ranks; None where this is none of them, or the only one."""
        backend = backend_of(transport, self._collectives)
        if len(ranks) == 1:
            return None
        if (ranks, backend) not in self._channels:
            self._channels[ranks, backend] = open_channel(
                ranks,
                self._rank,
                self.sent,
                backend=backend,
                timeout=self._timeout,
                staged=needs_staging(backend, self._collectives),
                levels=self._levels.get(ranks) if backend == "gloo" else None,
            )
        return self._channels[ranks, backend]

    def open_own(self, groups: Iterable[tuple[tuple[int, ...], str]]) -> tuple[Channel, ...]:
        """Open all of these groups; the channels of which this rank is one."""
        channels = [self.open(ranks, transport) for ranks, transport in groups]
        return tuple(channel for channel in dict.fromkeys(channels) if channel is not None)


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
    opener = _Opener(rank, collectives, timeout, sums)
    members = tuple(place.rank for place in places)
    control = open_channel(members, rank, opener.sent, backend="gloo", timeout=timeout)
    tensor = opener.open_own((place.tp_ranks, "") for place in places)
    boundaries: list[Channel] = []
    for pipeline in dict.fromkeys(place.pipeline for place in places):
        own = [place for place in places if place.pipeline == pipeline]
        ranks = tuple(place.rank for place in own)
        last = max(place.position for place in own)
        for transport in transports[pipeline] if transports else ("",) * last:
            channel = opener.open(ranks, transport)
            boundaries += [channel] if channel is not None else []
    channels = opener.open_own(reduction_groups)
    everyone = opener.open(members)
    if control is None:
        return None
    return Groups(
        tensor=tensor[0] if tensor else None,
        boundaries=tuple(boundaries),
        channels=channels,
        everyone=everyone,
        control=control.group,
        sent=opener.sent,
    )
