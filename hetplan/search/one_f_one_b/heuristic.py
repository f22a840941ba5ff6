"""Which meshes, in which order, with how many stages each: a good row of slots by local search.

A row is written as runs: (mesh, stages, extra depth) from the first stage to the last; `cut`
gives each the layers and the recomputation of its slots. From a row the search goes to the best of
its neighbours while that helps,

    stages     one run has more or fewer stages, or gives some to another
    order      two runs change places, one moves elsewhere
    meshes     a run is on another mesh; a mesh joins or leaves
    depth      a run and all before it keep one microbatch more or fewer in flight

then shakes the best row and goes again. Fixed seed, budget in slots that were cut: equal spaces
give equal rows.

`polish` moves single layers and changes recomputations of a cut, by replay where the closed forms
of `cut.estimate` leave a move a chance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Ints
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.cut import cut, estimate
from hetplan.search.one_f_one_b.replay import NEVER, Numbers, fits, step_seconds
from hetplan.search.space.stage_table import MAX_FREE_ISLANDS, StageTable

MESH, STAGES, EXTRA = 0, 1, 2
"""Columns of a run."""

_SHORT = 1e25
"""Score of a row that holds all layers but one; one more of each that is missing."""

_WRONG = 1e28
"""The same for every violation of a pin or of the number of stages."""

Bools = npt.NDArray[np.bool_]


class Rules(NamedTuple):
    """What a row must keep to."""

    mask: Ints
    """[M] islands as bits."""
    max_stages: Ints
    region: Ints
    may_be_first: Bools
    may_be_last: Bools
    most_slots: int
    stages: int
    """Pinned number of stages; 0: free."""
    most_extra: int
    regions_apart: bool
    """Meshes of one region stand next to each other."""


def rules_of(space: StageTable) -> Rules:
    """The rules of a space's rows."""
    islands = 0
    for mask in space.island_mask:
        islands |= int(mask)
    return Rules(
        mask=np.ascontiguousarray(space.island_mask, dtype=np.int64),
        max_stages=np.ascontiguousarray(space.max_stages, dtype=np.int64),
        region=np.ascontiguousarray(space.region, dtype=np.int64),
        may_be_first=np.ascontiguousarray(space.may_be_first, dtype=np.bool_),
        may_be_last=np.ascontiguousarray(space.may_be_last, dtype=np.bool_),
        most_slots=most_slots(space),
        stages=space.stages,
        most_extra=space.family.most_extra_depth,
        regions_apart=islands.bit_count() > MAX_FREE_ISLANDS,
    )


def most_slots(space: StageTable) -> int:
    """Most stages that a pipeline of the space can have."""
    room = int(space.max_stages.sum())
    return min(space.num_layers, room, space.stage_limit, space.stages or room)


@kernel
def violations(rules: Rules, runs: Ints, count: int) -> int:
    """How far these runs are from a row of the space, memory aside: 0 is one; -1: no way there."""
    if count < 1 or runs[count - 1, EXTRA] != 0:
        return -1
    used, slots, wrong = 0, 0, 0
    for r in range(count):
        i = runs[r, MESH]
        if used & rules.mask[i] or not 1 <= runs[r, STAGES] <= rules.max_stages[i]:
            return -1
        if not 0 <= runs[r, EXTRA] <= rules.most_extra:
            return -1
        if r > 0 and runs[r, EXTRA] > runs[r - 1, EXTRA]:
            return -1
        used |= rules.mask[i]
        slots += runs[r, STAGES]
        if rules.regions_apart and r > 0 and rules.region[i] >= 0:
            for q in range(r - 1):
                if (
                    rules.region[runs[q, MESH]] == rules.region[i]
                    and rules.region[runs[r - 1, MESH]] != rules.region[i]
                ):
                    return -1
    if not rules.may_be_first[runs[0, MESH]]:
        wrong += 1
    if not rules.may_be_last[runs[count - 1, MESH]]:
        wrong += 1
    if rules.stages > 0:
        wrong += abs(slots - rules.stages)
    return wrong + max(0, slots - rules.most_slots)


@kernel
def expand(runs: Ints, count: int) -> tuple[Ints, Ints]:
    """(mesh, extra depth) of every slot."""
    slots = 0
    for r in range(count):
        slots += runs[r, STAGES]
    mesh, extra = np.empty(slots, np.int64), np.empty(slots, np.int64)
    s = 0
    for r in range(count):
        for _ in range(runs[r, STAGES]):
            mesh[s], extra[s] = runs[r, MESH], runs[r, EXTRA]
            s += 1
    return mesh, extra


@kernel
def score(numbers: Numbers, rules: Rules, runs: Ints, count: int, ceiling: float) -> float:
    """About the step of the best cut of these runs; large where they are illegal or do not fit.

    Rows that cannot be below `ceiling` may get any larger number.
    """
    wrong = violations(rules, runs, count)
    if wrong != 0:
        return NEVER if wrong < 0 else _WRONG * wrong
    mesh, extra = expand(runs, count)
    slots = mesh.shape[0]
    variant, units = np.empty(slots, np.int64), np.empty(slots, np.int64)
    if cut(numbers, mesh, extra, 0.0, ceiling, variant, units):
        return estimate(numbers, mesh, variant, units, extra, False)
    if ceiling < _SHORT:
        return NEVER
    room = 0
    for s in range(slots):
        widest = 0
        for v in range(numbers.forward.shape[0]):
            widest = max(widest, fits(numbers, slots, s, mesh[s], v, extra[s]))
        if widest < 1:
            room -= numbers.layers
        room += widest
    return _SHORT * (1.0 + max(0, numbers.layers - room))


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
    rules: Rules, runs: Ints, count: int, kind: int, a: int, b: int, c: int, found: Ints
) -> int:
    """The runs of one neighbour in `found`, and how many; 0 where there is none.

    Kinds: 0 run a has c stages more; 1 run a gives c stages to run b; 2 runs a and b change
    places; 3 run a moves to place b; 4 run a goes to mesh b, filling as much of it times c / 4;
    5 mesh b with c stages joins at place a; 6 run a leaves; 7 runs up to a get c more depth.
    Where stages are too many then, or too few of a pinned number, the other runs give or take the
    difference.
    """
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
        room = rules.max_stages[b] / rules.max_stages[runs[a, MESH]]
        found[a, STAGES] = min(max(1, round(runs[a, STAGES] * room * c / 4)), rules.max_stages[b])
    elif kind == 5:
        if count + 1 > found.shape[0]:
            return 0
        for r in range(count, a, -1):
            for k in range(3):
                found[r, k] = runs[r - 1, k]
        found[a, MESH], found[a, STAGES] = b, min(c, rules.max_stages[b])
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
    _even_out(rules, found, count, a)
    return count


@kernel
def _even_out(rules: Rules, runs: Ints, count: int, kept: int) -> None:
    """Bring the number of stages within the rules at the cost of runs other than `kept`."""
    slots = 0
    for r in range(count):
        slots += runs[r, STAGES]
    wanted = rules.stages if rules.stages > 0 else min(slots, rules.most_slots)
    while slots != wanted:
        step = 1 if wanted > slots else -1
        largest, at = 0, -1
        for r in range(count):
            spare = rules.max_stages[runs[r, MESH]] - runs[r, STAGES]
            room = spare if step > 0 else runs[r, STAGES] - 1
            if r != kept and room > largest:
                largest, at = room, r
        if at < 0:
            return
        runs[at, STAGES] += step
        slots += step


@kernel
def descend(
    numbers: Numbers, rules: Rules, runs: Ints, count: int, budget: int, spent: Ints
) -> tuple[int, float]:
    """Go to better neighbours while there is one; changes `runs`; (number of runs, score)."""
    meshes = rules.mask.shape[0]
    best = score(numbers, rules, runs, count, NEVER)
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
                        c = _amount(kind, choice, rules, runs, count, a, b)
                        if c == 0 or (kind in (1, 2, 3) and a == b) or (kind == 2 and b < a):
                            break
                        if spent[0] >= budget or a >= (count + 1 if kind == 5 else count):
                            break
                        number = neighbour(rules, runs, count, kind, a, b, c, found)
                        if number < 1:
                            continue
                        seconds = score(numbers, rules, found, number, best)
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
def _amount(kind: int, choice: int, rules: Rules, runs: Ints, count: int, a: int, b: int) -> int:
    """The choice-th amount of a kind of move; 0 where there are no more."""
    if kind in (0, 7):
        if kind == 7 and (rules.most_extra == 0 or choice > 1):
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


@kernel
def search_rows(
    numbers: Numbers,
    rules: Rules,
    start: Ints,
    start_count: int,
    seed: int,
    rounds: int,
    budget: int,
    keep: Ints,
    keep_counts: Ints,
    keep_scores: npt.NDArray[np.float64],
) -> int:
    """Descend from a start and `rounds` times from a shaken best row; slots that were cut.

    The best distinct rows come back in `keep` [K, R, 3], best first.
    """
    spent = np.zeros(1, np.int64)
    state = np.full(1, 1 + seed % 2147483645, np.int64)
    best, count = start.copy(), start_count
    count, least = descend(numbers, rules, best, count, budget, spent)
    _remember(best, count, least, keep, keep_counts, keep_scores)
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
                b = _next(state, rules.mask.shape[0] if kind in (4, 5) else number)
                c = 1 + _next(state, 3) if kind < 2 else (4 if kind == 4 else 1 + _next(state, 8))
                if kind == 0 and _next(state, 2):
                    c = -c
                shaken = neighbour(rules, runs, number, kind, a, b, c, found)
                if shaken > 0 and violations(rules, found, shaken) >= 0:
                    number = shaken
                    _keep(runs, found, number)
                    break
        number, seconds = descend(numbers, rules, runs, number, budget, spent)
        _remember(runs, number, seconds, keep, keep_counts, keep_scores)
        if seconds < least:
            least, count = seconds, number
            _keep(best, runs, count)
    return int(spent[0])


@kernel
def _remember(
    runs: Ints,
    count: int,
    seconds: float,
    keep: Ints,
    keep_counts: Ints,
    keep_scores: npt.NDArray[np.float64],
) -> None:
    """Insert a row among the best ones unless it is there."""
    size = keep_scores.shape[0]
    if seconds >= keep_scores[size - 1]:
        return
    for k in range(size):
        if keep_counts[k] == count and keep_scores[k] == seconds:
            same = True
            for r in range(count):
                for j in range(3):
                    same = same and keep[k, r, j] == runs[r, j]
            if same:
                return
    at = size - 1
    while at > 0 and keep_scores[at - 1] > seconds:
        keep_scores[at] = keep_scores[at - 1]
        keep_counts[at] = keep_counts[at - 1]
        keep[at] = keep[at - 1]
        at -= 1
    keep_scores[at] = seconds
    keep_counts[at] = count
    _keep(keep[at], runs, count)


@kernel
def _tried(
    numbers: Numbers,
    mesh: Ints,
    variant: Ints,
    units: Ints,
    extra: Ints,
    best: float,
    spent: Ints,
) -> float:
    """The step of a row, or `NEVER` where its bound is not below `best`; counts its work."""
    slots = mesh.shape[0]
    spent[0] += slots
    if estimate(numbers, mesh, variant, units, extra, True) >= best:
        return NEVER
    spent[0] += 2 * slots * numbers.microbatches
    spent[1] += 1
    return step_seconds(numbers, mesh, variant, units, extra)


@kernel
def polish(
    numbers: Numbers,
    mesh: Ints,
    variant: Ints,
    units: Ints,
    extra: Ints,
    resolution: float,
    budget: int,
    spent: Ints,
) -> float:
    """Move single units between slots, and change recomputations, while a replay gets faster.

    Changes `variant` and `units` and gives the step. Adds to `spent` (operations, replays); ends
    when `budget` operations are spent.
    """
    slots, variants = mesh.shape[0], numbers.forward.shape[0]
    best = step_seconds(numbers, mesh, variant, units, extra)
    spent[0] += 2 * slots * numbers.microbatches
    spent[1] += 1
    moved = True
    while moved and spent[0] < budget:
        moved = False
        for giver in range(slots):
            for v in range(variants):
                before = variant[giver]
                if v == before or units[giver] > fits(
                    numbers, slots, giver, mesh[giver], v, extra[giver]
                ):
                    continue
                variant[giver] = v
                step = _tried(numbers, mesh, variant, units, extra, best, spent)
                if step < best * (1.0 - resolution):
                    best, moved = step, True
                else:
                    variant[giver] = before
            for taker in range(slots):
                if spent[0] >= budget:
                    return best
                if giver == taker or units[giver] <= 1:
                    continue
                before = variant[taker]
                if units[taker] >= fits(numbers, slots, taker, mesh[taker], before, extra[taker]):
                    other = roomy(numbers, slots, taker, mesh[taker], extra[taker], units[taker])
                    if other < 0:
                        continue
                    variant[taker] = other
                units[giver] -= 1
                units[taker] += 1
                step = _tried(numbers, mesh, variant, units, extra, best, spent)
                if step < best * (1.0 - resolution):
                    best, moved = step, True
                else:
                    units[giver] += 1
                    units[taker] -= 1
                    variant[taker] = before
    return best


@kernel
def roomy(numbers: Numbers, slots: int, slot: int, mesh: int, extra: int, units: int) -> int:
    """The fastest recomputation with room for one unit more; -1 where none has."""
    found, least = -1, NEVER
    for v in range(numbers.forward.shape[0]):
        seconds = numbers.forward[v, mesh] + numbers.backward[v, mesh]
        if fits(numbers, slots, slot, mesh, v, extra) > units and seconds < least:
            found, least = v, seconds
    return found
