"""Every row of slots of an interleaved family, and every cut of a row below a limit.

Rows have meshes in every order, stages of each next to each other. A number of stages P is one that
the target can interleave (`stage_counts`): P v <= L, at least 3, and m a multiple of P.

Cuts are found by the labels of `interleaved.bound`. Slots are cut from the first to the last. A cut
is followed as long as some label of the slots below keeps every chain of the slots above, and its
own, under the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.plans.check_job import MIN_INTERLEAVED_STAGES
from hetplan.search.interleaved.memory import MemoryRoom
from hetplan.search.interleaved.rows import (
    AWAY,
    AWAY_BACK,
    OWN,
    RISE,
    SKIP,
    SKIP_BACK,
    TURN,
    TURN_BACK,
    Arrays,
    cut_seconds,
)
from hetplan.search.one_f_one_b.replay import NEVER
from hetplan.search.space.family import Family
from hetplan.search.space.stage_table import StageTable

_INSIDE = 1e-12
"""A sum in another order differs by less than this part of itself."""

_LOOKED_PER_ROW = 10
"""Beginnings of rows that are looked at for every row that may be listed."""


def stage_counts(space: StageTable, family: Family) -> tuple[int, ...]:
    """Numbers of stages that the family can have, increasing; `space` may be of other chunks."""
    m, chunks = family.num_microbatches, family.virtual_stages
    most = min(space.num_layers // chunks, space.stage_limit, int(space.max_stages.sum()), m)
    every = range(MIN_INTERLEAVED_STAGES, most + 1)
    return tuple(p for p in every if m % p == 0 and space.stages in (0, p))


def most_by_time(space: StageTable, limit: float) -> list[int]:
    """Layer units of a stage of each mesh whose passes take at most `limit` in a step."""
    each = space.num_microbatches * (space.forward + space.backward).min(axis=0)
    with np.errstate(divide="ignore"):
        fits = np.minimum(limit / each, space.num_layers) * (1 + _INSIDE)
    return [int(most) for most in fits]


def rows(
    space: StageTable, family: Family, room: MemoryRoom, limit: float, most: int
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

    space: StageTable
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
        self.regions = self.space.regions_apart
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


def _region_stays(space: StageTable, before: tuple[tuple[int, int], ...], mesh: int) -> bool:
    """Whether the mesh may come next where regions stand together."""
    if not before:
        return True
    region, last = int(space.region[mesh]), int(space.region[before[-1][0]])
    return region == last or all(int(space.region[each]) != region for each, _ in before)


@kernel
def _open(
    row: Arrays,
    terms: Floats,
    variant: Ints,
    units: Ints,
    slot: int,
    labels: Floats,
    count: int,
    limit: float,
) -> bool:
    """Whether the slots below `slot` can be cut so that no chain seen here reaches the limit."""
    rise = np.zeros(slot + 2)
    for i in range(slot + 1):
        rise[i + 1] = rise[i] + terms[i, variant[i], units[i], RISE]
    for e in range(count):
        turn, turn_back = labels[e, 0], labels[e, 1]
        fine = rise[slot + 1] + labels[e, 4] < limit
        for i in range(slot, -1, -1):
            if not fine:
                break
            own = terms[i, variant[i], units[i]]
            gain = max(0.0, turn - own[SKIP])
            gain_back = max(0.0, turn_back - own[SKIP_BACK])
            if i == 0 and row.lockstep:
                gain = max(gain, labels[e, 2] - own[AWAY])
                gain_back = max(gain_back, labels[e, 3] - own[AWAY_BACK])
            gained = max(gain, gain_back) if row.one_detour else gain + gain_back
            fine = rise[i] + own[OWN] + gained < limit
            turn += own[TURN]
            turn_back += own[TURN_BACK]
        if fine:
            return True
    return False


@kernel
def list_cuts(
    row: Arrays,
    terms: Floats,
    total: int,
    cutoff: float,
    labels: Floats,
    counts: Ints,
    most: int,
    effort: int,
) -> tuple[Ints, int, bool]:
    """[cuts, 2, P] variants and units of cuts whose bound is below `cutoff`, how many they are, and
    whether they are all: at most `most`, and at most `effort` places looked at.
    """
    slots, variants = row.unit_forward.shape
    found = np.empty((most, 2, slots), np.int64)
    variant, units = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    left = np.zeros(slots + 1, np.int64)
    left[0] = total
    units[0] = row.chunks - 1
    limit = cutoff
    kept, looked, s = 0, 0, 0
    while s >= 0:
        # The next choice of slot s.
        units[s] += 1
        if units[s] > min(left[s], row.most[s, variant[s]]):
            variant[s] += 1
            units[s] = row.chunks - 1
            if variant[s] == variants:
                variant[s] = 0
                s -= 1
            continue
        looked += 1
        if looked > effort:
            return found, kept, False
        if s == 0:
            n = units[0]
            limit = cutoff - row.closing - row.after[0, n] - row.leaving[0, n]
        rest = left[s] - units[s]
        if not _open(
            row, terms, variant, units, s, labels[s + 1, rest], counts[s + 1, rest], limit
        ):
            continue
        if s == slots - 1:
            if kept == most:
                return found, kept, False
            found[kept, 0] = variant
            found[kept, 1] = units
            kept += 1
            continue
        left[s + 1] = rest
        s += 1
        variant[s] = 0
        units[s] = row.chunks - 1
    return found, kept, True


@kernel
def fastest(row: Arrays, cuts: Ints, count: int) -> tuple[float, int]:
    """Least step of these cuts by lock-step replay, and which one it is."""
    best, at = NEVER, -1
    for i in range(count):
        seconds = cut_seconds(row, cuts[i, 0], cuts[i, 1])
        if seconds < best:
            best, at = seconds, i
    return best, at
