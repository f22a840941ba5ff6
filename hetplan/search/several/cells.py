"""How short may a step be at these device prices? Paths in cells, the least cell split until sure.

A cell holds the paths whose bottleneck's time, depth, number of stages and options lie in given
ranges. Its value is a lower bound of their steps; the least value of all cells is the bound, once
the least cell is narrow and its path could be one of a plan.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.search.several.options import Options
from hetplan.search.several.paths import Path, PathPricer
from hetplan.search.several.pricing import Bools


@dataclass(frozen=True, slots=True)
class _Cell:
    """Paths whose bottleneck takes `low` to `high` seconds and that use allowed options only."""

    low: float
    high: float
    allowed: Bools
    """[phase, O] by the back and the front of a path, where they differ."""
    extra: tuple[int, int]
    """Fewest and most microbatches that the bottleneck has in flight beyond its position."""
    stages: tuple[int, int]
    """Fewest and most of a path."""
    path: Path

    def split(self, options: Options) -> tuple[Bools, ...]:
        """Parts between which every real path must choose; none where this one is real."""
        return self._orders(options) or self._shapes(options)

    def _orders(self, options: Options) -> tuple[Bools, ...]:
        """Stages of one island stand next to each other: another class is before or after it."""
        if len(self.allowed) > 1:
            return ()
        row = [place for place, _ in itertools.groupby(options.place[list(self.path.options)])]
        for place in dict.fromkeys(row):
            if row.count(place) > 1 and len(options.classes[place].islands) == 1:
                between = row[row.index(place) + 1]
                here, there = options.place == place, options.place == between
                allowed = self.allowed[0]
                return (
                    np.array([allowed & ~here, allowed & ~there]),
                    np.array([allowed & ~there, allowed & ~here]),
                )
        return ()

    def _shapes(self, options: Options) -> tuple[Bools, ...]:
        """All stages of one island have one shape."""
        seen: dict[int, dict[tuple[int, int], int]] = {}
        for o, n in zip(self.path.options, self.path.layers, strict=True):
            option = options.options[o]
            if len(options.classes[option.place].islands) == 1:
                shapes = seen.setdefault(option.place, {})
                key = (option.tp, option.microbatch_size)
                shapes[key] = shapes.get(key, 0) + n
        for place, shapes in seen.items():
            if len(shapes) > 1:
                tp, size = max(shapes, key=lambda each: (shapes[each], each))
                here = options.place == place
                same = here & (options.tp == tp) & (options.microbatch_size == size)
                return self.allowed & (~here | same), self.allowed & ~same
        return ()


_DEPTHS_APART = 1.06
"""Depths are told apart where the bottleneck is known this well."""

_COARSE = 1.01
"""Shapes are told apart where the bottleneck is known this well: earlier there are too many."""


def sweep(
    pricer: PathPricer, prices: Floats, limit: float, ratio: float
) -> tuple[float, list[Path]]:
    """(bound of these prices, paths that are nearest to it); prices sum up to the batch."""
    options = pricer.options
    shortest = float((pricer.layer + pricer.serial.min(axis=0)).min())
    longest = float((pricer.layer * options.num_layers + pricer.serial.max(axis=0)).max())
    longest = min(longest, limit)
    count = 2 + int(np.log(longest / shortest) / 0.1)
    edges = np.geomspace(shortest * 0.999, longest * 1.001, count)
    heap: list[tuple[float, int, _Cell]] = []
    made = 0

    def push(
        low: float,
        high: float,
        allowed: Bools,
        extra: tuple[int, int],
        stages: tuple[int, int],
        known: int = 1,
    ) -> None:
        nonlocal made
        weight, path = pricer.least(prices, allowed, (low, high), extra, stages, known)
        if path is not None:
            cell = _Cell(low, high, allowed, extra, stages, path)
            heapq.heappush(heap, (low * weight, made, cell))
            made += 1

    every = np.ones((1, len(options.options)), dtype=np.bool_)
    rows = (1, options.stage_limit)
    for low, high in itertools.pairwise(edges):
        push(float(low), float(high), every, (0, 0), rows)
        if pricer.extra_depth:
            push(float(low), float(high), every, (1, pricer.extra_depth), rows)
    while heap:
        value, _, cell = heap[0]
        wide = cell.high / cell.low
        parts = cell.split(options) if wide <= _COARSE else ()
        extra, stages, known = cell.extra, cell.stages, cell.path.microbatches
        if not parts and wide <= 1 + ratio and _apart(extra) and (_apart(stages) or not extra[1]):
            return value, [
                entry[2].path for entry in heapq.nsmallest(30, heap) if not entry[2].split(options)
            ]
        heapq.heappop(heap)
        if wide <= _DEPTHS_APART and extra[1] and not _apart(stages):
            for part in _halves(stages, len(cell.path.options)):
                push(cell.low, cell.high, cell.allowed, extra, part, known)
        elif wide <= _DEPTHS_APART and not _apart(extra):
            for part in _halves(extra, sum(extra) // 2):
                push(cell.low, cell.high, cell.allowed, part, stages, known)
        elif parts:
            for allowed in parts:
                push(cell.low, cell.high, allowed, extra, stages, known)
        else:
            halfway = (cell.low * cell.high) ** 0.5
            push(cell.low, halfway, cell.allowed, extra, stages, known)
            push(halfway, cell.high, cell.allowed, extra, stages, known)
    return np.inf, []


def _apart(numbers: tuple[int, int]) -> bool:
    """Whether the range has one number, or at most a sixth more than its least one."""
    return numbers[0] == numbers[1] or 6 * numbers[1] <= 7 * numbers[0]


def _halves(numbers: tuple[int, int], middle: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The range cut after `middle`, or before its last number."""
    middle = min(middle, numbers[1] - 1)
    return (numbers[0], middle), (middle + 1, numbers[1])
