"""One slot of the program over orders: what it adds to Sigma, and how much may be below it.

Symbols and inequalities are those of `hetplan.cost.bounds`.
"""

from __future__ import annotations

from typing import NamedTuple

from hetplan.cost.bounds import (
    downstream_room_seconds,
    interval_room_seconds,
    interval_seconds,
    wait_once_seconds,
)
from hetplan.kernels import kernel
from hetplan.search.families.space import BOTH, Ints
from hetplan.search.single.inequalities import SLACK
from hetplan.search.single.order_numbers import BUCKETS, OrderNumbers

_FAST = 0.4
"""Passes below this part of the slowest slot's are one bucket: their circuits do not bind."""


class Link(NamedTuple):
    """Boundaries of a slot: what is upstream and downstream of it."""

    role: int
    wire_in: float
    post_in: float
    late: float
    back: float
    post_back: float
    beside: float
    """F' + B of the slot downstream where the boundary is long, else negative."""
    joins: bool
    """Whether the slot downstream is of another mesh, so that the depth may grow."""


# What is called per slot takes numbers, not the tuples: those are large and passed by value.


@kernel
def slot_room(
    limit: float,
    microbatches: int,
    f: float,
    b: float,
    link: Link,
    flight: int,
    turning: int,
) -> float:
    """Most D with which a slot stays within the limit; negative where none does.

    f, b: seconds of its passes alone.
    """
    x = limit * SLACK
    serial_f, serial_b, back = f + link.post_in, b + link.post_back, b + link.back
    if wait_once_seconds(serial_f, serial_b, microbatches, flight) > x:
        return -1.0
    room = downstream_room_seconds(x, serial_f, serial_b, back, microbatches, flight)
    if link.beside >= 0.0 and turning > 0:
        circuit = serial_f + back + link.beside
        most = interval_seconds(circuit, serial_f, serial_b, microbatches, flight, turning)
        if most > x:
            return -1.0
        more = interval_room_seconds(
            x, circuit, serial_f, serial_b, back, microbatches, flight, turning
        )
        room = min(room, more)
    return float(room - link.late)


@kernel
def slot_own(link: Link, f: float, b: float) -> float:
    """What a slot adds to Sigma."""
    return float(link.wire_in + link.late + link.back + (f + b))


@kernel
def end_seconds(o: OrderNumbers, move: int, role: int, n: int, stages: int) -> float:
    """What the first slot of a pipeline, of the mesh of a move, adds behind Sigma."""
    levels, reached = 0, 1
    while reached < stages:
        reached, levels = 2 * reached, levels + 1
    after = o.after_first[1 if role == BOTH else 0, o.move_mesh[move], n]
    return float(after + levels * o.norm_hop[move])


@kernel
def undominated(o: OrderNumbers, role: int, a: int, held: int, first: Ints) -> None:
    """By variant: fewest units for which no other one is as fast both ways and fits as well.

    Where times of variants cross, that is left to the program.
    """
    for v in range(first.shape[0]):
        first[v] = 1
        for u in range(first.shape[0]):
            if u == v:
                continue
            f_u, f_v = o.extra_forward[role, u, a], o.extra_forward[role, v, a]
            b_u, b_v = o.extra_backward[role, u, a], o.extra_backward[role, v, a]
            if (
                f_u <= f_v
                and b_u <= b_v
                and o.forward[u, a] <= o.forward[v, a]
                and o.backward[u, a] <= o.backward[v, a]
                and (
                    u < v
                    or o.forward[u, a] < o.forward[v, a]
                    or o.backward[u, a] < o.backward[v, a]
                )
            ):
                first[v] = max(first[v], o.most_layers[u, role, a, held] + 1)


@kernel
def bucket_of(seconds: float, slowest: float) -> int:
    """Slice of a front slot by both its passes."""
    part = seconds / slowest
    if part < _FAST:
        return 1
    return 2 + min(BUCKETS - 2, int((part - _FAST) / (1.0 - _FAST) * (BUCKETS - 1)))


@kernel
def bucket_seconds(bucket: int, slowest: float) -> float:
    """Least passes of a slot in this slice."""
    if bucket <= 1:
        return 0.0
    part = _FAST + (1.0 - _FAST) * (bucket - 2) / (BUCKETS - 1)
    return slowest * part * (1.0 - 1e-9)


@kernel
def depths(o: OrderNumbers, row: int, level: int) -> tuple[int, int]:
    """(W of the bounds, W of the memory) of a slot above `row` at a level of extra depth."""
    stages = row // o.level_bound.shape[0] + 1
    widest = min(o.microbatches, o.most_layers.shape[3] - 1)
    return (
        min(stages + o.level_bound[level], o.microbatches),
        min(stages + o.level_memory[level], widest),
    )


@kernel
def turning_of(o: OrderNumbers, row: int) -> int:
    """W of the slot downstream; 0 where it is not known exactly."""
    levels = o.level_bound.shape[0]
    stages, level = row // levels, row % levels
    if o.level_bound[level] != o.level_memory[level]:
        return 0
    return int(min(stages + o.level_bound[level], o.microbatches))
