"""How slow is the slowest level of the sum of norms at least, by the islands that a pipeline uses?

Every level of the sum takes as long as the slowest boundary of the pipeline. Whatever the order of
the meshes, their boundaries connect all islands that are used; so the slowest of them is no faster
than the slowest edge of a spanning tree that avoids slow edges. Two islands are as far apart as the
nearest meshes on them, and not at all where one mesh that is used lies on both: states know that of
meshes in several regions.

Where regions are contiguous, a state does not say which islands of a region are used; then regions
are connected instead of islands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetplan.kernels import kernel
from hetplan.search.families.space import Floats, Ints, Space
from hetplan.search.single.order_states import OrderStates


def norm_hops(space: Space, states: OrderStates) -> Floats:
    """By move: least seconds of one level where the mesh of the move is the first one."""
    moves = len(states.mesh)
    if space.norm is None:
        return np.zeros(moves)
    masks = space.island_mask
    every = 0
    for mask in masks.tolist():
        every |= mask
    bits = every.bit_length()
    node, count = np.arange(bits, dtype=np.int64), bits
    if states.apart:
        node, count = _regions(space, bits)
    floor = float(min(space.norm.links.min(), space.norm.node_links.min()))
    bridges = int(states.bridge.max()) - bits + 1 if states.bridge.max() >= 0 else 0
    far = np.empty((1 << bridges, count, count))
    for used in range(1 << bridges):
        there = (states.bridge < 0) | (used >> np.maximum(states.bridge - bits, 0) & 1 == 1)
        far[used] = _distances(masks, node, count, space.norm.links, floor, there)
    into = np.repeat(states.blocked, np.diff(states.first))
    edges: Floats = np.maximum(floor, slowest_edges(into, node, far))
    return edges


def _regions(space: Space, bits: int) -> tuple[Ints, int]:
    """The node of every island: its region, or one of its own where no mesh tells."""
    node = np.arange(bits, dtype=np.int64) + 1 + int(space.region.max())
    for mask, region in zip(space.island_mask.tolist(), space.region.tolist(), strict=True):
        for island in range(bits):
            if mask >> island & 1 and region >= 0:
                node[island] = region
    _, numbers = np.unique(node, return_inverse=True)
    return numbers.astype(np.int64), int(numbers.max()) + 1


@kernel
def _distances(
    masks: Ints,
    node: Ints,
    count: int,
    links: Floats,
    floor: float,
    there: npt.NDArray[np.bool_],
) -> Floats:
    """[nodes, nodes] seconds of the nearest two meshes that are there; `floor` inside a mesh."""
    found = np.full((count, count), np.inf)
    for x in range(masks.shape[0]):
        for y in range(masks.shape[0]):
            together = x == y
            if not (there[x] and there[y]) or (not together and masks[x] & masks[y]):
                continue
            for i in range(node.shape[0]):
                for j in range(node.shape[0]):
                    if masks[x] >> i & 1 and masks[y] >> j & 1:
                        value = floor if together else min(links[x, y], links[y, x])
                        found[node[i], node[j]] = min(found[node[i], node[j]], value)
    return found


@kernel
def slowest_edges(used: Ints, node: Ints, far: Floats) -> Floats:
    """The longest edge of a shortest spanning tree over each set of islands, as bits.

    far: [bridges, nodes, nodes] by the bits above the islands; further bits do not matter.
    """
    count, islands, bridges = far.shape[1], node.shape[0], far.shape[0] - 1
    found = np.zeros(used.shape[0])
    near, inside = np.empty(count), np.empty(count, np.bool_)
    for k in range(used.shape[0]):
        if k > 0 and used[k] == used[k - 1]:
            found[k] = found[k - 1]
            continue
        start = -1
        inside[:] = True  # whatever is not used needs no edge
        for i in range(node.shape[0]):
            if used[k] >> i & 1:
                inside[node[i]], start = False, node[i]
        near[:] = np.inf
        at = start
        while at >= 0:
            inside[at] = True
            nearest = -1
            for other in range(count):
                if not inside[other]:
                    near[other] = min(near[other], far[used[k] >> islands & bridges, at, other])
                    if nearest < 0 or near[other] < near[nearest]:
                        nearest = other
            if nearest >= 0 and near[nearest] < np.inf:
                found[k] = max(found[k], near[nearest])
            at = nearest
    return found
