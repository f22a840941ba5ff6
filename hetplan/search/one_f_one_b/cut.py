"""How to cut the layers over given slots, fast and nearly as well as can be, and what it costs.

By bound (b) of `hetplan.cost.bounds` a step is at least Sigma + X, X the largest over
the slots of two linear forms in the slot's layers. So for a given X every slot takes as many
layers as X and its memory allow; where that is more than the model has, the layers whose Sigma is
largest are left out. The least X that holds all layers, and a few larger ones that let slow slots
rest, give the cuts. `estimate` then adds what round trips and long boundaries cost by the closed
forms (b), (c) and (i) of neighbours: within a percent of the replay and a hundred times as fast.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import interval_seconds
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.replay import (
    NEVER,
    boundaries_of,
    depth_of,
    fits,
    norm_seconds,
    role_of,
)
from hetplan.search.space.stage_table import StageTable

_HALVINGS = 16  # of the interval of X: below 2e-5 of it


@kernel
def _posts(table: StageTable, boundaries: Floats, slots: int) -> Floats:
    """[4, P]: what the transfers add to F', B' (dependency) and F, B (serial) of every slot."""
    added = np.zeros((4, slots))
    for s in range(slots - 1):
        forward_wire = boundaries[0, s] + boundaries[2, s]
        backward_wire = boundaries[1, s] + boundaries[2, s]
        added[0, s + 1] += forward_wire
        added[1, s] += backward_wire
        if table.rendezvous:
            added[2, s + 1] += boundaries[3, s] + forward_wire
            added[3, s] += boundaries[3, s] + backward_wire
    return added


@kernel
def _held(
    limit: float,
    forward: float,
    backward: float,
    fixed_forward: float,
    fixed_backward: float,
    microbatches: int,
    in_flight: int,
    most: int,
) -> int:
    """Most units with which both forms of (b) stay within `limit`."""
    if most < 1:
        return 0
    held = float(most)
    for turned in range(2):
        on_forward = microbatches - (in_flight if turned == 0 else 1)
        on_backward = microbatches - (1 if turned == 0 else in_flight)
        room = limit - on_forward * fixed_forward - on_backward * fixed_backward
        slope = on_forward * forward + on_backward * backward
        if slope > 0.0:
            held = min(held, np.floor(room / slope + 1e-9))
        elif room < 0.0:
            return 0
    return int(held) if held >= 1.0 else 0


@kernel
def cut(
    table: StageTable,
    mesh: Ints,
    extra: Ints,
    slack: float,
    ceiling: float,
    variant: Ints,
    units: Ints,
) -> bool:
    """Fill `variant` and `units` for X = least X * (1 + slack); False where the layers do not fit.

    False also where the least X is above `ceiling`. Every slot recomputes in the fastest way that
    has room for its layers.
    """
    slots, variants = mesh.shape[0], table.forward.shape[0]
    boundaries = boundaries_of(table, mesh)
    posts = _posts(table, boundaries, slots)
    most = np.zeros((slots, variants), np.int64)
    room = 0
    for s in range(slots):
        widest = 0
        for v in range(variants):
            most[s, v] = min(fits(table, slots, s, mesh[s], v, extra[s]), table.num_layers)
            widest = max(widest, most[s, v])
        if widest < 1:
            return False
        room += widest
    if room < table.num_layers or slots > table.num_layers:
        return False
    low, high = 0.0, min(ceiling, _largest(table, mesh, posts))
    if _fill(table, mesh, extra, posts, most, high, variant, units) < table.num_layers:
        return False
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _fill(table, mesh, extra, posts, most, middle, variant, units) >= table.num_layers:
            high = middle
        else:
            low = middle
    held = _fill(table, mesh, extra, posts, most, high * (1.0 + slack), variant, units)
    return _trim(table, mesh, most, held - table.num_layers, variant, units)


@kernel
def _largest(table: StageTable, mesh: Ints, posts: Floats) -> float:
    """An X with which every slot could take all layers."""
    slots, found = mesh.shape[0], 0.0
    for s in range(slots):
        role = role_of(slots, s)
        for v in range(table.forward.shape[0]):
            seconds = table.num_layers * (table.forward[v, mesh[s]] + table.backward[v, mesh[s]])
            seconds += table.extra_forward[role, v, mesh[s]] + posts[2, s]
            seconds += table.extra_backward[role, v, mesh[s]] + posts[3, s]
            found = max(found, table.num_microbatches * seconds)
    return found


@kernel
def _fill(
    table: StageTable,
    mesh: Ints,
    extra: Ints,
    posts: Floats,
    most: Ints,
    limit: float,
    variant: Ints,
    units: Ints,
) -> int:
    """Every slot as full as X = `limit` allows, at least one unit; the units of all slots."""
    slots, total = mesh.shape[0], 0
    for s in range(slots):
        i, role = mesh[s], role_of(slots, s)
        depth = depth_of(slots, s, extra[s], table.num_microbatches)
        units[s], variant[s], least = 0, -1, NEVER
        for v in range(table.forward.shape[0]):
            if most[s, v] < 1:
                continue
            held = _held(
                limit,
                table.forward[v, i],
                table.backward[v, i],
                table.extra_forward[role, v, i] + posts[2, s],
                table.extra_backward[role, v, i] + posts[3, s],
                table.num_microbatches,
                depth,
                most[s, v],
            )
            held = max(held, 1)
            seconds = table.forward[v, i] + table.backward[v, i]
            if held > units[s] or (held == units[s] and seconds < least):
                units[s], variant[s], least = held, v, seconds
        total += units[s]
    return total


@kernel
def _trim(
    table: StageTable, mesh: Ints, most: Ints, surplus: int, variant: Ints, units: Ints
) -> bool:
    """Take the surplus from the slots with the slowest layers; then the fastest variants."""
    slots = mesh.shape[0]
    while surplus > 0:
        slowest, worst = -1.0, -1
        for s in range(slots):
            seconds = (table.forward[variant[s], mesh[s]] + table.backward[variant[s], mesh[s]]) * (
                1.0 + 1e-9 * units[s]
            )
            if units[s] > 1 and seconds > slowest:
                slowest, worst = seconds, s
        if worst < 0:
            return False
        units[worst] -= 1
        surplus -= 1
        _fastest(table, mesh, most, worst, variant, units)
    for s in range(slots):
        _fastest(table, mesh, most, s, variant, units)
    return True


@kernel
def _fastest(table: StageTable, mesh: Ints, most: Ints, s: int, variant: Ints, units: Ints) -> None:
    least = table.forward[variant[s], mesh[s]] + table.backward[variant[s], mesh[s]]
    for v in range(table.forward.shape[0]):
        seconds = table.forward[v, mesh[s]] + table.backward[v, mesh[s]]
        if most[s, v] >= units[s] and seconds < least:
            variant[s], least = v, seconds


@kernel
def estimate(
    table: StageTable, mesh: Ints, variant: Ints, units: Ints, extra: Ints, proven: bool
) -> float:
    """About the step of this row: the largest of (b), (c) and (i) of neighbours, plus the end.

    `proven`: only what comes after the first stage's last pass is added, which every chain of
    those bounds passes; then no step of the row is shorter.
    """
    slots, m = mesh.shape[0], table.num_microbatches
    boundaries = boundaries_of(table, mesh)
    posts = _posts(table, boundaries, slots)
    forward, backward = np.empty(slots), np.empty(slots)
    sigma, ending, leaving, upstream = 0.0, 0.0, 0.0, 0.0
    for s in range(slots):
        i, v, n, role = mesh[s], variant[s], units[s], role_of(slots, s)
        forward[s] = table.extra_forward[role, v, i] + n * table.forward[v, i]
        backward[s] = table.extra_backward[role, v, i] + n * table.backward[v, i]
        sigma += forward[s] + backward[s] + posts[0, s] + posts[1, s]
        after = table.after[role, i, n] - table.leaving[role, i, n]
        if slots > 1 and (s == 0 or s == slots - 1):
            after += table.tied[mesh[0], mesh[slots - 1]]
        if s == 0 or not proven:
            ending = max(ending, after - upstream)
        leaving = max(leaving, table.leaving[role, i, n])
        upstream += backward[s] + posts[1, s]
    below, largest, wire = 0.0, 0.0, 0.0
    for s in range(slots - 1, -1, -1):
        w = depth_of(slots, s, extra[s], m)
        f, b = forward[s] + posts[2, s], backward[s] + posts[3, s]
        c, up = f + b, backward[s] + posts[1, s]
        found = (m - 1) * c - (w - 1) * min(f, b)
        trip = below + up + f
        if m - 1 >= w:
            most = (m - 1) // w
            exposed = trip - w * c
            found = max(found, (m - 1) * c + max(exposed, most * exposed))
        if s < slots - 1:
            next_depth = depth_of(slots, s + 1, extra[s + 1], m)
            whole = f + up + forward[s + 1] + posts[0, s + 1] + backward[s + 1] + posts[3, s + 1]
            found = max(found, interval_seconds(whole, f, b, m, w, next_depth))
            ahead = w - next_depth + 1
            if m - 1 >= w:
                more = max(0.0, ((m - 1 - w) // ahead) * (whole - ahead * c))
                found = max(found, (m - 1) * c + trip - w * c + more)
            wire = max(wire, (m - 1) * max(boundaries[0, s], boundaries[1, s]))
        largest = max(largest, found)
        below += forward[s] + posts[0, s] + up
    return sigma + max(largest, wire) + ending + leaving + norm_seconds(table, mesh, boundaries)
