"""Can a row of slots hold all layers at all, and how fast at best? Every slot by itself.

A slot of n units takes its own chain (`interleaved.paths`) after the rise of the slots above, each
of which has at least a unit per chunk. So for a step T every slot has a largest n, and a row whose
slots together hold too few has no cut below T. Cheap, and blind to detours.
"""

from __future__ import annotations

import numpy as np

from hetplan.kernels import kernel
from hetplan.search.families.space import Floats
from hetplan.search.interleaved.paths import OWN, RISE
from hetplan.search.interleaved.rows import Arrays
from hetplan.search.single.replay import NEVER


@kernel
def capacity_bound(row: Arrays, terms: Floats, units: int) -> float:
    """Least T for which the slots hold all units, exact; `NEVER` where memory forbids it."""
    slots, variants = row.unit_forward.shape
    # Of every slot and number of units the least chain: T is one of these values.
    chain = np.full((slots, units + 1), NEVER)
    rise, ending = 0.0, NEVER
    most = np.zeros(slots, np.int64)
    for n in range(row.chunks, units + 1):
        if n <= row.most[0].max():
            ending = min(ending, row.after[0, n] + row.leaving[0, n])
    held = 0
    for s in range(slots):
        least = NEVER
        for v in range(variants):
            for n in range(row.chunks, min(units, row.most[s, v]) + 1):
                chain[s, n] = min(chain[s, n], rise + terms[s, v, n, OWN])
                most[s] = max(most[s], n)
            if row.most[s, v] >= row.chunks:
                least = min(least, terms[s, v, row.chunks, RISE])
        if most[s] < row.chunks:
            return NEVER
        held += most[s]
        rise += least
    if held < units:
        return NEVER
    # Give units to the slot where one more costs least, from the fewest on: exact for a maximum.
    now = np.full(slots, row.chunks, np.int64)
    bound = 0.0
    for s in range(slots):
        bound = max(bound, chain[s, row.chunks])
    for _ in range(units - row.chunks * slots):
        at, least = -1, NEVER
        for s in range(slots):
            if now[s] < most[s] and chain[s, now[s] + 1] < least:
                at, least = s, chain[s, now[s] + 1]
        if at < 0:
            return NEVER
        now[at] += 1
        bound = max(bound, least)
    return bound + ending + row.closing
