"""The best plans of a family with few plans, by replay of every one that its bound lets through.

Rows of slots are listed: every order of meshes with islands of their own, every number of stages,
every extra depth. For each row an odometer over recomputation and layers of the slots before the
last one visits every cut; a slot that is busy too long closes all that is fuller. What is left is
bounded by the closed forms and then replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import busy_seconds
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.cut import estimate
from hetplan.search.one_f_one_b.heuristic import EXTRA, MESH, STAGES, violations
from hetplan.search.one_f_one_b.replay import fits, role_of, step_seconds
from hetplan.search.space.stage_table import StageTable, most_stages

Row = tuple[tuple[int, int, int], ...]
"""Runs (mesh, stages, extra depth) from the first stage to the last."""

_ROWS_BETWEEN = 1 << 12
"""Rows that are looked at between two calls of `check`: some 20 ms."""

_SLICE = 20_000_000
"""Operations between two calls of `check`: about 0.1 s."""

_UNFINISHED = -2
"""Answer of a slice after which there is more to visit."""


class _Place(NamedTuple):
    """Where the odometer of a row stands."""

    at: Ints
    """(slot, plans kept, number of the slowest of them)."""
    variant: Ints
    units: Ints
    left: Ints
    """Units that this slot and those after it hold."""
    before: Floats
    """Seconds of a microbatch in the slots before this one."""


def rows(table: StageTable, check: Callable[[], None] | None = None) -> Iterator[Row]:
    """Every legal row, memory aside; `check` is called now and then and may raise."""
    meshes, most_slots = len(table.max_stages), most_stages(table)
    runs = np.zeros((max(1, meshes), 3), dtype=np.int64)
    seen = 0

    def longer(row: Row, used: int, slots: int) -> Iterator[Row]:
        nonlocal seen
        seen += 1
        if check is not None and seen % _ROWS_BETWEEN == 0:
            check()
        # Depths do not grow towards the last stage, so rows are listed from the last run upstream.
        if row:
            for r, run in enumerate(row):
                runs[r] = run
            if violations(table, most_slots, runs, len(row)) == 0:
                yield row
        for i in range(meshes):
            if used & int(table.island_mask[i]):
                continue
            least = row[0][EXTRA] if row else 0
            most = table.most_extra_depth if row else 0
            room = min(int(table.max_stages[i]), most_slots - slots)
            for stages in range(1, room + 1):
                for extra in range(least, most + 1):
                    yield from longer(
                        ((i, stages, extra), *row), used | int(table.island_mask[i]), slots + stages
                    )

    yield from longer((), 0, 0)


def few_plans(
    table: StageTable, most: int, check: Callable[[], None] | None = None
) -> tuple[Row, ...] | None:
    """All rows where together they have at most `most` cuts; None where there are more.

    `check` is called now and then and may raise.
    """
    found: list[Row] = []
    plans, variants = 0, table.forward.shape[0]
    for tried, row in enumerate(rows(table, check)):
        slots = sum(run[STAGES] for run in row)
        plans += math.comb(table.num_layers - 1, slots - 1) * variants**slots
        if plans > most or tried > most:
            return None
        found.append(row)
    return tuple(found)


def row_arrays(row: Row) -> tuple[Ints, Ints]:
    """(mesh, extra depth) of every slot."""
    mesh = [run[MESH] for run in row for _ in range(run[STAGES])]
    extra = [run[EXTRA] for run in row for _ in range(run[STAGES])]
    return np.array(mesh, dtype=np.int64), np.array(extra, dtype=np.int64)


def cheapest(
    table: StageTable,
    mesh: Ints,
    extra: Ints,
    ceiling: float,
    budget: int,
    kept_steps: Floats,
    kept_variants: Ints,
    kept_units: Ints,
    spent: Ints,
    check: Callable[[], None] | None = None,
) -> int:
    """The K least steps below `ceiling` over all cuts of a row; how many there are, up to K.

    Fills `kept_steps` [K], in no order, and the slots `kept_variants` and `kept_units` [K, slots],
    adds to `spent` (operations, replays, plans) and gives minus one where it ended at `budget`
    operations. `check` is called now and then and may raise; what is kept by then stands.
    """
    slots = len(mesh)
    most = _most_units(table, mesh, extra)
    widest = most.max(axis=1)
    if widest.min() < 1:
        return 0
    rest = np.zeros(slots + 1, dtype=np.int64)
    rest[:slots] = widest[::-1].cumsum()[::-1]  # what slots s, s + 1, ... can hold
    place = _Place(
        at=np.zeros(3, dtype=np.int64),
        variant=np.zeros(slots, dtype=np.int64),
        units=np.zeros(slots, dtype=np.int64),
        left=np.zeros(slots + 1, dtype=np.int64),
        before=np.zeros(slots + 1),
    )
    place.left[0] = table.num_layers
    fixed = (table, mesh, extra, most, rest, ceiling, budget)
    while True:
        kept = _turn(*fixed, place, kept_steps, kept_variants, kept_units, spent, _SLICE)
        if kept != _UNFINISHED:
            return int(kept)
        if check is not None:
            check()


@kernel
def _most_units(table: StageTable, mesh: Ints, extra: Ints) -> Ints:
    """[P, V] units that fit."""
    slots, variants = mesh.shape[0], table.forward.shape[0]
    most = np.zeros((slots, variants), np.int64)
    for s in range(slots):
        for v in range(variants):
            most[s, v] = fits(table, slots, s, mesh[s], v, extra[s])
    return most


@kernel
def _turn(
    table: StageTable,
    mesh: Ints,
    extra: Ints,
    most: Ints,
    rest: Ints,
    ceiling: float,
    budget: int,
    place: _Place,
    kept_steps: Floats,
    kept_variants: Ints,
    kept_units: Ints,
    spent: Ints,
    slice_: int,
) -> int:
    """`cheapest` from `place` on, for about `slice_` operations."""
    slots, variants, m = mesh.shape[0], table.forward.shape[0], table.num_microbatches
    variant, units, left, before = place.variant, place.units, place.left, place.before
    s, kept, worst = place.at[0], place.at[1], place.at[2]
    best = kept_steps[worst] if kept == kept_steps.shape[0] else ceiling
    done = 0
    while s >= 0:
        if done > slice_:
            place.at[0], place.at[1], place.at[2] = s, kept, worst
            return _UNFINISHED
        done += 1
        units[s] += 1
        if s == slots - 1 and units[s] < left[s]:
            units[s] = left[s]
        v, i, role = variant[s], mesh[s], role_of(slots, s)
        own = table.extra_forward[role, v, i] + table.extra_backward[role, v, i]
        own += units[s] * (table.forward[v, i] + table.backward[v, i])
        over = units[s] > most[s, v] or left[s] - units[s] < slots - 1 - s
        if over or busy_seconds(before[s], own, m) >= best:
            variant[s] += 1
            units[s] = 0
            if variant[s] == variants:
                variant[s] = 0
                s -= 1
            continue
        if s < slots - 1:
            if left[s] - units[s] <= rest[s + 1]:
                left[s + 1] = left[s] - units[s]
                before[s + 1] = before[s] + own
                s += 1
                variant[s], units[s] = 0, 0
            continue
        spent[2] += 1
        spent[0] += slots
        done += 8 * slots
        if spent[0] > budget:
            return -1
        if estimate(table, mesh, variant, units, extra, True) >= best:
            continue
        spent[0] += 2 * slots * m
        spent[1] += 1
        done += 2 * slots * m
        step = step_seconds(table, mesh, variant, units, extra)
        if step < best:
            at = kept if kept < kept_steps.shape[0] else worst
            kept = max(kept, at + 1)
            kept_steps[at] = step
            kept_variants[at], kept_units[at] = variant, units
            if kept == kept_steps.shape[0]:
                worst = int(np.argmax(kept_steps))
                best = kept_steps[worst]
    return int(kept)
