"""A row of slots under 1F1B: its replay, its cut by a limit on X, and what it takes about.

`step_seconds` is the definition of a row's cost: the replay of `hetplan.cost.replay.times` on the
times of a `StageTable`. Slot s of P keeps W_s = min(P - s + extra_s, m) microbatches in flight. A
row that does not fit in memory takes infinitely long.

`cut` deals the layers over given slots, fast and nearly as well as can be. By bound (b) of
`hetplan.cost.bounds` a step is at least Sigma + X, X the largest over the slots of two linear forms
in the slot's layers. So for a given X every slot takes as many layers as X and its memory allow;
where that is more than the model has, the layers whose Sigma is largest are left out. The least X
that holds all layers, and a few larger ones that let slow slots rest, give the cuts.

`estimate` adds what round trips and long boundaries cost by the closed forms (b), (c) and (i) of
neighbours: within a percent of the replay and a hundred times as fast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import interval_seconds
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.kernels import kernel
from hetplan.search.space.row import (
    NEVER,
    before_norm,
    boundaries_of,
    norm_seconds,
    role_of,
    step_of_ends,
)
from hetplan.search.space.stage_table import StageTable

_HALVINGS = 16  # of the interval of X: below 2e-5 of it


class Slots(NamedTuple):
    """A row of slots and its cut, [P] each in pipeline order."""

    mesh: Ints
    variant: Ints
    """Recomputation."""
    units: Ints
    """Layer units."""
    extra: Ints
    """Microbatches in flight beyond the schedule's own."""

    def copy(self) -> Slots:
        """With arrays of its own."""
        return Slots(*[values.copy() for values in self])


def uncut(mesh: Ints, extra: Ints) -> Slots:
    """The row without layers."""
    return Slots(mesh, np.zeros_like(mesh), np.zeros_like(mesh), extra)


@kernel
def depth_of(slots: int, slot: int, extra: int, microbatches: int) -> int:
    """W_s: most microbatches in flight at a slot."""
    return min(slots - slot + extra, microbatches)


@kernel
def fits(table: StageTable, slots: int, slot: int, mesh: int, variant: int, extra: int) -> int:
    """Most layer units that a slot can hold; 0: none."""
    flight = min(
        depth_of(slots, slot, extra, table.num_microbatches), table.most_layers.shape[3] - 1
    )
    return int(table.most_layers[variant, role_of(slots, slot), mesh, flight])


@kernel
def most_units(table: StageTable, mesh: Ints, extra: Ints) -> Ints:
    """[P, V] units that fit."""
    slots, variants = mesh.shape[0], table.forward.shape[0]
    most = np.zeros((slots, variants), np.int64)
    for s in range(slots):
        for v in range(variants):
            most[s, v] = min(fits(table, slots, s, mesh[s], v, extra[s]), table.num_layers)
    return most


@kernel
def seconds_of(table: StageTable, row: Slots) -> Floats:
    """[4, P] forward and backward pass of a microbatch; what follows the last pass, before the sum
    of the norms and behind it.
    """
    slots = row.mesh.shape[0]
    seconds = np.empty((4, slots))
    for s in range(slots):
        i, v, n, role = row.mesh[s], row.variant[s], row.units[s], role_of(slots, s)
        tied = 0.0
        if slots > 1 and (s == 0 or s == slots - 1):
            tied = table.tied[row.mesh[0], row.mesh[slots - 1]]
        leaving = table.leaving[role, i, n]
        seconds[0, s] = table.extra_forward[role, v, i] + n * table.forward[v, i]
        seconds[1, s] = table.extra_backward[role, v, i] + n * table.backward[v, i]
        seconds[2, s] = before_norm(table.after[role, i, n], leaving, tied)
        seconds[3, s] = leaving
    return seconds


@kernel
def step_seconds(table: StageTable, row: Slots) -> float:
    """Seconds of one step of this row of slots; `NEVER` where it does not fit or cannot run."""
    mesh, variant, units, extra = row
    slots = mesh.shape[0]
    warmup = np.empty(slots, np.int64)
    boundaries = boundaries_of(table, mesh)
    for s in range(slots):
        n = units[s]
        if n < 1 or n > fits(table, slots, s, mesh[s], variant[s], extra[s]):
            return NEVER
        warmup[s] = depth_of(slots, s, extra[s], table.num_microbatches)
    seconds = seconds_of(table, row)
    times = StageTimes(
        seconds[0],
        seconds[1],
        boundaries[0, : slots - 1].copy(),
        boundaries[1, : slots - 1].copy(),
        boundaries[2, : slots - 1].copy(),
        boundaries[3, : slots - 1].copy(),
        warmup,
        table.num_microbatches,
    )
    ends, norm = pipeline_ends(times, table.rendezvous), norm_seconds(table, mesh, boundaries)
    return min(NEVER, step_of_ends(ends, seconds[2], seconds[3], norm))


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
def cut(table: StageTable, row: Slots, slack: float, ceiling: float) -> bool:
    """Fill `variant` and `units` for X = least X * (1 + slack); False where the layers do not fit.

    False also where the least X is above `ceiling`. Every slot recomputes in the fastest way that
    has room for its layers.
    """
    mesh, extra = row.mesh, row.extra
    slots = mesh.shape[0]
    posts = _posts(table, boundaries_of(table, mesh), slots)
    most = most_units(table, mesh, extra)
    room = 0
    for s in range(slots):
        widest = most[s].max()
        if widest < 1:
            return False
        room += widest
    if room < table.num_layers or slots > table.num_layers:
        return False
    low, high = 0.0, min(ceiling, _largest(table, mesh, posts))
    if _fill(table, row, posts, most, high) < table.num_layers:
        return False
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _fill(table, row, posts, most, middle) >= table.num_layers:
            high = middle
        else:
            low = middle
    held = _fill(table, row, posts, most, high * (1.0 + slack))
    return _trim(table, row, most, held - table.num_layers)


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
def _fill(table: StageTable, row: Slots, posts: Floats, most: Ints, limit: float) -> int:
    """Every slot as full as X = `limit` allows, at least one unit; the units of all slots."""
    mesh, variant, units, extra = row
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
def _trim(table: StageTable, row: Slots, most: Ints, surplus: int) -> bool:
    """Take the surplus from the slots with the slowest layers; then the fastest variants.

    Much is taken in large pieces: where every slot has room for all layers (one microbatch), 1,000
    slots have a million units too many.
    """
    units, slots = row.units, row.mesh.shape[0]
    slow = np.empty(slots)
    for s in range(slots):
        slow[s] = _slow(table, row, s)
    while surplus > 0:
        slowest, worst = -1.0, -1
        for s in range(slots):
            if slow[s] > slowest:
                slowest, worst = slow[s], s
        if worst < 0:
            return False
        piece = min(max(1, surplus // slots), units[worst] - 1)
        units[worst] -= piece
        surplus -= piece
        _fastest(table, row, most, worst)
        slow[worst] = _slow(table, row, worst)
    for s in range(slots):
        _fastest(table, row, most, s)
    return True


@kernel
def _slow(table: StageTable, row: Slots, s: int) -> float:
    """How soon a slot gives a unit, the slowest first; -1: it has none to give."""
    mesh, variant, units, _ = row
    if units[s] < 2:
        return -1.0
    seconds = table.forward[variant[s], mesh[s]] + table.backward[variant[s], mesh[s]]
    return float(seconds * (1.0 + 1e-9 * units[s]))


@kernel
def _fastest(table: StageTable, row: Slots, most: Ints, s: int) -> None:
    """The fastest recomputation of a slot with room for its units."""
    mesh, variant, units, _ = row
    least = table.forward[variant[s], mesh[s]] + table.backward[variant[s], mesh[s]]
    for v in range(table.forward.shape[0]):
        seconds = table.forward[v, mesh[s]] + table.backward[v, mesh[s]]
        if most[s, v] >= units[s] and seconds < least:
            variant[s], least = v, seconds


@kernel
def estimate(table: StageTable, row: Slots, proven: bool) -> float:
    """About the step of this row: the largest of (b), (c) and (i) of neighbours, plus the end.

    `proven`: only what comes after the first stage's last pass is added, which every chain of
    those bounds passes; then no step of the row is shorter.
    """
    mesh, extra = row.mesh, row.extra
    slots, m = mesh.shape[0], table.num_microbatches
    boundaries = boundaries_of(table, mesh)
    posts = _posts(table, boundaries, slots)
    seconds = seconds_of(table, row)
    forward, backward = seconds[0], seconds[1]
    sigma, ending, leaving, upstream = 0.0, 0.0, 0.0, 0.0
    for s in range(slots):
        sigma += forward[s] + backward[s] + posts[0, s] + posts[1, s]
        if s == 0 or not proven:
            ending = max(ending, seconds[2, s] - upstream)
        leaving = max(leaving, seconds[3, s])
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
