"""On which islands, alone or shared, have stages of some degrees room?

A stage of degrees (tp, cp, dp) lies on one island, or on 2 to 4 islands of one device kind and one
node size: its data-parallel ranks are then dealt out equally, or in proportion to the usable nodes
(reduced by their greatest common divisor). Targets with mixed stages also have parts on two small
islands of unlike kinds in one region, each with its own degrees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from hetplan.cluster.spec import Cluster, Island
from hetplan.plans.placing import stages_with_room
from hetplan.search.families.allowed import divisors

MOST_ISLANDS_OF_A_UNION = 4
MOST_MIXED_DEVICES = 16
"""Usable devices of two islands whose kinds a stage may mix: with more, pipelines side by side and
stages of unlike size are as fine a cut, and the choices would outnumber all others."""
FEW_SAMPLES = 8
"""Up to here every split of a microbatch between unlike parts is tried; above, the two that are
nearest to the ratio of their peak rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Islands that have room for stages of some degrees."""

    islands: tuple[int, ...]
    dps: tuple[int, ...]
    """Data-parallel ranks on each."""
    stages: int
    """How many such stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPart:
    """One island's part of a mixed stage."""

    island: int
    tp: int
    dp: int
    microbatch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRoom:
    """Two islands of unlike kinds that have room for stages with a part on each."""

    parts: tuple[MixedPart, MixedPart]
    stages: int


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """Answers for one cluster, as `allowed_cluster` left it."""

    cluster: Cluster
    most_stages: int
    """Stages beyond this are not counted."""
    unions: bool
    """Whether stages may lie on several islands."""
    _found: dict[tuple[int, int, int], tuple[Room, ...]] = field(default_factory=dict)

    @cached_property
    def usable(self) -> tuple[tuple[int, Island], ...]:
        """Islands with at least one usable node, with their positions."""
        return tuple(
            (at, island)
            for at, island in enumerate(self.cluster.islands)
            if island.num_usable_devices
        )

    @cached_property
    def _unions(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """(islands, weights of their data-parallel ranks) of every union of one kind."""
        if not self.unions:
            return ()
        alike: dict[tuple[str, int], list[int]] = {}
        for at, island in self.usable:
            alike.setdefault((island.device.kind, island.devices_per_node), []).append(at)
        found = []
        for group in alike.values():
            for count in range(2, min(len(group), MOST_ISLANDS_OF_A_UNION) + 1):
                for islands in combinations(group, count):
                    nodes = [len(self.cluster.islands[at].usable_nodes) for at in islands]
                    shared = math.gcd(*nodes)
                    weights = {(1,) * count, tuple(each // shared for each in nodes)}
                    found += [(islands, each) for each in sorted(weights)]
        return tuple(sorted(found))

    def of(self, tp: int, cp: int, dp: int) -> tuple[Room, ...]:
        """Every room for stages of these degrees, by islands."""
        key = (tp, cp, dp)
        if key not in self._found:
            self._found[key] = self._rooms(tp, cp, dp)
        return self._found[key]

    def _rooms(self, tp: int, cp: int, dp: int) -> tuple[Room, ...]:
        found = []
        for at, island in self.usable:
            stages = stages_with_room(island, tp, tp * cp * dp)
            if stages:
                found.append(Room(islands=(at,), dps=(dp,), stages=min(stages, self.most_stages)))
        for islands, weights in self._unions:
            share, rest = divmod(dp, sum(weights))
            if rest:
                continue
            dps = tuple(share * weight for weight in weights)
            stages = self.most_stages
            for at, ranks in zip(islands, dps, strict=True):
                room = stages_with_room(self.cluster.islands[at], tp, tp * cp * ranks)
                stages = min(stages, room)
            if stages:
                found.append(Room(islands=islands, dps=dps, stages=stages))
        return tuple(found)

    def mixed(self, samples: int, batch: int, tps: tuple[int, ...]) -> tuple[MixedRoom, ...]:
        """Every room for stages of two unlike kinds that share microbatches of so many samples."""
        found: list[MixedRoom] = []
        if samples < 2 or not self.unions:
            return ()
        for left, right in self._mixed_pairs:
            for one, two in product(self._parts(left, batch, tps), self._parts(right, batch, tps)):
                stages = min(one[2], two[2], self.most_stages)
                for first, second in _splits(samples, one[1], two[1], self._ratio(one, two)):
                    parts = (
                        MixedPart(island=left, tp=one[0], dp=one[1], microbatch_size=first),
                        MixedPart(island=right, tp=two[0], dp=two[1], microbatch_size=second),
                    )
                    found.append(MixedRoom(parts=parts, stages=stages))
        return tuple(found)

    @cached_property
    def _mixed_pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (left, right)
            for (left, one), (right, two) in combinations(self.usable, 2)
            if one.device.kind != two.device.kind
            and one.region == two.region
            and one.num_usable_devices + two.num_usable_devices <= MOST_MIXED_DEVICES
        )

    def _parts(
        self, at: int, batch: int, tps: tuple[int, ...]
    ) -> list[tuple[int, int, int, float]]:
        """(tp, dp, stages, peak rate of a part) on one island."""
        island = self.cluster.islands[at]
        rate = max((rate for _, rate in island.device.peak_flops_per_second), default=1.0)
        found = []
        for tp, dp in product(tps, divisors(batch)):
            if tp * dp <= island.num_usable_devices:
                stages = stages_with_room(island, tp, tp * dp)
                if stages:
                    found.append((tp, dp, stages, rate * tp * dp))
        return found

    @staticmethod
    def _ratio(one: tuple[int, int, int, float], two: tuple[int, int, int, float]) -> float:
        return one[3] / (one[3] + two[3])


def _splits(samples: int, left: int, right: int, ratio: float) -> list[tuple[int, int]]:
    """Microbatch sizes (a, b) with left * a + right * b = samples, nearest to the ratio first."""
    found = [
        (a, (samples - left * a) // right)
        for a in range(1, (samples - right) // left + 1)
        if (samples - left * a) % right == 0
    ]
    if samples > FEW_SAMPLES:
        found.sort(key=lambda split: (abs(left * split[0] / samples - ratio), split))
        found = sorted(found[:2])
    return found
