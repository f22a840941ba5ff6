"""A family as the compiled program over orders takes it: states, links by class, roles, depths.

Which islands a pipeline has used: the states that the program over orders goes through.

A pipeline is built from its last stage to its first. A state is the set of islands that can be used
no more, as bits, and where regions are contiguous the region that may still be continued. A move
puts all stages of one mesh in front of a state. With R regions of k islands there are about
R * 2**(R - 1) * 2**k states instead of 2**(R k). A mesh over several regions belongs to none of
them: it may stand anywhere, also where the regions of its islands have been left.

Equal islands are taken in the order of their numbers: swapping two of them changes no time.

`norm_hops` bounds the slowest level of the sum of norms by the islands that a pipeline uses. Every
level of the sum takes as long as the slowest boundary of the pipeline. Whatever the order of the
meshes, their boundaries connect all islands that are used; so the slowest of them is no faster than
the slowest edge of a spanning tree that avoids slow edges. Two islands are as far apart as the
nearest meshes on them, and not at all where one mesh that is used lies on both: states know that of
meshes in several regions.

Where regions are contiguous, a state does not say which islands of a region are used; then regions
are connected instead of islands.

Late slots. A slot q ends its step after its last backward pass, which chains pass before they go up
to the first slot:

    T >= Sigma - (B' upstream of q) + X + after(q)

with those X whose chains pass it: of a slot upstream of q all but the chains that end with backward
passes of that slot (`order_slots.slot_room`). The latest slot is the q with the largest after(q) -
(B' upstream of q). Among the slots that are placed that number is the larger one of after(slot in
front) and what it was before, less B' of the slot in front. Tables have a level for each of some
edges (`Ending`); it is rounded down to one of them (`order_slots.lateness`). A slot in front that
is not the latest so far loses chains; should it turn out to be downstream of the latest one, it
has more of them.

Meshes whose boundaries to everything upstream cost the same are one class: once their stages are
placed nothing in front can tell them apart. What a mesh upstream of a class needs to know is

    late, back     dependency parts of the boundary's transfers that its slot adds to Sigma
    post           serial part of the gradient (rendezvous sends)
    slice          which table of the class to read

A transfer of activations belongs to the slot that receives it. With rendezvous sends that slot is
serially longer, so a class has one table (slice) for every different boundary in front of it; with
eager sends the slot in front adds it (`late`) and there is one table, and one for every bucket of
the front slot's passes where some boundary is long, for the bound (i).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.space.stage_table import (
    BOTH,
    FIRST,
    MESH_AXES,
    RENDEZVOUS_EXTRA,
    StageTable,
    backward_wires,
    forward_wires,
    most_stages,
)

MERGE = -1
"""Instead of a mesh: what can be done in front of `below` can be done here."""

_NOWHERE = -1
_FAR = -2
"""As region: of a state that begins with a mesh over several regions. No such state is merged."""

_MOST_STATES = 1 << 12
"""States, as of 12 islands in any order: about 0.1 s to list, and as many tables at each X."""

_BITS = 62
"""Of a state."""

_MAX_BRIDGES = 3
"""Sets of islands in several regions that are told apart; each adds states."""


class OrderStates(NamedTuple):
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


def order_states(table: StageTable, mesh_class: Ints) -> OrderStates:
    """States of the table; moves into a state are sorted by the class of their mesh.

    Where regions are apart an island of a region that was left stays unused. Where states are more
    than `_MOST_STATES` there is the empty one alone: the order-free program asks for no other.
    """
    masks = [int(mask) for mask in table.island_mask]
    every = 0
    for mask in masks:
        every |= mask
    regions = [_NOWHERE] * len(masks)
    if table.regions_apart:
        regions = [int(r) if r >= 0 else _FAR for r in table.region]
    earlier = _earlier_equals(table, masks)
    bridge = _bridges(table, masks, every.bit_length())
    left = _left(masks, regions, max(every.bit_length(), max(bridge) + 1))
    moves: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {(0, _NOWHERE): []}
    pending = [(0, _NOWHERE)]
    if max([every, *left.values()]).bit_length() > _BITS:
        return _no_order(bridge)
    while pending:
        if len(moves) > _MOST_STATES:
            return _no_order(bridge)
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
    )


def _no_order(bridge: list[int]) -> OrderStates:
    """The empty state alone."""
    none = np.zeros(0, dtype=np.int64)
    first = np.zeros(2, dtype=np.int64)
    bridges = np.array(bridge, dtype=np.int64)
    return OrderStates(np.zeros(1, np.int64), first, none, none, bridges)


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


def _bridges(table: StageTable, masks: list[int], first: int) -> list[int]:
    """`OrderStates.bridge`: a bit for each set of islands, or one for all where they are many."""
    if not table.clips_gradients:
        return [-1] * len(masks)
    spread = [region < 0 for region in table.region.tolist()]
    different = sorted({mask for mask, far in zip(masks, spread, strict=True) if far})
    many = len(different) > _MAX_BRIDGES
    return [
        (first if many else first + different.index(mask)) if far else -1
        for mask, far in zip(masks, spread, strict=True)
    ]


def _earlier_equals(table: StageTable, masks: list[int]) -> list[int]:
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
            if {left, right} & shared or not _equal(table, owners[left], owners[right]):
                continue
            for i in owners[right]:
                found[i] |= 1 << left
            break  # the one before it waits for its own predecessor
    return found


def _equal(table: StageTable, left: list[int], right: list[int]) -> bool:
    """Whether the meshes of two islands can be exchanged, one for one, without any change."""
    if len(left) != len(right):
        return False
    swapped = np.arange(len(table.max_stages))
    swapped[left], swapped[right] = right, left
    other = table.of_meshes(swapped)
    return all(
        np.array_equal(getattr(table, name), getattr(other, name))
        for name in MESH_AXES
        if name != "island_mask"
    )


def norm_hops(table: StageTable, states: OrderStates) -> Floats:
    """By move: least seconds of one level where the mesh of the move is the first one."""
    moves = len(states.mesh)
    if not table.clips_gradients:
        return np.zeros(moves)
    masks = table.island_mask
    every = 0
    for mask in masks.tolist():
        every |= mask
    bits = every.bit_length()
    node, count = np.arange(bits, dtype=np.int64), bits
    if table.regions_apart:
        node, count = _regions(table, bits)
    floor = float(min(table.norm_links.min(), table.norm_node_links.min()))
    bridges = int(states.bridge.max()) - bits + 1 if states.bridge.max() >= 0 else 0
    far = np.empty((1 << bridges, count, count))
    for used in range(1 << bridges):
        there = (states.bridge < 0) | (used >> np.maximum(states.bridge - bits, 0) & 1 == 1)
        far[used] = _distances(masks, node, count, table.norm_links, floor, there)
    into = np.repeat(states.blocked, np.diff(states.first))
    edges: Floats = np.maximum(floor, slowest_edges(into, node, far))
    return edges


def _regions(table: StageTable, bits: int) -> tuple[Ints, int]:
    """The node of every island: its region, or one of its own where no mesh tells."""
    node = np.arange(bits, dtype=np.int64) + 1 + int(table.region.max())
    for mask, region in zip(table.island_mask.tolist(), table.region.tolist(), strict=True):
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


BUCKETS = 16
"""Parts of the passes of a slot below a long boundary, a table each: more tighten the bound."""

_LONG = 0.05
"""Transfers of a boundary over one unit's passes from which its circuit is worth a bound."""


class Ending(NamedTuple):
    """Ends of the step that count for every slot (see above)."""

    ends: Floats
    """[M, L + 1] by units."""
    edges: Floats
    """[E] increasing, from 0 on."""


class OrderNumbers(NamedTuple):
    """Arrays of one space; M meshes, C classes, V variants, S states, E levels of depth."""

    table: StageTable
    """Its ends are those of the pipelines that are looked for."""
    most_stages: int
    inner: Floats
    """[4, M] boundary inside a mesh: activation in, its serial part, gradient, its serial part."""
    may_be_only: npt.NDArray[np.bool_]
    """[M] first and last at once, where a tied matrix costs nothing."""
    after_first: Floats
    """[2, M, L + 1] what a first slot adds at the end; [1] where it is the only one."""
    norm_hop: Floats
    """By move: least seconds of one level of the sum of norms where its mesh is first."""
    level_bound: Ints
    """[E] extra depth that bounds assume."""
    level_memory: Ints
    """[E] extra depth that memory assumes."""
    mesh_class: Ints
    slices: Ints
    """[C] tables of a class."""
    slice_in: Floats
    """[C, slices, 2] activation into the front slot, and its serial part, by slice."""
    slice_of: Ints
    """[M, C] slice that a mesh upstream reads."""
    late: Floats
    """[M, C]"""
    back: Floats
    """[M, C]"""
    post: Floats
    """[M, C]"""
    is_long: npt.NDArray[np.bool_]
    """[M, C] whether buckets are read."""
    buckets: npt.NDArray[np.bool_]
    """[C] whether the tables of a class are buckets."""
    wires: Floats
    """[M] least transfers that a slot with something downstream adds to Sigma."""
    wire_once: float
    """What of them one slot may not have: the first one (rendezvous), or one whose transfer in is
    already in the entry below it (eager, inside a mesh)."""
    posts: Floats
    """[2, M] least serial parts of a slot with neighbours on both sides."""
    ends: Floats
    """[M, L + 1] what a slot of so many units adds after its last pass."""
    edges: Floats
    """[E] of levels of lateness; empty: levels are of extra depth, ends of first slots count."""
    states: OrderStates


def order_numbers(
    table: StageTable,
    levels: tuple[tuple[int, int], ...],
    *,
    last: npt.NDArray[np.bool_] | None = None,
    ending: Ending | None = None,
) -> OrderNumbers:
    """Numbers of a space; levels: (extra depth of bounds, of memory), the first one (0, 0).

    last: only pipelines that end on these meshes, and begin where their tied matrix can be.
    ending: ends of all slots count (see above), with as many levels of no extra depth as edges.
    """
    count = len(table.max_stages)
    ends = table.may_be_last if last is None else table.may_be_last & last
    pairs = _pair_times(table.links, rendezvous=table.rendezvous)
    inner = _inner_times(table)
    mesh_class = _classes(table.island_mask, pairs)
    classes = int(mesh_class.max()) + 1
    numbers = np.full((4, count, classes), np.inf)
    for i in range(count):
        reads = (table.island_mask & table.island_mask[i]) == 0
        numbers[:, reads, mesh_class[i]] = pairs[:, reads, i]
    known = np.isfinite(numbers[0])
    slices, slice_in, slice_of = _slices(numbers, known, rendezvous=table.rendezvous)
    late = np.where(known, numbers[0], 0.0) * float(not table.rendezvous)
    is_long = np.zeros((count, classes), dtype=np.bool_)
    if not table.rendezvous:
        unit = float((table.forward + table.backward).min(axis=0).mean())
        is_long = known & (numbers[0] + numbers[2] > _LONG * unit)
        slices = np.where(is_long.any(axis=0), 1 + BUCKETS, 1)
        slice_in = np.zeros((classes, int(slices.max()), 2))
    wires, wire_once, posts = _least_wires(numbers, known, inner, rendezvous=table.rendezvous)
    states = order_states(table, mesh_class)
    after, first = _after_first(table, ends)
    return OrderNumbers(
        table=table._replace(may_be_first=first, may_be_last=ends),
        most_stages=most_stages(table),
        inner=inner,
        may_be_only=table.may_be_first & ends,
        after_first=after,
        norm_hop=norm_hops(table, states),
        level_bound=np.array([bound for bound, _ in levels], dtype=np.int64),
        level_memory=np.array([held for _, held in levels], dtype=np.int64),
        mesh_class=mesh_class,
        slices=slices.astype(np.int64),
        slice_in=slice_in,
        slice_of=slice_of,
        late=late,
        back=np.where(known, numbers[2], 0.0),
        post=np.where(known, numbers[3], 0.0),
        is_long=is_long,
        buckets=np.array([bool(column.any()) for column in is_long.T]),
        wires=wires,
        wire_once=wire_once,
        posts=posts,
        ends=np.zeros((0, 0)) if ending is None else ending.ends,
        edges=np.zeros(0) if ending is None else ending.edges,
        states=states,
    )


def _pair_times(links: Floats, *, rendezvous: bool) -> Floats:
    """[4, ...]: activation (dependency, serial), gradient (dependency, serial) of boundaries."""
    held, posted = float(rendezvous), links[RENDEZVOUS_EXTRA]
    forward, backward = forward_wires(links), backward_wires(links)
    return np.stack((forward, held * (forward + posted), backward, held * (backward + posted)))


def _inner_times(table: StageTable) -> Floats:
    """[4, M]: where stages of a mesh lie in one node or in several, the faster boundary."""
    pairs = _pair_times(table.links, rendezvous=table.rendezvous)
    within = pairs[:, np.arange(pairs.shape[1]), np.arange(pairs.shape[1])]
    between = _pair_times(table.node_links, rendezvous=table.rendezvous)
    found = np.minimum(within, between)
    found = np.where(table.stages_per_node == 1, between, found)
    return np.where(table.stages_per_node >= table.max_stages, within, found)


def _classes(masks: Ints, pairs: Floats) -> Ints:
    """[M] equal where boundaries to every mesh that can be upstream of both cost the same."""
    apart = (masks[:, None] & masks[None, :]) == 0
    members: list[list[int]] = []
    found = np.zeros(len(masks), dtype=np.int64)
    for i in range(len(masks)):
        for number, group in enumerate(members):
            both = apart[:, group] & apart[:, [i]]
            same = (pairs[:, :, group] == pairs[:, :, [i]]).all(axis=0)
            if (same | ~both).all():
                found[i] = number
                group.append(i)
                break
        else:
            found[i] = len(members)
            members.append([i])
    return found


def _slices(
    numbers: Floats, known: npt.NDArray[np.bool_], *, rendezvous: bool
) -> tuple[Ints, Floats, Ints]:
    """(tables of each class, boundary in front of each table, table that each mesh reads)."""
    _, count, classes = numbers.shape
    slice_of = np.zeros((count, classes), dtype=np.int64)
    different: list[list[tuple[float, float]]] = []
    for c in range(classes):
        fronts: dict[tuple[float, float], int] = {}
        for a in np.nonzero(known[:, c])[0] if rendezvous else ():
            key = float(numbers[0, a, c]), float(numbers[1, a, c])
            slice_of[a, c] = fronts.setdefault(key, len(fronts))
        different.append(list(fronts) or [(0.0, 0.0)])
    most = max(len(fronts) for fronts in different)
    slice_in = np.zeros((classes, most, 2))
    for c, fronts_of in enumerate(different):
        slice_in[c, : len(fronts_of)] = fronts_of
    return np.array([len(fronts) for fronts in different]), slice_in, slice_of


def _least_wires(
    numbers: Floats, known: npt.NDArray[np.bool_], inner: Floats, *, rendezvous: bool
) -> tuple[Floats, float, Floats]:
    """`OrderNumbers.wires`, `wire_once` and `posts`."""
    # Upstream neighbours of a mesh are rows of `numbers`; what it receives comes from any of them.
    # The least over all boundaries of the space is less than that and simple.
    everywhere = np.concatenate(
        (np.where(known, numbers, np.inf).reshape(4, -1), inner), axis=1
    ).min(axis=1)
    own = np.minimum(np.where(known, numbers, np.inf).min(axis=2), inner)
    into = np.minimum(everywhere[0], inner[0]) if rendezvous else own[0]
    once = float(np.max(into))
    posts = np.stack((np.minimum(everywhere[1], inner[1]), own[3]))
    return into + own[2], once, posts


def _after_first(
    table: StageTable, ends: npt.NDArray[np.bool_]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[2, M, L + 1] and which meshes can be first."""
    after = np.stack((table.after[FIRST], table.after[BOTH]))
    tied = np.where(ends[None, :], table.tied, np.inf).min(axis=1)
    after[0] += np.where(np.isfinite(tied), tied, 0.0)[:, None]
    after += table.norm_inside[None, :, None]
    return np.ascontiguousarray(after), table.may_be_first & np.isfinite(tied)
