"""Which rows can be part of a plan whose step is below a limit: prices of devices.

Prices p_i >= 0 of a device of island i such that no row (samples b_r, devices n_ri) is worth more
than its devices, b_r <= sum_i n_ri p_i, bound what any rows do together: sum_i N_i p_i samples on
N_i devices. Where even the least such sum is below the batch, no plan consists of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from hetplan.cost.arrays import Floats, Ints

_SURE = 1e-7
"""Accuracy of the linear program."""


def least_prices(needs: Ints, samples: Ints, devices: Ints) -> Floats:
    """Prices with the least sum; needs: [R, I] devices of every row on every island."""
    found = linprog(devices, A_ub=-needs, b_ub=-samples, bounds=(0, None), method="highs")
    if found.x is None:  # no rows
        return np.zeros(len(devices))
    prices: Floats = np.maximum(found.x, 0.0)
    # What the program's accuracy leaves below a row's samples.
    worth = needs @ prices
    short = float(np.max(samples / np.maximum(worth, 1e-300), initial=1.0))
    return prices * max(1.0, short)


def enough(needs: Ints, samples: Ints, devices: Ints, batch: int) -> bool:
    """Whether these rows may do the batch."""
    if not len(samples):
        return False
    return float(devices @ least_prices(needs, samples, devices)) >= batch * (1 - _SURE)


def least_step(
    seconds: Sequence[float], needs: Ints, samples: Ints, devices: Ints, batch: int
) -> float:
    """The least limit at which rows that take no longer may do the batch; infinite: never."""
    order = np.argsort(np.array(seconds), kind="stable")
    finite = int(np.count_nonzero(np.array(seconds) < np.inf))
    low, high = 0, finite
    if not enough(needs[order[:high]], samples[order[:high]], devices, batch):
        return float("inf")
    while high - low > 1:
        middle = (low + high) // 2
        some = order[:middle]
        if enough(needs[some], samples[some], devices, batch):
            high = middle
        else:
            low = middle
    return float(seconds[order[high - 1]])
