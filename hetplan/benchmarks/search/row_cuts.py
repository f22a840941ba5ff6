"""Where is a row of stages cut into layers so that Sailor's step is short?

Of P stages with dp replicas and N microbatches, c_s[a, e] the seconds of one microbatch on layers
a to e - 1 (sends included), r_s[a, e] the reduction:

    step = (N - 1) max_s c_s + sum_s c_s + max_s r_s

`cut` first finds the least possible max_s c_s by a program over stages and layers, and among cuts
with it a least sum; then it moves every boundary, by one or two layers, as long as the step falls.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel


@kernel
def _step(ticks: Floats, reductions: Floats, count: int, ends: Ints) -> float:
    longest = total = reduced = 0.0
    first = 0
    for s in range(len(ends)):
        if ends[s] <= first:
            return np.inf
        tick = ticks[s, first, ends[s]]
        longest = max(longest, tick)
        total += tick
        reduced = max(reduced, reductions[s, first, ends[s]])
        first = ends[s]
    return (count - 1) * longest + total + reduced


@kernel
def _cut(ticks: Floats, limit: float, ends: Ints) -> float:
    """The least max_s c_s (limit inf), or the cut of least sum with no c_s above the limit."""
    stages, layers = ticks.shape[0], ticks.shape[1] - 1
    by_sum = limit < np.inf
    best = np.full((stages + 1, layers + 1), np.inf)
    came = np.zeros((stages + 1, layers + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for s in range(stages):
        for e in range(s + 1, layers - (stages - 1 - s) + 1):
            for a in range(s, e):
                tick = ticks[s, a, e]
                if tick > limit or best[s, a] == np.inf:
                    continue
                value = best[s, a] + tick if by_sum else max(best[s, a], tick)
                if value < best[s + 1, e]:
                    best[s + 1, e] = value
                    came[s + 1, e] = a
    found = best[stages, layers]
    if found < np.inf:
        e = layers
        for s in range(stages - 1, -1, -1):
            ends[s] = e
            e = came[s + 1, e]
    return float(found)


@kernel
def cut(ticks: Floats, reductions: Floats, count: int, ends: Ints) -> float:
    """Fills `ends` (the layer after each stage's last); the step, infinite where none fits."""
    longest = _cut(ticks, np.inf, ends)
    if longest == np.inf:
        return np.inf
    _cut(ticks, longest * (1 + 1e-12), ends)
    best = _step(ticks, reductions, count, ends)
    moved = True
    while moved:
        moved = False
        for s in range(len(ends) - 1):
            for by in (-2, -1, 1, 2):
                ends[s] += by
                step = _step(ticks, reductions, count, ends)
                if step < best:
                    best = step
                    moved = True
                else:
                    ends[s] -= by
    return best
