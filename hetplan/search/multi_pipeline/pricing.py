"""The cheapest path of one pipeline at a given bottleneck, by a program over positions and layers.

A path has one part per stage. Its bottleneck's stage time lies between `least` and `most` seconds;
stages upstream of it, itself and those downstream of it weigh

    price + C / least        price        price + down * C / least - bonus

(`multi_pipeline.bound` says why). Positions count from the last stage, as microbatches in flight
do: a stage at position r has r of them in flight. The options that a stage may have can differ
between the back of a path and its front (two phases).

    below[r][l]  least weight of stages 1 to r, all downstream of the bottleneck, with l layers
    above[r][l]  the same with the bottleneck among them
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE

Bools = npt.NDArray[np.bool_]

BELOW, TURN, ABOVE, FIRST_TURN, FIRST_ABOVE, LAST_BELOW, LAST_TURN, ONLY = range(8)
"""Kinds of stages: downstream of the bottleneck, itself, upstream; the first, the last, both."""


@kernel
def _table(
    weights: Floats,
    which: Ints,
    slope: float,
    bonus: float,
    role: int,
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    most: float,
    rows: int,
) -> None:
    """[r][n] least weight of a stage of n layers at position r, and whose option it is."""
    weights[:] = np.inf
    which[:] = -1
    layers = weights.shape[1] - 1
    for o in range(layer.shape[0]):
        if not allowed[o]:
            continue
        # A little more than fits: another order of additions must not leave a stage out.
        fits = int(np.floor((most * (1 + 1e-12) - serial[role, o]) / layer[o] * (1 + 1e-12)))
        row = rows
        for n in range(1, min(layers, fits) + 1):
            while row >= 1 and most_layers[role, o, row] < n:
                row -= 1
            if row < 1:
                break
            value = price[o] + slope * (n * layer[o] + wire[role, o]) - bonus
            if value < weights[row, n]:
                weights[row, n] = value
                which[row, n] = o
    for row in range(rows - 1, 0, -1):
        for n in range(1, layers + 1):
            if weights[row + 1, n] < weights[row, n]:
                weights[row, n] = weights[row + 1, n]
                which[row, n] = which[row + 1, n]


@kernel
def _longest(weights: Floats) -> int:
    """The most layers of such a stage; 0 where none fits."""
    for n in range(weights.shape[0] - 1, 0, -1):
        if weights[n] < np.inf:
            return n
    return 0


@kernel
def weigh_turns(
    values: Floats,
    chosen: Ints,
    layer: Floats,
    wire: Floats,
    serial: Floats,
    most_layers: Ints,
    price: Floats,
    allowed: Bools,
    least: float,
    most: float,
    down: float,
    bonus: float,
) -> None:
    """Fill [phase, kind, r, n] with weights of stages, and with the options that have them.

    layer: [O] seconds per layer; wire, serial: [4, O] what a stage of this role has besides, as it
    counts for one microbatch's way, and in a stage's own turn; most_layers: [4, O, W + 1];
    allowed: [phase, O].
    """
    rows = values.shape[2] - 1
    up = 1.0 / least
    slopes = (down * up, 0.0, up, 0.0, up, down * up, 0.0, 0.0)
    roles = (MIDDLE, MIDDLE, MIDDLE, FIRST, FIRST, LAST, LAST, BOTH)
    for phase in range(values.shape[0]):
        for kind in range(8):
            below = kind in (BELOW, LAST_BELOW)
            table_rows = rows if kind < LAST_BELOW else 1
            _table(
                values[phase, kind, : table_rows + 1],
                chosen[phase, kind, : table_rows + 1],
                slopes[kind],
                bonus if below else 0.0,
                roles[kind],
                layer,
                wire,
                serial,
                most_layers,
                price,
                allowed[phase],
                most,
                table_rows,
            )


@kernel
def _lowest_below(values: Floats) -> float:
    """What one more stage downstream of the bottleneck can take off at most; not above 0."""
    return float(min(0.0, values[:, BELOW].min()))


@kernel
def _widest(values: Floats) -> int:
    """The most layers of any stage."""
    for n in range(values.shape[3] - 1, 0, -1):
        for phase in range(values.shape[0]):
            for kind in range(values.shape[1]):
                for r in range(1, values.shape[2]):
                    if values[phase, kind, r, n] < np.inf:
                        return n
    return 0


@kernel
def cheapest_path(values: Floats, chosen: Ints, fewest: int, path: Ints) -> float:
    """Least weight of a whole path of `fewest` or more stages, infinite where there is none.

    `values`, `chosen`: [phase, kind, rows + 1, layers + 1]. `path` [2, rows] is filled with
    (option, layers) by position from the back, from index 0 on; its end is marked by option -1.
    """
    phases, rows, layers = values.shape[0], values.shape[2] - 1, values.shape[3] - 1
    # [bottleneck among them?, phase, r, l], and (layers, the same of what is downstream) as one.
    reached = np.full((2, phases, rows + 1, layers + 1), np.inf)
    came = np.zeros((2, phases, rows + 1, layers + 1), np.int64)
    best, best_row, best_came, best_kind, best_phase = np.inf, 0, 0, ONLY, 0
    for phase in range(phases):
        for n in range(1, layers + 1):
            reached[0, phase, 1, n], came[0, phase, 1, n] = values[phase, LAST_BELOW, 1, n], n * 4
            reached[1, phase, 1, n], came[1, phase, 1, n] = values[phase, LAST_TURN, 1, n], n * 4
        if fewest <= 1 and values[phase, ONLY, 1, layers] < best:
            best, best_row, best_came = values[phase, ONLY, 1, layers], 1, layers * 4
            best_phase = phase
    deepest, most = _lowest_below(values), _widest(values)
    for r in range(2, rows + 1):
        # Stages upstream of the bottleneck weigh nothing less than 0: nothing better follows.
        least = reached[0, :, r - 1].min() + deepest * (rows - r)
        if min(least, reached[1, :, r - 1].min()) >= best:
            break
        # What stages further upstream can hold.
        needed = layers - (rows - r) * most
        for phase in range(phases):
            for before in range(phase + 1):
                for k in range(2):
                    if r < fewest:
                        continue
                    ends = values[phase, FIRST_TURN + k, r]
                    for n in range(1, min(layers - 1, _longest(ends)) + 1):
                        value = reached[k, before, r - 1, layers - n] + ends[n]
                        if value < best:
                            best, best_row, best_phase = value, r, phase
                            best_kind, best_came = FIRST_TURN + k, n * 4 + 2 * k + before
                if r == rows:
                    continue
                for kind in range(3):
                    k, into = int(kind == ABOVE), int(kind != BELOW)
                    weights = values[phase, kind, r]
                    downstream, here = reached[k, before, r - 1], reached[into, phase, r]
                    last = _longest(downstream)
                    if last == 0:
                        continue
                    for n in range(1, _longest(weights) + 1):
                        for held in range(max(r - 1 + n, needed), min(last + n + 1, layers)):
                            value = downstream[held - n] + weights[n]
                            if value < here[held]:
                                here[held] = value
                                came[into, phase, r, held] = n * 4 + 2 * k + before
    path[0, :] = -1
    if best == np.inf:
        return float(best)
    left, kind, phase, code = layers, best_kind, best_phase, best_came
    for r in range(best_row, 0, -1):
        n = code // 4
        path[0, r - 1], path[1, r - 1] = chosen[phase, kind, r, n], n
        left -= n
        if r > 1:
            k, phase = code % 4 // 2, code % 2
            code = came[k, phase, r - 1, left]
            if r == 2:
                kind = LAST_TURN if k else LAST_BELOW
            elif k == 0:
                kind = BELOW
            else:
                kind = ABOVE if code % 4 // 2 else TURN
    return float(best)
