"""The cheapest path where every stage may be the one that the step waits for.

As `hetplan.search.several.pricing`, for pipelines whose warm-up may be deeper than usual: there
only (a) of `hetplan.search.several.bound` holds, for every stage j, and a mixture of those with
weights y_r by position r from the back, r <= depth, which sum up to 1, is

    T / K >= m + sum over stages of  Y_r C / K - M y_r (1 - C / K),   Y_r = y_1 + ... + y_(r-1)

because T >= U_j + m C_j and m (K - C_j) <= M (K - C_j) with M a number that m cannot exceed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.families.space import BOTH, FIRST, LAST, MIDDLE
from hetplan.search.several.pricing import Bools


@njit(cache=True)
def _row(
    weights: Floats,
    which: Ints,
    row: int,
    role: int,
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    seconds: Floats,
    above: float,
    here: float,
) -> None:
    """[n] least weight of a stage of n layers at this position, and its option.

    seconds: (least, most) of the bottleneck; above: Y_r; here: M y_r.
    """
    weights[:] = np.inf
    least, most = seconds[0], seconds[1]
    for o in range(layer.shape[0]):
        if not allowed[o]:
            continue
        fits = int(np.floor((most * (1 + 1e-12) - serial[role, o]) / layer[o] * (1 + 1e-12)))
        for n in range(1, min(weights.shape[0] - 1, fits, most_layers[role, o, row]) + 1):
            turn = n * layer[o] + serial[role, o]
            value = price[o] + above * (n * layer[o] + wire[role, o]) / least
            # The bottleneck takes up to `most`: the whole of what this one is short of that.
            value -= here * max(0.0, most - turn) / least
            if value < weights[n]:
                weights[n] = value
                which[n] = o


@njit(cache=True)
def cheapest_slanted_path(
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    seconds: Floats,
    num_layers: int,
    fewest: int,
    rows: int,
    depth: int,
    microbatches: float,
    path: Ints,
) -> float:
    """Least weight of a path of `fewest` to `rows` stages; `depth` is at most `fewest`.

    The y_r of the first `depth` positions fall as stage times should (by 1 / M from one to the
    next). `path` as in `hetplan.search.several.pricing.cheapest_path`.
    """
    fall = 1.0 - 1.0 / max(2.0, microbatches)
    share = (1.0 - fall) / (1.0 - fall**depth)
    reached = np.full((rows + 1, num_layers + 1), np.inf)
    taken = np.zeros((rows + 1, num_layers + 1), np.int64)
    who = np.zeros((rows + 1, num_layers + 1), np.int64)
    weights, which = np.empty(num_layers + 1), np.empty(num_layers + 1, np.int64)
    path[0, :] = -1
    best, best_row, best_taken, best_who = np.inf, 0, 0, 0
    below = 0.0
    for r in range(1, rows + 1):
        own = share * fall ** (r - 1) if r <= depth else 0.0
        role = BOTH if r == 1 else FIRST
        if r >= fewest:
            _row(
                weights, which, r, role, layer, wire, serial, most_layers, price, allowed,
                seconds, below, microbatches * own,
            )  # fmt: skip
            for n in range(1, num_layers + 1):
                rest = num_layers - n
                before = reached[r - 1, rest] if r > 1 else (0.0 if rest == 0 else np.inf)
                if weights[n] + before < best:
                    best, best_row = weights[n] + before, r
                    best_taken, best_who = n, which[n]
        if r == rows:
            break
        role = LAST if r == 1 else MIDDLE
        _row(
            weights, which, r, role, layer, wire, serial, most_layers, price, allowed,
            seconds, below, microbatches * own,
        )  # fmt: skip
        for n in range(1, num_layers):
            if weights[n] == np.inf:
                continue
            if r == 1:
                reached[1, n], taken[1, n], who[1, n] = weights[n], n, which[n]
                continue
            for held in range(r - 1 + n, num_layers):
                value = reached[r - 1, held - n] + weights[n]
                if value < reached[r, held]:
                    reached[r, held], taken[r, held], who[r, held] = value, n, which[n]
        below += own
    if best == np.inf:
        return best
    path[0, best_row - 1], path[1, best_row - 1], path[2, best_row - 1] = best_who, best_taken, 0
    left = num_layers - best_taken
    for r in range(best_row - 1, 0, -1):
        path[0, r - 1], path[1, r - 1], path[2, r - 1] = who[r, left], taken[r, left], 0
        left -= taken[r, left]
    return best
