"""Solver of families whose schedules split the backward pass: zb-h1, zbv, dualpipev.

Every plan that is looked at is placed and priced whole (`space.plan_evaluator`): the replay says
what its order of passes takes, and what its stages keep. `improve` begins with the rows of the best
plan so far and of the fastest meshes, deals layers out by speed, and moves them, and recomputation,
one by one. `prove` prices every plan of a small family that its busiest stage does not exclude;
other families keep their order-free bound (`bounds.order_free_bound`): m K, K the longest stage.

A stage's layers are dealt over its chunks as evenly as possible, the first one more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.pieces import own_depth
from hetplan.plans.v_schedules import is_v
from hetplan.search.family_solver import FamilySolver, chosen_of_slots
from hetplan.search.interleaved.enumerate import meshes_of, rows
from hetplan.search.interleaved.heuristic import beginnings
from hetplan.search.solver import RESOLUTION, Best, Grounds
from hetplan.search.space.row import INSIDE, NEVER
from hetplan.search.space.stage_table import FIRST, LAST, StageTable

_PRICED = 60
"""Plans that are priced for one row, at 2 to 20 ms each (measured)."""
_ROWS = 3
"""Rows that are begun with."""
_MOST_PASSES = 400_000
"""Of a step; the first replay of longer ones takes more than a second (measured)."""
_LISTED = 300
"""Plans of a family that are priced in a proof, four times more with each `Best.effort`."""
_LOOKED = 20_000
"""Beginnings of cuts that are looked at for them."""


class _Cut(NamedTuple):
    """Layer units and recomputation of every slot."""

    units: tuple[int, ...]
    variant: tuple[int, ...]


class _Price(NamedTuple):
    """The smaller one is better."""

    missing_bytes: float
    """Memory that all stages together lack."""
    seconds: float


class _TooManyError(Exception):
    """More cuts than are worth it."""


class SplitSolver(FamilySolver):
    """Searches the plans of one family with split backward passes."""

    @cached_property
    def space(self) -> StageTable:
        """The numbers of the family's meshes, as if stages had one chunk and 1F1B."""
        return self._maker.unchunked_space(self.family)

    def _improve(self, best: Best) -> None:
        """Offer the best cuts of the likeliest rows."""
        names = self._maker.island_names
        starts = beginnings(self.space, self.family, names, best.chosen)
        for runs in starts[:_ROWS]:
            mesh = meshes_of(runs)
            passes = 3 * len(mesh) * self.family.virtual_stages * self.family.num_microbatches
            start = self._proportional(mesh) if passes <= _MOST_PASSES else None
            if start is not None:
                self._climb(mesh, start, best)

    def _prove(self, best: Best) -> None:
        """Price every plan that may be below the target, where they are few."""
        target, most = best.target, _LISTED * 4**best.effort
        if not target < NEVER:
            return
        known = rows(self.space, self.family, self._room, None, target, most)
        if known is None:
            return
        try:
            cuts = [(mesh, cut) for mesh in known for cut in self._below(mesh, target, most)]
        except _TooManyError:
            return
        if len(cuts) > most:
            return
        least = target
        for mesh, cut in cuts:
            best.check_time()
            best.explored += 1
            least = min(least, self._offer(mesh, cut, best))
        best.raise_bound(self.index, least, Grounds.EVERY_PLAN)

    def _room(self, mesh: Sequence[int]) -> Ints:
        """[P, V] units that a slot may hold: memory is the pricing's matter."""
        rest = (len(mesh) - 1) * self.family.virtual_stages
        shape = len(mesh), len(self.family.recompute)
        return np.full(shape, self.space.num_layers - rest, dtype=np.int64)

    def _below(self, mesh: tuple[int, ...], limit: float, most: int) -> Iterator[_Cut]:
        """Cuts of which no stage alone is busy for as long as the limit."""
        slots, chunks = len(mesh), self.family.virtual_stages
        limit -= self._maker.job.data_loading_seconds
        room = [
            [
                int(np.count_nonzero(self._busy(mesh, s, v) < limit * (1.0 + INSIDE)))
                for v in range(len(self.family.recompute))
            ]
            for s in range(slots)
        ]
        looked = 0

        def cuts(s: int, left: int) -> Iterator[tuple[int, ...]]:
            nonlocal looked
            looked += 1
            if looked > _LOOKED:
                raise _TooManyError
            rest = sum(max(each) - 1 for each in room[s + 1 :])
            for units in range(chunks, min(left, max(room[s]) - 1) + 1):
                if s == slots - 1 and units == left:
                    yield (units,)
                elif s < slots - 1 and 0 < left - units <= rest:
                    yield from ((units, *more) for more in cuts(s + 1, left - units))

        found = 0
        for units in cuts(0, self.space.num_layers):
            choices = [
                [v for v, many in enumerate(room[s]) if n < many] for s, n in enumerate(units)
            ]
            for variant in product(*choices):
                found += 1
                if found > most:
                    raise _TooManyError
                yield _Cut(units, variant)

    def _busy(self, mesh: Sequence[int], slot: int, variant: int) -> Floats:
        """[L + 1] seconds of all passes of a slot by its units."""
        space = self.space
        n = np.arange(space.num_layers + 1)
        at = mesh[slot]
        each = space.forward[variant, at] + space.backward[variant, at]
        besides = space.extra_forward[:, variant, at] + space.extra_backward[:, variant, at]
        first, head = slot == 0, slot == (0 if is_v(self.family.schedule) else len(mesh) - 1)
        extra = besides[FIRST] * first + besides[LAST] * head
        seconds: Floats = space.num_microbatches * (each * n + extra)
        return seconds

    def _proportional(self, mesh: tuple[int, ...]) -> _Cut | None:
        """Units that keep all slots equally busy with their fastest recomputation."""
        chunks, total = self.family.virtual_stages, self.space.num_layers
        if total < chunks * len(mesh):
            return None
        variants = range(len(self.family.recompute))
        busy = [[self._busy(mesh, s, v) for v in variants] for s in range(len(mesh))]
        variant = [min(variants, key=lambda v: float(row[v][chunks])) for row in busy]
        units = [chunks] * len(mesh)
        for _ in range(total - sum(units)):
            after = [float(row[v][n + 1]) for row, v, n in zip(busy, variant, units, strict=True)]
            units[after.index(min(after))] += 1
        return _Cut(tuple(units), tuple(variant))

    def _climb(self, mesh: tuple[int, ...], cut: _Cut, best: Best) -> None:
        """Move from a cut to better ones, by memory that lacks first, and offer the last."""
        price, left, moved = self._price(mesh, cut, best), _PRICED, True
        while moved and left > 0:
            moved = False
            for other in self._neighbours(mesh, cut):
                best.check_time()
                left -= 1
                found = self._price(mesh, other, best)
                if found[0] < price[0] or (
                    found[0] == price[0] and found[1] < price[1] * (1.0 - RESOLUTION)
                ):
                    cut, price, moved = other, found, True
                    break
                if left <= 0:
                    break
        if price.missing_bytes == 0.0:
            self._offer(mesh, cut, best)

    def _neighbours(self, mesh: tuple[int, ...], cut: _Cut) -> Iterator[_Cut]:
        """A unit from one slot to another, or another recomputation; the busiest slots first."""
        busy = [float(self._busy(mesh, s, v)[n]) for s, (n, v) in enumerate(zip(*cut, strict=True))]
        order = sorted(range(len(mesh)), key=lambda s: (-busy[s], s))
        for giver in order:
            for v in range(len(self.family.recompute)):
                if v != cut.variant[giver]:
                    yield cut._replace(variant=_with(cut.variant, giver, v))
            if cut.units[giver] <= self.family.virtual_stages:
                continue
            for taker in reversed(order):
                if taker != giver:
                    units = _with(cut.units, giver, cut.units[giver] - 1)
                    yield cut._replace(units=_with(units, taker, cut.units[taker] + 1))

    def _price(self, mesh: tuple[int, ...], cut: _Cut, best: Best) -> _Price:
        best.replays += 1
        step = self._maker.evaluator.step(self._chosen(mesh, cut))
        uses = [use for pipeline in step.memory for use in pipeline]
        missing = sum(max(0.0, use.total_bytes - use.available_bytes) for use in uses)
        return _Price(missing, step.step_seconds)

    def _offer(self, mesh: tuple[int, ...], cut: _Cut, best: Best) -> float:
        """Offer a cut; its step, infinite where it does not fit."""
        chosen = self._chosen(mesh, cut)
        best.replays += 1
        seconds = self._maker.evaluator.seconds(chosen)
        if seconds < math.inf:
            best.offer(self.index, chosen, seconds)
        return seconds

    def _chosen(self, mesh: tuple[int, ...], cut: _Cut) -> ChosenPlan:
        family, slots = self.family, len(mesh)
        m, chunks = family.num_microbatches, family.virtual_stages
        depth = [own_depth(family.schedule, s, slots, m, chunks) for s in range(slots)]
        units, variant = (np.array(each, dtype=np.int64) for each in cut)
        names = self._maker.island_names
        return chosen_of_slots(family, self.space, names, mesh, variant, units, depth)


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
