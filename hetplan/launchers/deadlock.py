"""Which rank the others wait for when all are alive and none finishes anything.

Who waits for whom is a graph. A rank that computes waits for nobody: it is what the others wait
for. Where every rank waits, the answer is a set of ranks that wait for each other and for nobody
else (a strongly connected component without a way out): the two ends of a link that is down, or
ranks that deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.runtime.activity import ActivityKind, Beat

WAITING = (ActivityKind.COMMUNICATING, ActivityKind.CONNECTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a standstill comes from."""

    ranks: tuple[int, ...]
    """The one that has been in its operation longest comes first."""
    computes: bool
    """The ranks wait for nobody; otherwise they wait for each other, or for ranks that are gone."""


def root_of_standstill(beats: Mapping[int, Beat], waiting: int | None = None) -> Root:
    """The root among these ranks, which are alive; there is at least one.

    Of several roots the one that began to stand first. `waiting`: only what this rank waits for.
    """
    if waiting is not None:
        beats = {rank: beats[rank] for rank in _reached(waiting, beats)}

    def since(rank: int) -> tuple[float, int]:
        return beats[rank].since_seconds, rank

    computing = [rank for rank, beat in beats.items() if beat.kind not in WAITING]
    if computing:
        return Root(ranks=(min(computing, key=since),), computes=True)
    reached = {rank: _reached(rank, beats) for rank in beats}
    # Without a way out: all that it reaches reaches it.
    closed = [
        rank for rank in beats if all(rank in reached[other] for other in reached[rank] - {rank})
    ]
    first = min(closed, key=since)
    return Root(ranks=tuple(sorted(reached[first], key=since)), computes=False)


def _reached(rank: int, beats: Mapping[int, Beat]) -> frozenset[int]:
    """Whom the rank waits for, they wait for, and so on; itself included."""
    reached, left = {rank}, [rank]
    while left:
        for peer in beats[left.pop()].peers:
            if peer in beats and peer not in reached:
                reached.add(peer)
                left.append(peer)
    return frozenset(reached)
