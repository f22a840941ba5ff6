"""All cuts and recomputations of one row, compiled: what fits, how long it is busy, when it ends.

Stages may have several parts (U), of which the slowest counts; K ways to recompute; positions count
the layers of the row from the embedding on.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.kernel import pipeline_ends
from hetplan.kernels import kernel


@kernel
def variants(
    units: Ints,
    positions: Ints,
    choices: Ints,
    parts: Ints,
    most: Ints,
    seconds: Floats,
    microbatches: int,
    limit: float,
    cut: Ints,
    choice: Ints,
    slow: Ints,
    forward: Floats,
    backward: Floats,
    busy: Floats,
) -> int:
    """How many (cut, choice) fit and are busy for less than `limit`; fills the last six with them.

    units: [C, P] of every stage. positions: [C, P + 1] layers where stages begin. choices: [R, P].
    parts: [P] how many. most: [P, K] units that fit. seconds: [P, U, K, 3, layers + 1] of all
    layers before each position: forward, backward, again. slow, forward, backward: [., P].
    busy: max over stages of what is before one and its own passes of all microbatches.
    """
    found = 0
    stages = units.shape[1]
    for c in range(units.shape[0]):
        for r in range(choices.shape[0]):
            before = longest = 0.0
            s = 0
            while s < stages:
                k = choices[r, s]
                if units[c, s] > most[s, k]:
                    break
                start, stop = positions[c, s], positions[c, s + 1]
                whole, at = -1.0, 0
                for u in range(parts[s]):
                    total = 0.0
                    for way in range(3):
                        total += seconds[s, u, k, way, stop] - seconds[s, u, k, way, start]
                    if total > whole:
                        whole, at = total, u
                row = seconds[s, at, k]
                slow[found, s] = at
                forward[found, s] = row[0, stop] - row[0, start]
                backward[found, s] = row[1, stop] - row[1, start] + (row[2, stop] - row[2, start])
                own = forward[found, s] + backward[found, s]
                longest = max(longest, before + own * microbatches)
                before += own
                if longest >= limit:
                    break
                s += 1
            if s == stages:
                cut[found], choice[found], busy[found] = c, r, longest
                found += 1
    return found


@kernel
def ends_of(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    rendezvous_extra: Floats,
    depths: Ints,
    microbatches: int,
    rendezvous: bool,
    limit: float,
    busy: Floats,
    ends: Floats,
    last: Floats,
) -> int:
    """Fills `ends` [V, P] and `last` [V], infinite where no less than `limit`; how many replays."""
    replays = 0
    for v in range(forward.shape[0]):
        last[v] = np.inf
        if busy[v] >= limit:
            continue
        ends[v] = pipeline_ends(
            forward[v],
            backward[v],
            send_forward,
            send_backward,
            wire_latency,
            rendezvous_extra,
            depths,
            microbatches,
            rendezvous,
        )
        replays += 1
        most = ends[v].max()
        if most < limit:
            last[v] = most
    return replays
