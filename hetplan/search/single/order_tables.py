"""Tables of the program over orders: [row, layers] with a band by row, and packed ones.

Outside its band every row of a table is NONE, so that only bands are read and cleaned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from hetplan.search.families.space import Floats, Ints
from hetplan.search.single.order_numbers import OrderNumbers
from hetplan.search.single.partition_kernel import NONE


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
    """[slices, 2, rows]"""


@numba.njit(cache=True)
def work_of(o: OrderNumbers) -> Work:
    """Working space for a space."""
    rows = (o.most_stages + 1) * o.level_bound.shape[0]
    shape = (rows, o.layers + 1)
    bands = np.empty((2, rows), np.int64)
    bands[0], bands[1] = o.layers + 1, -1
    slices = o.slices.max()
    closing_band = np.empty((slices, 2, rows), np.int64)
    closing_band[:] = bands
    return Work(
        np.full(shape, NONE), bands.copy(), np.full(shape, NONE), bands.copy(),
        np.full(shape, NONE), bands.copy(), np.full(shape, NONE), bands.copy(),
        np.full((slices, rows, o.layers + 1), NONE), closing_band,
    )  # fmt: skip


@numba.njit(cache=True)
def one_slice(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The table as one with a single slice."""
    return table.reshape((1, table.shape[0], table.shape[1]))


@numba.njit(cache=True)
def clean(values: Floats, band: Ints) -> None:
    """Make a table empty."""
    for row in range(values.shape[0]):
        if band[0, row] <= band[1, row]:
            values[row, band[0, row] : band[1, row] + 1] = NONE
            band[0, row], band[1, row] = values.shape[1], -1


@numba.njit(cache=True)
def merge(values: Floats, band: Ints, out: Floats, out_band: Ints) -> None:
    """Elementwise least."""
    for row in range(values.shape[0]):
        low, high = band[0, row], band[1, row]
        if low > high:
            continue
        for at in range(low, high + 1):
            out[row, at] = min(out[row, at], values[row, at])
        out_band[0, row] = min(out_band[0, row], low)
        out_band[1, row] = max(out_band[1, row], high)


@numba.njit(cache=True)
def prune(values: Floats, band: Ints, need: Floats, cutoff: float, room: float) -> bool:
    """Drop what cannot end below `cutoff`, or places too few layers; whether anything is left."""
    layers, left = values.shape[1] - 1, False
    for row in range(values.shape[0]):
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
        left = left or first <= last
    return left


@numba.njit(cache=True)
def load(pool: Pool, t: int, c: int, part: int, out: Floats, out_band: Ints) -> None:
    """Elementwise least with a slice of a packed table."""
    start = pool.start[t, c]
    if start < 0:
        return
    r0, r1, l0, l1 = pool.size[t, c]
    width = l1 - l0 + 1
    at = start + part * (r1 - r0 + 1) * width
    for row in range(r0, r1 + 1):
        first, last = out_band[0, row], out_band[1, row]
        for k in range(width):
            value = pool.values[at + k]
            if value < NONE:
                out[row, l0 + k] = min(out[row, l0 + k], value)
                first, last = min(first, l0 + k), max(last, l0 + k)
        out_band[0, row], out_band[1, row] = first, last
        at += width
