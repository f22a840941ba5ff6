"""Which islands a pipeline has used: the states that the program over orders goes through.

A pipeline is built from its last stage to its first. A state is the set of islands that can be used
no more, as bits, and where regions are contiguous the region that may still be continued. A move
puts all stages of one mesh in front of a state. With R regions of k islands there are about
R * 2**(R - 1) * 2**k states instead of 2**(R k). A mesh over several regions belongs to none of
them: it may stand anywhere, also where the regions of its islands have been left.

Equal islands are taken in the order of their numbers: swapping two of them changes no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.search.families.space import MAX_FREE_ISLANDS, Floats, Ints, Links, Space

MERGE = -1
"""Instead of a mesh: what can be done in front of `below` can be done here."""

_NOWHERE = -1
_FAR = -2
"""As region: of a state that begins with a mesh over several regions. No such state is merged."""

_MAX_BRIDGES = 3
"""Sets of islands in several regions that are told apart; each adds states."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderStates:
    """States in an order in which every state comes after those below it; 0 is empty."""

    blocked: Ints
    """[S] islands that can be used no more, as bits; above them the bits of `bridge`, and above
    those one for each region that was left while islands of it may still be used."""
    first: Ints
    """[S + 1] where the moves into each state begin."""
    mesh: Ints
    """By move: the mesh that is added, or `MERGE`."""
    below: Ints
    """By move: the state to which it is added."""
    bridge: Ints
    """[M] the bit that is set once the mesh is used, where it lies in several regions; else -1."""
    apart: bool
    """Whether regions are contiguous; islands of a region that was left may then be unused."""


def order_states(space: Space, mesh_class: Ints, *, contiguous: bool | None = None) -> OrderStates:
    """States of the space; moves into a state are sorted by the class of their mesh.

    contiguous: whether meshes of one region stand next to each other, an island of a region that
    was left staying unused; by the number of islands where left out.
    """
    masks = [int(mask) for mask in space.island_mask]
    every = 0
    for mask in masks:
        every |= mask
    apart = every.bit_count() > MAX_FREE_ISLANDS if contiguous is None else contiguous
    regions = [_NOWHERE] * len(masks)
    if apart:
        regions = [int(r) if r >= 0 else _FAR for r in space.region]
    earlier = _earlier_equals(space, masks)
    bridge = _bridges(space, masks, every.bit_length())
    left = _left(masks, regions, max(every.bit_length(), max(bridge) + 1))
    moves: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {(0, _NOWHERE): []}
    pending = [(0, _NOWHERE)]
    while pending:
        at = pending.pop()
        blocked, region = at
        found: list[tuple[int, tuple[int, int]]] = []
        if region >= 0:
            found.append((MERGE, (blocked | left[region], _NOWHERE)))
        for i, mask in enumerate(masks):
            if mask & blocked or earlier[i] & ~blocked:
                continue
            if regions[i] in left and left[regions[i]] & ~blocked == 0:
                continue  # its region was left
            if region < 0 or region == regions[i]:
                bit = 1 << bridge[i] if bridge[i] >= 0 else 0
                found.append((i, (blocked | mask | bit, regions[i])))
        for mesh, goal in found:
            if goal not in moves:
                moves[goal] = []
                pending.append(goal)
            moves[goal].append((mesh, at))
    keys = sorted(moves, key=lambda key: (key[0].bit_count(), key[1] < 0, key))
    number = {key: at for at, key in enumerate(keys)}
    first, mesh_of, below = [0], list[int](), list[int]()
    for key in keys:
        into = sorted(
            (int(mesh_class[mesh]) if mesh >= 0 else -1, mesh, number[source])
            for mesh, source in moves[key]
        )
        mesh_of.extend(mesh for _, mesh, _ in into)
        below.extend(source for _, _, source in into)
        first.append(len(mesh_of))
    return OrderStates(
        blocked=np.array([key[0] for key in keys], dtype=np.int64),
        first=np.array(first, dtype=np.int64),
        mesh=np.array(mesh_of, dtype=np.int64),
        below=np.array(below, dtype=np.int64),
        bridge=np.array(bridge, dtype=np.int64),
        apart=apart,
    )


def _left(masks: list[int], regions: list[int], first: int) -> dict[int, int]:
    """By region, the bits that are set when it is left: its islands, but not those that meshes over
    several regions may still use; for these one bit, from `first` on.
    """
    far, found = 0, dict[int, int]()
    for mask, region in zip(masks, regions, strict=True):
        if region >= 0:
            found[region] = found.get(region, 0) | mask
        elif region == _FAR:
            far |= mask
    return {
        region: mask & ~far | (1 << first + at if mask & far else 0)
        for at, (region, mask) in enumerate(sorted(found.items()))
    }


def _bridges(space: Space, masks: list[int], first: int) -> list[int]:
    """`OrderStates.bridge`: a bit for each set of islands, or one for all where they are many."""
    if space.norm is None:
        return [-1] * len(masks)
    spread = [region < 0 for region in space.region.tolist()]
    different = sorted({mask for mask, far in zip(masks, spread, strict=True) if far})
    many = len(different) > _MAX_BRIDGES
    return [
        (first if many else first + different.index(mask)) if far else -1
        for mask, far in zip(masks, spread, strict=True)
    ]


def _earlier_equals(space: Space, masks: list[int]) -> list[int]:
    """By mesh: islands equal to its own with smaller numbers, which are used before it."""
    owners: dict[int, list[int]] = {}
    for i, mask in enumerate(masks):
        for island in range(mask.bit_length()):
            if mask >> island & 1:
                owners.setdefault(island, []).append(i)
    shared = {island for i, m in enumerate(masks) if m.bit_count() > 1
              for island in range(m.bit_length()) if m >> island & 1}  # fmt: skip
    found = [0] * len(masks)
    islands = sorted(owners)
    for at, right in enumerate(islands):
        for left in reversed(islands[:at]):
            if {left, right} & shared or not _equal(space, owners[left], owners[right]):
                continue
            for i in owners[right]:
                found[i] |= 1 << left
            break  # the one before it waits for its own predecessor
    return found


def _equal(space: Space, left: list[int], right: list[int]) -> bool:
    """Whether the meshes of two islands can be exchanged, one for one, without any change."""
    if len(left) != len(right):
        return False
    swapped = np.arange(len(space.max_stages))
    swapped[left], swapped[right] = right, left
    for whole, axis in (
        (space.region, 0),
        (space.max_stages, 0),
        (space.forward, 1),
        (space.backward, 1),
        (space.extra_forward, 2),
        (space.extra_backward, 2),
        (space.most_layers, 2),
        (space.after, 1),
        (space.leaving, 1),
        (space.stages_per_node, 0),
        (space.may_be_first, 0),
        (space.may_be_last, 0),
    ):
        if not np.array_equal(whole, np.take(whole, swapped, axis=axis)):
            return False
    pairs = [space.tied, *_times(space.links)]
    lines = _times(space.node_links)
    if space.norm is not None:
        pairs.append(space.norm.links)
        lines += [space.norm.inside, space.norm.node_links]
    return all(np.array_equal(pair, pair[np.ix_(swapped, swapped)]) for pair in pairs) and all(
        np.array_equal(line, line[swapped]) for line in lines
    )


def _times(links: Links) -> list[Floats]:
    return [links.send_forward, links.send_backward, links.wire_latency, links.rendezvous_extra]
