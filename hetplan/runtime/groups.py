"""The process groups of one rank: whom it reduces with, sends to and waits for."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Those among the ranks that were asked for, of which this is one."""
    everyone: Channel | None
    """All ranks of the plan."""
    control: dist.ProcessGroup
    """The same over gloo: barriers and measurements, never inside a timed step."""

    sent: SentBytes
    """What this rank has sent so far, barriers and measurements left out."""

    def channel(self, ranks: tuple[int, ...]) -> Channel | None:
        """The channel among these ranks; None where this is none of them."""
        return next((each for each in self.channels if each.ranks == ranks), None)


def backend_of(transport: str, collectives: str) -> str:
    """The torch.distributed backend for a transport of the plan: gloo where it is host-staged."""
    return "gloo" if transport == Transport.HOST_STAGED.value else collectives


def needs_staging(backend: str, collectives: str) -> bool:
    """Whether the backend does not move the memory of the ranks' devices."""
    return backend == "gloo" and collectives != "gloo"


def open_groups(
    places: Sequence[RankPlace],
    rank: int,
    *,
    collectives: str,
    timeout: timedelta,
    transports: Sequence[tuple[str, ...]] = (),
    asked: Sequence[tuple[tuple[int, ...], str]] = (),
    sums: Sequence[GroupSum] = (),
) -> Groups | None:
    """The groups of this rank; None where it has no place in the plan.

    Every rank of the default process group must call it, those without a place too: torch numbers
    groups in the order in which all processes make them. `collectives` is the torch.distributed
    backend that moves the memory of the ranks' devices; `transports` are those of
    the boundaries of each pipeline, `asked` groups beside those of the layers and of the pipelines,
    with their transports (`Reduction.groups`); `sums` says which of them sum level by level, where
    gloo serves them.
    """
    levels = {each.ranks: each.levels for each in sums}
    members = tuple(place.rank for place in places)
    sent = SentBytes(float)
    control = open_channel(members, rank, sent, backend="gloo", timeout=timeout)
    channels: dict[tuple[tuple[int, ...], str], Channel | None] = {}

    def channel(ranks: tuple[int, ...], transport: str = "") -> Channel | None:
        backend = backend_of(transport, collectives)
        if len(ranks) == 1:
            return None
        if (ranks, backend) not in channels:
            channels[ranks, backend] = open_channel(
                ranks,
                rank,
                sent,
                backend=backend,
                timeout=timeout,
                staged=needs_staging(backend, collectives),
                levels=levels.get(ranks) if backend == "gloo" else None,
            )
        return channels[ranks, backend]

    tensor = [channel(ranks) for ranks in dict.fromkeys(place.tp_ranks for place in places)]
    pipelines = []
    for pipeline in dict.fromkeys(place.pipeline for place in places):
        own = tuple(place.rank for place in places if place.pipeline == pipeline)
        last = max(place.position for place in places if place.pipeline == pipeline)
        mine = transports[pipeline] if transports else ("",) * last
        pipelines.append(tuple(channel(own, each) for each in mine))
    others = [channel(ranks, transport) for ranks, transport in asked]
    everyone = channel(members)
    if control is None:
        return None
    return Groups(
        tensor=next((each for each in tensor if each is not None), None),
        boundaries=next(
            (
                tuple(each for each in found if each is not None)
                for found in pipelines
                if found and found[0] is not None
            ),
            (),
        ),
        channels=tuple(each for each in dict.fromkeys(others) if each is not None),
        everyone=everyone,
        control=control.group,
        sent=sent,
    )
