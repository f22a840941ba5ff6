"""What the programs over a pipeline's slots add up, and what they keep below X.

Symbols and inequalities are those of `hetplan.cost.bounds`; a slot s has n layer
units, F and B are affine in n, and W_s is its microbatches in flight. Every 1F1B step is at least
Sigma + after_0 + X with

    X >= (b) less Sigma                 only the slot's own times
    X >= (c) less Sigma                 and D, everything strictly downstream in dependency form
    X >= (i) less Sigma, j = s + 1      of two neighbouring slots; where a boundary is long

For one X the right sides only grow with D, so the least D dominates and a dynamic program from the
last slot is an exact minimiser; below a long boundary the least D is kept for every number of
layers of the slot. S(X) = least Sigma + after_0 is a falling step function, so that over a grid
X_0 < X_1 < ... the least of X_k + S(X_{k+1}) is a bound for every plan, whatever the grid.

`Outline` says of all orders at once, for one X, how many layers fit where, at what least cost. A
mesh with p stages holds at most the largest sum over p neighbouring places of the units that (b)
and memory allow there; an island at most what its best mesh does. So layers that have not been
placed need at least the fractional filling of the islands that are left, cheapest first:

    need(state, k)   least seconds that k more units add to Sigma + after_0

Entries of the program that cannot end below a cutoff, or cannot place all layers, are dropped with
it. Meshes that waste more room than there is to spare are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import wait_once_seconds
from hetplan.kernels import kernel, order_of, sum_of
from hetplan.search.one_f_one_b.order_numbers import OrderNumbers
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE

NONE = 1e300
"""Stands for "no plan", far above any step."""

SLACK = 1.0 + 1e-12
"""Comparisons against X forgive the rounding of the other side, so that no plan is lost by it."""


class Outline(NamedTuple):
    """For one X."""

    limit: float
    """X."""
    cutoff: float
    """Entries that cannot end below it are dropped."""
    live: npt.NDArray[np.bool_]
    """[M] meshes that can be part of a plan."""
    units: Ints
    """[M] most units of one stage."""
    need: Floats
    """[S, L + 1] least seconds of what is missing; NONE where it does not fit."""
    room: Floats
    """[S] units that fit on the islands that are left."""
    slowest: float
    """Most seconds that both passes of a slot take."""
    free: float
    """Least Sigma + after_0 of any plan; NONE where there is none."""


@kernel
def outline(o: OrderNumbers, limit: float, prune: bool) -> Outline:
    """The outline for X = `limit`; without `prune` nothing is ever dropped."""
    meshes, layers, states = o.table.forward.shape[1], o.table.num_layers, o.states.blocked.shape[0]
    units, capacity, slowest = _capacities(o, limit)
    islands = 0
    for mask in o.table.island_mask:
        while mask >> islands:
            islands += 1
    room = np.zeros(islands)
    for a in range(meshes):
        share = capacity[a] / _bits(o.table.island_mask[a])
        for island in range(islands):
            if o.table.island_mask[a] >> island & 1:
                room[island] = max(room[island], share)
    spare = sum_of(room) - layers
    live = np.zeros(meshes, np.bool_)
    for a in range(meshes):
        wasted = -1.0 * capacity[a]
        for island in range(islands):
            if o.table.island_mask[a] >> island & 1:
                wasted += room[island]
        live[a] = capacity[a] > 0 and wasted <= spare + 1e-6
    need, left = np.zeros((states, layers + 1)), np.full(states, np.inf)
    if not prune:
        return Outline(limit, NONE, capacity > 0, units, need, left, slowest, 0.0)
    base, head = _ends(o, live)
    owner, slope, width = _segments(o, live, units, capacity, islands)
    base -= o.wire_once
    for t in range(states):
        left[t] = 0.0
        for at in range(owner.shape[0]):
            if not o.states.blocked[t] >> owner[at] & 1:
                left[t] += width[at]
        _fill(o.states.blocked[t], owner, slope, width, base, need[t])
    free = need[0, layers]
    if free < NONE:
        # A last slot has nothing downstream, so it may not have any transfer.
        free += head - (o.wires.max() if meshes else 0.0)
    return Outline(limit, NONE, live, units, need, left, slowest, free)


@kernel
def _bits(mask: int) -> int:
    count = 0
    while mask:
        count += mask & 1
        mask >>= 1
    return count


@kernel
def _capacities(o: OrderNumbers, limit: float) -> tuple[Ints, Ints, float]:
    """(most units of a stage, of a mesh, most seconds of both passes) for every mesh."""
    variants, meshes = o.table.forward.shape
    levels, widest = o.level_bound.shape[0], o.table.most_layers.shape[3] - 1
    units, capacity = np.zeros(meshes, np.int64), np.zeros(meshes, np.int64)
    sums = np.zeros(o.most_stages + 1, np.int64)
    slowest = 0.0
    for a in range(meshes):
        for q in range(1, o.most_stages + 1):
            most = 0
            for e in range(levels):
                flight = min(q + o.level_bound[e], o.table.num_microbatches)
                held = min(q + o.level_memory[e], o.table.num_microbatches, widest)
                for v in range(variants):
                    forward, backward = o.table.forward[v, a], o.table.backward[v, a]
                    for role in (MIDDLE, FIRST, LAST, BOTH):
                        top = o.table.most_layers[v, role, a, held]
                        if top <= most:
                            continue
                        f, b = o.table.extra_forward[role, v, a], o.table.extra_backward[role, v, a]
                        passes = f + b
                        if not role & FIRST:
                            f += o.posts[0, a]
                        if not role & LAST:
                            b += o.posts[1, a]
                        n = _most(
                            limit,
                            f,
                            b,
                            forward,
                            backward,
                            o.table.num_microbatches,
                            flight,
                            most,
                            top,
                            o.edges.shape[0] > 0,
                        )
                        if n > most:
                            most = n
                            slowest = max(slowest, passes + n * (forward + backward))
            sums[q] = sums[q - 1] + most
            units[a] = max(units[a], most)
            capacity[a] = max(capacity[a], sums[q] - sums[max(0, q - o.table.max_stages[a])])
    return units, capacity, slowest


@kernel
def _most(
    limit: float,
    f: float,
    b: float,
    forward: float,
    backward: float,
    microbatches: int,
    flight: int,
    known: int,
    top: int,
    upstream: bool,
) -> int:
    """Most units, from `known` to `top`, with which (b) of a slot stays within the limit; upstream:
    of a later slot (`order_slots.lateness`).

    It takes numbers: tuples would be made for every slot.
    """
    # Many arguments: numbers, as a tuple of the table would be passed by value.
    n = known
    while n < top:
        one, two = f + (n + 1) * forward, b + (n + 1) * backward
        more = wait_once_seconds(one, two, microbatches, flight)
        if upstream:
            more -= (flight - 1) * max(0.0, two - one)
        if more > limit * SLACK:
            break
        n += 1
    return n


@kernel
def _ends(o: OrderNumbers, live: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Least seconds of a first slot besides its units; of what a last one adds to that."""
    base, head, only = np.inf, np.inf, np.inf
    for a in range(live.shape[0]):
        if not live[a]:
            continue
        for v in range(o.table.forward.shape[0]):
            extra = o.table.extra_forward[:, v, a] + o.table.extra_backward[:, v, a]
            if o.table.may_be_first[a]:
                base = min(base, extra[FIRST] + o.after_first[0, a, 1:].min())
            if o.table.may_be_last[a]:
                head = min(head, extra[LAST])
            if o.may_be_only[a]:
                only = min(only, extra[BOTH] + o.after_first[1, a, 1:].min())
    if base == np.inf:
        # Only pipelines of one stage are left; nothing is ever put in front of another stage.
        return only, 0.0
    return base, min(head, only - base)


@kernel
def _segments(
    o: OrderNumbers, live: npt.NDArray[np.bool_], units: Ints, capacity: Ints, islands: int
) -> tuple[Ints, Floats, Floats]:
    """(island, seconds per unit, units) of the lower hulls of all islands, cheapest first."""
    meshes = live.shape[0]
    price = np.zeros(meshes)
    for a in range(meshes):
        price[a] = np.inf
        for v in range(o.table.forward.shape[0]):
            price[a] = min(price[a], o.table.forward[v, a] + o.table.backward[v, a])
        price[a] += o.wires[a] / max(1, units[a])
    owner, slope = np.zeros(meshes * islands, np.int64), np.zeros(meshes * islands)
    width = np.zeros(meshes * islands)
    count = 0
    for island in range(islands):
        held, cost = 0.0, 0.0
        while True:
            best, reach, total = np.inf, 0.0, 0.0
            for a in range(meshes):
                if not live[a] or not o.table.island_mask[a] >> island & 1:
                    continue
                share = capacity[a] / _bits(o.table.island_mask[a])
                if share > held + 1e-9:
                    steep = (share * price[a] - cost) / (share - held)
                    if steep < best:
                        best, reach, total = steep, share, share * price[a]
            if best == np.inf:
                break
            owner[count], slope[count], width[count] = island, best, reach - held
            count += 1
            held, cost = reach, total
    order = order_of(slope[:count])
    return owner[:count][order], slope[:count][order], width[:count][order]


@kernel
def _fill(
    blocked: int, owner: Ints, slope: Floats, width: Floats, base: float, need: Floats
) -> None:
    """need[k]: `base` and k units on what is not blocked, cheapest first."""
    seconds, taken, k = base, 0.0, 1
    for at in range(owner.shape[0]):
        if blocked >> owner[at] & 1:
            continue
        while k < need.shape[0] and k <= taken + width[at] + 1e-6:
            need[k] = max(0.0, seconds + (k - taken) * slope[at])
            k += 1
        seconds += width[at] * slope[at]
        taken += width[at]
    need[k:] = NONE
