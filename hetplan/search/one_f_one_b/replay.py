"""How long a step of given slots takes by replay: the definition of a plan's cost, on arrays.

A row of slots is four arrays in pipeline order: mesh, recomputation (variant), layer units, and
microbatches in flight beyond the schedule's own (extra). Slot s of P keeps
W_s = min(P - s + extra_s, m) microbatches in flight. Times come from a `StageTable`; the replay is
`hetplan.cost.replay.kernel`. A row that does not fit in memory takes infinitely long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.kernel import replay_seconds
from hetplan.kernels import kernel
from hetplan.search.space.stage_table import FIRST, LAST, StageTable

NEVER = 1e30
"""Seconds of what cannot be; numba compiles comparisons with it faster than with infinity."""


class Numbers(NamedTuple):
    """A `StageTable` as compiled code takes it, boundaries [4, M, M] and [4, M]."""

    microbatches: int
    layers: int
    rendezvous: bool
    forward: Floats
    backward: Floats
    extra_forward: Floats
    extra_backward: Floats
    links: Floats
    """[4, M, M] activation, gradient, latency, wait of rendezvous sends."""
    node_links: Floats
    """[4, M] the same between two nodes of a mesh."""
    stages_per_node: Ints
    tied: Floats
    most_layers: Ints
    after: Floats
    leaving: Floats
    norm_inside: Floats
    """[M] beyond the least, which `after` has."""
    norm_links: Floats
    norm_node_links: Floats


def numbers_of(space: StageTable) -> Numbers:
    """The space's arrays in one value, contiguous."""
    links, nodes, norm = space.links, space.node_links, space.norm
    count = len(space.max_stages)
    square, line = np.zeros((count, count)), np.zeros(count)
    return Numbers(
        microbatches=space.num_microbatches,
        layers=space.num_layers,
        rendezvous=space.rendezvous,
        forward=_floats(space.forward),
        backward=_floats(space.backward),
        extra_forward=_floats(space.extra_forward),
        extra_backward=_floats(space.extra_backward),
        links=_floats(np.stack(links.times)),
        node_links=_floats(np.stack(nodes.times)),
        stages_per_node=np.ascontiguousarray(space.stages_per_node, dtype=np.int64),
        tied=_floats(space.tied),
        most_layers=np.ascontiguousarray(space.most_layers, dtype=np.int64),
        after=_floats(space.after),
        leaving=_floats(space.leaving),
        norm_inside=line if norm is None else _floats(norm.inside - norm.inside.min()),
        norm_links=square if norm is None else _floats(norm.links),
        norm_node_links=line if norm is None else _floats(norm.node_links),
    )


def _floats(values: Floats) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float64)


@kernel
def depth_of(slots: int, slot: int, extra: int, microbatches: int) -> int:
    """W_s: most microbatches in flight at a slot."""
    return min(slots - slot + extra, microbatches)


@kernel
def boundaries_of(numbers: Numbers, mesh: Ints) -> Floats:
    """[5, P]: the four times of the boundary below each slot, and its level of the norm's sum.

    Stages of a mesh fill node after node.
    """
    slots = mesh.shape[0]
    found = np.zeros((5, slots))
    placed = 0
    for s in range(slots - 1):
        left, right = mesh[s], mesh[s + 1]
        placed = placed + 1 if left == right else 0
        if left == right and placed % numbers.stages_per_node[left] == 0:
            for k in range(4):
                found[k, s] = numbers.node_links[k, left]
            found[4, s] = numbers.norm_node_links[left]
        else:
            for k in range(4):
                found[k, s] = numbers.links[k, left, right]
            found[4, s] = numbers.norm_links[left, right]
    return found


@kernel
def norm_seconds(numbers: Numbers, mesh: Ints, boundaries: Floats) -> float:
    """The sum of all gradients' norms beyond the least that every plan has."""
    inside, across = 0.0, 0.0
    for s in range(mesh.shape[0]):
        inside = max(inside, numbers.norm_inside[mesh[s]])
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
def fits(numbers: Numbers, slots: int, slot: int, mesh: int, variant: int, extra: int) -> int:
    """Most layer units that a slot can hold; 0: none."""
    flight = min(
        depth_of(slots, slot, extra, numbers.microbatches), numbers.most_layers.shape[3] - 1
    )
    return int(numbers.most_layers[variant, role_of(slots, slot), mesh, flight])


@kernel
def step_seconds(numbers: Numbers, mesh: Ints, variant: Ints, units: Ints, extra: Ints) -> float:
    """Seconds of one step of this row of slots; `NEVER` where it does not fit or cannot run."""
    slots = mesh.shape[0]
    forward, backward, ends = np.empty(slots), np.empty(slots), np.empty(slots)
    warmup = np.empty(slots, np.int64)
    boundaries = boundaries_of(numbers, mesh)
    leaving = 0.0
    for s in range(slots):
        i, v, n, role = mesh[s], variant[s], units[s], role_of(slots, s)
        if n < 1 or n > fits(numbers, slots, s, i, v, extra[s]):
            return NEVER
        forward[s] = numbers.extra_forward[role, v, i] + n * numbers.forward[v, i]
        backward[s] = numbers.extra_backward[role, v, i] + n * numbers.backward[v, i]
        ends[s] = numbers.after[role, i, n] - numbers.leaving[role, i, n]
        leaving = max(leaving, numbers.leaving[role, i, n])
        warmup[s] = depth_of(slots, s, extra[s], numbers.microbatches)
    if slots > 1:
        tied = numbers.tied[mesh[0], mesh[slots - 1]]
        ends[0] += tied
        ends[slots - 1] += tied
    whole = replay_seconds(
        forward,
        backward,
        boundaries[0, : slots - 1].copy(),
        boundaries[1, : slots - 1].copy(),
        boundaries[2, : slots - 1].copy(),
        boundaries[3, : slots - 1].copy(),
        warmup,
        numbers.microbatches,
        ends,
        numbers.rendezvous,
    )
    return min(NEVER, whole + leaving + norm_seconds(numbers, mesh, boundaries))
