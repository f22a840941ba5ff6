"""A space as the compiled program over orders takes it: links by class, roles, depths, states.

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

from hetplan.search.families.space import BOTH, FIRST, Floats, Ints, Links, Space
from hetplan.search.single.order_norms import norm_hops
from hetplan.search.single.order_states import order_states

BUCKETS = 16
"""Parts of the passes of a slot below a long boundary, a table each: more tighten the bound."""

_LONG = 0.05
"""Transfers of a boundary over one unit's passes from which its circuit is worth a bound."""


class OrderNumbers(NamedTuple):
    """Arrays of one space; M meshes, C classes, V variants, S states, E levels of depth."""

    microbatches: int
    layers: int
    most_stages: int
    pinned: int
    forward: Floats
    backward: Floats
    extra_forward: Floats
    extra_backward: Floats
    inner: Floats
    """[4, M] boundary inside a mesh: activation in, its serial part, gradient, its serial part."""
    most_layers: Ints
    """[V, 4, M, W + 1]"""
    max_stages: Ints
    islands: Ints
    """[M] as bits."""
    may_be_first: npt.NDArray[np.bool_]
    may_be_last: npt.NDArray[np.bool_]
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
    state_blocked: Ints
    state_first: Ints
    move_mesh: Ints
    move_below: Ints


def most_stages_of(space: Space) -> int:
    """Most stages that a pipeline of this space can have."""
    room = 0
    for island in range(int(space.island_mask.max()).bit_length()):
        on = (space.island_mask >> island & 1).astype(bool)
        if on.any():
            room += int(space.max_stages[on].max())
    most = min(space.num_layers, room, space.stage_limit)
    return min(most, space.stages) if space.stages else most


def order_numbers(
    space: Space,
    levels: tuple[tuple[int, int], ...],
    *,
    contiguous: bool | None,
    last: npt.NDArray[np.bool_] | None = None,
) -> OrderNumbers:
    """Numbers of a space; levels: (extra depth of bounds, of memory), the first one (0, 0).

    last: only pipelines that end on these meshes, and begin where their tied matrix can be.
    """
    count = len(space.max_stages)
    ends = space.may_be_last if last is None else space.may_be_last & last
    pairs = _pair_times(space.links, rendezvous=space.rendezvous)
    inner = _inner_times(space)
    mesh_class = _classes(space.island_mask, pairs)
    classes = int(mesh_class.max()) + 1
    numbers = np.full((4, count, classes), np.inf)
    for i in range(count):
        reads = (space.island_mask & space.island_mask[i]) == 0
        numbers[:, reads, mesh_class[i]] = pairs[:, reads, i]
    known = np.isfinite(numbers[0])
    slices, slice_in, slice_of = _slices(numbers, known, rendezvous=space.rendezvous)
    late = np.where(known, numbers[0], 0.0) * float(not space.rendezvous)
    is_long = np.zeros((count, classes), dtype=np.bool_)
    if not space.rendezvous:
        unit = float((space.forward + space.backward).min(axis=0).mean())
        is_long = known & (numbers[0] + numbers[2] > _LONG * unit)
        slices = np.where(is_long.any(axis=0), 1 + BUCKETS, 1)
        slice_in = np.zeros((classes, int(slices.max()), 2))
    wires, wire_once, posts = _least_wires(numbers, known, inner, rendezvous=space.rendezvous)
    states = order_states(space, mesh_class, contiguous=contiguous)
    after, first = _after_first(space, ends)
    return OrderNumbers(
        microbatches=space.num_microbatches,
        layers=space.num_layers,
        most_stages=most_stages_of(space),
        pinned=space.stages,
        forward=_floats(space.forward),
        backward=_floats(space.backward),
        extra_forward=_floats(space.extra_forward),
        extra_backward=_floats(space.extra_backward),
        inner=inner,
        most_layers=np.ascontiguousarray(np.minimum(space.most_layers, space.num_layers)),
        max_stages=np.ascontiguousarray(np.minimum(space.max_stages, space.num_layers)),
        islands=np.ascontiguousarray(space.island_mask),
        may_be_first=first,
        may_be_last=np.ascontiguousarray(ends),
        may_be_only=space.may_be_first & ends,
        after_first=after,
        norm_hop=norm_hops(space, states),
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
        state_blocked=states.blocked,
        state_first=states.first,
        move_mesh=states.mesh,
        move_below=states.below,
    )


def _floats(values: Floats) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float64)


def _pair_times(links: Links, *, rendezvous: bool) -> Floats:
    """[4, ...]: activation (dependency, serial), gradient (dependency, serial) of boundaries."""
    held = float(rendezvous)
    return np.stack(
        (
            links.forward_wire,
            held * (links.forward_wire + links.rendezvous_extra),
            links.backward_wire,
            held * (links.backward_wire + links.rendezvous_extra),
        )
    )


def _inner_times(space: Space) -> Floats:
    """[4, M]: where stages of a mesh lie in one node or in several, the faster boundary."""
    pairs = _pair_times(space.links, rendezvous=space.rendezvous)
    within = pairs[:, np.arange(pairs.shape[1]), np.arange(pairs.shape[1])]
    between = _pair_times(space.node_links, rendezvous=space.rendezvous)
    found = np.minimum(within, between)
    found = np.where(space.stages_per_node == 1, between, found)
    return np.where(space.stages_per_node >= space.max_stages, within, found)


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


def _after_first(space: Space, ends: npt.NDArray[np.bool_]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[2, M, L + 1] and which meshes can be first."""
    after = np.stack((space.after[FIRST], space.after[BOTH]))
    tied = np.where(ends[None, :], space.tied, np.inf).min(axis=1)
    after[0] += np.where(np.isfinite(tied), tied, 0.0)[:, None]
    if space.norm is not None:
        after += (space.norm.inside - space.norm.inside.min())[None, :, None]
    return np.ascontiguousarray(after), space.may_be_first & np.isfinite(tied)
