"""Weights of stages where every stage may be the one that the step waits for.

As `hetplan.search.several.pricing`, for pipelines whose warm-up may be deeper than usual. There
(a) of `hetplan.search.several.bound` holds for every stage j, and a mixture of those with weights
y_r by position r from the back, r <= depth, which sum up to 1, is

    T / K >= m + sum over stages of  Y_r C / K - M y_r (1 - C / K),   Y_r = y_1 + ... + y_(r-1)

because T >= U_j + m C_j and m (K - C_j) <= M (K - C_j) with M a number that m cannot exceed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.families.space import BOTH, FIRST, LAST, MIDDLE
from hetplan.search.several.pricing import ABOVE, FIRST_ABOVE, LAST_TURN, ONLY, Bools


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
def weigh_slanted(
    values: Floats,
    chosen: Ints,
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    seconds: Floats,
    depth: int,
    microbatches: float,
) -> None:
    """Fill [phase, kind, r, n] as `weigh_turns` does; no stage is downstream of the bottleneck.

    seconds: (least, most) of the bottleneck. The y_r of the first `depth` positions fall as stage
    times should (by 1 / M from one to the next); paths must have as many stages.
    """
    fall = 1.0 - 1.0 / max(2.0, microbatches)
    share = (1.0 - fall) / (1.0 - fall**depth)
    values[:] = np.inf
    below = 0.0
    for r in range(1, values.shape[2]):
        own = share * fall ** (r - 1) if r <= depth else 0.0
        roles = (LAST, BOTH) if r == 1 else (MIDDLE, FIRST)
        kinds = (LAST_TURN, ONLY) if r == 1 else (ABOVE, FIRST_ABOVE)
        for at in range(2):
            for phase in range(values.shape[0]):
                _row(
                    values[phase, kinds[at], r], chosen[phase, kinds[at], r], r, roles[at],
                    layer, wire, serial, most_layers, price, allowed[phase], seconds, below,
                    microbatches * own,
                )  # fmt: skip
        below += own
