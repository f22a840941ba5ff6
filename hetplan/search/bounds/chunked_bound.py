"""How long must the longest stage of an interleaved family be, for each number of stages?

As in `order_free_bound`, with what interleaving keeps in flight. Of P stages of v chunks the w-th
 from the end has 2 (w - 1) + (v - 1) P + 1 chunk passes in flight before its first backward
pass (at most m v), and has them in its first chunks, which are the larger ones: with n units at
least n / v for each. So a stage has room for fewer units than under 1F1B, every one has at least v,
and P is a number of stages that the target can interleave.
"""

from __future__ import annotations

import math

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.job.check import MIN_INTERLEAVED_STAGES
from hetplan.kernels import kernel, sum_of

_STEPS = 20
"""Halvings of the range of K: the bound is within 1e-6 of the range of what it could be."""

_BESIDE_SLOW_HOPS = 4.0
"""Stages that wait for the slowest hops in every exchange: two of them, one leads back. A guess."""


@kernel
def room_of(
    rows: Floats, room: Floats, units: int, m: int, chunks: int, stages: int
) -> Floats:  # fmt: skip
    """[V, M, P] units that fit, by distance from the last stage."""
    found = np.zeros((rows.shape[0], rows.shape[1], stages))
    for v in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            r = rows[v, i]
            have = room[i] * (1.0 + 1e-12)
            fixed = min(float(units), (have - r[4]) / r[5])
            for w in range(stages):
                passes = min(2 * w + (chunks - 1) * stages + 1, m * chunks)
                fits = math.floor(min(fixed, (have - r[0]) / (r[1] + passes / chunks * r[7])))
                if fits < chunks:
                    break
                found[v, i, w] = fits
    return found


@kernel
def _holds(
    longest: float, cost: Floats, cap: Floats, first: Ints, most: Ints, chunks: int, units: int
) -> bool:
    """Whether P stages of at most this long could hold all units, by islands and by position."""
    choices, meshes, stages = cap.shape
    best = np.zeros(int(first.max()) + 1)
    at = np.zeros(stages)
    for i in range(meshes):
        own = 0.0
        for w in range(stages):
            here = 0.0
            for v in range(choices):
                here = max(
                    here, min(math.floor(longest / cost[v, i] * (1.0 + 1e-12)), cap[v, i, w])
                )
            if here < chunks:
                break
            at[w] = max(at[w], here)
            if w < most[i]:
                own += here
        best[first[i]] = max(best[first[i]], own)
    return bool(at.min() >= chunks and sum_of(best) >= units and sum_of(at) >= units)


@kernel
def least_chunked(
    cost: Floats,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: int,
    most_chunks: int,
    stages: Ints,
    known: float,
    whole: float,
    hop: float,
) -> Floats:
    """[most_chunks + 1, 2] for each number of chunks: least K, and a guess at the least step, over
    these numbers of stages; infinite where none fits.

    cost [V, M] of one unit; rows [V, M, 8] and room [M] of memory; first [M]: island; most [M]:
    stages; known: K is not below; whole: sum of all stages' passes; hop: seconds that an exchange
    over the slowest hop takes.
    """
    found = np.full((most_chunks + 1, 2), np.inf)
    high = 0.0
    for i in range(cost.shape[1]):
        for v in range(cost.shape[0]):
            if cost[v, i] < np.inf:
                high = max(high, cost[v, i] * units)
    for chunks in range(2, most_chunks + 1):
        for count in stages:
            if count * chunks > units:
                break
            cap = room_of(rows, room, units, microbatches, chunks, count)
            low, top = known, high
            if not _holds(low, cost, cap, first, most, chunks, units):
                if not _holds(top, cost, cap, first, most, chunks, units):
                    continue
                for _ in range(_STEPS):
                    middle = 0.5 * (low + top)
                    if _holds(middle, cost, cap, first, most, chunks, units):
                        top = middle
                    else:
                        low = middle
            waits = microbatches * chunks * hop * min(1.0, _BESIDE_SLOW_HOPS / count)
            guess = microbatches * low + max(0.0, whole - low) / chunks + waits
            found[chunks, 0] = min(found[chunks, 0], low)
            found[chunks, 1] = min(found[chunks, 1], guess)
    return found


def stage_counts(microbatches: int, most: int, pinned: int) -> tuple[int, ...]:
    """Numbers of stages that can be interleaved, increasing."""
    every = range(MIN_INTERLEAVED_STAGES, most + 1)
    return tuple(p for p in every if microbatches % p == 0 and pinned in (0, p))
