"""The best plan of one interleaved family: rows of slots, cut by a program and by replay.

`improve` visits the likeliest rows, cuts them by the program and by work, and moves layers by
replay. `prove` bounds every row: by what its slots can hold, then by the program over its cuts,
then by replaying every cut that the program's bound leaves open. A row of which nothing is left is
closed at the target of that moment. Families with more rows than can be listed are bounded over
sets of islands (`island_bound`), which also says where to look for plans. Families that differ in
nothing but their chunks have one space.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.pieces import own_depth
from hetplan.search.interleaved.bound import capacity_bound, least_bound
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
from hetplan.search.interleaved.island_bound import IslandProgram, island_program, least_open
from hetplan.search.interleaved.memory import MemoryRoom
from hetplan.search.interleaved.rows import Row, row_of, row_terms
from hetplan.search.solver import Best, OrderFreeBound
from hetplan.search.space.family import Family
from hetplan.search.space.row import NEVER
from hetplan.search.space.stage_table import StageTable
from hetplan.search.table_maker import TableMaker

_MAX_ROWS = 3000
"""Rows of a family that are listed: about 0.5 s at 0.15 ms each (measured)."""

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
_EFFORT = 2_000_000
"""Places that are looked at for one list of cuts."""


@dataclass(slots=True)
class _Open:
    """A row of the family, and the least that is known of its plans."""

    row: Row
    terms: Floats
    bound: float


class InterleavedSolver:
    """Searches the plans of one family under interleaved 1F1B."""

    def __init__(self, index: int, family: Family, maker: TableMaker) -> None:
        self.index = index
        self.family = family
        self.whole = True
        """Whether all rows were listed, so that each can be bounded."""
        self._maker = maker
        self._listed: list[_Open] | None = None
        self._programs: dict[int, IslandProgram] = {}

    @cached_property
    def order_free(self) -> OrderFreeBound:
        """Order-free bound and estimate of the family."""
        return self._maker.order_free(self.family)

    @cached_property
    def space(self) -> StageTable:
        """The numbers of the family's meshes."""
        return self._maker.unchunked_space(self.family)

    @cached_property
    def _memory(self) -> MemoryRoom:
        return self._maker.chunk_memory(self.family)

    def _rows(self, limit: float) -> list[_Open]:
        """Rows that may have a step below `limit`, least bound first; kept once they are listed.

        A later limit is never higher. None, and `whole` is false, where they are too many.
        """
        if self._listed is None:
            meshes = rows(self.space, self.family, self._memory, limit, _MAX_ROWS)
            if meshes is None:
                meshes = self._rows_by_islands(limit)
            self.whole = meshes is not None
            found = [self._open(mesh) for mesh in meshes or ()]
            found = [each for each in found if each.bound < limit]
            found.sort(key=lambda each: (each.bound, each.row.mesh))
            self._listed = found
        return self._listed

    def _open(self, mesh: tuple[int, ...]) -> _Open:
        family, units = self.family, self.space.num_layers
        most = self._memory.most_units(mesh)
        row = row_of(self.space, mesh, most, family.virtual_stages, self._maker.exchange)
        terms = row_terms(row.arrays, units)
        return _Open(row, terms, float(capacity_bound(row.arrays, terms, units)))

    def improve(self, best: Best) -> None:
        """Offer the best cuts of the likeliest rows."""
        if not best.still_open(self.index, self._crossing_bound):
            return
        limit = min(best.target, NEVER)
        self._like_best(best)
        found = self._rows(limit)
        if not self.whole:
            found = self._likely(best)
        for each in found[:_FIRST_ROWS]:
            best.check_time()
            if each.bound >= limit:
                return
            start = proportional(each.row)
            if start is not None:
                self._polish(each.row, *start, best)
            bound, variant, units, _, _ = self._program(each, best.seconds)
            if bound < NEVER:
                self._polish(each.row, variant, units, best)

    def sharpen(self, best: Best) -> None:
        """By the bound that knows boundaries between islands."""
        best.still_open(self.index, self._crossing_bound)

    def _crossing_bound(self, enough: float) -> float:
        return self._maker.crossing_bound(self.family, enough)

    def _like_best(self, best: Best) -> None:
        """The row and the cut of the best plan so far, where the family has them."""
        space, family = self.space, self.family
        runs = like(family, self._maker.island_names, best.chosen)
        row = meshes_of(runs)
        if best.chosen is None or len(row) not in stage_counts(space, family):
            return
        if not legal(space, runs):
            return
        opened = self._open(row)
        if opened.bound < min(best.target, NEVER):
            units = np.array(units_of(space, best.chosen), dtype=np.int64)
            arrays = opened.row.arrays
            cost = arrays.unit_forward + arrays.unit_backward
            variant = np.where(arrays.most >= units[:, None], cost, NEVER).argmin(axis=1)
            self._polish(opened.row, variant.astype(np.int64), units, best)

    def _rows_by_islands(self, limit: float) -> list[tuple[int, ...]] | None:
        """The same rows, fewer of them, by what positions can hold (`interleaved.islands`)."""
        found: list[tuple[int, ...]] = []
        for stages in stage_counts(self.space, self.family):
            some = self._island_program(stages).rows(limit, _MAX_ROWS - len(found))
            if some is None:
                return None
            found += [row for row in some if legal(self.space, runs_of(row))]
        return found

    def _island_program(self, stages: int) -> IslandProgram:
        found = self._programs.get(stages)
        if found is None:
            found = self._programs[stages] = island_program(
                self.space, self.family, self._memory, self._maker.exchange, stages
            )
        return found

    def _likely(self, best: Best) -> list[_Open]:
        """Rows to begin with where there are too many to list, and what moves make of the best."""
        space, family = self.space, self.family
        starts = dict.fromkeys(beginnings(space, family, self._maker.island_names, best.chosen))
        least = min(best.target, NEVER)
        for stages in stage_counts(space, family):
            best.check_time()
            _, row = least_open(self._island_program(stages), 0.0, least, _HALVINGS)
            runs = runs_of(row)
            if runs and legal(space, runs):
                starts[runs] = None
        found = []
        for runs in starts:
            each = self._open(meshes_of(runs))
            if each.bound < least:
                each.bound = self._program(each, NEVER)[0]
                found.append(each)
        found.sort(key=lambda each: (each.bound, each.row.mesh))
        if found and found[0].bound < NEVER:
            found.insert(0, self._climbed(found[0], best))
        return [each for each in found if each.bound < NEVER]

    def _climbed(self, top: _Open, best: Best) -> _Open:
        """The row of least bound that moves from this one to the next better row reach."""
        space, family = self.space, self.family
        tried, moved = 0, True
        while moved and tried < _ROWS_CLIMBED:
            moved = False
            for runs in neighbours(space, family, runs_of(top.row.mesh)):
                best.check_time()
                tried += 1
                each = self._open(meshes_of(runs))
                if each.bound < top.bound:
                    each.bound = self._program(each, top.bound)[0]
                if each.bound < top.bound:
                    top, moved = each, True
                    break
                if tried >= _ROWS_CLIMBED:
                    break
        return top

    def prove(self, best: Best) -> None:
        """Bound every row, replay what is left open, and raise the family's bound."""
        if not best.still_open(self.index, self._crossing_bound):
            return
        least = limit = min(best.target, NEVER)
        if not self.whole:
            self._listed = None  # fewer rows may be below this limit
        left, replays = _MAX_WORK * 10**best.effort, best.replays
        for each in self._rows(limit):
            best.check_time()
            if each.bound < best.target:
                each.bound = max(each.bound, self._close(each, best, left))
                left -= (best.replays - replays) * each.row.work
                replays = best.replays
            least = min(least, each.bound)
        if not self.whole:
            least = self._least_of_islands(best)
        best.raise_bound(self.index, least if least < NEVER else float("inf"))

    def _least_of_islands(self, best: Best) -> float:
        """A bound of all rows, by islands (`interleaved.islands`)."""
        known, least = best.bounds[self.index], NEVER
        for stages in stage_counts(self.space, self.family):
            best.check_time()
            best.explored += 1
            target = min(best.target, NEVER)
            bound, row = least_open(self._island_program(stages), known, target, _HALVINGS)
            runs = runs_of(row)
            if runs and legal(self.space, runs):
                each = self._open(row)
                step, variant, units, _, _ = self._program(each, target)
                if step < NEVER:
                    self._polish(each.row, variant, units, best)
            least = min(least, bound)
        return least

    def _program(self, each: _Open, cutoff: float) -> tuple[float, Ints, Ints, Floats, Ints]:
        found: tuple[float, Ints, Ints, Floats, Ints] = least_bound(
            each.row.arrays, each.terms, each.row.units, min(cutoff, NEVER)
        )
        return found

    def _close(self, each: _Open, best: Best, left: int) -> float:
        """A bound of the row: the target where no cut of it is below.

        `left`: passes that replays of its cuts may run together.
        """
        target = best.target
        best.explored += 1
        bound, variant, units, labels, counts = self._program(each, target)
        if bound >= NEVER:
            return min(target, NEVER)
        best.replays += 1
        if each.row.seconds(variant, units) < _NEAR * best.seconds:
            self._polish(each.row, variant, units, best)
        target = best.target
        if bound >= target:
            return bound
        row, lockstep = each.row, each.row.arrays.lockstep
        cuts, count, whole = list_cuts(
            row.arrays, each.terms, row.units, target, labels, counts,
            min(_MAX_CUTS if lockstep else _GENERAL_CUTS, max(0, left // row.work)), _EFFORT,
        )  # fmt: skip
        if lockstep:
            seconds, at = fastest(row.arrays, cuts, count)
        else:
            steps = [row.seconds(*cuts[i]) for i in range(count)]
            at = int(np.argmin(steps)) if steps else -1
            seconds = steps[at] if steps else NEVER
        best.replays += count
        if at >= 0:
            self._offer(row, cuts[at, 0], cuts[at, 1], seconds, best)
        return min(target, max(seconds, bound)) if whole else bound

    def _polish(self, row: Row, variant: Ints, units: Ints, best: Best) -> None:
        most = min(_POLISH_REPLAYS, 1 + _POLISH_WORK // row.work)
        seconds, variant, units, replays = polish(row, variant, units, most)
        best.replays += replays
        if seconds < NEVER:
            self._offer(row, variant, units, seconds, best)

    def _offer(self, row: Row, variant: Ints, units: Ints, seconds: float, best: Best) -> None:
        if seconds < best.wanted(self.index):
            best.offer(self.index, self._chosen(row, variant, units), seconds)

    def _chosen(self, row: Row, variant: Ints, units: Ints) -> ChosenPlan:
        """The plan of these slots."""
        family, space, islands = self.family, self.space, self._maker.island_names
        m, chunks, slots = family.num_microbatches, family.virtual_stages, row.slots
        stages = []
        for s, at in enumerate(row.mesh):
            each, rest = divmod(int(units[s]), chunks)
            held = [(each + (c < rest)) * space.layers_per_unit for c in range(chunks)]
            held[0] += space.front_layers * (s == 0)
            held[-1] += space.back_layers * (s == slots - 1)
            stages.append(
                family.meshes[at].stage(
                    islands,
                    tuple(held),
                    family.recompute[int(variant[s])],
                    own_depth(family.schedule, s, slots, m, chunks),
                )
            )
        return family.plan(stages)
