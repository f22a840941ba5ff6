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
the cheapest with that many, and so on). As G m <= B, a stage has no more than B / m data-parallel
ranks to share the optimizer's state. Receive buffers are there for all microbatches or, with early
sends, for those in flight. What is left out (links between islands beyond the fastest, reductions)
only makes plans faster.

An island is in one mesh of a pipeline at most, so that its stages stand next to each other and have
one shape. A mesh of several islands has the same shares on all of its stages, so that a path can be
chosen that stays on one of them. Both are made true by branching, for classes of one island.

The best prices are found by cutting planes: every path found is a row of a linear program whose
optimum is the next price. Any prices are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
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
) -> SeveralBound:
    """The best bound that `rounds` of the cutting planes give; `limit`: a step that is known.

    pricers: of every tick; `first`: prices to begin with. The bound is infinite where there are no
    pipelines of two that end within the limit.
    """
    for pricer in pricers:
        pricer.limit = limit
    devices = pricers[0].tick.devices
    prices = np.array(first) if first else _first_prices(pricers, batch)
    best = SeveralBound(seconds=0.0, prices=(), paths=())
    paths: list[Path] = []
    reach = _REACH
    for _ in range(rounds):
        value, near = sweep(pricers, prices, limit, ratio)
        print("round", value, prices, len(near), len(paths), reach)
        paths += near
        if value > best.seconds:
            best = SeveralBound(seconds=value, prices=tuple(prices.tolist()), paths=tuple(near))
        else:
            reach *= 0.5
        if not paths or reach < 0.01:
            break
        prices, upper = _next_prices(paths, devices, batch, np.array(best.prices), reach)
        if best.seconds >= upper * (1 - tolerance):
            break
    return SeveralBound(seconds=best.seconds, prices=best.prices, paths=tuple(paths))


_REACH = 0.3
"""How far prices may move at once; half of it after a move that was none for the better: a linear
program over few paths leaps."""


def _first_prices(pricers: Sequence[PathPricer], batch: int) -> Floats:
    """In proportion to the layers that a device of each class passes per second."""
    devices = pricers[0].tick.devices
    rate = np.zeros(len(devices))
    for pricer in pricers:
        use = pricer.tick.use
        alone = (use > 0).sum(axis=1) == 1
        place = use[alone].argmax(axis=1)
        np.maximum.at(rate, place, 1.0 / (pricer.layer[alone] * use[alone].max(axis=1)))
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
        bounds=[(price / (1 + reach), price * (1 + reach)) for price in center] + [(0, None)],
        method="highs",
    )
    prices = np.array(found.x, dtype=np.float64)
    return prices[:count], float(prices[count])
