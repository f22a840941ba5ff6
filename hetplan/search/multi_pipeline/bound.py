"""No plan of several 1F1B pipelines whose sends wait has a shorter step than this.

Proof. Pipeline p has m_p microbatches of G_p samples, and the sum of all G_p m_p is the batch B.
Prices pi_k >= 0 of a device of class k (N_k of them) are such that sum N_k pi_k = B. If every
pipeline that ends within T did fewer sequences G m than its devices cost, then

    B = sum G_p m_p < sum of the prices of all devices used <= sum N_k pi_k = B,

so some pipeline of every plan has m >= price, the price of its devices over G. It is left to show
when it ends. Let C_j be the time that stage j needs for both passes of a microbatch with both
messages that it waits for, K the largest of them (the bottleneck s), U, D the sums of C_j up- and
downstream of s. Then (`hetplan.cost.bounds`)

    (a)  T >= U + m K
    (b)  T >= U + D + m K - (W - 1) beta K
    (c)  T >= U + 2 D + (m + 1 - W) K

where W = r microbatches of s are in flight, r - 1 stages stand downstream of it, and beta is its
shorter pass over K, at most the largest of all options. (c) is proven there for m > r. With
1 < m <= r let z be the nearest stage downstream of s with fewer than m in flight. (c) of z, whose W
is at most m - 1, says

    T >= U_z + 2 D_z + 2 C_z = U + K + sum between s and z + 2 (C_z + D_z),

no less than U + 2 D + (m + 1 - r) K, as r - m stages of at most K seconds stand between. With m = 1
the way of one microbatch is U + K + D, no less either. A mixture of the three, with
d = t_b + 2 t_c and g = t_b beta + t_c, is

    T / K >= m + sum over upstream C_j / K + sum over downstream (d C_j / K - g)

With m >= price the right side is a sum over the stages, so its least value over all pipelines of
one G is found by a program over positions and layers (`multi_pipeline.paths`), for K in an
interval: its lower end stands for K, as the sum of all multiples of K is not negative where m >= r;
where a pipeline may have fewer microbatches than stages its upper end does in what is taken off.

The stages of a pipeline on an island are of one mesh, of which it can have M at most. So each
counts as N_k / M devices of a class k of one island, no fewer than its own, and as its own
devices elsewhere; all stages together count as at most N_k (`MeshOptions.room`). For any multiplier
lambda_k >= 0 a pipeline weighs no less with lambda_k for each that is counted, and without
lambda_k N_k / G; multipliers are raised where the program's path counts as more than there are
(`hetplan.search.multi_pipeline.paths`). The bottleneck's stage takes no less than the lower end of
K's interval: no other stage stands for it.

Memory is that of as many microbatches as the price asks for (`paths._Interval._needed`: a pipeline
that is worth its price has at least as many as the cheapest one with the memory of one microbatch
costs, then as many as the cheapest with that many, and so on). The ranks that share the optimizer's
state are those of the stage. What is left out (links between islands beyond the fastest,
reductions) only makes plans faster.

An island is in one mesh of a pipeline at most, so that its stages stand next to each other and have
one shape: made true by branching, for classes of one island.

The best prices are found by cutting planes: every path found is a row of a linear program whose
optimum is the next price. Any prices are valid.

`sweep` says how short a step may be at given prices. A cell holds the paths whose bottleneck's
time, depth, number of stages and options lie in given ranges. Its value is a lower bound of their
steps; the least value of all cells is the bound, once the least cell is narrow and its path could
be one of a plan; until then the least cell is split.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from hetplan.cost.arrays import Floats
from hetplan.search.multi_pipeline.paths import Path, PathPricer
from hetplan.search.multi_pipeline.stage_options import Bools


@dataclass(frozen=True, slots=True)
class _Cell:
    """Paths whose bottleneck takes `low` to `high` seconds, of allowed options only."""

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
        options = self.pricer.options
        if len(self.allowed) > 1:
            return ()
        row = [
            mesh for mesh, _ in itertools.groupby(options.mesh[list(self.path.options)].tolist())
        ]
        for mesh in dict.fromkeys(row):
            here = options.mesh == mesh
            if row.count(mesh) > 1 and self._only_once(here):
                between = row[row.index(mesh) + 1]
                there = options.mesh == between
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
        options = self.pricer.options
        return bool((options.use[here][0][options.alone] > 0).any())

    def _disjoint(self, here: Bools, there: Bools) -> bool:
        options = self.pricer.options
        return not bool(
            ((options.use[here][0] > 0) & (options.use[there][0] > 0) & options.alone).any()
        )

    def _shapes(self) -> tuple[Bools, ...]:
        """An island is in one mesh."""
        options = self.pricer.options
        for place in np.flatnonzero(options.alone):
            here = options.use[:, place] > 0
            layers: dict[int, int] = {}
            for o, n in zip(self.path.options, self.path.layers, strict=True):
                if here[o]:
                    mesh = int(options.mesh[o])
                    layers[mesh] = layers.get(mesh, 0) + n
            if len(layers) > 1:
                mesh = max(layers, key=lambda each: (layers[each], each))
                same = options.mesh == mesh
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
        path = pricer.least(prices, allowed, low, high, parent)
        if path is not None:
            cell = _Cell(pricer, low, high, allowed, path)
            heapq.heappush(heap, (max(known, low * path.weight), next(made), cell))

    for pricer in pricers:
        every = np.ones((1, len(pricer.options.forward)), dtype=np.bool_)
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
    longest = float((pricer.layer * pricer.options.num_layers + pricer.serial.max(axis=0)).max())
    longest = max(shortest, min(longest, limit))
    count = 2 + int(np.log(longest / shortest) / _FIRST)
    return [float(edge) for edge in np.geomspace(shortest * 0.999, longest * 1.001, count)]


def busy_seconds(pricers: Sequence[PathPricer], batch: int) -> float:
    """Seconds in which no plan can be done, were all devices busy all the time; made at once.

    Proof. With prices as above, a stage of option o occupies devices worth w_o for a sequence of a
    microbatch, for c_o seconds per layer unit. So all B sequences through all L units take at least
    B L min w_o c_o of price times seconds; a step of T seconds has T B.
    """
    prices = _first_prices(pricers, batch)
    least = min(float((each.layer * (each.options.use @ prices)).min()) for each in pricers)
    return pricers[0].options.num_layers * least


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiPipelineBound:
    """A bound, the prices that prove it, and the paths that came nearest to it."""

    seconds: float
    prices: tuple[float, ...]
    paths: tuple[Path, ...]


def multi_pipeline_bound(
    pricers: Sequence[PathPricer],
    batch: int,
    limit: float,
    *,
    rounds: int,
    ratio: float,
    first: Sequence[float] = (),
    on_bound: Callable[[float], None] | None = None,
) -> MultiPipelineBound:
    """The best bound that `rounds` of the cutting planes give, no more than the limit.

    pricers: by samples per microbatch, at least one; `first`: prices to begin with; `on_bound`:
    told of every bound at once, may raise. The bound is infinite where there is no pipeline at all.
    """
    for pricer in pricers:
        pricer.limit = limit
    devices = pricers[0].options.devices
    prices = np.array(first) if first else _first_prices(pricers, batch)
    best = MultiPipelineBound(seconds=0.0, prices=tuple(prices.tolist()), paths=())
    paths: list[Path] = []
    reach = _REACH
    for _ in range(rounds):
        value, near = sweep(pricers, prices, limit, ratio, on_bound)
        paths += near
        if value > best.seconds:
            best = MultiPipelineBound(
                seconds=value, prices=tuple(prices.tolist()), paths=tuple(near)
            )
        else:
            reach *= 0.5
        if not paths or reach < 0.01:
            break
        # Prices that prove nothing are no better than the last ones.
        center = np.array(best.prices) if best.seconds > 0.0 else prices
        last, prices = prices, _next_prices(paths, devices, batch, center, reach)
        if np.allclose(prices, last, rtol=_TOLERANCE):
            prices = 0.5 * (prices + center)
        if np.allclose(prices, center, rtol=_TOLERANCE):
            break
    return MultiPipelineBound(seconds=best.seconds, prices=best.prices, paths=tuple(paths))


_TOLERANCE = 1e-3
"""Prices that move by no more than this part are not tried. The program's own value says nothing:
other surcharges and inequalities may weigh its paths more."""

_REACH = 0.3
"""How far prices may move at once; half of it after a move that was none for the better: a linear
program over few paths leaps."""


def _first_prices(pricers: Sequence[PathPricer], batch: int) -> Floats:
    """In proportion to the layers that a device of each class passes per second: by itself, or
    where it cannot be used so, together with others. None are 0 but of classes that no stage uses.
    """
    devices = pricers[0].options.devices
    rate, mixed = np.zeros(len(devices)), np.zeros(len(devices))
    for pricer in pricers:
        use = pricer.options.use
        each = 1.0 / (pricer.layer * use.sum(axis=1))
        alone = (use > 0).sum(axis=1) == 1
        np.maximum.at(rate, use[alone].argmax(axis=1), each[alone])
        np.maximum(mixed, np.where(use > 0, each[:, None], 0.0).max(axis=0), out=mixed)
    rate = np.where(rate > 0.0, rate, mixed)
    return rate * batch / float((rate * devices).sum())


def _next_prices(
    paths: Sequence[Path], devices: Floats, batch: int, center: Floats, reach: float
) -> Floats:
    """Prices not far from these at which the known paths allow the longest step."""
    count = len(devices)
    rows = [[*(-path.bottleneck_seconds * np.array(path.use)), 1.0] for path in paths]
    right = [path.bottleneck_seconds * path.weight_without_price for path in paths]
    found = linprog(
        c=[0.0] * count + [-1.0],
        A_ub=np.array(rows),
        b_ub=np.array(right),
        A_eq=np.array([[*devices, 0.0]]),
        b_eq=[float(batch)],
        bounds=[(price / (1 + reach), price * (1 + reach)) for price in center] + [(None, None)],
        method="highs",
    )
    prices: Floats = np.array(found.x, dtype=np.float64)[:count]
    return prices
