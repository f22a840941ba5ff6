"""The compiled program of `hetplan.search.single.partition`."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from hetplan.cost.bounds.closed_forms import (
    downstream_room_seconds,
    interval_room_seconds,
    interval_seconds,
    wait_once_seconds,
)
from hetplan.search.families.space import Floats, Ints

NONE = 1e300
"""Stands for "no plan", far above any step."""

SLACK = 1.0 + 1e-12
"""Comparisons against X forgive the rounding of the other side, so that no plan is lost by it."""


class ChainNumbers(NamedTuple):
    """A `Chain` as compiled code takes it."""

    microbatches: int
    layers: int
    in_flight: Ints
    forward: Floats
    backward: Floats
    forward_dependency: Floats
    backward_dependency: Floats
    forward_serial: Floats
    backward_serial: Floats
    most_layers: Ints
    after_first: Floats
    """[L + 1]"""
    together: Ints
    """[P] number of the table by the layers of the next slot; -1 where its boundary is not long."""


@numba.njit(cache=True)
def fitting(c: ChainNumbers, limit: float, most: Ints) -> None:
    """Most layers [V, P] with which (b) alone stays within the limit."""
    x = limit * SLACK
    for v in range(most.shape[0]):
        for s in range(most.shape[1]):
            most[v, s] = 0
            for n in range(1, c.most_layers[v, s] + 1):
                f = c.forward_serial[v, s] + n * c.forward[v, s]
                b = c.backward_serial[v, s] + n * c.backward[v, s]
                if wait_once_seconds(f, b, c.microbatches, c.in_flight[s]) > x:
                    break
                most[v, s] = n


@numba.njit(cache=True)
def bands(most: Ints, layers: int, low: Ints, high: Ints) -> None:
    """Fewest and most layers [P + 1] that slots s, s + 1, ... can hold of a whole pipeline."""
    slots = most.shape[1]
    low[slots] = high[slots] = 0
    for s in range(slots - 1, -1, -1):
        low[s] = low[s + 1] + 1
        high[s] = high[s + 1] + most[:, s].max()
    above = 0
    for s in range(slots):
        low[s] = max(low[s], layers - above)
        high[s] = min(high[s], layers - s)
        above += most[:, s].max()


@numba.njit(cache=True)
def own_seconds(c: ChainNumbers, s: int, v: int, n: int) -> float:
    """What a slot adds to Sigma + after_0."""
    own = c.forward_dependency[v, s] + c.backward_dependency[v, s]
    own += n * (c.forward[v, s] + c.backward[v, s])
    if s == 0:
        own += c.after_first[n]
    return float(own)


@numba.njit(cache=True)
def room_seconds(c: ChainNumbers, limit: float, s: int, v: int, n: int) -> float:
    """Most seconds downstream of a slot with which (c) stays within the limit."""
    return float(
        downstream_room_seconds(
            limit * SLACK,
            c.forward_serial[v, s] + n * c.forward[v, s],
            c.backward_serial[v, s] + n * c.backward[v, s],
            c.backward_dependency[v, s] + n * c.backward[v, s],
            c.microbatches,
            c.in_flight[s],
        )
    )


@numba.njit(cache=True)
def room_together(
    c: ChainNumbers, limit: float, s: int, v: int, n: int, next_v: int, next_n: int
) -> float:
    """The same for (i) with the next slot; below zero where its first line is above the limit."""
    j, x = s + 1, limit * SLACK
    f = c.forward_serial[v, s] + n * c.forward[v, s]
    b = c.backward_serial[v, s] + n * c.backward[v, s]
    back = c.backward_dependency[v, s] + n * c.backward[v, s]
    circuit = f + back
    circuit += c.forward_dependency[next_v, j] + next_n * c.forward[next_v, j]
    circuit += c.backward_serial[next_v, j] + next_n * c.backward[next_v, j]
    flight, turning = c.in_flight[s], c.in_flight[j]
    if interval_seconds(circuit, f, b, c.microbatches, flight, turning) > x:
        return -1.0
    return float(interval_room_seconds(x, circuit, f, b, back, c.microbatches, flight, turning))


@numba.njit(cache=True)
def _add(below: Floats, low: int, high: int, n: int, room: float, own: float, out: Floats) -> None:
    """out[l + n] becomes the least of itself and below[l] + own, where below[l] <= room."""
    for at in range(low, high + 1):
        value = below[at]
        moved = value + own if value <= room else NONE
        out[at + n] = min(out[at + n], moved)


@numba.njit(cache=True)
def least_downstream(
    c: ChainNumbers,
    limit: float,
    most: Ints,
    low: Ints,
    high: Ints,
    table: Floats,
    fronts: Floats,
) -> float:
    """Least Sigma + after_0 over all cuts whose X is at most `limit`; NONE where there is none.

    Working space: most [V, P], low and high [P + 1], table [P + 1, L + 1], and fronts
    [long boundaries, V, N + 1, L + 1], the rows of `table` by what the slot below a long boundary
    holds. `trace` reads them afterwards.
    """
    variants, slots = c.forward.shape
    fitting(c, limit, most)
    bands(most, c.layers, low, high)
    table[slots, :] = NONE
    table[slots, 0] = 0.0
    for s in range(slots - 1, -1, -1):
        out = table[s]
        out[:] = NONE
        if low[s] > high[s]:
            return NONE
        upper = c.together[s - 1] if s > 0 else -1
        under = c.together[s]
        for v in range(variants):
            for n in range(1, most[v, s] + 1):
                goal = out
                if upper >= 0:
                    goal = fronts[upper, v, n]
                    goal[:] = NONE
                own, room = own_seconds(c, s, v, n), room_seconds(c, limit, s, v, n)
                first, stop = max(low[s + 1], low[s] - n), min(high[s + 1], high[s] - n)
                if under < 0:
                    _add(table[s + 1], first, stop, n, room, own, goal)
                else:
                    for w in range(variants):
                        for k in range(1, most[w, s + 1] + 1):
                            tight = min(room, room_together(c, limit, s, v, n, w, k))
                            if tight > 0.0:
                                _add(fronts[under, w, k], first, stop, n, tight, own, goal)
                if upper >= 0:
                    for at in range(low[s], high[s] + 1):
                        out[at] = min(out[at], goal[at])
    return float(table[0, c.layers])


@numba.njit(cache=True)
def trace(
    c: ChainNumbers,
    limit: float,
    most: Ints,
    low: Ints,
    high: Ints,
    table: Floats,
    fronts: Floats,
    units: Ints,
    chosen: Ints,
) -> None:
    """Layers and variants per slot of the last `least_downstream` that found a cut."""
    variants, slots = c.forward.shape
    at, held_v, held_n = c.layers, -1, 0
    for s in range(slots):
        goal = table[s, at] if held_v < 0 else fronts[c.together[s - 1], held_v, held_n, at]
        nearest, from_v, from_n, next_v, next_n = NONE, 0, 0, -1, 0
        under = c.together[s]
        for v in range(variants):
            for n in range(1, min(most[v, s], at - low[s + 1]) + 1):
                if at - n > high[s + 1] or (held_v >= 0 and (v != held_v or n != held_n)):
                    continue
                own, room = own_seconds(c, s, v, n), room_seconds(c, limit, s, v, n)
                if under < 0:
                    value = table[s + 1, at - n]
                    if value <= room and abs(value + own - goal) < nearest:
                        nearest, from_v, from_n = abs(value + own - goal), v, n
                    continue
                for w in range(variants):
                    for k in range(1, most[w, s + 1] + 1):
                        value = fronts[under, w, k, at - n]
                        tight = min(room, room_together(c, limit, s, v, n, w, k))
                        if value <= tight and abs(value + own - goal) < nearest:
                            nearest, from_v, from_n = abs(value + own - goal), v, n
                            next_v, next_n = w, k
        units[s], chosen[s] = from_n, from_v
        at -= from_n
        held_v, held_n = next_v, next_n


@numba.njit(cache=True)
def empty_fronts(long: int, variants: int, most: int, layers: int) -> Floats:
    """Working space of `least_downstream`."""
    return np.full((long, variants, most + 1, layers + 1), NONE)
