"""Tables of the program over orders: [row, layers] with a band by row, and packed ones.

Outside its band every row of a table is NONE, so that only bands are read and cleaned. The last
column of a band holds the first and the last row that have one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.kernels import kernel
from hetplan.search.families.space import Floats, Ints
from hetplan.search.single.inequalities import NONE
from hetplan.search.single.order_numbers import OrderNumbers


class Pool(NamedTuple):
    """Packed tables by state and class."""

    values: Floats
    start: Ints
    """[S, C] position of the first entry, -1 where there is no table."""
    size: Ints
    """[S, C, 4] first and last row, first and last number of layers."""


class Work(NamedTuple):
    """Working space. Outside its band every row of a table is NONE."""

    below: Floats
    below_band: Ints
    one: Floats
    one_band: Ints
    two: Floats
    two_band: Ints
    every: Floats
    every_band: Ints
    closing: Floats
    """[slices, rows, L + 1]"""
    closing_band: Ints
    """[slices, 2, rows + 1]"""


@kernel
def work_of(o: OrderNumbers) -> Work:
    """Working space for a space."""
    rows = (o.most_stages + 1) * o.level_bound.shape[0]
    shape = (rows, o.layers + 1)
    bands = np.empty((2, rows + 1), np.int64)
    bands[0], bands[1] = o.layers + 1, -1
    bands[0, rows] = rows
    slices = o.slices.max()
    closing_band = np.empty((slices, 2, rows + 1), np.int64)
    closing_band[:] = bands
    return Work(
        np.full(shape, NONE), bands.copy(), np.full(shape, NONE), bands.copy(),
        np.full(shape, NONE), bands.copy(), np.full(shape, NONE), bands.copy(),
        np.full((slices, rows, o.layers + 1), NONE), closing_band,
    )  # fmt: skip


@kernel
def one_slice(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The table as one with a single slice."""
    return table.reshape((1, table.shape[0], table.shape[1]))


@kernel
def clean(values: Floats, band: Ints) -> None:
    """Make a table empty."""
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
def merge(values: Floats, band: Ints, out: Floats, out_band: Ints) -> None:
    """Elementwise least."""
    rows = values.shape[0]
    for row in range(band[0, rows], band[1, rows] + 1):
        low, high = band[0, row], band[1, row]
        if low > high:
            continue
        for at in range(low, high + 1):
            out[row, at] = min(out[row, at], values[row, at])
        widen(out_band, row, low, high)


@kernel
def prune(values: Floats, band: Ints, need: Floats, cutoff: float, room: float) -> bool:
    """Drop what cannot end below `cutoff`, or places too few layers; whether anything is left."""
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
def load(pool: Pool, t: int, c: int, part: int, out: Floats, out_band: Ints) -> None:
    """Elementwise least with a slice of a packed table."""
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
                out[row, l0 + k] = min(out[row, l0 + k], value)
                first, last = min(first, k), k
        if last >= 0:
            widen(out_band, row, l0 + first, l0 + last)
        at += width
