"""Which rows of slots does a family have: meshes in every order, stages of each next to each other.

A number of stages P is one that the target can interleave (`stage_counts`): P v <= L, at least 3,
and m a multiple of P.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetplan.job.check import MIN_INTERLEAVED_STAGES
from hetplan.search.families.family import Family
from hetplan.search.families.space import MAX_FREE_ISLANDS, Space
from hetplan.search.interleaved.memory import MemoryRoom

_INSIDE = 1e-12
"""A sum in another order differs by less than this part of itself."""

_LOOKED_PER_ROW = 10
"""Beginnings of rows that are looked at for every row that may be listed."""


def stage_counts(space: Space, family: Family) -> tuple[int, ...]:
    """Numbers of stages that the family can have, increasing; `space` may be of other chunks."""
    m, chunks = family.num_microbatches, family.virtual_stages
    most = min(space.num_layers // chunks, space.stage_limit, int(space.max_stages.sum()), m)
    every = range(MIN_INTERLEAVED_STAGES, most + 1)
    return tuple(p for p in every if m % p == 0 and space.stages in (0, p))


def most_by_time(space: Space, limit: float) -> list[int]:
    """Layer units of a stage of each mesh whose passes take at most `limit` in a step."""
    each = space.num_microbatches * (space.forward + space.backward).min(axis=0)
    with np.errstate(divide="ignore"):
        fits = np.minimum(limit / each, space.num_layers) * (1 + _INSIDE)
    return [int(most) for most in fits]


def rows(
    space: Space, family: Family, room: MemoryRoom, limit: float, most: int
) -> list[tuple[int, ...]] | None:
    """Meshes of every slot of all rows, by number of stages; None where there are more than `most`.

    Without rows whose slots cannot hold all units in steps of `limit`, by memory and by time.
    """
    by_time = np.array(most_by_time(space, limit))
    found: list[tuple[int, ...]] = []
    for stages in stage_counts(space, family):
        # A mesh's units by position: as if all slots were of it.
        fits = [
            room.most_units(family, (mesh,) * stages, space.num_layers).max(axis=1)
            for mesh in range(len(by_time))
        ]
        held = np.minimum(np.array(fits), by_time[:, None]).T
        listing = _Listing(space, family.virtual_stages, held.tolist(), most, found)
        if not listing.add((), 0, 0, space.num_layers):
            return None
    return found


@dataclass(slots=True)
class _Listing:
    """Rows of one number of stages while they are listed."""

    space: Space
    chunks: int
    held: list[list[int]]
    """[P][M] most units that a slot in this place can hold."""
    most: int
    found: list[tuple[int, ...]]
    looked: int = 0
    room: list[int] = field(default_factory=list)
    """Most units of all slots from each place on, whichever their meshes are."""
    regions: bool = False
    """Whether meshes of a region stand together."""

    def __post_init__(self) -> None:
        islands = {island for each in self.space.family.meshes for island in each.islands}
        self.regions = len(islands) > MAX_FREE_ISLANDS
        left = [0]
        for place in reversed(self.held):
            left.append(left[-1] + max(place))
        self.room = left[::-1]

    def add(self, before: tuple[tuple[int, int], ...], used: int, at: int, units: int) -> bool:
        """Rows that begin with these runs of `at` slots and have `units` units behind them.

        False where they are too many.
        """
        space = self.space
        self.looked += 1
        if self.looked > _LOOKED_PER_ROW * self.most:
            return False
        if at == len(self.held):
            if units <= 0 and space.may_be_last[before[-1][0]]:
                self.found.append(tuple(mesh for mesh, count in before for _ in range(count)))
            return len(self.found) <= self.most
        if self.room[at] < units:
            return True
        for mesh, mask in enumerate(space.island_mask.tolist()):
            if used & mask or not (before or space.may_be_first[mesh]):
                continue
            if self.regions and not _region_stays(space, before, mesh):
                continue
            left = units
            for end in range(at, min(len(self.held), at + int(space.max_stages[mesh]))):
                if self.held[end][mesh] < self.chunks:
                    break
                left -= self.held[end][mesh]
                runs = (*before, (mesh, end + 1 - at))
                if not self.add(runs, used | mask, end + 1, left):
                    return False
        return True


def _region_stays(space: Space, before: tuple[tuple[int, int], ...], mesh: int) -> bool:
    """Whether the mesh may come next where regions stand together."""
    if not before:
        return True
    region, last = int(space.region[mesh]), int(space.region[before[-1][0]])
    return region == last or all(int(space.region[each]) != region for each, _ in before)
