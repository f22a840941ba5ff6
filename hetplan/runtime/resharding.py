"""Who sends which samples to whom where a stage ends and the next one begins?

Every tensor-parallel rank of a stage has the whole activations of its samples (and, of the gradient
of its inputs, the whole sum), so any of them can send a sample, and each rank of the other side
needs its own samples once. Of the ranks that have a sample the one at the same relative place in
its tensor-parallel group sends it: with equal degrees on both sides that is the rank of the same
position, and nobody sends what nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.runtime.placement import RankPlace


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
    for each in senders:
        # Ranks of one tensor-parallel group hold the same samples and no other group does.
        groups.setdefault((each.first, each.count, each.tp), {})[each.tp_index] = each
    ordered = sorted(groups.items())
    return tuple(found for receiver in receivers for found in _to(receiver, ordered))


def _to(
    receiver: Holder, groups: Sequence[tuple[tuple[int, int, int], dict[int, Holder]]]
) -> Iterator[Transfer]:
    for (first, count, tp), members in groups:
        start = max(first, receiver.first)
        stop = min(first + count, receiver.first + receiver.count)
        if start < stop:
            sender = members[receiver.tp_index * tp // receiver.tp]
            yield Transfer(source=sender.rank, target=receiver.rank, start=start, stop=stop)
