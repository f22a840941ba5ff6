"""Is a cut next to this one faster? Units moved between slots, recomputation changed, by replay."""

from __future__ import annotations

import numpy as np

from hetplan.search.families.space import Ints
from hetplan.search.interleaved.rows import Row, passes_of
from hetplan.search.single.replay import NEVER
from hetplan.search.solver import RESOLUTION


def polish(row: Row, variant: Ints, units: Ints, budget: int) -> tuple[float, Ints, Ints, int]:
    """Step, recomputation and units of the best cut met, and how many replays it took.

    The slots that are busy longest give first. At most `budget` replays.
    """
    variant, units = variant.copy(), units.copy()
    best, replays = row.seconds(variant, units), 1
    moved = best < NEVER
    while moved and replays < budget:
        moved = False
        for other, changed in _neighbours(row, variant, units):
            step = row.seconds(other, changed)
            replays += 1
            if step < best * (1.0 - RESOLUTION):
                best, variant, units, moved = step, other, changed, True
                break
            if replays >= budget:
                break
    return best, variant, units, replays


def _neighbours(row: Row, variant: Ints, units: Ints) -> list[tuple[Ints, Ints]]:
    """Cuts one move away that fit, those that relieve the busiest slots first."""
    arrays = row.arrays
    forward, backward = passes_of(arrays, variant, units)
    busy = forward.sum(axis=1) + backward.sum(axis=1)
    found = []
    for giver in np.argsort(-busy, kind="stable"):
        for v in range(arrays.unit_forward.shape[1]):
            if v != variant[giver] and units[giver] <= arrays.most[giver, v]:
                other = variant.copy()
                other[giver] = v
                found.append((other, units))
        if units[giver] <= arrays.chunks:
            continue
        for taker in np.argsort(busy, kind="stable"):
            if taker != giver and units[taker] < arrays.most[taker, variant[taker]]:
                changed = units.copy()
                changed[giver] -= 1
                changed[taker] += 1
                found.append((variant, changed))
    return found


def proportional(row: Row) -> tuple[Ints, Ints] | None:
    """A first cut: every slot as many units as keeps all equally busy, by memory; None: none fits.

    Of every slot the recomputation that is fastest where it fits one unit per chunk, or else, where
    all together hold too little, the one that fits most.
    """
    arrays = row.arrays
    cost = arrays.unit_forward + arrays.unit_backward
    fit = arrays.most >= arrays.chunks
    if not fit.any(axis=1).all():
        return None
    variant = np.where(fit, cost, np.inf).argmin(axis=1)
    slots = np.arange(row.slots)
    if arrays.most[slots, variant].sum() < row.units:
        variant = arrays.most.argmax(axis=1)
    most = arrays.most[slots, variant]
    if most.sum() < row.units or row.units < arrays.chunks * row.slots:
        return None
    each = cost[slots, variant]
    besides = np.zeros(row.slots)
    besides[0] += arrays.first[:, variant[0]].sum()
    besides[-1] += arrays.last[:, variant[-1]].sum()
    units = np.full(row.slots, arrays.chunks, dtype=np.int64)
    for _ in range(row.units - arrays.chunks * row.slots):
        after = np.where(units < most, besides + (units + 1) * each, np.inf)
        units[int(after.argmin())] += 1
    return variant.astype(np.int64), units
