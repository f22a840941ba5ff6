"""The cheapest path of one pipeline at a given bottleneck, by a program over positions and layers.

A path has one part per stage. Its bottleneck's stage time lies between `least` and `most` seconds;
stages upstream of it, itself and those downstream of it weigh

    price + C / least        price        price + down * C / least - bonus

(`hetplan.search.several.bound` says why). Positions count from the last stage, as microbatches in
flight do: stage at position r has r of them in flight, or `deeper` more.

    below[r][l]  least weight of stages 1 to r, all downstream of the bottleneck, with l layers
    above[r][l]  the same with the bottleneck among them
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.families.space import BOTH, FIRST, LAST, MIDDLE

Bools = npt.NDArray[np.bool_]


@njit(cache=True)
def _table(
    weights: Floats,
    which: Ints,
    slope: float,
    bonus: float,
    role: int,
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    most: float,
    rows: int,
    deeper: int,
) -> None:
    """[r][n] least weight of a stage of n layers at position r, and whose option it is.

    `deeper`: it has so many more microbatches in flight than its position.
    """
    weights[:] = np.inf
    which[:] = -1
    layers = weights.shape[1] - 1
    for o in range(layer.shape[0]):
        if not allowed[o]:
            continue
        # A little more than fits: another order of additions must not leave a stage out.
        fits = int(np.floor((most * (1 + 1e-12) - serial[role, o]) / layer[o] * (1 + 1e-12)))
        row = rows
        for n in range(1, min(layers, fits) + 1):
            while row >= 1 and most_layers[role, o, row + deeper] < n:
                row -= 1
            if row < 1:
                break
            value = price[o] + slope * (n * layer[o] + wire[role, o]) - bonus
            if value < weights[row, n]:
                weights[row, n] = value
                which[row, n] = o
    for row in range(rows - 1, 0, -1):
        for n in range(1, layers + 1):
            if weights[row + 1, n] < weights[row, n]:
                weights[row, n] = weights[row + 1, n]
                which[row, n] = which[row + 1, n]


@njit(cache=True)
def _longest(weights: Floats, row: int) -> int:
    """The most layers of a stage at this position; 0 where none fits."""
    for n in range(weights.shape[1] - 1, 0, -1):
        if weights[row, n] < np.inf:
            return n
    return 0


@njit(cache=True)
def cheapest_path(
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    least: float,
    most: float,
    num_layers: int,
    rows: int,
    down: float,
    bonus: float,
    deeper: int,
    path: Ints,
) -> float:
    """Least weight of a whole path, infinite where there is none.

    deeper: microbatches that the bottleneck and all upstream of it have in flight beyond their
    positions; of the last stage it is none, so that with `deeper` above 0 it is not the bottleneck.
    layer: [O] seconds per layer; wire, serial: [4, O] what a stage of this role has besides, as it
    counts for one microbatch's way, and in a stage's own turn; most_layers: [4, O, W + 1]. `path`
    [3, rows] is filled with (option, layers, 1 for the bottleneck) by position from the back, from
    index 0 on; its end is marked by option -1.
    """
    shape = (rows + 1, num_layers + 1)
    up = 1.0 / least
    values = np.empty((8, rows + 1, num_layers + 1))
    chosen = np.empty((8, rows + 1, num_layers + 1), np.int64)
    slopes = (down * up, 0.0, up, 0.0, up, down * up, 0.0, 0.0)
    roles = (MIDDLE, MIDDLE, MIDDLE, FIRST, FIRST, LAST, LAST, BOTH)
    for k in range(8):
        table_rows = rows if k < 5 else 1
        _table(
            values[k, : table_rows + 1],
            chosen[k, : table_rows + 1],
            slopes[k],
            bonus if k == 0 or k == 5 else 0.0,
            roles[k],
            layer,
            wire,
            serial,
            most_layers,
            price,
            allowed,
            most,
            table_rows,
            0 if k == 0 or k == 5 else deeper,
        )
    below = np.full(shape, np.inf)
    above = np.full(shape, np.inf)
    # Layers of the stage at this position; of `above` negative where it is the bottleneck.
    below_taken = np.zeros(shape, np.int64)
    above_taken = np.zeros(shape, np.int64)
    for n in range(1, num_layers + 1):
        below[1, n], below_taken[1, n] = values[5, 1, n], n
        if deeper == 0:
            above[1, n], above_taken[1, n] = values[6, 1, n], -n
    best, best_row, best_taken, best_kind = np.inf, 1, num_layers, 7
    if deeper == 0:
        best = values[7, 1, num_layers]
    for r in range(2, rows + 1):
        # The first stage at this position.
        for n in range(
            1, min(num_layers - 1, max(_longest(values[3], r), _longest(values[4], r))) + 1
        ):
            rest = num_layers - n
            value = below[r - 1, rest] + values[3, r, n]
            if value < best:
                best, best_row, best_taken, best_kind = value, r, n, 3
            value = above[r - 1, rest] + values[4, r, n]
            if value < best:
                best, best_row, best_taken, best_kind = value, r, n, 4
        if r == rows:
            break
        for n in range(1, _longest(values[1], r) + 1):
            for held in range(r - 1 + n, num_layers):
                value = below[r - 1, held - n] + values[0, r, n]
                if value < below[r, held]:
                    below[r, held], below_taken[r, held] = value, n
                value = below[r - 1, held - n] + values[1, r, n]
                if value < above[r, held]:
                    above[r, held], above_taken[r, held] = value, -n
                value = above[r - 1, held - n] + values[2, r, n]
                if value < above[r, held]:
                    above[r, held], above_taken[r, held] = value, n
    path[0, :] = -1
    if best == np.inf:
        return float(best)
    path[0, best_row - 1] = chosen[best_kind, best_row, best_taken]
    path[1, best_row - 1] = best_taken
    path[2, best_row - 1] = 1 if best_kind == 3 or best_kind == 7 else 0
    placed = best_kind == 3
    left = num_layers - best_taken
    for r in range(best_row - 1, 0, -1):
        if placed:
            taken, kind = below_taken[r, left], 5 if r == 1 else 0
        else:
            taken = above_taken[r, left]
            kind = 2
            if taken < 0:
                taken, placed = -taken, True
                kind = 6 if r == 1 else 1
                path[2, r - 1] = 1
        if kind != 6 and kind != 1:
            path[2, r - 1] = 0
        path[0, r - 1] = chosen[kind, r, taken]
        path[1, r - 1] = taken
        left -= taken
    return float(best)
