"""Heuristic of 1F1B families: good plans, fast, without proof.

Which meshes, in which order, with how many stages each? A row is written as runs: (mesh, stages,
extra depth) from the first stage to the last; `cut` gives its slots layers and recomputations. From
a row the search goes to better neighbours while there are any,

    stages     one run has more or fewer stages, or gives some to another
    order      two runs change places, one moves elsewhere
    meshes     a run is on another mesh; a mesh joins or leaves
    depth      a run and all before it keep one microbatch more or fewer in flight

then shakes the best row and goes again. Where the meshes of a region stand together, the runs of a
neighbour are gathered by region. Fixed seed, budget in slots that were cut: equal spaces give equal
rows.

`polish` moves single layers and changes recomputations of a cut, by replay where the closed forms
of `rows.estimate` leave a move a chance.

Neighbourhoods grow with the meshes, and most meshes of an island are worse than another one on it,
so of many meshes only the likely ones are searched (`likely_meshes`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.rows import (
    Slots,
    cut,
    estimate,
    most_units,
    step_seconds,
)
from hetplan.search.solver import RESOLUTION
from hetplan.search.space.row import NEVER
from hetplan.search.space.stage_table import StageTable

MESH, STAGES, EXTRA = 0, 1, 2
"""Columns of a run."""

_SHORT = 1e25
"""Score of a row that holds all layers but one; one more of each that is missing."""

_WRONG = 1e28
"""The same for every violation of a pin or of the number of stages."""


@kernel
def violations(table: StageTable, most_slots: int, runs: Ints, count: int) -> int:
    """How far these runs are from a row of the space, memory aside: 0 is one; -1: no way there."""
    if count < 1 or runs[count - 1, EXTRA] != 0:
        return -1
    used, slots, wrong = 0, 0, 0
    for r in range(count):
        i = runs[r, MESH]
        if used & table.island_mask[i] or not 1 <= runs[r, STAGES] <= table.max_stages[i]:
            return -1
        if not 0 <= runs[r, EXTRA] <= table.most_extra_depth:
            return -1
        if r > 0 and runs[r, EXTRA] > runs[r - 1, EXTRA]:
            return -1
        used |= table.island_mask[i]
        slots += runs[r, STAGES]
        if table.regions_apart and r > 0 and table.region[i] >= 0:
            for q in range(r - 1):
                if (
                    table.region[runs[q, MESH]] == table.region[i]
                    and table.region[runs[r - 1, MESH]] != table.region[i]
                ):
                    return -1
    if not table.may_be_first[runs[0, MESH]]:
        wrong += 1
    if not table.may_be_last[runs[count - 1, MESH]]:
        wrong += 1
    if table.stages > 0:
        wrong += abs(slots - table.stages)
    return wrong + max(0, slots - most_slots)


@kernel
def expand(runs: Ints, count: int) -> Slots:
    """The slots of the first `count` runs, without layers."""
    slots = 0
    for r in range(count):
        slots += runs[r, STAGES]
    mesh, extra = np.empty(slots, np.int64), np.empty(slots, np.int64)
    s = 0
    for r in range(count):
        for _ in range(runs[r, STAGES]):
            mesh[s], extra[s] = runs[r, MESH], runs[r, EXTRA]
            s += 1
    return Slots(mesh, np.zeros_like(mesh), np.zeros_like(mesh), extra)


@kernel
def score(table: StageTable, most_slots: int, runs: Ints, count: int, ceiling: float) -> float:
    """About the step of the best cut of these runs; large where they are illegal or do not fit.

    Rows that cannot be below `ceiling` may get any larger number.
    """
    wrong = violations(table, most_slots, runs, count)
    if wrong != 0:
        return NEVER if wrong < 0 else _WRONG * wrong
    row = expand(runs, count)
    if cut(table, row, 0.0, ceiling):
        return estimate(table, row, False)
    if ceiling < _SHORT:
        return NEVER
    most, room = most_units(table, row.mesh, row.extra), 0
    for s in range(most.shape[0]):
        room += most[s].max() if most[s].max() > 0 else -table.num_layers
    return _SHORT * (1.0 + max(0, table.num_layers - room))


@kernel
def _next(state: Ints, below: int) -> int:
    """A number from 0 to below `below`; advances the generator (Park and Miller's)."""
    state[0] = state[0] * 48271 % 2147483647
    return int(state[0] % below)


@kernel
def _keep(best: Ints, found: Ints, count: int) -> None:
    for r in range(count):
        for k in range(3):
            best[r, k] = found[r, k]


@kernel
def neighbour(
    table: StageTable,
    most_slots: int,
    runs: Ints,
    count: int,
    move: tuple[int, int, int, int],
    found: Ints,
) -> int:
    """The runs of one neighbour in `found`, and how many; 0 where there is none.

    A move is its kind and up to three numbers a, b and c. Kinds: 0 run a has c stages more; 1 run a
    gives c stages to run b; 2 runs a and b change places; 3 run a moves to place b; 4 run a goes to
    mesh b, filling as much of it times c / 4; 5 mesh b with c stages joins at place a; 6 run a
    leaves; 7 runs up to a get c more depth.
    Where stages are too many then, or too few of a pinned number, the other runs give or take the
    difference.
    """
    kind, a, b, c = move
    _keep(found, runs, count)
    if kind == 0:
        found[a, STAGES] += c
    elif kind == 1:
        found[a, STAGES] -= c
        found[b, STAGES] += c
    elif kind == 2:
        for k in range(2):
            found[a, k], found[b, k] = runs[b, k], runs[a, k]
    elif kind == 3:
        step = 1 if b > a else -1
        for r in range(a, b, step):
            for k in range(2):
                found[r, k] = runs[r + step, k]
        for k in range(2):
            found[b, k] = runs[a, k]
    elif kind == 4:
        found[a, MESH] = b
        room = table.max_stages[b] / table.max_stages[runs[a, MESH]]
        found[a, STAGES] = min(max(1, round(runs[a, STAGES] * room * c / 4)), table.max_stages[b])
    elif kind == 5:
        if count + 1 > found.shape[0]:
            return 0
        for r in range(count, a, -1):
            for k in range(3):
                found[r, k] = runs[r - 1, k]
        found[a, MESH], found[a, STAGES] = b, min(c, table.max_stages[b])
        found[a, EXTRA] = runs[a, EXTRA] if a < count else 0
        count += 1
    elif kind == 6:
        for r in range(a, count - 1):
            for k in range(3):
                found[r, k] = runs[r + 1, k]
        if count > 1:
            found[count - 2, EXTRA] = 0
        count -= 1
        a = -1
    elif kind == 7:
        for r in range(a + 1):
            found[r, EXTRA] += c
    _even_out(table, most_slots, found, count, a)
    if table.regions_apart:
        _gather(table, found, count)
    return count


@kernel
def _gather(table: StageTable, runs: Ints, count: int) -> None:
    """Put every run next to the first ones of its region; depths stay in their places."""
    for r in range(1, count):
        region, last = table.region[runs[r, MESH]], -1
        for q in range(r):
            if region >= 0 and table.region[runs[q, MESH]] == region:
                last = q
        for q in range(r, last + 1 if last >= 0 else r, -1):
            for k in range(2):
                runs[q, k], runs[q - 1, k] = runs[q - 1, k], runs[q, k]


@kernel
def _even_out(table: StageTable, most_slots: int, runs: Ints, count: int, kept: int) -> None:
    """Bring the number of stages within the rules at the cost of runs other than `kept`."""
    slots = 0
    for r in range(count):
        slots += runs[r, STAGES]
    wanted = table.stages if table.stages > 0 else min(slots, most_slots)
    while slots != wanted:
        step = 1 if wanted > slots else -1
        largest, at = 0, -1
        for r in range(count):
            spare = table.max_stages[runs[r, MESH]] - runs[r, STAGES]
            room = spare if step > 0 else runs[r, STAGES] - 1
            if r != kept and room > largest:
                largest, at = room, r
        if at < 0:
            return
        runs[at, STAGES] += step
        slots += step


@kernel
def descend(
    table: StageTable, most_slots: int, runs: Ints, count: int, budget: int, spent: Ints
) -> tuple[int, float]:
    """Go to better neighbours while there is one; changes `runs`; (number of runs, score)."""
    meshes = table.island_mask.shape[0]
    best = score(table, most_slots, runs, count, NEVER)
    found = runs.copy()
    moved = True
    while moved and spent[0] < budget:
        moved = False
        for kind in range(8):
            a = 0
            while a < (count + 1 if kind == 5 else count):
                others = 1
                if kind in (1, 2, 3):
                    others = count
                elif kind in (4, 5):
                    others = meshes
                b = 0
                while b < others:
                    for choice in range(6):
                        c = _amount(kind, choice, table, runs, count, a, b)
                        if c == 0 or (kind in (1, 2, 3) and a == b) or (kind == 2 and b < a):
                            break
                        if spent[0] >= budget or a >= (count + 1 if kind == 5 else count):
                            break
                        number = neighbour(table, most_slots, runs, count, (kind, a, b, c), found)
                        if number < 1:
                            continue
                        seconds = score(table, most_slots, found, number, best)
                        for r in range(number):
                            spent[0] += found[r, STAGES]
                        if seconds < best * (1.0 - 1e-9):
                            best, count, moved = seconds, number, True
                            _keep(runs, found, count)
                    if kind in (1, 2, 3):
                        others = count
                    b += 1
                a += 1
    return count, best


@kernel
def _amount(
    kind: int, choice: int, table: StageTable, runs: Ints, count: int, a: int, b: int
) -> int:
    """The choice-th amount of a kind of move; 0 where there are no more."""
    if kind in (0, 7):
        if kind == 7 and (table.most_extra_depth == 0 or choice > 1):
            return 0
        steps = (1, -1, 2, -2, 4, -4)
        return steps[choice]
    if kind == 1:
        return (choice + 1) if choice < 3 else 0
    if kind in (2, 3, 6):
        return 1 if choice == 0 else 0
    if kind == 4:
        if b == runs[a, MESH] if a < count else True:
            return 0
        scales = (4, 2, 8)
        return scales[choice] if choice < 3 else 0
    if kind == 5:
        joined = (1, 2, 4, 8, 16, 1 << 20)
        return joined[choice]
    return 0


class KeptRows(NamedTuple):
    """The best distinct rows of a local search, best first."""

    runs: Ints
    """[K, R, 3]"""
    counts: Ints
    """[K] runs of each; 0: there is no such row."""
    scores: Floats
    """[K]"""


def kept_rows(most: int, runs: int) -> KeptRows:
    """Room for so many rows, of at most so many runs."""
    return KeptRows(
        np.zeros((most, runs, 3), dtype=np.int64),
        np.zeros(most, dtype=np.int64),
        np.full(most, np.inf),
    )


@kernel
def search_rows(
    table: StageTable, most_slots: int, seed: int, rounds: int, budget: int, kept: KeptRows
) -> int:
    """Descend from nothing and `rounds` times from a shaken best row; slots that were cut.

    Fills `kept`.
    """
    spent = np.zeros(1, np.int64)
    state = np.full(1, 1 + seed % 2147483645, np.int64)
    best, count = np.zeros(kept.runs.shape[1:], np.int64), 0
    count, least = descend(table, most_slots, best, count, budget, spent)
    _remember(kept, best, count, least)
    if count == 0:  # no row takes less than for ever
        return int(spent[0])
    runs, found = best.copy(), best.copy()
    for _ in range(rounds):
        if spent[0] >= budget:
            break
        number = count
        _keep(runs, best, count)
        for _ in range(1 + _next(state, 3)):
            for _ in range(8):  # some moves have no such neighbour
                kind = _next(state, 7)
                a = _next(state, number + (1 if kind == 5 else 0))
                b = _next(state, table.island_mask.shape[0] if kind in (4, 5) else number)
                c = 1 + _next(state, 3) if kind < 2 else (4 if kind == 4 else 1 + _next(state, 8))
                if kind == 0 and _next(state, 2):
                    c = -c
                shaken = neighbour(table, most_slots, runs, number, (kind, a, b, c), found)
                if shaken > 0 and violations(table, most_slots, found, shaken) >= 0:
                    number = shaken
                    _keep(runs, found, number)
                    break
        number, seconds = descend(table, most_slots, runs, number, budget, spent)
        _remember(kept, runs, number, seconds)
        if seconds < least:
            least, count = seconds, number
            _keep(best, runs, count)
    return int(spent[0])


@kernel
def _remember(kept: KeptRows, runs: Ints, count: int, seconds: float) -> None:
    """Insert a row among the best ones unless it is there."""
    size = kept.scores.shape[0]
    if seconds >= kept.scores[size - 1]:
        return
    for k in range(size):
        if kept.counts[k] == count and kept.scores[k] == seconds:
            same = True
            for r in range(count):
                for j in range(3):
                    same = same and kept.runs[k, r, j] == runs[r, j]
            if same:
                return
    at = size - 1
    while at > 0 and kept.scores[at - 1] > seconds:
        kept.scores[at] = kept.scores[at - 1]
        kept.counts[at] = kept.counts[at - 1]
        kept.runs[at] = kept.runs[at - 1]
        at -= 1
    kept.scores[at] = seconds
    kept.counts[at] = count
    _keep(kept.runs[at], runs, count)


@kernel
def _tried(table: StageTable, row: Slots, best: float, spent: Ints) -> float:
    """The step of a row, or `NEVER` where its bound is not below `best`; counts its work."""
    slots = row.mesh.shape[0]
    spent[0] += slots
    if estimate(table, row, True) >= best:
        return NEVER
    spent[0] += 2 * slots * table.num_microbatches
    spent[1] += 1
    return step_seconds(table, row)


@kernel
def polish(table: StageTable, row: Slots, budget: int, spent: Ints) -> float:
    """Move single units between slots, and change recomputations, while a replay gets faster.

    Changes `variant` and `units` of the row and gives the step. Adds to `spent` (operations,
    replays); ends when `budget` operations are spent.
    """
    mesh, variant, units, extra = row
    slots = mesh.shape[0]
    most = most_units(table, mesh, extra)
    best = step_seconds(table, row)
    spent[0] += 2 * slots * table.num_microbatches
    spent[1] += 1
    moved = True
    while moved and spent[0] < budget:
        moved = False
        for giver in range(slots):
            for v in range(most.shape[1]):
                before = variant[giver]
                if v == before or units[giver] > most[giver, v]:
                    continue
                variant[giver] = v
                step = _tried(table, row, best, spent)
                if step < best * (1.0 - RESOLUTION):
                    best, moved = step, True
                else:
                    variant[giver] = before
            for taker in range(slots):
                if spent[0] >= budget:
                    return best
                if giver == taker or units[giver] <= 1:
                    continue
                before = variant[taker]
                if units[taker] >= most[taker, before]:
                    other = _roomy(table, most[taker], mesh[taker], units[taker])
                    if other < 0:
                        continue
                    variant[taker] = other
                units[giver] -= 1
                units[taker] += 1
                step = _tried(table, row, best, spent)
                if step < best * (1.0 - RESOLUTION):
                    best, moved = step, True
                else:
                    units[giver] += 1
                    units[taker] -= 1
                    variant[taker] = before
    return best


@kernel
def _roomy(table: StageTable, most: Ints, mesh: int, units: int) -> int:
    """The fastest recomputation with room for one unit more; -1 where none has. most: [V]"""
    fastest, least = -1, NEVER
    for v in range(most.shape[0]):
        seconds = table.forward[v, mesh] + table.backward[v, mesh]
        if most[v] > units and seconds < least:
            fastest, least = v, seconds
    return fastest


MANY = 48
"""Meshes above which a local search sees the likely ones only."""

_ALONE = 4
"""Meshes that are kept of an island,"""
_TOGETHER = 2
"""and of a set of islands."""
_SLACKS = (1.0, 1.15)
"""Times K, at which meshes are compared."""
IN_FLIGHT = 4
_HALVINGS = 40


def likely_meshes(
    masks: Ints, seconds: Floats, fits: Floats, most_stages: Ints, layers: int
) -> Ints:
    """Numbers of the meshes that are kept, increasing; all where they are not many.

    With K the least time of a stage's passes at which all islands together hold the units, each by
    its best mesh (`most_stages` stages of what K and memory allow), the meshes that hold most at a
    little more than K are kept, some per set of islands.

    masks, most_stages: [M]; seconds: [V, M] both passes of a unit, infinite where none fits; fits:
    [V, M] units that a stage with some microbatches in flight holds (`IN_FLIGHT`); layers: units.
    """
    if len(masks) <= MANY:
        return np.arange(len(masks))
    islands = [1 << bit for bit in range(int(masks.max()).bit_length())]
    alone = [np.flatnonzero(masks == island) for island in islands]

    def held(longest: float) -> Floats:
        units = np.minimum(np.floor(longest / seconds), fits).max(axis=0)
        found: Floats = units * most_stages
        return found

    low, high = 0.0, float(seconds[np.isfinite(seconds)].max()) * layers
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        units = held(middle)
        enough = sum(float(units[each].max()) for each in alone if len(each)) >= layers
        low, high = (low, middle) if enough else (middle, high)
    kept: set[int] = set()
    for mask in np.unique(masks).tolist():
        here = np.flatnonzero(masks == mask)
        most = _ALONE if mask in islands else _TOGETHER
        for slack in _SLACKS:
            units = held(high * slack)[here]
            # Of equal ones the fastest; stages that need no recomputation are.
            order = np.lexsort((seconds.min(axis=0)[here], -units))
            kept.update(here[order[:most]].tolist())
    return np.array(sorted(kept), dtype=np.int64)
