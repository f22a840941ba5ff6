"""A row of slots: what the solvers of one pipeline add up alike, compiled.

A row names the mesh of every slot in pipeline order; stages of a mesh stand next to each other and
fill node after node. Its runs are (mesh, stages), from the first stage to the last. A step ends as
`hetplan.cost.step_model.step` has it: every slot reduces its gradients, all wait for the sum of the
norms where gradients are clipped, then every slot updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.space.stage_table import FIRST, LAST, StageTable

NEVER = 1e30
"""Seconds of what cannot be; numba compiles comparisons with it faster than with infinity."""

INSIDE = 1e-12
"""A sum in another order differs by less than this part of itself."""


@kernel
def role_of(slots: int, slot: int) -> int:
    """0 middle, 1 first, 2 last, 3 both."""
    return (FIRST if slot == 0 else 0) + (LAST if slot == slots - 1 else 0)


@kernel
def boundaries_of(table: StageTable, mesh: Ints) -> Floats:
    """[5, P]: the four times of the boundary below each slot, and its level of the norm's sum.

    The last column is zero: a pipeline of one chunk per stage has nothing below its last slot.
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
def norm_levels(stages: int) -> int:
    """Levels of the sum of norms over so many stages."""
    levels, reached = 0, 1
    while reached < stages:
        reached, levels = 2 * reached, levels + 1
    return levels


@kernel
def norm_seconds(table: StageTable, mesh: Ints, boundaries: Floats) -> float:
    """The sum of all gradients' norms beyond the least that every plan has."""
    inside, across = 0.0, 0.0
    for s in range(mesh.shape[0]):
        inside = max(inside, table.norm_inside[mesh[s]])
        across = max(across, boundaries[4, s])
    return inside + norm_levels(mesh.shape[0]) * across


@kernel
def before_norm(after: Any, leaving: Any, tied: Any) -> Any:
    """What follows the last pass of a slot before the sum of the norms; numbers or arrays.

    after, leaving: of the table; tied: the sum of a tied matrix, where the slot takes part in it.
    """
    return after - leaving + tied


@kernel
def step_of_ends(ends: Floats, after: Floats, leaving: Floats, norm: float) -> float:
    """The step whose slots leave the pipeline at `ends`, [P].

    after, leaving: [P] what follows a slot's last pass before the sum of the norms (`before_norm`),
    and behind it.
    """
    arrived, left = 0.0, 0.0
    for s in range(ends.shape[0]):
        arrived = max(arrived, ends[s] + after[s])
        left = max(left, leaving[s])
    return arrived + left + norm


def region_follows(before: Sequence[int], region: int) -> bool:
    """Whether a mesh of a region may stand behind meshes of others, each region in one piece.

    A mesh over several regions (-1) belongs to none of them and may stand anywhere.
    """
    return region < 0 or region in before[-1:] or region not in before
