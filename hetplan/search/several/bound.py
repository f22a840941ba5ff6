"""No plan of one or several pipelines can have a shorter step than this, whatever its stages are.

(docstring below is completed with the proof)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.several.options import Options
from hetplan.search.single.space import FIRST, LAST
from hetplan.search.several.pricing import Bools, cheapest_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Parts of the stages of one pipeline, last stage first, and where its bottleneck may be."""

    options: tuple[int, ...]
    layers: tuple[int, ...]
    bottleneck_seconds: float
    """Least stage time that was assumed of the bottleneck."""
    use: tuple[float, ...]
    """Devices of each class that one sequence of a microbatch occupies."""
    weight_without_price: float
    """Microbatches that the filling of the pipeline costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Which of the inequalities a stage downstream of the bottleneck is weighed by."""

    down: float
    bonus: float


def modes_of(options: Options) -> tuple[Mode, ...]:
    share = np.minimum(options.forward, options.backward) / (options.forward + options.backward)
    return (
        Mode(down=2.0, bonus=1.0),
        Mode(down=1.0, bonus=0.5),
        Mode(down=0.0, bonus=0.0),
    )


_NO_FILL = Mode(down=0.0, bonus=0.0)


@dataclass(slots=True)
class PathPricer:
    """Cheapest paths of one job's options at device prices."""

    options: Options
    layer: Floats
    wire: Floats
    serial: Floats
    modes: tuple[Mode, ...]
    known: dict[int, Ints]
    calls: int = 0

    def most_layers(self, microbatches: int) -> Ints:
        found = self.known.get(microbatches)
        if found is None:
            found = self.known[microbatches] = self.options.most_layers(microbatches, self.options.stage_limit)
        return found

    @staticmethod
    def of(options: Options) -> PathPricer:
        """Ready to price."""
        extra = options.extra_forward + options.extra_backward
        wire = extra.copy()
        for role in range(4):
            if not role & FIRST:
                wire[role] += options.arrive_forward
            if not role & LAST:
                wire[role] += options.arrive_backward
        return PathPricer(
            options=options,
            layer=options.forward + options.backward,
            wire=wire,
            serial=wire if options.rendezvous else extra,
            modes=modes_of(options),
            known={},
        )

    def least(
        self, prices: Floats, allowed: Bools, least: float, most: float, rows: int
    ) -> tuple[float, Path | None]:
        """(least weight of a path, the path) where the bottleneck takes `least` to `most`."""
        price = prices[self.options.place] * self.options.use
        microbatches = self._fewest(price, allowed, most, rows)
        if microbatches == 0:
            return np.inf, None
        best, found = -1.0, None
        for mode in self.modes:
            value, path = self._cheapest(price, allowed, (least, most), rows, microbatches, mode)
            if value > best:
                best, found = value, path
        if found is None or best == np.inf:
            return np.inf, None
        return best, self._path(found, best, price, least)

    def _cheapest(
        self,
        price: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        rows: int,
        microbatches: int,
        mode: Mode,
    ) -> tuple[float, Ints]:
        self.calls += 1
        path = np.empty((3, rows), dtype=np.int64)
        value = cheapest_path(
            self.layer,
            self.wire,
            self.serial,
            self.most_layers(microbatches),
            price,
            allowed,
            *seconds,
            self.options.num_layers,
            rows,
            mode.down,
            mode.bonus,
            path,
        )
        return value, path

    def _fewest(self, price: Floats, allowed: Bools, most: float, rows: int) -> int:
        """Microbatches that a path whose stages take `most` seconds must do to be worth its price.

        0 where there is no such path. The price falls with fewer microbatches, for which more
        memory is left, so this climbs from one to the first number that holds itself up.
        """
        known = 1
        while True:
            value, _ = self._cheapest(
                price, allowed, (np.inf, most), rows, known, _NO_FILL
            )
            if value == np.inf or value > self.options.batch:
                return 0
            # A grid of few numbers, from below, so that few tables of memory are made.
            needed = int(1.06 ** np.floor(np.log(max(1.0, value * (1 - 1e-9))) / np.log(1.06)))
            if needed <= known:
                return known
            known = needed

    def _path(self, path: Ints, weight: float, price: Floats, least: float) -> Path:
        count = int(np.count_nonzero(np.cumprod(path[0] >= 0)))
        options = path[0, :count]
        use = np.bincount(
            self.options.place[options],
            weights=self.options.use[options],
            minlength=len(self.options.classes),
        )
        return Path(
            options=tuple(options.tolist()),
            layers=tuple(path[1, :count].tolist()),
            bottleneck_seconds=least,
            use=tuple(use.tolist()),
            weight_without_price=weight - float(price[options].sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralBound:
    """A bound, the prices that prove it, and the paths that came nearest to it."""

    seconds: float
    prices: tuple[float, ...]
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """Paths whose bottleneck takes `low` to `high` seconds and that use allowed options only."""

    low: float
    high: float
    allowed: Bools
    path: Path

    def split_shapes(self, options: Options) -> tuple[Bools, Bools] | None:
        """Two parts between which every real path must choose; None where this one is real."""
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
        return None


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

    def push(low: float, high: float, allowed: Bools) -> None:
        nonlocal made
        rows = options.stage_limit
        if options.enough_microbatches:
            rows = min(rows, int(limit / low))
        if rows < 1:
            return
        weight, path = pricer.least(prices, allowed, low, high, rows)
        if path is not None:
            heapq.heappush(heap, (low * weight, made, _Cell(low, high, allowed, path)))
            made += 1

    every = np.ones(len(options.options), dtype=np.bool_)
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        push(float(low), float(high), every)
    while heap:
        value, _, cell = heap[0]
        wide = cell.high / cell.low
        parts = cell.split_shapes(options) if wide <= _COARSE else None
        if parts is None and wide <= 1 + ratio:
            near = [
                entry[2].path
                for entry in heapq.nsmallest(30, heap)
                if entry[2].split_shapes(options) is None
            ]
            return value, near
        heapq.heappop(heap)
        if parts is not None:
            for part in parts:
                push(cell.low, cell.high, part)
        else:
            middle = (cell.low * cell.high) ** 0.5
            push(cell.low, middle, cell.allowed)
            push(middle, cell.high, cell.allowed)
    return np.inf, []


def several_bound(
    pricer: PathPricer,
    batch: int,
    limit: float,
    *,
    rounds: int = 30,
    ratio: float = 1e-3,
    tolerance: float = 1e-3,
) -> SeveralBound:
    """The best bound that `rounds` of the cutting planes give; `limit`: a step that is known."""
    options = pricer.options
    devices = options.devices.astype(np.float64)
    rate = np.zeros(len(devices))
    np.maximum.at(rate, options.place, 1.0 / (pricer.layer * options.use))
    prices = rate * batch / float((rate * devices).sum())
    best = SeveralBound(seconds=0.0, prices=(), paths=())
    paths: list[Path] = []
    upper = np.inf
    for turn in range(rounds):
        value, near = sweep(pricer, prices, limit, ratio)
        paths += near
        if value > best.seconds:
            best = SeveralBound(seconds=value, prices=tuple(prices.tolist()), paths=tuple(near))
        if not near or best.seconds >= upper * (1 - tolerance):
            break
        prices, upper = _next_prices(paths, devices, batch, np.array(best.prices))
    return SeveralBound(
        seconds=best.seconds + options.after_seconds, prices=best.prices, paths=tuple(paths)
    )


def _next_prices(
    paths: Sequence[Path], devices: Floats, batch: int, center: Floats
) -> tuple[Floats, float]:
    """(prices at which the known paths allow the longest step, that step)."""
    count = len(devices)
    rows = [
        [*(-path.bottleneck_seconds * np.array(path.use)), 1.0] for path in paths
    ]
    right = [path.bottleneck_seconds * path.weight_without_price for path in paths]
    found = linprog(
        c=[0.0] * count + [-1.0],
        A_ub=np.array(rows),
        b_ub=np.array(right),
        A_eq=np.array([[*devices, 0.0]]),
        b_eq=[float(batch)],
        bounds=[(0, None)] * (count + 1),
        method="highs",
    )
    return found.x[:count], -float(found.fun)
