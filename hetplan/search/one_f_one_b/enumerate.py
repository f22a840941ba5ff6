"""Enumeration of 1F1B families: every plan, where they are few.

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
from hetplan.search.one_f_one_b.heuristic import EXTRA, STAGES, violations
from hetplan.search.one_f_one_b.rows import Slots, estimate, most_units, step_seconds
from hetplan.search.space.row import role_of
from hetplan.search.space.stage_table import StageTable, most_stages

Row = tuple[tuple[int, int, int], ...]
"""Runs (mesh, stages, extra depth) from the first stage to the last."""

_ROWS_BETWEEN = 1 << 12
"""Rows that are looked at between two calls of `check`: some 20 ms."""

_SLICE = 20_000_000
"""Operations between two calls of `check`: about 0.1 s."""

_UNFINISHED = -2
"""Answer of a slice after which there is more to visit."""


class KeptCuts(NamedTuple):
    """The K fastest cuts of a row, in no order."""

    steps: Floats
    """[K]"""
    variants: Ints
    """[K, P]"""
    units: Ints
    """[K, P]"""


def kept_cuts(most: int, slots: int) -> KeptCuts:
    """Room for so many cuts of a row of so many slots."""
    shape = most, slots
    return KeptCuts(
        np.zeros(most), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    )


class _Place(NamedTuple):
    """Where the odometer of a row stands."""

    row: Slots
    most: Ints
    """[P, V] units that fit."""
    rest: Ints
    """[P + 1] units that this slot and those after it can hold."""
    at: Ints
    """(slot, cuts kept, number of the slowest of them)."""
    left: Ints
    """[P + 1] units that this slot and those after it have to hold."""
    before: Floats
    """[P + 1] seconds of a microbatch in the slots before this one."""


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


def cheapest(
    table: StageTable,
    row: Slots,
    ceiling: float,
    budget: int,
    kept: KeptCuts,
    spent: Ints,
    check: Callable[[], None] | None = None,
) -> int:
    """Fill `kept` with the K least steps below `ceiling` over all cuts of a row; how many they are.

    Adds to `spent` (operations, replays, plans) and gives minus one where it ended at `budget`
    operations. `check` is called now and then and may raise; what is kept by then stands.
    """
    slots = len(row.mesh)
    most = most_units(table, row.mesh, row.extra)
    widest = most.max(axis=1)
    if widest.min() < 1:
        return 0
    rest = np.zeros(slots + 1, dtype=np.int64)
    rest[:slots] = widest[::-1].cumsum()[::-1]
    place = _Place(
        row=Slots(row.mesh, np.zeros_like(row.mesh), np.zeros_like(row.mesh), row.extra),
        most=most,
        rest=rest,
        at=np.zeros(3, dtype=np.int64),
        left=np.zeros(slots + 1, dtype=np.int64),
        before=np.zeros(slots + 1),
    )
    place.left[0] = table.num_layers
    while True:
        count = _turn(table, ceiling, budget, place, kept, spent, _SLICE)
        if count != _UNFINISHED:
            return int(count)
        if check is not None:
            check()


@kernel
def _turn(
    table: StageTable,
    ceiling: float,
    budget: int,
    place: _Place,
    kept: KeptCuts,
    spent: Ints,
    slice_: int,
) -> int:
    """`cheapest` from `place` on, for about `slice_` operations."""
    # Long: one odometer, whose place is in local numbers.
    row, most, rest = place.row, place.most, place.rest
    mesh, variant, units, left, before = row.mesh, row.variant, row.units, place.left, place.before
    slots, variants, m = mesh.shape[0], table.forward.shape[0], table.num_microbatches
    s, count, worst = place.at[0], place.at[1], place.at[2]
    best = kept.steps[worst] if count == kept.steps.shape[0] else ceiling
    done = 0
    while s >= 0:
        if done > slice_:
            place.at[0], place.at[1], place.at[2] = s, count, worst
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
        if estimate(table, row, True) >= best:
            continue
        spent[0] += 2 * slots * m
        spent[1] += 1
        done += 2 * slots * m
        step = step_seconds(table, row)
        if step < best:
            at = count if count < kept.steps.shape[0] else worst
            count = max(count, at + 1)
            kept.steps[at] = step
            kept.variants[at], kept.units[at] = variant, units
            if count == kept.steps.shape[0]:
                worst = int(np.argmax(kept.steps))
                best = kept.steps[worst]
    return int(count)
