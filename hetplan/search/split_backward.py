"""Solver of families whose schedules split the backward pass: zb-h1, zbv, dualpipev.

Every plan that is looked at is placed and priced whole (`space.plan_evaluator`): the replay says
what its order of passes takes, and what its stages keep. `improve` begins with the rows of the best
plan so far and of the fastest meshes, deals layers out by speed, and moves them, and recomputation,
one by one. `prove` bounds every row (`row_bound`) and prices every plan of a small family that its
busiest stage does not exclude. Families with too many rows keep their order-free bound.

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
_HALVINGS = 30
"""Of the range of a row's longest stage."""
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
        loading = self._maker.job.data_loading_seconds
        bounds = [loading + row_bound(self.space, self.family.schedule, mesh) for mesh in known]
        best.raise_bound(self.index, min([target, *bounds]))
        left = [mesh for mesh, bound in zip(known, bounds, strict=True) if bound < target]
        try:
            cuts = [(mesh, cut) for mesh in left for cut in self._below(mesh, target, most)]
        except _TooManyError:
            return
        if not left or len(cuts) > most:
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
                if found < price._replace(seconds=price.seconds * (1.0 - RESOLUTION)):
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


def row_bound(space: StageTable, schedule: str, mesh: Sequence[int]) -> float:
    """Seconds of no shorter step of P slots of these meshes, whatever their layers.

    Of a stage s f, i and w are the seconds of all its forward passes, gradients of inputs and of
    weights of one microbatch, c = f + i + w; m microbatches. Every term below has a factor of at
    least 0, so ends of the model, which only add to the units' seconds, are left out. The busiest
    stage has c >= K, K the least with which all units find room. T >= m c for all schedules.

    zb-h1: stage s cannot run backward before the first microbatch has gone down to the last stage
    and up to s. From there to the end of its last backward pass it has m of those, all but
    min(P - s, m) of its forward passes and max(0, m - 1 - s) gradients of weights. Then that
    microbatch goes up. Both ways together are one round trip:

        T >= sum (f + i) + (m - 1) c_s - (min(P - s, m) - 1) f_s - min(s, m - 1) w_s

    Of a unit w is at most half of i + w (`LayerPricer.transformer`), and the right side falls with
    w, so w = (i + w) / 2 is the least.

    V schedules: stage s begins backward when the first microbatch has gone down and up again, and
    has run a = min(m, 2 P - 1 - s) forward passes of chunk 0 and b = min(m, s + 1) of chunk 1:

        T >= sum f + m c_s - a f0_s - b f1_s,     f0 at most (f + a unit's) / 2
    """
    at, m, slots = np.array(mesh), space.num_microbatches, len(mesh)
    forward, backward = space.forward[:, at], space.backward[:, at]
    both, place = forward + backward, np.arange(slots)
    fastest = both.min(axis=0)
    low, high = 0.0, float(fastest.min()) * space.num_layers
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        short = np.floor(middle / fastest * (1.0 + INSIDE)).sum() < space.num_layers
        low, high = (middle, high) if short else (low, middle)
    if is_v(schedule):
        first, second = np.minimum(m, 2 * slots - 1 - place), np.minimum(m, place + 1)
        once = space.num_layers * float(forward.min())
        once -= float((np.maximum(first - second, 0) * forward.max(axis=0)).max()) / 2
        turns = m - float(((first + second) / 2 * forward / both).max())
    else:
        once = space.num_layers * float((forward + backward / 2).min())
        early = np.minimum(slots - place, m) - 1
        late = np.minimum(place, m - 1)
        turns = m - 1 - float(((early * forward + late * backward / 2) / both).max())
    return max(m * low, once + low * max(0.0, turns))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
