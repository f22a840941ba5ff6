"""No plan of one or several 1F1B pipelines has a shorter step than this, whatever its stages are.

Proof. Every stage deals the G sequences of a tick to its parts; the common refinement of all deals
cuts a pipeline into *paths*: w sequences that are with one part on every stage, in every tick. A
part of tp ranks and microbatch size b has dp b sequences on dp tp devices, so a path of w sequences
occupies w tp / b devices of each of its parts, paths do not overlap, and the w m of all paths add
up to the batch B. A stage is as slow as its slowest part, so a pipeline of the path's own parts
alone would end no later than the whole one.

Prices p_k >= 0 of a device of class k (N_k of them) with sum N_k p_k = B. If every path that ends
within T had fewer microbatches m than the price of its devices per sequence, then

    B = sum w m < sum w price <= sum N_k p_k = B,

so some path of every plan has m >= price. It is left to show when such a path ends. Let C_j be the
time that stage j needs for both passes of a microbatch with both messages that it waits for, K the
largest of them (the bottleneck s), U, D the sums of C_j up- and downstream of s. Then
(`hetplan.cost.bounds.closed_forms`)

    (a)  T >= U + m K
    (b)  T >= U + D + m K - (W - 1) beta K
    (c)  T >= U + 2 D + (m + 1 - W) K

where W microbatches of s are in flight, r - 1 stages stand downstream of it, and beta is its
shorter pass over K, at most the largest of all options. Usual warm-up has W = r; deeper warm-up
(early sends only) W = min(r + e, m), with e not growing downstream and 0 on the last stage, and
then all upstream of s have e more in flight than their positions, too. A mixture of the three, with
d = t_b + 2 t_c and g = t_b beta + t_c, is

    T / K >= m + sum over upstream C_j / K + sum over downstream (d C_j / K - g) - g e

(c) is proven there for m > W. With m <= r + e and m > 1 let z be the nearest stage downstream of s
with fewer than m in flight, at position q: the last stage has 1. (c) of z, whose W is at most
m - 1, says

    T >= U_z + 2 D_z + 2 C_z = U + K + sum between s and z + 2 (C_z + D_z),

no less than U + 2 D + (m + 1 - r - e) K, as at most r + e - m stages of at most K seconds stand
between: position q + 1 and its own e make m or more. With m = 1 the way of one microbatch is
U + K + D, no less either.

With m >= price the right side is a sum over the stages, so its least value over all paths is found
by a program over positions and layers (`hetplan.search.several.pricing`), for every e and for K in
an interval: its lower end stands for K in m K, as m K + ... >= m low + ...; in what is taken off,
g (r - 1 + e) K, its upper end does where e > 0. (With e = 0 that need not be: m > W - 1 and the sum
of all multiples of K is not negative.) Where e > 0, mixtures of (a) of several stages are looked at
besides (`hetplan.search.several.slanted`).

Memory is that of as many microbatches as the price asks for (`PathPricer._fewest`: a path that is
worth its price has at least as many as the cheapest path of one microbatch costs, then as many as
the cheapest with that many, and so on). As G m <= B, no more than B / m ranks share the state of
the optimizer, which all of them hold in one stage. Receive buffers are there for all of them, or, with early
sends, for those in flight. What is left out (links between islands beyond the fastest, reductions)
only makes plans faster.

An island is in one mesh of a pipeline at most, so that its stages stand next to each other and have
one shape. A mesh of several islands has the same shares on all of its stages, so that a path can be
chosen that stays on one of them. Both are made true by branching, for classes of one island.

The best prices are found by cutting planes: every path found is a row of a linear program whose
optimum is the next price. Any prices are valid.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.families.space import FIRST, LAST, MIDDLE
from hetplan.search.several.options import Options
from hetplan.search.several.pricing import Bools, cheapest_path, weigh_turns
from hetplan.search.several.slanted import weigh_slanted


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


_NO_FILL = Mode(down=0.0, bonus=0.0)
"""(a) alone."""


def _modes(turn: float) -> tuple[Mode, ...]:
    """(c), (b), half of each, and (a); `turn`: the largest min(F, B) / C of a bottleneck."""
    return (
        Mode(down=2.0, bonus=1.0),
        Mode(down=1.0, bonus=turn),
        Mode(down=1.5, bonus=0.5 * (1.0 + turn)),
        _NO_FILL,
    )


@dataclass(slots=True)
class PathPricer:
    """Cheapest paths of one job's options at device prices."""

    options: Options
    layer: Floats
    wire: Floats
    serial: Floats
    modes: tuple[Mode, ...]
    early_sends: bool
    extra_depth: int
    known: dict[int, Ints]
    limit: float = np.inf
    """Seconds of a step that is known: only shorter ones are looked at."""
    check: Callable[[], None] | None = None
    """Called now and then; raises where time is up."""
    calls: int = 0

    def most_layers(self, microbatches: int) -> Ints:
        """[4, O, W + 1] units that fit in a pipeline of so many microbatches."""
        found = self.known.get(microbatches)
        if found is None:
            found = self.known[microbatches] = self.options.most_layers(
                microbatches,
                self.options.stage_limit + self.extra_depth,
                # G m is at most the batch, and a stage has at most G data-parallel ranks.
                min(self.options.most_shards, max(1, self.options.batch // microbatches)),
                early_sends=self.early_sends,
            )
        return found

    @staticmethod
    def of(options: Options, *, early_sends: bool = False, extra_depth: int = 0) -> PathPricer:
        """Ready to price.

        `early_sends`: no send waits for its receiver; then warm-up may be deeper by `extra_depth`
        on all but the last mesh.
        """
        extra = options.extra_forward + options.extra_backward
        wire = extra.copy()
        for role in range(4):
            if not role & FIRST:
                wire[role] += options.arrive_forward
            if not role & LAST:
                wire[role] += options.arrive_backward
        waits = options.rendezvous and not early_sends
        return PathPricer(
            options=options,
            layer=options.forward + options.backward,
            wire=wire,
            serial=wire if waits else extra,
            modes=_modes(_largest_turn(options, waits=waits)),
            early_sends=early_sends,
            extra_depth=extra_depth,
            known={},
        )

    def least(
        self,
        prices: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        extra: tuple[int, int],
        stages: tuple[int, int],
    ) -> tuple[float, Path | None]:
        """(least weight of a path, the path).

        `seconds`: least and most that the bottleneck takes; `extra`: fewest and most microbatches
        that it has in flight beyond its position; `stages`: fewest and most of the path.
        """
        price = prices[self.options.place] * self.options.use
        if self.check is not None:
            self.check()
        least, most = seconds
        rows = min(stages[1], self.options.stage_limit)
        if self.options.enough_microbatches:
            rows = int(min(rows, self.limit / least))
        if rows < stages[0]:
            return np.inf, None
        microbatches = self._fewest(price, allowed, most, rows)
        if microbatches == 0:
            return np.inf, None
        # Fewer turns are taken off where the bottleneck takes less than `most`.
        scale = most / least if extra[1] else 1.0
        best, found = -np.inf, None
        for mode in self.modes:
            scaled = Mode(down=mode.down, bonus=mode.bonus * scale)
            value, path = self._cheapest(
                price, allowed, seconds, (stages[0], rows), microbatches, scaled, extra[0]
            )
            value -= scaled.bonus * extra[1]
            if value > best:
                best, found = value, path
            if best == np.inf:
                return np.inf, None
        if extra[1]:
            done = min(float(self.options.batch), self.limit / least)
            for depth in sorted({1, min(stages[0], 8)}):
                value, path = self._slanted(
                    price, allowed, seconds, (stages[0], rows), microbatches, (depth, done)
                )
                if value > best:
                    best, found = value, path
        if found is None or best == np.inf:
            return np.inf, None
        return best, self._path(found, best, price, least)

    def _tables(self, allowed: Bools, rows: int) -> tuple[Floats, Ints]:
        shape = (len(allowed), 8, rows + 1, self.options.num_layers + 1)
        return np.empty(shape), np.empty(shape, np.int64)

    def _cheapest(
        self,
        price: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        stages: tuple[int, int],
        microbatches: int,
        mode: Mode,
        deeper: int = 0,
    ) -> tuple[float, Ints]:
        self.calls += 1
        path = np.empty((2, stages[1]), dtype=np.int64)
        values, chosen = self._tables(allowed, stages[1])
        weigh_turns(
            values,
            chosen,
            self.layer,
            self.wire,
            self.serial,
            self.most_layers(microbatches),
            price,
            allowed,
            *seconds,
            mode.down,
            mode.bonus,
            deeper,
        )
        return cheapest_path(values, chosen, stages[0], path), path

    def _slanted(
        self,
        price: Floats,
        allowed: Bools,
        seconds: tuple[float, float],
        stages: tuple[int, int],
        microbatches: int,
        mixture: tuple[int, float],
    ) -> tuple[float, Ints]:
        self.calls += 1
        path = np.empty((2, stages[1]), dtype=np.int64)
        values, chosen = self._tables(allowed, stages[1])
        weigh_slanted(
            values,
            chosen,
            self.layer,
            self.wire,
            self.serial,
            self.most_layers(microbatches),
            price,
            allowed,
            np.array(seconds),
            *mixture,
        )
        return cheapest_path(values, chosen, stages[0], path), path

    def _fewest(self, price: Floats, allowed: Bools, most: float, rows: int) -> int:
        """Microbatches that a path whose stages take `most` seconds must do to be worth its price.

        0 where there is no such path. The price falls with fewer microbatches, for which more
        memory is left, so this climbs from one to the first number that holds itself up.
        """
        known = 1
        while True:
            value, _ = self._cheapest(price, allowed, (np.inf, most), (1, rows), known, _NO_FILL)
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


def _largest_turn(options: Options, *, waits: bool) -> float:
    """Of all stages but last ones, the largest part of a turn that its shorter pass takes."""
    layers = np.arange(1, options.num_layers + 1)
    largest = 0.0
    for role in (FIRST, MIDDLE):
        forward, backward = options.extra_forward[role], options.extra_backward[role]
        if waits:
            forward = forward + (0.0 if role == FIRST else options.arrive_forward)
            backward = backward + options.arrive_backward
        forward = forward[:, None] + options.forward[:, None] * layers
        backward = backward[:, None] + options.backward[:, None] * layers
        shorter = np.minimum(forward, backward)
        largest = max(largest, float((shorter / (forward + backward)).max()))
    return largest


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
        low: float, high: float, allowed: Bools, extra: tuple[int, int], stages: tuple[int, int]
    ) -> None:
        nonlocal made
        weight, path = pricer.least(prices, allowed, (low, high), extra, stages)
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
        extra, stages = cell.extra, cell.stages
        if not parts and wide <= 1 + ratio and _apart(extra) and (_apart(stages) or not extra[1]):
            return value, [
                entry[2].path for entry in heapq.nsmallest(30, heap) if not entry[2].split(options)
            ]
        heapq.heappop(heap)
        if wide <= _DEPTHS_APART and extra[1] and not _apart(stages):
            for part in _halves(stages, len(cell.path.options)):
                push(cell.low, cell.high, cell.allowed, extra, part)
        elif wide <= _DEPTHS_APART and not _apart(extra):
            for part in _halves(extra, sum(extra) // 2):
                push(cell.low, cell.high, cell.allowed, part, stages)
        elif parts:
            for allowed in parts:
                push(cell.low, cell.high, allowed, extra, stages)
        else:
            halfway = (cell.low * cell.high) ** 0.5
            push(cell.low, halfway, cell.allowed, extra, stages)
            push(halfway, cell.high, cell.allowed, extra, stages)
    return np.inf, []


def _apart(numbers: tuple[int, int]) -> bool:
    """Whether the range has one number, or at most a sixth more than its least one."""
    return numbers[0] == numbers[1] or 6 * numbers[1] <= 7 * numbers[0]


def _halves(numbers: tuple[int, int], middle: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The range cut after `middle`, or before its last number."""
    middle = min(middle, numbers[1] - 1)
    return (numbers[0], middle), (middle + 1, numbers[1])


def several_bound(
    pricer: PathPricer,
    limit: float,
    *,
    rounds: int,
    ratio: float,
    tolerance: float = 1e-3,
) -> SeveralBound:
    """The best bound that `rounds` of the cutting planes give; `limit`: a step that is known."""
    options, batch = pricer.options, pricer.options.batch
    pricer.limit = limit
    devices = options.devices.astype(np.float64)
    rate = np.zeros(len(devices))
    np.maximum.at(rate, options.place, 1.0 / (pricer.layer * options.use))
    prices = rate * batch / float((rate * devices).sum())
    best = SeveralBound(seconds=0.0, prices=(), paths=())
    paths: list[Path] = []
    upper = np.inf
    for _ in range(rounds):
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
    rows = [[*(-path.bottleneck_seconds * np.array(path.use)), 1.0] for path in paths]
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
    prices = np.array(found.x, dtype=np.float64)
    return prices[:count], float(prices[count])
