"""How short may a step be at these device prices? Paths in cells, the least cell split until sure.

A cell holds the paths whose bottleneck's time, depth, number of stages and options lie in given
ranges. Its value is a lower bound of their steps; the least value of all cells is the bound, once
the least cell is narrow and its path could be one of a plan.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.search.several.paths import Path, PathPricer
from hetplan.search.several.pricing import Bools


@dataclass(frozen=True, slots=True)
class _Cell:
    """Paths of a tick whose bottleneck takes `low` to `high` seconds, of allowed options only."""

    pricer: PathPricer
    low: float
    high: float
    allowed: Bools
    """[phase, O] by the back and the front of a path, where they differ."""
    path: Path

    def split(self) -> tuple[Bools, ...]:
        """Parts between which every real path must choose; none where this one is real."""
        return self._orders() or self._shapes()

    def _orders(self) -> tuple[Bools, ...]:
        """Stages of a mesh stand next to each other: another one is before or after it."""
        tick = self.pricer.tick
        if len(self.allowed) > 1:
            return ()
        row = [mesh for mesh, _ in itertools.groupby(tick.mesh[list(self.path.options)].tolist())]
        for mesh in dict.fromkeys(row):
            here = tick.mesh == mesh
            if row.count(mesh) > 1 and self._only_once(here):
                between = row[row.index(mesh) + 1]
                there = tick.mesh == between
                # Not disjoint ones are told apart by `_shapes`; alike islands are one mesh here,
                # so that another of them may stand on the other side.
                if not self._disjoint(here, there) or not self._only_once(there):
                    continue
                allowed = self.allowed[0]
                return (
                    np.array([allowed & ~here, allowed & ~there]),
                    np.array([allowed & ~there, allowed & ~here]),
                )
        return ()

    def _only_once(self, here: Bools) -> bool:
        """Whether a pipeline cannot have two such meshes: one of its classes has one island."""
        tick = self.pricer.tick
        return bool((tick.use[here][0][tick.alone] > 0).any())

    def _disjoint(self, here: Bools, there: Bools) -> bool:
        tick = self.pricer.tick
        return not bool(((tick.use[here][0] > 0) & (tick.use[there][0] > 0) & tick.alone).any())

    def _shapes(self) -> tuple[Bools, ...]:
        """An island is in one mesh."""
        tick = self.pricer.tick
        for place in np.flatnonzero(tick.alone):
            here = tick.use[:, place] > 0
            layers: dict[int, int] = {}
            for o, n in zip(self.path.options, self.path.layers, strict=True):
                if here[o]:
                    mesh = int(tick.mesh[o])
                    layers[mesh] = layers.get(mesh, 0) + n
            if len(layers) > 1:
                mesh = max(layers, key=lambda each: (layers[each], each))
                same = tick.mesh == mesh
                return self.allowed & (~here | same), self.allowed & ~same
        return ()


_FIRST = 0.8
"""Logarithm of the first intervals' width."""

_TOLD = 200
"""Cells between two reports, each of about a millisecond."""

_NEAR = 100
"""Paths of which the next prices are made."""

_KNOWN = 1.03
"""Paths of narrower intervals than this say what they take."""

_COARSE = 1.06
"""Shapes are told apart where the bottleneck is known this well: earlier there are too many."""


def sweep(
    pricers: Sequence[PathPricer],
    prices: Floats,
    limit: float,
    ratio: float,
    on_bound: Callable[[float], None] | None = None,
) -> tuple[float, list[Path]]:
    """(bound of these prices, paths that are nearest to it); prices sum up to the batch.

    The limit where no path is below it. `on_bound` is told now and then what is known so far.
    """
    heap: list[tuple[float, int, _Cell]] = []
    made = itertools.count()

    def push(
        pricer: PathPricer,
        low: float,
        high: float,
        allowed: Bools,
        parent: Path | None = None,
        known: float = 0.0,
    ) -> None:
        stages = pricer.tick.fewest_stages, pricer.tick.most_stages
        weight, path = pricer.least(prices, allowed, (low, high), stages, parent)
        if path is not None:
            cell = _Cell(pricer, low, high, allowed, path)
            heapq.heappush(heap, (max(known, low * weight), next(made), cell))

    for pricer in pricers:
        every = np.ones((1, len(pricer.tick.forward)), dtype=np.bool_)
        for low, high in itertools.pairwise(_edges(pricer, limit)):
            push(pricer, low, high, every)
    told = 0
    while heap:
        value, count, cell = heap[0]
        if on_bound is not None and count >= told + _TOLD:
            told = count
            on_bound(value)
        wide = cell.high / cell.low
        parts = cell.split() if wide <= _COARSE else ()
        if not parts and wide <= 1 + ratio:
            near = [entry[2] for entry in heapq.nsmallest(_NEAR, heap)]
            known = [each.path for each in near if each.high <= each.low * _KNOWN]
            return value, known
        heapq.heappop(heap)
        if parts:
            for allowed in parts:
                push(cell.pricer, cell.low, cell.high, allowed, cell.path, value)
        else:
            halfway = (cell.low * cell.high) ** 0.5
            push(cell.pricer, cell.low, halfway, cell.allowed, cell.path, value)
            push(cell.pricer, halfway, cell.high, cell.allowed, cell.path, value)
    return limit, []


def _edges(pricer: PathPricer, limit: float) -> list[float]:
    """Ends of the first intervals of the bottleneck's time, far apart."""
    shortest = float((pricer.layer + pricer.serial.min(axis=0)).min())
    longest = float((pricer.layer * pricer.tick.num_layers + pricer.serial.max(axis=0)).max())
    longest = max(shortest, min(longest, limit))
    count = 2 + int(np.log(longest / shortest) / _FIRST)
    return [float(edge) for edge in np.geomspace(shortest * 0.999, longest * 1.001, count)]
