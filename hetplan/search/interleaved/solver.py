"""Solver of interleaved families: improve, sharpen, prove, list.

`improve` visits the likeliest rows (`heuristic`), cuts them by the program and by work, and moves
layers by replay. `prove` bounds every row (`bound`): by what its slots can hold, then by the
program over its cuts; then it lists every cut that the program's bound leaves open (`enumerate`). A
row of which nothing is left is closed at the target of that moment. Families with more rows than
can be listed are bounded over sets of islands (`island_bound`), which also says where to look for
plans. Families that differ in nothing but their chunks have one space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.cost.arrays import Ints
from hetplan.job.trainer import trainer_settings
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.pieces import own_depth
from hetplan.search.family_solver import FamilySolver, chosen_of_slots
from hetplan.search.interleaved.bound import CutBound, capacity_bound, label_bytes, least_bound
from hetplan.search.interleaved.enumerate import (
    fastest,
    list_cuts,
    meshes_of,
    rows,
    stage_counts,
)
from hetplan.search.interleaved.heuristic import (
    beginnings,
    legal,
    like,
    neighbours,
    polish,
    proportional,
    runs_of,
    units_of,
)
from hetplan.search.interleaved.island_bound import (
    IslandProgram,
    island_program,
    least_open,
    program_bytes,
)
from hetplan.search.interleaved.rows import Row, row_bytes, row_of
from hetplan.search.solver import Best
from hetplan.search.space.chunk_memory import ChunkMemory
from hetplan.search.space.family import Family
from hetplan.search.space.row import NEVER
from hetplan.search.space.stage_table import StageTable
from hetplan.search.table_maker import TableMaker

_MAX_ROWS = 3000
"""Rows of a family that are listed: about 0.5 s at 0.15 ms each (measured)."""

_FEW_ROWS = 100
"""Rows of a family that are looked at without ends of the step first."""

_MOST_LABEL_BYTES = 600_000_000
"""Of the program over the cuts of one row: 600 slots of 1,000 layers."""

_FIRST_ROWS = 4
"""Rows that are cut before the proof."""
_POLISH_REPLAYS = 400
"""Replays that polish one cut, and passes in all of them: about 0.4 s at 9 ns each (measured)."""
_POLISH_WORK = 40_000_000

_ROWS_CLIMBED = 60
"""Rows that are looked at where there are too many to list."""

_HALVINGS = 7
"""Of the range of a bound by islands: to within a hundredth of it."""

_MAX_CUTS = 20_000
"""Cuts of a row that are replayed one by one: about 0.6 s at 30 us each (measured)."""
_NEAR = 1.1
"""Cuts this much above the best step are polished in a proof."""

_MAX_WORK = 50_000_000
"""Passes in all replays of one proof, ten times more with each `Best.effort`: about 0.5 s at 9 ns
each (measured)."""
_GENERAL_CUTS = 2_000
"""The same where the general replay has to be asked, at 0.3 ms each."""
_OFFERED = 20
"""Cuts of a row that are priced whole where compute hides reductions, at a millisecond each."""
_EFFORT = 2_000_000
"""Places that are looked at for one list of cuts."""


@dataclass(slots=True)
class _Open:
    """A row of the family, and the least that is known of its plans."""

    mesh: tuple[int, ...]
    bound: float
    row_of: Callable[[tuple[int, ...]], Row]

    @property
    def row(self) -> Row:
        """Its numbers: those of all rows would take more memory than there is."""
        return self.row_of(self.mesh)

    def program(self, cutoff: float, best: Best) -> CutBound | None:
        """The bound of its cuts below the cutoff; None where that takes too much memory."""
        arrays = self.row.arrays
        if label_bytes(len(self.mesh), arrays.units) > _MOST_LABEL_BYTES:
            return None
        return least_bound(arrays, min(cutoff, NEVER), best.check_time)


class InterleavedSolver(FamilySolver):
    """Searches the plans of one family under interleaved 1F1B."""

    def __init__(self, index: int, family: Family, maker: TableMaker) -> None:
        super().__init__(index, family, maker)
        self._listed: list[_Open] | None = None
        self._whole = True
        """Whether all rows were listed, so that each can be bounded."""

    @cached_property
    def space(self) -> StageTable:
        """The numbers of the family's meshes."""
        return self._maker.unchunked_space(self.family)

    @cached_property
    def _memory(self) -> ChunkMemory:
        return self._maker.chunk_memory(self.family)

    def _improve(self, best: Best) -> None:
        """Offer the best cuts of the likeliest rows."""
        limit = min(best.target, NEVER)
        self._like_best(best)
        likeliest = self._rows(limit, best)
        if not self._whole:
            likeliest = self._likely(best)
        for one in likeliest[:_FIRST_ROWS]:
            best.check_time()
            if one.bound >= limit:
                return
            self.offer_row(one, best)

    def _like_best(self, best: Best) -> None:
        """The row and the cut of the best plan so far, where the family has them."""
        space, family = self.space, self.family
        runs = like(family, self._maker.island_names, best.chosen)
        mesh = meshes_of(runs)
        if best.chosen is None or len(mesh) not in stage_counts(space, family):
            return
        if not legal(space, runs):
            return
        one = self._open(mesh)
        if one.bound < min(best.target, NEVER):
            units = np.array(units_of(space, best.chosen), dtype=np.int64)
            arrays = one.row.arrays
            cost = arrays.unit_forward + arrays.unit_backward
            variant = np.where(arrays.most >= units[:, None], cost, NEVER).argmin(axis=1)
            self.offer_cut(one.row, variant.astype(np.int64), units, best)

    def _likely(self, best: Best) -> list[_Open]:
        """Rows to begin with where there are too many to list, and what moves make of the best."""
        space, family = self.space, self.family
        starts = dict.fromkeys(beginnings(space, family, self._maker.island_names, best.chosen))
        least = min(best.target, NEVER)
        for stages in stage_counts(space, family):
            best.check_time()
            program = self._island_program(stages)
            if program is None:
                continue
            _, mesh = least_open(program, 0.0, least, _HALVINGS)
            if legal(space, runs_of(mesh)):
                starts[runs_of(mesh)] = None
        found = []
        for runs in starts:
            one = self._open(meshes_of(runs))
            if one.bound < least:
                cut = one.program(NEVER, best)
                one.bound = one.bound if cut is None else cut.seconds
                found.append(one)
        found.sort(key=lambda one: (one.bound, one.mesh))
        if found and found[0].bound < NEVER:
            found.insert(0, self._climbed(found[0], best))
        return [one for one in found if one.bound < NEVER]

    def _climbed(self, top: _Open, best: Best) -> _Open:
        """The row of least bound that moves from this one to the next better row reach."""
        space, family = self.space, self.family
        tried, moved = 0, True
        while moved and tried < _ROWS_CLIMBED:
            moved = False
            for runs in neighbours(space, family, runs_of(top.mesh)):
                best.check_time()
                tried += 1
                one = self._open(meshes_of(runs))
                cut = one.program(top.bound, best) if one.bound < top.bound else None
                one.bound = NEVER if cut is None else cut.seconds
                if one.bound < top.bound:
                    top, moved = one, True
                    break
                if tried >= _ROWS_CLIMBED:
                    break
        return top

    def offer_row(self, one: _Open, best: Best) -> None:
        """Cut and polish a row of slots by work and by the program; offer the fastest."""
        start = proportional(one.row)
        if start is not None:
            self.offer_cut(one.row, *start, best)
        cut = one.program(best.seconds, best)
        if cut is not None and cut.seconds < NEVER:
            self.offer_cut(one.row, cut.variant, cut.units, best)

    def offer_cut(self, row: Row, variant: Ints, units: Ints, best: Best) -> None:
        """Polish a cut and offer it."""
        most = min(_POLISH_REPLAYS, 1 + _POLISH_WORK // row.work)
        seconds, variant, units, replays = polish(row, variant, units, most)
        best.replays += replays
        if seconds < NEVER:
            self._offer(row, variant, units, seconds, best)

    def _offer(self, row: Row, variant: Ints, units: Ints, seconds: float, best: Best) -> float:
        """Offer the cut if it is wanted; its seconds, by its whole price where it was asked."""
        if seconds < best.wanted(self.index):
            chosen = self._chosen(row, variant, units)
            if self._hides:
                seconds = max(seconds, self._maker.evaluator.seconds(chosen))
            best.offer(self.index, chosen, seconds)
        return seconds

    @cached_property
    def _hides(self) -> bool:
        """Whether compute hides reductions: by how much depends on the chunks, which rows leave
        open.
        """
        return trainer_settings(self._maker.job).overlap_grad_reduce

    def _prove(self, best: Best) -> None:
        """Bound every row, list the cuts that are left open, and raise the family's bound."""
        least = limit = min(best.target, NEVER)
        if best.effort == 0 and self._closed_by_passes(limit):
            best.raise_bound(self.index, limit if limit < NEVER else float("inf"))
            return
        if not self._whole:
            self._listed = None  # fewer rows may be below this limit
        left, replays = _MAX_WORK * 10**best.effort, best.replays
        for one in self._rows(limit, best):
            best.check_time()
            if one.bound < best.target:
                one.bound = max(one.bound, self._prove_row(one, best, left))
                left -= (best.replays - replays) * one.row.work
                replays = best.replays
            least = min(least, one.bound)
        if not self._whole:
            least = self._least_of_islands(best)
        best.raise_bound(self.index, least if least < NEVER else float("inf"))

    def _closed_by_passes(self, limit: float) -> bool:
        """Whether no row has a step below `limit` even if nothing followed the last pass: most of
        the time of a stage table goes into that.
        """
        space = self._maker.unchunked_space(self.family, ends=False)
        most_units, exchange = self._memory.most_units, self._maker.exchange
        meshes = rows(space, self.family, most_units, exchange, limit, _FEW_ROWS)
        if meshes is None:
            return False
        chunks = self.family.virtual_stages
        every = (row_of(space, mesh, most_units(mesh), chunks, exchange) for mesh in meshes)
        return all(capacity_bound(row.arrays) >= limit for row in every)

    def _prove_row(self, one: _Open, best: Best, left: int) -> float:
        """A bound of the row: the target where no cut of it is below.

        `left`: passes that replays of its cuts may run together.
        """
        target, row = best.target, one.row
        best.explored += 1
        cut = one.program(target, best)
        if cut is None:
            return one.bound
        if cut.seconds >= NEVER:
            return min(target, NEVER)
        best.replays += 1
        if row.seconds(cut.variant, cut.units) < _NEAR * best.seconds:
            self.offer_cut(row, cut.variant, cut.units, best)
        if cut.seconds >= best.target:
            return cut.seconds
        best.replays += 1
        least = row.least_seconds(best.target)
        if least >= best.target:
            return best.target
        return max(least, self._list_row(row, cut, best, left))

    def _least_of_islands(self, best: Best) -> float:
        """A bound of all rows, by islands (`island_bound`)."""
        known, least = best.bounds[self.index], NEVER
        for stages in stage_counts(self.space, self.family):
            best.check_time()
            best.explored += 1
            target, program = min(best.target, NEVER), self._island_program(stages)
            if program is None:
                return known
            bound, mesh = least_open(program, known, target, _HALVINGS)
            if legal(self.space, runs_of(mesh)):
                one = self._open(mesh)
                cut = one.program(target, best)
                if cut is not None and cut.seconds < NEVER:
                    self.offer_cut(one.row, cut.variant, cut.units, best)
            least = min(least, bound)
        return least

    def _island_program(self, stages: int) -> IslandProgram | None:
        """None where its tables would be too large: then there is no bound by islands."""
        found = self._maker.kept.value(
            (self.family, stages),
            program_bytes(self.space, stages),
            lambda: island_program(
                self.space, self.family, self._memory.most_units, self._maker.exchange, stages
            ),
        )
        return found if isinstance(found, IslandProgram) else None

    def _rows(self, limit: float, best: Best) -> list[_Open]:
        """Rows that may have a step below `limit`, least bound first; kept once they are listed.

        A later limit is never higher. None, and `_whole` is false, where they are too many.
        """
        if self._listed is None:
            most_units, exchange = self._memory.most_units, self._maker.exchange
            meshes = rows(self.space, self.family, most_units, exchange, limit, _MAX_ROWS)
            if meshes is None:
                meshes = self._rows_by_islands(limit)
            self._whole = meshes is not None
            listed = []
            for mesh in meshes or ():
                best.check_time()
                one = self._open(mesh)
                if one.bound < limit:
                    listed.append(one)
            self._listed = listed
            self._listed.sort(key=lambda one: (one.bound, one.mesh))
        return self._listed

    def _rows_by_islands(self, limit: float) -> list[tuple[int, ...]] | None:
        """The same rows, fewer of them, by what positions can hold (`island_bound`)."""
        found: list[tuple[int, ...]] = []
        for stages in stage_counts(self.space, self.family):
            program = self._island_program(stages)
            some = None if program is None else program.rows(limit, _MAX_ROWS - len(found))
            if some is None:
                return None
            found += [mesh for mesh in some if legal(self.space, runs_of(mesh))]
        return found

    def _open(self, mesh: tuple[int, ...]) -> _Open:
        return _Open(mesh, float(capacity_bound(self._row(mesh).arrays)), self._row)

    def _row(self, mesh: tuple[int, ...]) -> Row:
        """The row over these meshes, kept while there is room."""
        size = row_bytes(self.space, len(mesh))
        found = self._maker.kept_rows.value((self.family, mesh), size, lambda: self._made(mesh))
        return found if isinstance(found, Row) else self._made(mesh)

    def _made(self, mesh: tuple[int, ...]) -> Row:
        most, chunks = self._memory.most_units(mesh), self.family.virtual_stages
        return row_of(self.space, mesh, most, chunks, self._maker.exchange)

    def _list_row(self, row: Row, bound: CutBound, best: Best, left: int) -> float:
        """Replay every cut below the target where they are few; a bound of the row."""
        target, lockstep = best.target, row.arrays.lockstep
        most = min(_MAX_CUTS if lockstep else _GENERAL_CUTS, max(0, left // row.work))
        cuts, count, whole = list_cuts(row.arrays, bound, target, most, _EFFORT)
        best.replays += count
        if lockstep and not self._hides:
            seconds, at = fastest(row.arrays, cuts, count)
            if at >= 0:
                self._offer(row, cuts[at, 0], cuts[at, 1], seconds, best)
        else:
            steps = [row.seconds(*cuts[i]) for i in range(count)]
            order = np.argsort(steps, kind="stable").tolist()
            some = order[: _OFFERED if self._hides else 1]
            priced = []
            for at in some:
                best.check_time()
                priced.append(self._offer(row, cuts[at, 0], cuts[at, 1], steps[at], best))
            rest = [steps[at] for at in order[len(some) :]]
            seconds = min((*priced, *rest), default=NEVER)
        return min(target, max(seconds, bound.seconds)) if whole else bound.seconds

    def _chosen(self, row: Row, variant: Ints, units: Ints) -> ChosenPlan:
        """The plan of these slots."""
        family, slots = self.family, row.slots
        m, chunks = family.num_microbatches, family.virtual_stages
        depth = [own_depth(family.schedule, s, slots, m, chunks) for s in range(slots)]
        names = self._maker.island_names
        return chosen_of_slots(family, self.space, names, row.mesh, variant, units, depth)
