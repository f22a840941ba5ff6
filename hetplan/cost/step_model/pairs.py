"""Which samples of a microbatch cross which link between two neighbouring stages.

The data-parallel ranks of a stage share the samples of a microbatch in order, replica entry by
replica entry. A rank gets each of its samples from the rank of the other stage that has it, so the
ranks of a stage that lies on several islands send over unlike links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.network.segments import Segment, shared_link
from hetplan.plans.build import neighbour_link


class Entry(NamedTuple):
    """A replica entry of a stage, as its neighbours see it."""

    start: int
    """First of its samples of a microbatch."""
    stop: int
    """Behind its last one."""
    microbatch_size: int
    """Samples of one of its data-parallel ranks."""
    rank_devices: int
    """Devices of such a rank; they have its samples alike and share what it sends."""
    sample_bytes: float
    """What each of these receives of a sample."""


class Load(NamedTuple):
    """A run of samples on an entry."""

    entry: Entry
    start: int
    stop: int
    weight: float
    """Of each sample, on one device."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a stage sends another over one link."""

    senders: int
    """Devices that send, or that receive, where these are fewer."""
    sent: tuple[Load, ...]
    """In bytes."""
    received: tuple[Load, ...]
    whole_bytes: float
    """Of all devices."""

    @property
    def most_bytes(self) -> float:
        """Of the device that sends, or receives, most."""
        return longest((self,), (1.0,))


class StagePart(NamedTuple):
    """A replica entry of a stage and where it lies."""

    island: Island
    entry: Entry
    ends: tuple[int, int]
    """Least and greatest device; they lie in one node where all do."""
    gathering_seconds: float
    """Of scattered activations, by its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A link between two neighbouring stages, and what crosses it."""

    link: Link
    islands: tuple[Island, Island]
    """Of the first pair of parts."""
    segments: tuple[Segment | None, Segment | None]
    """What all pairs share, there and back, where the link says so."""
    there: Way
    back: Way
    gathering_seconds: float
    """Longest of any part."""


def runs_between(
    left: Sequence[Entry], right: Sequence[Entry]
) -> tuple[tuple[int, int, int, int], ...]:
    """(left entry, right entry, first sample, behind the last one) of all that have some alike."""
    return tuple(
        (i, j, max(one.start, two.start), min(one.stop, two.stop))
        for i, one in enumerate(left)
        for j, two in enumerate(right)
        if max(one.start, two.start) < min(one.stop, two.stop)
    )


def routes_between(
    cluster: Cluster, left: Sequence[StagePart], right: Sequence[StagePart]
) -> tuple[Route, ...]:
    """Links that the samples of a microbatch cross; pairs of islands that share one are a route."""
    found: dict[tuple[Link, Segment | None], list[tuple[int, int, int, int]]] = {}
    for run in runs_between([each.entry for each in left], [each.entry for each in right]):
        one, two = left[run[0]], right[run[1]]
        if one.island is two.island:
            link, shared = neighbour_link(cluster, one.ends, two.ends)[0], None
        else:
            link = cluster.link_between(one.island.name, two.island.name)
            shared = shared_link(cluster, one.island, two.island)
        found.setdefault((link, shared), []).append(run)
    waits, routes = max(each.gathering_seconds for each in (*left, *right)), []
    for (link, shared), runs in found.items():
        ends = left[runs[0][0]].island, right[runs[0][1]].island
        pairs = [(left[i].entry, right[j].entry, start, stop) for i, j, start, stop in runs]
        routes.append(
            Route(
                link=link,
                islands=ends,
                segments=(shared, None if shared is None else shared_link(cluster, *ends[::-1])),
                there=way(pairs),
                back=way([(two, one, start, stop) for one, two, start, stop in pairs]),
                gathering_seconds=waits,
            )
        )
    return tuple(routes)


def way(runs: Sequence[tuple[Entry, Entry, int, int]]) -> Way:
    """Of the runs (sender, receiver, first sample, behind the last one) that cross a link."""
    sent, received = [], []
    whole, counts = 0.0, [0, 0]
    for sender, receiver, start, stop in runs:
        ratio = receiver.rank_devices / sender.rank_devices
        sent.append(Load(sender, start, stop, receiver.sample_bytes * ratio))
        received.append(Load(receiver, start, stop, receiver.sample_bytes))
        whole += receiver.sample_bytes * receiver.rank_devices * (stop - start)
        for side, entry in enumerate((sender, receiver)):
            ranks = math.ceil((stop - start) / entry.microbatch_size)
            counts[side] += ranks * entry.rank_devices
    return Way(min(counts), tuple(sent), tuple(received), whole)


def longest(ways: Sequence[Way], factors: Sequence[float]) -> float:
    """Largest sum over the ways of a device's bytes times the way's factor, sent or received."""
    found = 0.0
    for side in ("sent", "received"):
        loads = [
            (load, load.weight * factor)
            for each, factor in zip(ways, factors, strict=True)
            for load in getattr(each, side)
        ]
        found = max(found, _heaviest_rank(loads))
    return found


def _heaviest_rank(loads: Sequence[tuple[Load, float]]) -> float:
    """Largest sum over the samples of one rank.

    A rank inside a run has nothing else: besides one such rank only those at a run's ends count.
    """
    found = 0.0
    for (entry, start, stop, _), weight in loads:
        size = entry.microbatch_size
        low, high = (start - entry.start) // size, (stop - 1 - entry.start) // size
        if high - low > 1:
            found = max(found, size * weight)
        for rank in {low, high}:
            begin = entry.start + rank * size
            if start <= begin and begin + size <= stop:
                found = max(found, size * weight)
                continue
            held = 0.0
            for (other, first, last, _), each in loads:
                if other is entry:
                    held += max(0, min(last, begin + size) - max(first, begin)) * each
            found = max(found, held)
    return found
