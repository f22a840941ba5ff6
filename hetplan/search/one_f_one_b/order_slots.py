"""One slot of the program over orders: what it adds to Sigma, and how much may be below it.

Symbols and inequalities are those of `hetplan.cost.bounds`.

Tables of the program are [row, layers] with a band by row (`Table`), or packed (`Pool`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import (
    downstream_room_seconds,
    interval_room_seconds,
    interval_seconds,
    wait_once_seconds,
)
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.order_numbers import BUCKETS, OrderNumbers
from hetplan.search.one_f_one_b.order_relaxation import NONE, SLACK
from hetplan.search.space.row import norm_levels
from hetplan.search.space.stage_table import BOTH, LAST, MIDDLE

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


@kernel
def fronted(link: Link, role: int, wire_in: float, post_in: float) -> Link:
    """The same with another boundary upstream."""
    return Link(
        role, wire_in, post_in, link.late, link.back, link.post_back, link.beside, link.joins
    )


@kernel
def link_of_last() -> Link:
    """Of a slot with nothing downstream."""
    return Link(LAST, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, False)


@kernel
def link_inside(o: OrderNumbers, a: int) -> Link:
    """Of a slot with one of the same mesh downstream."""
    return Link(MIDDLE, 0.0, 0.0, 0.0, o.inner[2, a], o.inner[3, a], -1.0, False)


@kernel
def link_between(o: OrderNumbers, a: int, c: int, bucket: int, slowest: float) -> Link:
    """Of a slot with class c downstream; bucket: of that slot's passes, where the boundary is
    long.
    """
    beside = bucket_seconds(bucket, slowest) + o.late[a, c] if o.is_long[a, c] else -1.0
    return Link(MIDDLE, 0.0, 0.0, o.late[a, c], o.back[a, c], o.post[a, c], beside, True)


@kernel
def lateness(o: OrderNumbers, a: int, n: int, level: int, back: float) -> tuple[int, bool]:
    """(level with a slot of mesh a and n units in front of one, whether the slot is upstream of the
    latest one); back: what passes of gradients add to Sigma there.
    """
    before = o.edges[level] - back
    upstream = o.ends[a, n] < before
    late, found = before if upstream else o.ends[a, n], 0
    while found + 1 < o.edges.shape[0] and o.edges[found + 1] <= late:
        found += 1
    return found, upstream


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
    upstream: bool,
) -> float:
    """Most D with which a slot stays within the limit; negative where none does.

    f, b: seconds of its passes alone; upstream: of the latest slot (`lateness`).
    """
    x = limit * SLACK
    serial_f, serial_b, back = f + link.post_in, b + link.post_back, b + link.back
    # Chains that end with backward passes of this slot do not pass the latest one.
    lost = max(0.0, serial_b - serial_f) if upstream else 0.0
    if wait_once_seconds(serial_f, serial_b, microbatches, flight) - (flight - 1) * lost > x:
        return -1.0
    room = downstream_room_seconds(x, serial_f, serial_b, back, microbatches, flight)
    if link.beside >= 0.0 and turning > 0:
        circuit = serial_f + back + link.beside
        most = interval_seconds(circuit, serial_f, serial_b, microbatches, flight, turning)
        if most - (turning - 1) * lost > x:
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
def end_seconds(o: OrderNumbers, move: int, role: int, n: int, row: int, back: float) -> float:
    """What the first slot of a pipeline, of the mesh of a move, adds behind Sigma, in front of an
    entry of this row; back: as of `lateness`.
    """
    levels = o.level_bound.shape[0]
    after = o.after_first[1 if role == BOTH else 0, o.states.mesh[move], n]
    if o.edges.shape[0]:
        after = max(after, o.edges[row % levels] - back)
    return float(after + norm_levels(row // levels + 1) * o.norm_hop[move])


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
            f_u, f_v = o.table.extra_forward[role, u, a], o.table.extra_forward[role, v, a]
            b_u, b_v = o.table.extra_backward[role, u, a], o.table.extra_backward[role, v, a]
            if (
                f_u <= f_v
                and b_u <= b_v
                and o.table.forward[u, a] <= o.table.forward[v, a]
                and o.table.backward[u, a] <= o.table.backward[v, a]
                and (
                    u < v
                    or o.table.forward[u, a] < o.table.forward[v, a]
                    or o.table.backward[u, a] < o.table.backward[v, a]
                )
            ):
                first[v] = max(first[v], o.table.most_layers[u, role, a, held] + 1)


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
    widest = min(o.table.num_microbatches, o.table.most_layers.shape[3] - 1)
    return (
        min(stages + o.level_bound[level], o.table.num_microbatches),
        min(stages + o.level_memory[level], widest),
    )


@kernel
def turning_of(o: OrderNumbers, row: int) -> int:
    """W of the slot downstream; 0 where it is not known exactly."""
    levels = o.level_bound.shape[0]
    stages, level = row // levels, row % levels
    if o.level_bound[level] != o.level_memory[level]:
        return 0
    return int(min(stages + o.level_bound[level], o.table.num_microbatches))


class Pool(NamedTuple):
    """Packed tables by state and class."""

    values: Floats
    start: Ints
    """[S, C] position of the first entry, -1 where there is no table."""
    size: Ints
    """[S, C, 4] first and last row, first and last number of layers."""


class Table(NamedTuple):
    """Least D by row and layers. Outside its band every row is NONE, so that only bands are read
    and cleaned.
    """

    values: Floats
    """[rows, L + 1]"""
    band: Ints
    """[2, rows + 1] first and last number of layers of each row; last column: first and last row
    that have one."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The part of a table that has entries."""

    row: int
    at: int
    """Layers of its first column."""
    values: Floats

    @classmethod
    def of(cls, table: Table) -> Packed:
        """Of a table that is not empty."""
        r0, r1 = table.band[:, -1].tolist()
        bands = table.band[:, r0 : r1 + 1]
        some = bands[:, bands[0] <= bands[1]]
        l0, l1 = int(some[0].min()), int(some[1].max())
        return cls(r0, l0, table.values[r0 : r1 + 1, l0 : l1 + 1].copy())

    def _in(self, table: Floats) -> Floats:
        rows, layers = self.values.shape
        return table[self.row : self.row + rows, self.at : self.at + layers]

    def write(self, table: Floats) -> None:
        """Into an empty table."""
        self._in(table)[:] = self.values

    def wipe(self, table: Floats) -> None:
        """Out of it again."""
        self._in(table)[:] = NONE


class Tables(NamedTuple):
    """One for each slice."""

    values: Floats
    """[slices, rows, L + 1]"""
    band: Ints
    """[slices, 2, rows + 1]"""


class Work(NamedTuple):
    """Working space."""

    below: Table
    one: Table
    two: Table
    every: Table
    closing: Tables


@kernel
def empty_tables(slices: int, rows: int, layers: int) -> Tables:
    """Tables without entries."""
    band = np.empty((slices, 2, rows + 1), np.int64)
    band[:, 0], band[:, 1] = layers + 1, -1
    band[:, 0, rows] = rows
    return Tables(np.full((slices, rows, layers + 1), NONE), band)


@kernel
def table_of(tables: Tables, part: int) -> Table:
    """One slice."""
    return Table(tables.values[part], tables.band[part])


@kernel
def one_slice(table: Table) -> Tables:
    """The table as tables of a single slice."""
    values, band = table
    return Tables(
        values.reshape((1, values.shape[0], values.shape[1])),
        band.reshape((1, band.shape[0], band.shape[1])),
    )


@kernel
def work_of(o: OrderNumbers) -> Work:
    """Working space for a space."""
    rows, layers = (o.most_stages + 1) * o.level_bound.shape[0], o.table.num_layers
    spare = empty_tables(4, rows, layers)
    return Work(
        table_of(spare, 0),
        table_of(spare, 1),
        table_of(spare, 2),
        table_of(spare, 3),
        empty_tables(o.slices.max(), rows, layers),
    )


@kernel
def clean(table: Table) -> None:
    """Make a table empty."""
    values, band = table
    rows = values.shape[0]
    for row in range(band[0, rows], band[1, rows] + 1):
        if band[0, row] <= band[1, row]:
            values[row, band[0, row] : band[1, row] + 1] = NONE
            band[0, row], band[1, row] = values.shape[1], -1
    band[0, rows], band[1, rows] = rows, -1


@kernel
def widen(band: Ints, row: int, low: int, high: int) -> None:
    """The row has entries from low to high too."""
    rows = band.shape[1] - 1
    band[0, row], band[1, row] = min(band[0, row], low), max(band[1, row], high)
    band[0, rows], band[1, rows] = min(band[0, rows], row), max(band[1, rows], row)


@kernel
def merge(table: Table, out: Table) -> None:
    """Elementwise least, into `out`."""
    values, band = table
    rows = values.shape[0]
    for row in range(band[0, rows], band[1, rows] + 1):
        low, high = band[0, row], band[1, row]
        if low > high:
            continue
        for at in range(low, high + 1):
            out.values[row, at] = min(out.values[row, at], values[row, at])
        widen(out.band, row, low, high)


@kernel
def prune(table: Table, need: Floats, cutoff: float, room: float) -> bool:
    """Drop what cannot end below `cutoff`, or places too few layers; whether anything is left."""
    values, band = table
    layers, rows = values.shape[1] - 1, values.shape[0]
    r0, r1 = rows, -1
    for row in range(band[0, rows], band[1, rows] + 1):
        low, high = band[0, row], band[1, row]
        if low > high:
            continue
        first, last = layers + 1, -1
        for at in range(low, high + 1):
            value = values[row, at]
            if value >= NONE:
                continue
            if layers - at > room + 1e-6 or value > cutoff - need[layers - at]:
                values[row, at] = NONE
                continue
            first = min(first, at)
            last = at
        band[0, row], band[1, row] = first, last
        if first <= last:
            r0, r1 = min(r0, row), row
    band[0, rows], band[1, rows] = r0, r1
    return r1 >= 0


@kernel
def load(pool: Pool, t: int, c: int, part: int, out: Table) -> None:
    """Elementwise least with a slice of a packed table, into `out`."""
    start = pool.start[t, c]
    if start < 0:
        return
    r0, r1, l0, l1 = pool.size[t, c]
    width = l1 - l0 + 1
    at = start + part * (r1 - r0 + 1) * width
    for row in range(r0, r1 + 1):
        first, last = width, -1
        for k in range(width):
            value = pool.values[at + k]
            if value < NONE:
                out.values[row, l0 + k] = min(out.values[row, l0 + k], value)
                first, last = min(first, k), k
        if last >= 0:
            widen(out.band, row, l0 + first, l0 + last)
        at += width
