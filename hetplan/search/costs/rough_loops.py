"""The questions of `rough_longest` and `rough_chunks` about many blocks of meshes at once.

The meshes of block k are those from start[k] to start[k + 1]. Compiled code.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetplan.job.check import MIN_INTERLEAVED_STAGES
from hetplan.kernels import kernel
from hetplan.search.costs.rough_chunks import least_chunked
from hetplan.search.costs.rough_longest import caps, holds, least_bottleneck
from hetplan.search.families.space import Floats, Ints

Bools = npt.NDArray[np.bool_]


@kernel
def fitting(
    blocks: Ints,
    start: Ints,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: Ints,
    positions: Ints,
    some: Bools,
) -> Bools:
    """[B] whether the meshes of a block have room for all units, however long stages take."""
    found = np.zeros(blocks.shape[0], np.bool_)
    for k in range(blocks.shape[0]):
        a, b = start[blocks[k]], start[blocks[k] + 1]
        if not some[a:b].any():
            continue
        cap = caps(rows[:, a:b], room[a:b], units, microbatches[blocks[k]], positions[blocks[k]])
        ones = np.ones((cap.shape[0], cap.shape[1]))
        found[k] = holds(np.inf, ones, cap, first[a:b], most[a:b], units)
    return found


@kernel
def bottlenecks(
    blocks: Ints,
    start: Ints,
    cost: Floats,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: Ints,
    positions: Ints,
) -> Floats:
    """[2, B] K and S of `least_bottleneck`."""
    found = np.zeros((2, blocks.shape[0]))
    for k in range(blocks.shape[0]):
        a, b = start[blocks[k]], start[blocks[k] + 1]
        cap = caps(rows[:, a:b], room[a:b], units, microbatches[blocks[k]], positions[blocks[k]])
        longest, whole = least_bottleneck(cost[:, a:b], cap, first[a:b], most[a:b], units)
        found[0, k], found[1, k] = longest, whole
    return found


@kernel
def chunked(
    blocks: Ints,
    start: Ints,
    cost: Floats,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: Ints,
    positions: Ints,
    chunks: Ints,
    longest: Floats,
    whole: Floats,
    hop: Floats,
    pinned: int,
) -> Floats:
    """[B, most chunks + 1, 2] of `least_chunked`; chunks[B]: most of a block, 0 where it has none.

    pinned: stages, 0 where any number of them will do.
    """
    found = np.full((blocks.shape[0], chunks.max() + 1 if chunks.size else 1, 2), np.inf)
    for k in range(blocks.shape[0]):
        if chunks[k] == 0:
            continue
        a, b, m = start[blocks[k]], start[blocks[k] + 1], microbatches[blocks[k]]
        counts = np.zeros(units + 1, np.int64)
        size = 0
        for p in range(MIN_INTERLEAVED_STAGES, min(positions[blocks[k]], units // 2) + 1):
            if m % p == 0 and (pinned == 0 or pinned == p):
                counts[size] = p
                size += 1
        found[k, : chunks[k] + 1] = least_chunked(
            cost[:, a:b], rows[:, a:b], room[a:b], first[a:b], most[a:b], units, m, chunks[k],
            counts[:size], longest[k], whole[k], hop[k],
        )  # fmt: skip
    return found
