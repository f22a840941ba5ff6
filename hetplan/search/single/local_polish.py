"""The last improvements of a cut: single layers moved, recomputations changed, by replay.

A move is replayed only where the closed forms of `local_cut.estimate` leave it a chance.
"""

from __future__ import annotations

from hetplan.kernels import kernel
from hetplan.search.families.space import Ints
from hetplan.search.single.local_cut import estimate
from hetplan.search.single.replay import NEVER, Numbers, fits, step_seconds


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
