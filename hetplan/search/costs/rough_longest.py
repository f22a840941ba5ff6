"""How long must the longest stage of a family be (`hetplan.search.costs.rough`)? Compiled code."""

from __future__ import annotations

import math

import numpy as np

from hetplan.kernels import kernel, order_of, sum_of
from hetplan.search.families.space import Floats, Ints

_STEPS = 24
"""Halvings of the range of K: the bound is within 1e-7 of the range of what it could be."""


@kernel
def caps(rows: Floats, room: Floats, most: int, microbatches: int, positions: int) -> Floats:
    """[V, M, W] units that fit with 1 .. W microbatches in flight."""
    found = np.zeros((rows.shape[0], rows.shape[1], positions))
    for v in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            r = rows[v, i]
            have = room[i] * (1.0 + 1e-12)
            fixed = min(float(most), (have - r[4]) / r[5])
            for w in range(positions):
                flight = min(w + 1, microbatches)
                fits = min(fixed, (have - r[0]) / (r[1] + flight * r[7]))
                if fits < 1.0:
                    break
                found[v, i, w] = math.floor(fits)
    return found


@kernel
def holds(longest: float, cost: Floats, cap: Floats, first: Ints, most: Ints, units: int) -> bool:
    """Whether stages of at most this long could hold all units, by islands and by position."""
    choices, meshes, positions = cap.shape
    best = np.zeros(int(first.max()) + 1)
    at = np.zeros(positions)
    for i in range(meshes):
        for v in range(choices):
            if cap[v, i, 0] < 1.0:
                continue
            fits = np.floor(longest / cost[v, i] * (1.0 + 1e-12))
            best[first[i]] = max(best[first[i]], most[i] * min(fits, cap[v, i, 0]))
            for w in range(positions):
                if cap[v, i, w] < 1.0:
                    break
                at[w] = max(at[w], min(fits, cap[v, i, w]))
    if sum_of(best) < units:
        return False
    return bool(sum_of(at) >= units)


@kernel
def least_bottleneck(
    cost: Floats, cap: Floats, first: Ints, most: Ints, units: int
) -> tuple[float, float]:
    """(least K, least S) with which the units find room, which they must without a limit on K.

    cost[V, M] of one unit; cap[V, M, W]: units that fit; first[M]: island; most[M]: stages.
    """
    choices, meshes = cost.shape
    islands = int(first.max()) + 1
    cheapest = np.full(islands, np.inf)
    rooms = np.zeros(islands)
    high, low = 0.0, np.inf
    for i in range(meshes):
        for v in range(choices):
            if cap[v, i, 0] > 0:
                cheapest[first[i]] = min(cheapest[first[i]], cost[v, i])
                rooms[first[i]] = max(rooms[first[i]], most[i] * cap[v, i, 0])
                high = max(high, cost[v, i] * cap[v, i, 0])
                low = min(low, cost[v, i])
    low *= 1.0 - 1e-9
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if holds(middle, cost, cap, first, most, units):
            high = middle
        else:
            low = middle
    whole, left = 0.0, float(units)
    for at in order_of(cheapest):
        taken = min(left, rooms[at])
        if taken > 0:
            whole += taken * cheapest[at]
            left -= taken
    return low, whole
