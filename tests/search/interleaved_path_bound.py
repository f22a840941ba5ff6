"""The bound of one row's slots put together from the terms that the programs add up."""

from __future__ import annotations

import numba
import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.search.interleaved.rows import (
    AWAY,
    AWAY_BACK,
    OWN,
    RISE,
    SKIP,
    SKIP_BACK,
    TERMS,
    TURN,
    TURN_BACK,
    exchange_seconds,
    slot_terms,
)


@numba.njit
def path_bound_seconds(
    forward: Floats,
    backward: Floats,
    hops: Floats,
    microbatches: int,
    lockstep: bool,
    after: Floats,
) -> float:
    """Seconds that no step of these slots can beat; `after` [P] follows each slot's last pass.

    Arguments as in `lockstep_ends`; valid for every interleaved order; m is a multiple of P.
    """
    stages, chunks = forward.shape
    exchanges = np.zeros((5, stages))
    if lockstep:
        exchanges = exchange_seconds(hops, stages, chunks, microbatches)
    both = hops[0] + hops[1] + 2.0 * hops[2]
    terms = np.empty((stages, TERMS))
    for s in range(stages):
        slot_terms(
            forward[s], backward[s], s, stages, microbatches, both[s - 1],
            both[s] if s < stages - 1 else 0.0, exchanges[:, s].copy(), lockstep, terms[s],
        )  # fmt: skip
    best, turn, turn_back, need = 0.0, 0.0, 0.0, 0.0
    for s in range(stages - 1, -1, -1):
        gain = max(0.0, turn - terms[s, SKIP])
        gain_back = max(0.0, turn_back - terms[s, SKIP_BACK])
        if s == 0 and lockstep:
            gain = max(gain, terms[stages - 1, AWAY] - terms[0, AWAY])
            gain_back = max(gain_back, terms[stages - 1, AWAY_BACK] - terms[0, AWAY_BACK])
        one = microbatches == stages
        own = terms[s, OWN] + (max(gain, gain_back) if one else gain + gain_back)
        need = max(own, need + terms[s, RISE])
        turn += terms[s, TURN]
        turn_back += terms[s, TURN_BACK]
        best = max(best, need) if s == 0 else best
    return float(best + after[0])
