"""Enumeration of interleaved families: every plan, where they are few.

Every row of slots of a family, and every cut of a row below a limit. Rows have meshes in every
order, all stages of a mesh next to each other. A number of stages P is one that the target can
interleave (`stage_counts`): P v <= L, at least 3, and m a multiple of P.

Cuts are found by the labels of `interleaved.bound`. Slots are cut from the first to the last. A cut
is followed as long as some label of the slots below keeps every chain of the slots above, and its
own, under the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.kernels import kernel
from hetplan.plans.check_job import MIN_INTERLEAVED_STAGES
from hetplan.plans.v_schedules import microbatch_multiple as multiple
from hetplan.search.interleaved.bound import CutBound, borders_of, gained_of
from hetplan.search.interleaved.chains import OWN, PASS, RISE, TURN, TURN_BACK, Arrays
from hetplan.search.interleaved.rows import cut_seconds
from hetplan.search.space.family import Family
from hetplan.search.space.row import INSIDE, NEVER, region_follows
from hetplan.search.space.stage_table import StageTable

Runs = tuple[tuple[int, int], ...]
"""(mesh, stages) of a row from the first slot to the last."""

MostUnits = Callable[[Sequence[int]], Ints]
"""[P, V] layer units that fit on each slot of these meshes (`chunk_memory`); 0: none fits."""

_LOOKED_PER_ROW = 10
"""Beginnings of rows that are looked at for every row that may be listed."""


def stage_counts(space: StageTable, family: Family) -> tuple[int, ...]:
    """Numbers of stages that the family can have, increasing; `space` may be of other chunks."""
    m, chunks = family.num_microbatches, family.virtual_stages
    most = min(space.num_layers // chunks, space.stage_limit, int(space.max_stages.sum()))
    if family.splits:
        most = min(most, m // 2) if family.schedule == "dualpipev" else most
        every = [p for p in range(2, most + 1) if m % multiple(family.schedule, chunks, p, m) == 0]
    else:
        every = [p for p in range(MIN_INTERLEAVED_STAGES, min(most, m) + 1) if m % p == 0]
    return tuple(p for p in every if space.stages in (0, p))


def meshes_of(runs: Runs) -> tuple[int, ...]:
    """Mesh of every slot."""
    return tuple(mesh for mesh, stages in runs for _ in range(stages))


def most_by_time(space: StageTable, limit: float) -> list[int]:
    """Layer units of a stage of each mesh whose passes take at most `limit` in a step."""
    each = space.num_microbatches * (space.forward + space.backward).min(axis=0)
    with np.errstate(divide="ignore"):
        fits = np.minimum(limit / each, space.num_layers) * (1 + INSIDE)
    return [int(most) for most in fits]


class _TooManyRowsError(Exception):
    """More rows, or beginnings of rows, than are worth it."""


@dataclass(slots=True, kw_only=True)
class RowListing:
    """Rows of one number of stages P over M meshes, by runs of stages from the first slot on."""

    masks: Sequence[int]
    """[M] islands as bits; no island is used twice."""
    most_stages: Sequence[int]
    """[M]"""
    ends: Sequence[int]
    """[M] whether the last slot may be of this mesh."""
    held: Sequence[Sequence[int]]
    """[P][M] most units that a slot in this place can hold."""
    chunks: int
    next_meshes: Callable[[Runs], Iterable[int]]
    """Meshes that may come behind these runs."""
    enough: Callable[[int, int, int], bool]
    """Whether slots from a place on, without a set of islands, may hold so many units."""
    most_rows: int
    most_looked: float = math.inf
    """Beginnings of rows that are looked at."""
    _rows: list[tuple[int, ...]] = field(default_factory=list)
    _looked: int = 0

    def rows(self, units: int) -> list[tuple[int, ...]] | None:
        """Meshes of every slot of all rows that can hold the units; None where they are too many.

        Only once for each listing.
        """
        try:
            self._add((), 0, 0, units)
        except _TooManyRowsError:
            return None
        return self._rows

    def _add(self, runs: Runs, used: int, at: int, units: int) -> None:
        """Rows that begin with these runs of `at` slots and have `units` units behind them."""
        self._looked += 1
        if self._looked > self.most_looked:
            raise _TooManyRowsError
        if at == len(self.held):
            if units <= 0 and self.ends[runs[-1][0]]:
                self._rows.append(meshes_of(runs))
                if len(self._rows) > self.most_rows:
                    raise _TooManyRowsError
            return
        if not self.enough(used, at, units):
            return
        for mesh in self.next_meshes(runs):
            mask = self.masks[mesh]
            if used & mask:
                continue
            left = units
            for end in range(at, min(len(self.held), at + self.most_stages[mesh])):
                if self.held[end][mesh] < self.chunks:
                    break
                left -= self.held[end][mesh]
                self._add((*runs, (mesh, end + 1 - at)), used | mask, end + 1, left)


def rows(
    space: StageTable,
    family: Family,
    most_units: MostUnits,
    exchange: Exchange | None,
    limit: float,
    most: int,
) -> list[tuple[int, ...]] | None:
    """Meshes of every slot of all rows, by number of stages; None where there are more than `most`.

    Without rows that no step below `limit` has: by what their slots can hold, by memory and by
    time, and by their boundaries (`bound.borders_of`; None as `exchange`: those count nothing).
    """
    by_time = np.array(most_by_time(space, limit))
    found: list[tuple[int, ...]] = []
    for stages in stage_counts(space, family):
        # A mesh's units by position: as if all slots were of it.
        fits = [most_units((mesh,) * stages).max(axis=1) for mesh in range(len(by_time))]
        held = np.minimum(np.array(fits), by_time[:, None]).T
        behind = held.max(axis=1)[::-1].cumsum()[::-1].tolist()
        may_follow = np.ones((len(by_time), len(by_time)), dtype=np.bool_)
        rings = space.may_be_last[:, None] & space.may_be_first
        if exchange is not None:
            borders = borders_of(space, family.virtual_stages, exchange, stages)
            may_follow, rings = ~borders.blocked(limit), borders.rings(limit)
        follows = [np.flatnonzero(each).tolist() for each in may_follow]
        begins = np.flatnonzero(rings.any(axis=0)).tolist()
        ends = np.asarray(rings.any(axis=1)).tolist()
        listing = RowListing(
            masks=space.island_mask.tolist(),
            most_stages=space.max_stages.tolist(),
            ends=ends,
            held=held.tolist(),
            chunks=family.virtual_stages,
            next_meshes=partial(_next_meshes, space, follows, begins),
            enough=partial(_may_hold, behind),
            most_rows=most - len(found),
            most_looked=_LOOKED_PER_ROW * most,
        )
        some = listing.rows(space.num_layers)
        if some is None:
            return None
        found += some
    return found


def _may_hold(behind: Sequence[int], used: int, at: int, units: int) -> bool:
    """By what slots from each place on can hold, whichever their meshes are."""
    return behind[at] >= units


def _next_meshes(
    space: StageTable, follows: Sequence[Sequence[int]], begins: Sequence[int], runs: Runs
) -> Iterable[int]:
    """Where the islands are many, meshes of one region stand together."""
    if not runs:
        return begins
    if not space.regions_apart:
        return follows[runs[-1][0]]
    before = [int(space.region[mesh]) for mesh, _ in runs]
    return [
        mesh for mesh in follows[runs[-1][0]] if region_follows(before, int(space.region[mesh]))
    ]


@kernel
def _open(row: Arrays, variant: Ints, units: Ints, slot: int, labels: Floats, limit: float) -> bool:
    """Whether the slots below `slot` can be cut so that no chain seen here reaches the limit.

    labels: those of the slots below.
    """
    rise = np.zeros(slot + 2)
    for i in range(slot + 1):
        rise[i + 1] = rise[i] + row.terms[i, variant[i], units[i], RISE]
    for e in range(labels.shape[0]):
        turn, turn_back, way = labels[e, 0], labels[e, 1], labels[e, 5]
        fine = rise[slot + 1] + labels[e, 4] < limit
        for i in range(slot, -1, -1):
            if not fine:
                break
            own = row.terms[i, variant[i], units[i]]
            away = i == 0 and row.lockstep
            gained = gained_of(row, own, turn, turn_back, way, labels[e], away)
            fine = rise[i] + own[OWN] + gained < limit
            turn += own[TURN]
            turn_back += own[TURN_BACK]
            way += own[PASS]
        if fine:
            return True
    return False


@kernel
def list_cuts(
    row: Arrays, bound: CutBound, cutoff: float, most: int, effort: int
) -> tuple[Ints, int, bool]:
    """[cuts, 2, P] variants and units of cuts whose bound is below `cutoff`, how many they are, and
    whether they are all: at most `most`, and at most `effort` places looked at.

    bound: `least_bound` with this cutoff or a larger one.
    """
    slots, variants = row.unit_forward.shape
    found = np.empty((most, 2, slots), np.int64)
    variant, units = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    left = np.zeros(slots + 1, np.int64)
    left[0] = row.units
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
        labels = bound.labels[s + 1, rest, : bound.counts[s + 1, rest]]
        if not _open(row, variant, units, s, labels, limit):
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
