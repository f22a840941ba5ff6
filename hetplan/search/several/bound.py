"""No plan of several 1F1B pipelines whose sends wait has a shorter step than this.

Proof. Pipeline p has the tick G_p and m_p microbatches, and the sum of all G_p m_p is the batch B.
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

With m >= price the right side is a sum over the stages, so its least value over all pipelines of a
tick is found by a program over positions and layers (`hetplan.search.several.pricing`), for K in an
interval: its lower end stands for K, as the sum of all multiples of K is not negative where m >= r;
where a pipeline may have fewer microbatches than stages its upper end does in what is taken off.

A pipeline has at most N_k devices of class k. For any surcharge lambda_k >= 0 it weighs no less
than with prices pi_k + lambda_k and without lambda_k N_k / G; surcharges are raised where the
program's path has more devices than there are (`hetplan.search.several.paths`).

Memory is that of as many microbatches as the price asks for (`PathPricer._fewest`: a pipeline that
is worth its price has at least as many as the cheapest one with the memory of one microbatch costs,
then as many as the cheapest with that many, and so on). The ranks that share the optimizer's state
are those of the stage. What is left out (links between islands beyond the fastest, reductions) only
makes plans faster.

An island is in one mesh of a pipeline at most, so that its stages stand next to each other and have
one shape: made true by branching, for classes of one island.

The best prices are found by cutting planes: every path found is a row of a linear program whose
optimum is the next price. Any prices are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from hetplan.cost.arrays import Floats
from hetplan.search.several.cells import sweep
from hetplan.search.several.paths import Path, PathPricer


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralBound:
    """A bound, the prices that prove it, and the paths that came nearest to it."""

    seconds: float
    prices: tuple[float, ...]
    paths: tuple[Path, ...]


def several_bound(
    pricers: Sequence[PathPricer],
    batch: int,
    limit: float,
    *,
    rounds: int,
    ratio: float,
    tolerance: float = 1e-3,
    first: Sequence[float] = (),
    on_bound: Callable[[float], None] | None = None,
) -> SeveralBound:
    """The best bound that `rounds` of the cutting planes give, no more than the limit.

    pricers: of every tick, at least one; `first`: prices to begin with; `on_bound`: told of every
    bound at once, may raise. The bound is infinite where there is no pipeline at all.
    """
    for pricer in pricers:
        pricer.limit = limit
    devices = pricers[0].tick.devices
    prices = np.array(first) if first else _first_prices(pricers, batch)
    best = SeveralBound(seconds=0.0, prices=tuple(prices.tolist()), paths=())
    paths: list[Path] = []
    reach = _REACH
    for _ in range(rounds):
        value, near = sweep(pricers, prices, limit, ratio, on_bound)
        paths += near
        if value > best.seconds:
            best = SeveralBound(seconds=value, prices=tuple(prices.tolist()), paths=tuple(near))
        else:
            reach *= 0.5
        if not paths or reach < 0.01:
            break
        # Prices that prove nothing are no better than the last ones.
        center = np.array(best.prices) if best.seconds > 0.0 else prices
        prices, upper = _next_prices(paths, devices, batch, center, reach)
        if best.seconds >= upper * (1 - tolerance):
            break
    return SeveralBound(seconds=best.seconds, prices=best.prices, paths=tuple(paths))


_REACH = 0.3
"""How far prices may move at once; half of it after a move that was none for the better: a linear
program over few paths leaps."""


def _first_prices(pricers: Sequence[PathPricer], batch: int) -> Floats:
    """In proportion to the layers that a device of each class passes per second: by itself, or
    where it cannot be used so, together with others. None are 0 but of classes that no stage uses.
    """
    devices = pricers[0].tick.devices
    rate, mixed = np.zeros(len(devices)), np.zeros(len(devices))
    for pricer in pricers:
        use = pricer.tick.use
        each = 1.0 / (pricer.layer * use.sum(axis=1))
        alone = (use > 0).sum(axis=1) == 1
        np.maximum.at(rate, use[alone].argmax(axis=1), each[alone])
        np.maximum(mixed, np.where(use > 0, each[:, None], 0.0).max(axis=0), out=mixed)
    rate = np.where(rate > 0.0, rate, mixed)
    return rate * batch / float((rate * devices).sum())


def _next_prices(
    paths: Sequence[Path], devices: Floats, batch: int, center: Floats, reach: float
) -> tuple[Floats, float]:
    """(prices not far from these at which the known paths allow the longest step, that step)."""
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
    prices = np.array(found.x, dtype=np.float64)
    return prices[:count], float(prices[count])
