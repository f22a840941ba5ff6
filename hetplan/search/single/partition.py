"""How few seconds a pipeline of fixed slots needs, over all cuts, recomputations at free slots.

Symbols and inequalities are those of `hetplan.cost.bounds.closed_forms`; a slot s has n layer
units, F and B are affine in n, and W_s is the chain's. Every 1F1B step is at least
Sigma + after_0 + X with

    X >= (b) less Sigma                 only the slot's own times
    X >= (c) less Sigma                 and D, everything strictly downstream in dependency form
    X >= (i) less Sigma, j = s + 1      of two neighbouring slots; where a boundary is long

For one X the right sides only grow with D, so the least D dominates and a dynamic program from the
last slot is an exact minimiser; below a long boundary the least D is kept for every number of
layers of the slot. S(X) = least Sigma + after_0 is a falling step function, so that over a grid
X_0 < X_1 < ... the least of X_k + S(X_{k+1}) is a bound for every cut, whatever the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.search.families.space import Floats, Ints
from hetplan.search.single.chain import Chain
from hetplan.search.single.partition_kernel import (
    NONE,
    ChainNumbers,
    empty_fronts,
    least_downstream,
    trace,
)

_LONG = 0.02
"""Transfers of a boundary over the passes of a slot from which its circuit is worth a bound: with
even slots it adds half of them to every cycle."""

_MOST_LONG = 8
"""Boundaries whose circuits are followed; each multiplies the work at one slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Layer units and recomputation of every slot."""

    units: tuple[int, ...]
    variants: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBound:
    """A bound over all cuts of a chain and the cuts that the scan met on its way."""

    lower_bound_seconds: float
    cuts: tuple[Cut, ...]
    """The likeliest last; no cut twice."""


def long_boundaries(chain: Chain) -> tuple[int, ...]:
    """Slots whose boundary to the next slot is long against a slot, the longest ones."""
    wires = chain.links.forward_wire + chain.links.backward_wire
    passes = (chain.forward + chain.backward).min(axis=0).mean() * chain.num_layers
    least = _LONG * passes / len(chain.meshes)
    longest = np.argsort(-wires, kind="stable")[:_MOST_LONG]
    return tuple(sorted(int(s) for s in longest if wires[s] >= least and wires[s] > 0))


class ChainProgram:
    """The dynamic program of one chain, with its working space.

    Without `long_too` long boundaries are like others.
    """

    def __init__(self, chain: Chain, *, long_too: bool = True) -> None:
        self.chain = chain
        variants, slots = chain.forward.shape
        layers = chain.num_layers
        together = np.full(slots, -1, dtype=np.int64)
        far = long_boundaries(chain) if long_too else ()
        together[list(far)] = np.arange(len(far))
        below = [s + 1 for s in far]
        most = int(min(layers, chain.most_layers[:, below].max())) if far else 0
        self.operations = 0
        """Slots added so far, times layers: what a budget counts."""
        self._numbers = ChainNumbers(
            microbatches=chain.num_microbatches,
            layers=layers,
            in_flight=chain.in_flight,
            forward=chain.forward,
            backward=chain.backward,
            forward_dependency=chain.forward_dependency,
            backward_dependency=chain.backward_dependency,
            forward_serial=chain.forward_serial,
            backward_serial=chain.backward_serial,
            most_layers=np.minimum(chain.most_layers, layers),
            after_first=np.ascontiguousarray(chain.after[0]),
            together=together,
        )
        self._most: Ints = np.empty((variants, slots), dtype=np.int64)
        self._low: Ints = np.empty(slots + 1, dtype=np.int64)
        self._high: Ints = np.empty(slots + 1, dtype=np.int64)
        self._table: Floats = np.empty((slots + 1, layers + 1))
        self._fronts = empty_fronts(len(far), variants, most, layers)
        self._limit = NONE

    def least(self, limit: float) -> float:
        """S(limit): least Sigma + after_0 with X at most `limit`; NONE where no cut has it."""
        self._limit = limit
        self.operations += self._table.size
        return least_downstream(
            self._numbers, limit, self._most, self._low, self._high, self._table, self._fronts
        )

    def cut(self) -> Cut:
        """The cut of the last call of `least`, if that found one."""
        slots = len(self.chain.meshes)
        units, chosen = (np.zeros(slots, dtype=np.int64) for _ in range(2))
        trace(
            self._numbers, self._limit, self._most, self._low, self._high, self._table,
            self._fronts, units, chosen,
        )  # fmt: skip
        return Cut(units=tuple(int(n) for n in units), variants=tuple(int(v) for v in chosen))

    def bound(self, ceiling: float, step: float) -> ChainBound:
        """Bound over all cuts, exact up to `step` seconds, in as far as it lies below `ceiling`.

        A chain none of whose cuts can be below `ceiling` returns a bound of at least `ceiling`.
        """
        least_free = self.least(NONE)
        if least_free >= NONE:
            return ChainBound(lower_bound_seconds=NONE, cuts=())
        low, high = 0.0, max(ceiling - least_free, 0.0)
        if self.least(high) >= NONE:
            # Every X up to `high` is infeasible, every X above gives at least the ceiling.
            return ChainBound(lower_bound_seconds=ceiling, cuts=())
        while high - low > step / 2:
            middle = (low + high) / 2
            low, high = (middle, high) if self.least(middle) >= NONE else (low, middle)
        return self._scan(low, least_free, ceiling, step)

    def _scan(self, start: float, least_free: float, ceiling: float, step: float) -> ChainBound:
        lower, cuts = NONE, dict[Cut, float]()
        at = start
        while at + least_free < min(lower, ceiling):
            upper = at + step
            value = self.least(upper)
            if value < NONE:
                cuts.setdefault(self.cut(), upper + value)
                lower = min(lower, at + value)
            at = upper
        ordered = sorted(cuts, key=lambda cut: -cuts[cut])
        return ChainBound(lower_bound_seconds=min(lower, at + least_free), cuts=tuple(ordered))
