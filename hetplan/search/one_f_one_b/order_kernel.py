"""The compiled program over orders: which meshes, in which order, how many stages and layers each.

Tables [row, layers] hold the least D that a pipeline's end can have; a row is a number of stages
and a level of extra depth. A move puts one mesh in front of a state (`order_numbers`):

    below    tables of the classes that can be in front of the lower state, least of those whose
             boundaries cost this mesh the same
    block    one stage more at a time; all lengths are merged
    closing  the slot in front, once for every different boundary ahead (`order_numbers`)

so the work of a move does not grow with the number of meshes that can come next. Tables of a
finished state are kept packed in one array (`Pool`), because `order_program` reads them again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.order_numbers import BUCKETS, OrderNumbers
from hetplan.search.one_f_one_b.order_relaxation import NONE, Outline
from hetplan.search.one_f_one_b.order_slots import (
    Link,
    Pool,
    Table,
    Tables,
    Work,
    bucket_of,
    clean,
    depths,
    end_seconds,
    fronted,
    lateness,
    link_between,
    link_inside,
    link_of_last,
    load,
    merge,
    one_slice,
    prune,
    slot_own,
    slot_room,
    table_of,
    turning_of,
    undominated,
    widen,
)
from hetplan.search.space.stage_table import BOTH, FIRST, LAST

_OF_A_SLOT = 8
"""Operations that a slot takes besides those of its entries."""


class Goal(NamedTuple):
    """The best whole pipeline so far."""

    seconds: Floats
    """[1]"""
    place: Ints
    """[3] move, row and variant + V * units of the first slot."""


class Ahead(NamedTuple):
    """The boundaries in front of a slot that are asked for."""

    seconds: Floats
    """[K, 2] wire_in and post_in."""
    parts: Ints
    """[K] the slice for each; negative: that of the slot's bucket."""


@kernel
def _shift(
    below: Floats, low: int, high: int, n: int, room: float, own: float, out: Floats
) -> None:
    """out[l + n] becomes the least of itself and below[l] + own, where below[l] <= room."""
    for at in range(low, high + 1):
        value, known = below[at], out[at + n]
        moved = value + own if value <= room else NONE
        out[at + n] = moved if moved < known else known


@kernel
def extend(
    o: OrderNumbers, out: Outline, a: int, link: Link, ahead: Ahead, table: Table, into: Tables
) -> int:
    """Put one slot of mesh a before every entry of `table`; operations."""
    # Long: the loops share what is loaded once per row, depth, recomputation and boundary.
    levels, layers, m = o.level_bound.shape[0], o.table.num_layers, o.table.num_microbatches
    parts, different, slowest = ahead.parts, ahead.parts.shape[0], out.slowest
    below, below_band = table
    rows, done = below.shape[0], 0
    if below_band[1, rows] < 0 or different == 0:
        return 0
    fewest = np.empty(o.table.forward.shape[0], np.int64)
    for row in range(below_band[0, rows], min(below_band[1, rows] + 1, rows - levels)):
        low, high = below_band[0, row], below_band[1, row]
        if low > high:
            continue
        turning, upstream, by_end = turning_of(o, row), False, o.edges.shape[0] > 0
        top = levels if link.joins and not by_end else row % levels + 1
        for level in range(row % levels, top):
            flight, held = depths(o, row, level)
            goal = (row // levels + 1) * levels + level
            undominated(o, link.role, a, held, fewest)
            for v in range(fewest.shape[0]):
                most = min(o.table.most_layers[v, link.role, a, held], layers - 1 - low)
                if most < fewest[v]:
                    continue
                forward, backward = o.table.forward[v, a], o.table.backward[v, a]
                extra_f, extra_b = (
                    o.table.extra_forward[link.role, v, a],
                    o.table.extra_backward[link.role, v, a],
                )
                for k in range(different):
                    one = fronted(link, link.role, ahead.seconds[k, 0], ahead.seconds[k, 1])
                    last = -1
                    for n in range(fewest[v], most + 1):
                        f, b = extra_f + n * forward, extra_b + n * backward
                        if by_end:
                            to, upstream = lateness(o, a, n, level, link.back + b)
                            goal = (row // levels + 1) * levels + to
                        room = slot_room(out.limit, m, f, b, one, flight, turning, upstream)
                        done += _OF_A_SLOT
                        if room < 0.0:
                            break
                        at = parts[k] if parts[k] >= 0 else bucket_of(f + b, slowest)
                        stop = min(high, layers - 1 - n)
                        own = slot_own(one, f, b)
                        _shift(below[row], low, stop, n, room, own, into.values[at, goal])
                        done += stop - low + 1
                        if parts[k] < 0 or by_end:
                            widen(into.band[at], goal, low + n, stop + n)
                        last = stop + n
                    if last >= 0 and parts[k] >= 0 and not by_end:
                        widen(into.band[parts[k]], goal, low + fewest[v], last)
    return done


@kernel
def finish(o: OrderNumbers, out: Outline, move: int, link: Link, table: Table, goal: Goal) -> None:
    """Put a first slot before every entry of `table` and keep the best whole pipeline."""
    levels, variants, a = o.level_bound.shape[0], o.table.forward.shape[0], o.states.mesh[move]
    below, below_band = table
    rows = below.shape[0]
    for row in range(below_band[0, rows], min(below_band[1, rows] + 1, rows - levels)):
        low, high = below_band[0, row], below_band[1, row]
        stages = row // levels + 1
        if low > high or (o.table.stages and stages != o.table.stages):
            continue
        turning, upstream, by_end = turning_of(o, row), False, o.edges.shape[0] > 0
        top = levels if link.joins and not by_end else row % levels + 1
        for level in range(row % levels, top):
            flight, held = depths(o, row, level)
            for v in range(variants):
                most = min(o.table.most_layers[v, link.role, a, held], o.table.num_layers - low)
                for n in range(max(1, o.table.num_layers - high), most + 1):
                    value = below[row, o.table.num_layers - n]
                    if value >= NONE:
                        continue
                    f = o.table.extra_forward[link.role, v, a] + n * o.table.forward[v, a]
                    b = o.table.extra_backward[link.role, v, a] + n * o.table.backward[v, a]
                    m = o.table.num_microbatches
                    if by_end:
                        _, upstream = lateness(o, a, n, level, link.back + b)
                    if value > slot_room(out.limit, m, f, b, link, flight, turning, upstream):
                        continue
                    value += slot_own(link, f, b)
                    value += end_seconds(o, move, link.role, n, row, link.back + b)
                    if value < goal.seconds[0]:
                        goal.seconds[0] = value
                        goal.place[0], goal.place[1] = move, row + levels - row % levels + level
                        goal.place[2] = v + variants * n


@kernel
def _close(
    o: OrderNumbers,
    out: Outline,
    move: int,
    link: Link,
    ahead: Ahead,
    table: Table,
    w: Work,
    goal: Goal,
) -> int:
    """Slots of a move's mesh with another mesh in front of them (`boundaries`), or none."""
    a, only = o.states.mesh[move], link.role == LAST
    done = extend(o, out, a, link, ahead, table, w.closing)
    if o.may_be_only[a] if only else o.table.may_be_first[a]:
        first = fronted(link, BOTH if only else FIRST, 0.0, 0.0)
        finish(o, out, move, first, table, goal)
    return done


@kernel
def boundaries(o: OrderNumbers, out: Outline, t: int, a: int) -> Ahead:
    """What mesh a, in front of state t, may have upstream: the different boundaries to meshes that
    can still be part of a plan there.
    """
    c = o.mesh_class[a]
    if out.room[t] <= 0.0:
        return Ahead(np.empty((0, 2)), np.empty(0, np.int64))
    if o.buckets[c]:
        return Ahead(o.slice_in[c, :1].copy(), np.full(1, -1, np.int64))
    read = np.zeros(o.slices[c], np.bool_)
    for mesh in range(out.live.shape[0]):
        if out.live[mesh] and not o.table.island_mask[mesh] & o.states.blocked[t]:
            read[o.slice_of[mesh, c]] = True
    parts = np.flatnonzero(read)
    seconds = np.empty((parts.shape[0], 2))
    for k in range(parts.shape[0]):
        seconds[k] = o.slice_in[c, parts[k]]
    return Ahead(seconds, parts)


@kernel
def inside(o: OrderNumbers, a: int) -> Ahead:
    """The boundary upstream within mesh a."""
    seconds = np.empty((1, 2))
    seconds[0, 0], seconds[0, 1] = o.inner[0, a], o.inner[1, a]
    return Ahead(seconds, np.zeros(1, np.int64))


@kernel
def _first_slots(
    o: OrderNumbers, out: Outline, move: int, link: Link, ahead: Ahead, w: Work, goal: Goal
) -> int:
    """The slot of a block that is next to what is below it, from `w.below`, which is emptied."""
    a = o.states.mesh[move]
    done = _close(o, out, move, link, ahead, w.below, w, goal)
    if o.table.max_stages[a] > 1:
        done += extend(o, out, a, link, inside(o, a), w.below, one_slice(w.one))
    clean(w.below)
    return done


@kernel
def same_boundary(o: OrderNumbers, a: int, c: int, d: int) -> bool:
    """Whether mesh a can read classes c and d together."""
    return bool(
        o.late[a, c] == o.late[a, d]
        and o.back[a, c] == o.back[a, d]
        and o.post[a, c] == o.post[a, d]
        and o.is_long[a, c] == o.is_long[a, d]
    )


@kernel
def starts(
    o: OrderNumbers, out: Outline, move: int, ahead: Ahead, pool: Pool, w: Work, goal: Goal
) -> int:
    """All slots of a move's mesh that are next to what the state below has in front; operations."""
    a, under, classes = o.states.mesh[move], o.states.below[move], o.slices.shape[0]
    if under == 0:
        if not o.table.may_be_last[a]:
            return 0
        w.below.values[0, 0] = 0.0
        widen(w.below.band, 0, 0, 0)
        return _first_slots(o, out, move, link_of_last(), ahead, w, goal)
    done, seen = 0, np.zeros(classes, np.bool_)
    for c in range(classes):
        if pool.start[under, c] < 0:
            continue
        if seen[c]:
            continue
        far = o.is_long[a, c]
        for bucket in range(1, BUCKETS + 1) if far else range(1):
            for d in range(c, classes):
                if pool.start[under, d] >= 0 and same_boundary(o, a, c, d):
                    seen[d] = True
                    load(pool, under, d, bucket if far else o.slice_of[a, d], w.below)
            link = link_between(o, a, c, bucket, out.slowest)
            done += _first_slots(o, out, move, link, ahead, w, goal)
    return done


@kernel
def table_of_length(w: Work, length: int) -> Table:
    """The block of so many stages of the mesh that is added, while it is one of `add_mesh`."""
    return w.one if length % 2 == 1 else w.two


@kernel
def prune_length(o: OrderNumbers, out: Outline, t: int, move: int, length: int, w: Work) -> bool:
    """Drop of the block of so many stages what leads to nothing; whether anything is left."""
    a, under = o.states.mesh[move], o.states.below[move]
    room = out.room[t] + (o.table.max_stages[a] - length) * out.units[a]
    return prune(table_of_length(w, length), out.need[under], out.cutoff, room)


@kernel
def longer(o: OrderNumbers, out: Outline, move: int, length: int, w: Work) -> int:
    """From the block of so many stages to the one with one more; operations."""
    a, done = o.states.mesh[move], 0
    table = table_of_length(w, length)
    merge(table, w.every)
    if length < o.table.max_stages[a] - 1:
        into = one_slice(table_of_length(w, length + 1))
        done = extend(o, out, a, link_inside(o, a), inside(o, a), table, into)
    clean(table)
    return done


@kernel
def end_block(o: OrderNumbers, out: Outline, t: int, move: int, w: Work, goal: Goal) -> int:
    """Closings of blocks of several stages, of all lengths; operations."""
    a = o.states.mesh[move]
    done = _close(o, out, move, link_inside(o, a), boundaries(o, out, t, a), w.every, w, goal)
    clean(w.every)
    return done


@kernel
def add_mesh(
    o: OrderNumbers,
    out: Outline,
    t: int,
    move: int,
    pool: Pool,
    w: Work,
    goal: Goal,
    place: Ints,
    slice_: int,
) -> int:
    """All blocks of stages of a move's mesh; closings gather in `w`; operations.

    place[3]: length from which it goes on; 0 to begin with, and when it has come to its end. It
    comes back after about `slice_` operations.
    """
    a, done = o.states.mesh[move], 0
    if place[3] == 0:
        done = starts(o, out, move, boundaries(o, out, t, a), pool, w, goal)
        if done == 0:
            return 0
        place[3] = 1
    while place[3] < o.table.max_stages[a] and prune_length(o, out, t, move, place[3], w):
        if done >= slice_:
            return done
        done += longer(o, out, move, place[3], w)
        place[3] += 1
    place[3] = 0
    return done + end_block(o, out, t, move, w, goal)


@kernel
def _flush(o: OrderNumbers, out: Outline, t: int, c: int, pool: Pool, used: int, w: Work) -> int:
    """Pack what has gathered in `w.closing` as the table of a class; entries of the pool in use."""
    parts = o.slices[c]
    closing, bands = w.closing
    if o.buckets[c]:
        for part in range(1, parts):
            merge(table_of(w.closing, part), table_of(w.closing, 0))
    rows = closing.shape[1]
    r0, r1, l0, l1 = rows, -1, closing.shape[2], -1
    for part in range(parts):
        prune(table_of(w.closing, part), out.need[t], out.cutoff, out.room[t])
        for row in range(bands[part, 0, rows], bands[part, 1, rows] + 1):
            if bands[part, 0, row] <= bands[part, 1, row]:
                r0, r1 = min(r0, row), max(r1, row)
                l0, l1 = min(l0, bands[part, 0, row]), max(l1, bands[part, 1, row])
    if r1 < 0:
        return used
    pool.start[t, c] = used
    pool.size[t, c, 0], pool.size[t, c, 1] = r0, r1
    pool.size[t, c, 2], pool.size[t, c, 3] = l0, l1
    at = used
    for part in range(parts):
        for row in range(r0, r1 + 1):
            pool.values[at : at + l1 - l0 + 1] = closing[part, row, l0 : l1 + 1]
            at += l1 - l0 + 1
        clean(table_of(w.closing, part))
    return at


@kernel
def run(
    o: OrderNumbers, out: Outline, pool: Pool, w: Work, goal: Goal, place: Ints, slice_: int
) -> int:
    """Fill tables of states; `goal` gets the best pipeline; operations.

    place: [4] state, move, entries of the pool in use and length of the move's block, from which it
    goes on; zeros to begin with. It comes back after about `slice_` operations, and where the pool
    has no room for one more table (`w.closing`), and is done when the state is past the last one.
    """
    states = o.states.blocked.shape[0]
    if place[0] == 0:
        pool.start[:] = -1
        goal.seconds[0] = NONE
        place[0], place[1], place[2] = 1, o.states.first[1], 0
    done, most = 0, w.closing.values.size
    while place[0] < states and done < slice_ and place[2] + most <= pool.values.shape[0]:
        t = place[0]
        first, stop = o.states.first[t], o.states.first[t + 1]
        if o.states.mesh[first] < 0:
            c = place[1] - first
            for move in range(first, stop):
                for part in range(o.slices[c]):
                    load(pool, o.states.below[move], c, part, table_of(w.closing, part))
            place[2] = _flush(o, out, t, c, pool, place[2], w)
            place[1] += 1
            if c + 1 == o.slices.shape[0]:
                place[0], place[1] = t + 1, stop
            continue
        move = place[1]
        a = o.states.mesh[move]
        if out.live[a]:
            done += add_mesh(o, out, t, move, pool, w, goal, place, slice_ - done)
            if place[3] > 0:
                break
        if move + 1 == stop or o.mesh_class[o.states.mesh[move + 1]] != o.mesh_class[a]:
            place[2] = _flush(o, out, t, o.mesh_class[a], pool, place[2], w)
        place[1] = move + 1
        if move + 1 == stop:
            place[0] = t + 1
    return done
