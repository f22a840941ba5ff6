"""No plan of several 1F1B pipelines whose sends wait has a shorter step than this.

Proof. Pipeline p has m_p microbatches of G_p samples, and the sum of all G_p m_p is the batch B.
Prices pi_k >= 0 of a device of class k (N_k of them) are such that sum N_k pi_k = B. Let T be a
time. If every pipeline that ends within T did fewer sequences G m than its devices cost, then in a
plan that ends within T

    B = sum G_p m_p < sum of the prices of all devices used <= sum N_k pi_k = B,

so there is no such plan. Whether a pipeline of m microbatches that ends within T can cost m or less
per sequence of a microbatch is found by a program over positions and layers
(`multi_pipeline.within`), for every m and all G at once. Many m are asked together: a pipeline that
does the most of them in time does the fewest in time too.

Memory is that of so many microbatches. The ranks that share the optimizer's state are those of the
stage. What is left out (links between islands beyond the fastest, reductions, that the stages of an
island are of one shape and stand next to each other) only makes plans faster.

Any prices are valid. Good ones are found by cutting planes: pipelines that are worth their price
are the rows of a linear program whose optimum is the next price. T begins where all devices are
busy all the time, and is raised as long as prices are found that exclude it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.search.multi_pipeline.within import WithinPricer, Worth
from hetplan.search.solver import RESOLUTION

_ROUGH_STEP, _STEP, _LEAST_STEP = 0.08, 0.03, 0.006
"""By how much a bound is raised at once: roughly, at first and at last."""

_TRIES = 4
"""Prices that are tried to raise it so far."""

_HOPELESS = 0.9
"""A pipeline that costs so little of its worth is not made dear enough by the next prices."""

_CUTS = 24
"""Pipelines worth their price that the next prices are made of."""

_REACH = 0.15
"""How far prices may move at once: a linear program over few pipelines leaps."""

_BINS = ((4, 8), (8, 16), (16, 32))
"""Of states that are merged (`within`): more of them where fewer leave a pipeline worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiPipelineBound:
    """A bound, the prices that prove it, and pipelines that come near to it."""

    seconds: float
    prices: tuple[float, ...]
    near: tuple[Worth, ...] = ()


def busy_bound(pricer: WithinPricer, batch: int) -> MultiPipelineBound:
    """Seconds in which no plan can be done, were all devices busy all the time; made at once.

    Proof. With prices as above, a stage of option o occupies devices worth w_o for a sequence of a
    microbatch, for c_o seconds per layer unit. So all B sequences through all L units take at least
    B L min w_o c_o of price times seconds; a step of T seconds has T B.
    """
    prices = _first_prices(pricer, batch)
    seconds = pricer.num_layers * float((pricer.layer * (pricer.use @ prices)).min())
    return MultiPipelineBound(seconds=seconds, prices=tuple(prices.tolist()))


def _first_prices(pricer: WithinPricer, batch: int) -> Floats:
    """In proportion to the layers that a device of each class passes per second: by itself, or
    where it cannot be used so, together with others. None are 0 but of classes that no stage uses.
    """
    devices, use = pricer.devices, pricer.use
    rate, mixed = np.zeros(len(devices)), np.zeros(len(devices))
    each = 1.0 / (pricer.layer * use.sum(axis=1))
    alone = (use > 0).sum(axis=1) == 1
    np.maximum.at(rate, use[alone].argmax(axis=1), each[alone])
    np.maximum(mixed, np.where(use > 0, each[:, None], 0.0).max(axis=0), out=mixed)
    rate = np.where(rate > 0.0, rate, mixed)
    return rate * batch / float((rate * devices).sum())


def raised_bound(
    pricer: WithinPricer,
    batch: int,
    known: MultiPipelineBound,
    limit: float,
    on_bound: Callable[[float], None],
    *,
    rough: bool = False,
) -> MultiPipelineBound:
    """The known bound raised to the limit, as far as prices are found that prove it; infinite where
    there is no plan.

    rough: until the first time that a large step fails, with few bins. `on_bound`: told of every
    bound at once, and now and then in between; may raise.
    """
    search = _PriceSearch(pricer, batch, on_bound, _BINS[:1] if rough else _BINS)
    tries, step, least = (1, _ROUGH_STEP, _ROUGH_STEP) if rough else (_TRIES, _STEP, _LEAST_STEP)
    asked = limit * (1.0 + 2.0 * RESOLUTION)  # what is proven of it reaches the limit
    while known.seconds < limit and step >= least:
        if known.seconds > pricer.latest:
            return replace(known, seconds=np.inf)
        goal = min(asked, known.seconds * (1 + step))
        prices = search.proof(goal, known, tries)
        if prices is None:
            step /= 2
            known = replace(known, near=search.near)
            continue
        # Other orders of additions: a plan that takes exactly as long is not excluded.
        known = replace(known, seconds=goal * (1.0 - RESOLUTION), prices=tuple(prices.tolist()))
        on_bound(known.seconds)
    return known


@dataclass(slots=True)
class _PriceSearch:
    """Looks for prices at which every pipeline costs more than it is worth."""

    pricer: WithinPricer
    batch: int
    on_bound: Callable[[float], None]
    bins: Sequence[tuple[int, int]]
    near: tuple[Worth, ...] = ()
    """Pipelines that were worth their price last."""
    _before: dict[int, None] = field(default_factory=dict)
    """Numbers of microbatches of those of all times, the last first."""

    def proof(self, seconds: float, known: MultiPipelineBound, tries: int) -> Floats | None:
        """Prices that prove that no plan ends within so many seconds; None where none are found."""
        center = prices = np.array(known.prices)
        best, cuts = 0.0, list[Worth]()
        for _ in range(tries):
            found = self._worth_it(seconds, prices, known.seconds)
            if not found:
                return prices
            self.near = tuple(found)
            ratio = min(each.price / each.microbatches for each in found)
            cuts += found
            if ratio > best:
                best, center = ratio, prices
            if best < _HOPELESS:
                return None
            prices, possible = self._next(cuts, center)
            if possible <= 1.0:
                return None
        return None

    def _worth_it(self, seconds: float, prices: Floats, known: float) -> list[Worth]:
        """Pipelines that end in this time and cost no more than they are worth; none only where no
        number of microbatches has one.
        """
        asked = {counts[0]: counts for counts in self.pricer.counts(seconds)}
        found: list[Worth] = []
        for key in [key for key in dict.fromkeys([*self._before, *asked]) if key in asked]:
            worth: Worth | None = None
            for bins in self.bins:
                self.on_bound(known)
                worth = self.pricer.cheapest(asked[key], seconds, prices, bins)
                if worth is None:
                    break
            if worth is not None:
                found.append(worth)
                self._before = {key: None, **self._before}
                if len(found) >= _CUTS or worth.price < _HOPELESS * worth.microbatches:
                    break
        return found

    def _next(self, cuts: Sequence[Worth], center: Floats) -> tuple[Floats, float]:
        """(prices not far from these, the least part of its worth that one of the pipelines costs)
        where that part is largest.
        """
        from scipy.optimize import linprog

        devices, count = self.pricer.devices, len(center)
        found = linprog(
            c=[0.0] * count + [-1.0],
            A_ub=np.array([[*(-np.array(each.use) / each.microbatches), 1.0] for each in cuts]),
            b_ub=np.zeros(len(cuts)),
            A_eq=np.array([[*devices, 0.0]]),
            b_eq=[float(self.batch)],
            bounds=[(price / (1 + _REACH), price * (1 + _REACH)) for price in center]
            + [(None, None)],
            method="highs",
        )
        values: Floats = np.array(found.x, dtype=np.float64)
        return values[:count], float(values[count])
