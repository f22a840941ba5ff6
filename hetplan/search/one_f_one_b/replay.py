"""How long a step of given slots takes by replay: the definition of a plan's cost, on arrays.

A row of slots is four arrays in pipeline order: mesh, recomputation (variant), layer units, and
microbatches in flight beyond the schedule's own (extra). Slot s of P keeps
W_s = min(P - s + extra_s, m) microbatches in flight. Times come from a `StageTable`; the replay is
`hetplan.cost.replay.times`. A row that does not fit in memory takes infinitely long.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import StageTimes, replay_seconds
from hetplan.kernels import kernel
from hetplan.search.space.stage_table import FIRST, LAST, StageTable

NEVER = 1e30
"""Seconds of what cannot be; numba compiles comparisons with it faster than with infinity."""


@kernel
def depth_of(slots: int, slot: int, extra: int, microbatches: int) -> int:
    """W_s: most microbatches in flight at a slot."""
    return min(slots - slot + extra, microbatches)


@kernel
def boundaries_of(table: StageTable, mesh: Ints) -> Floats:
    """[5, P]: the four times of the boundary below each slot, and its level of the norm's sum.

    Stages of a mesh fill node after node.
    """
    slots = mesh.shape[0]
    found = np.zeros((5, slots))
    placed = 0
    for s in range(slots - 1):
        left, right = mesh[s], mesh[s + 1]
        placed = placed + 1 if left == right else 0
        if left == right and placed % table.stages_per_node[left] == 0:
            for k in range(4):
                found[k, s] = table.node_links[k, left]
            found[4, s] = table.norm_node_links[left]
        else:
            for k in range(4):
                found[k, s] = table.links[k, left, right]
            found[4, s] = table.norm_links[left, right]
    return found


@kernel
def norm_seconds(table: StageTable, mesh: Ints, boundaries: Floats) -> float:
    """The sum of all gradients' norms beyond the least that every plan has."""
    inside, across = 0.0, 0.0
    for s in range(mesh.shape[0]):
        inside = max(inside, table.norm_inside[mesh[s]])
        across = max(across, boundaries[4, s])
    levels, reached = 0, 1
    while reached < mesh.shape[0]:
        reached, levels = 2 * reached, levels + 1
    return inside + levels * across


@kernel
def role_of(slots: int, slot: int) -> int:
    """0 middle, 1 first, 2 last, 3 both."""
    return (FIRST if slot == 0 else 0) + (LAST if slot == slots - 1 else 0)


@kernel
def fits(table: StageTable, slots: int, slot: int, mesh: int, variant: int, extra: int) -> int:
    """Most layer units that a slot can hold; 0: none."""
    flight = min(
        depth_of(slots, slot, extra, table.num_microbatches), table.most_layers.shape[3] - 1
    )
    return int(table.most_layers[variant, role_of(slots, slot), mesh, flight])


@kernel
def step_seconds(table: StageTable, mesh: Ints, variant: Ints, units: Ints, extra: Ints) -> float:
    """Seconds of one step of this row of slots; `NEVER` where it does not fit or cannot run."""
    slots = mesh.shape[0]
    forward, backward, ends = np.empty(slots), np.empty(slots), np.empty(slots)
    warmup = np.empty(slots, np.int64)
    boundaries = boundaries_of(table, mesh)
    leaving = 0.0
    for s in range(slots):
        i, v, n, role = mesh[s], variant[s], units[s], role_of(slots, s)
        if n < 1 or n > fits(table, slots, s, i, v, extra[s]):
            return NEVER
        forward[s] = table.extra_forward[role, v, i] + n * table.forward[v, i]
        backward[s] = table.extra_backward[role, v, i] + n * table.backward[v, i]
        ends[s] = table.after[role, i, n] - table.leaving[role, i, n]
        leaving = max(leaving, table.leaving[role, i, n])
        warmup[s] = depth_of(slots, s, extra[s], table.num_microbatches)
    if slots > 1:
        tied = table.tied[mesh[0], mesh[slots - 1]]
        ends[0] += tied
        ends[slots - 1] += tied
    times = StageTimes(
        forward,
        backward,
        boundaries[0, : slots - 1].copy(),
        boundaries[1, : slots - 1].copy(),
        boundaries[2, : slots - 1].copy(),
        boundaries[3, : slots - 1].copy(),
        warmup,
        table.num_microbatches,
    )
    whole = replay_seconds(times, ends, table.rendezvous)
    return min(NEVER, whole + leaving + norm_seconds(table, mesh, boundaries))
