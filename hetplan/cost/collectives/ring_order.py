"""Which way around a ring goes: the order of islands and regions with the fastest slowest edge.

Three have only one ring. Of more, every order of up to seven is looked at (360 rings); beyond that
they stay in order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TypeVar

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives.shape import GroupShape, IslandRanks

_MAX_TRIED = 7
_ONE_RING = 3

_T = TypeVar("_T")
_Islands = tuple[IslandRanks, ...]


def ring_order(cluster: Cluster, shape: GroupShape, message_bytes: float) -> GroupShape:
    """The shape with islands and regions in the order in which rings take them."""
    if max(len(shape.regions), *(len(region) for region in shape.regions)) <= _ONE_RING:
        return shape
    step_bytes = message_bytes / shape.num_ranks / shape.fewest_ranks

    def seconds(one: IslandRanks, two: IslandRanks) -> float:
        link = cluster.link_between(one.island, two.island)
        return link.latency_seconds + step_bytes / link.goodput_bytes_per_second

    def between(one: _Islands, two: _Islands) -> float:
        return max(seconds(left, right) for left in one for right in two)

    regions = [_around(region, seconds) for region in shape.regions]
    ordered = _around(regions, between)
    return GroupShape(islands=tuple(island for region in ordered for island in region))


def _around(units: Sequence[_T], seconds: Callable[[_T, _T], float]) -> tuple[_T, ...]:
    """The ring with the least slowest neighbours, then with the least sum; the first stays."""
    count = len(units)
    if not _ONE_RING < count <= _MAX_TRIED:
        return tuple(units)
    times = [[seconds(one, two) if one is not two else 0.0 for two in units] for one in units]

    def cost(order: tuple[int, ...]) -> tuple[float, float]:
        edges = [times[order[at - 1]][order[at]] for at in range(count)]
        return max(edges), sum(edges)

    # One of every two mirror images.
    orders = ((0, *rest) for rest in permutations(range(1, count)) if rest[0] < rest[-1])
    return tuple(units[at] for at in min(orders, key=cost))
