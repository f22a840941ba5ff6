"""Which meshes of a large family are worth a local search?

Neighbourhoods of a local search grow with the meshes, and most meshes of an island are worse than
another one on it. With K the least time of a stage's passes at which all islands together hold the
units, each by its best mesh (`max_stages` stages of what K and memory allow), the meshes that hold
most at a little more than K are kept, some per set of islands.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints

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
