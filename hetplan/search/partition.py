"""How few seconds a pipeline of fixed slots needs, over all ways to cut the layers.

Symbols: slot s counted from the first, n its layers, m microbatches, W = min(P - s, m) in flight.
F, B are a slot's forward and backward times per microbatch; a prime marks the dependency form
(`hetplan.search.space`), none the serial one; C = F + B. D is everything strictly downstream of
s in dependency form, Sigma the same over the whole pipeline. Every 1F1B step obeys, by explicit
paths through its operations (last: only where m > W),

    step >= Sigma + after_0 + X   with, for every slot,
    X >= (m - 1) C - (W - 1) min(F, B)            wait once: round trip of one microbatch
    X >= (m - 1) C + k (D + B' + F - W C)         k round trips, 1 <= k <= (m - 1) // W

For one X the right sides only grow with D, so the least D dominates and a dynamic program from the
last slot is an exact minimiser. Over a grid X_0 < X_1 < ... the least of
X_k + least(X_{k+1}) is a bound for every cut, whatever the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from hetplan.search.space import Chain, Floats, Ints

NONE = 1e300
"""Stands for "no cut", far above any step."""

# Comparisons against X forgive the rounding of the other side, so that no cut is lost by it.
_SLACK = 1.0 + 1e-12


@numba.njit(cache=True)
def relax(
    below: Floats,
    below_tag: Ints,
    out: Floats,
    out_tag: Ints,
    most: int,
    in_flight: int,
    microbatches: int,
    limit: float,
    forward: float,
    backward: float,
    forward_dependency: float,
    backward_dependency: float,
    forward_serial: float,
    backward_serial: float,
    after: Floats,
    only_total: int,
) -> bool:
    """Add one slot in front of every downstream sum; True where `out` got smaller anywhere.

    below[l] and out[l] are least downstream seconds that hold l layers; the tag of the entry
    that out[l] came from goes with it. `after` is added by layers of the slot. only_total >= 0
    asks only for sums that hold that many layers.
    """
    layers = out.shape[0] - 1
    changed = False
    x = limit * _SLACK
    longest = (microbatches - 1) // in_flight
    for n in range(1, most + 1):
        f = forward_serial + n * forward
        b = backward_serial + n * backward
        c = f + b
        if (microbatches - 1) * c - (in_flight - 1) * min(f, b) > x:
            break
        room = NONE
        own = forward_dependency + backward_dependency + n * (forward + backward)
        if longest >= 1:
            turn = backward_dependency + n * backward + f
            room = min(
                x - (microbatches - 1) * c + in_flight * c - turn,
                (x - (microbatches - 1) * c) / longest + in_flight * c - turn,
            )
        own += after[n]
        first, stop = 0, layers + 1 - n
        if only_total >= 0:
            first, stop = only_total - n, only_total - n + 1
            if first < 0:
                break
        for at in range(first, stop):
            value = below[at]
            if value <= room and value < NONE and value + own < out[at + n]:
                out[at + n] = value + own
                out_tag[at + n] = below_tag[at]
                changed = True
    return changed


@numba.njit(cache=True)
def least_downstream(
    forward: Floats,
    backward: Floats,
    forward_dependency: Floats,
    backward_dependency: Floats,
    forward_serial: Floats,
    backward_serial: Floats,
    most_layers: Ints,
    after_first: Floats,
    layers: int,
    microbatches: int,
    limit: float,
    table: Floats,
    source: Ints,
) -> float:
    """Least Sigma + after_0 over all cuts whose X is at most `limit`; NONE where there is none.

    `table` [P + 1, L + 1] and `source` [P, L + 1] are working space; afterwards `source` leads
    from (0, L) to the cut.
    """
    slots = forward.shape[0]
    nothing = np.zeros(layers + 1)
    every = np.arange(layers + 1)
    table[slots, :] = NONE
    table[slots, 0] = 0.0
    for s in range(slots - 1, -1, -1):
        table[s, :] = NONE
        relax(
            table[s + 1],
            every,
            table[s],
            source[s],
            most_layers[s],
            min(slots - s, microbatches),
            microbatches,
            limit,
            forward[s],
            backward[s],
            forward_dependency[s],
            backward_dependency[s],
            forward_serial[s],
            backward_serial[s],
            after_first if s == 0 else nothing,
            layers if s == 0 else -1,
        )
    return float(table[0, layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBound:
    """A bound over all cuts of a chain and the cuts that the scan met on its way."""

    lower_bound_seconds: float
    cuts: tuple[tuple[int, ...], ...]
    """Layers per slot, first to last; no cut twice."""


class ChainProgram:
    """The dynamic program of one chain, with its working space."""

    def __init__(self, chain: Chain, layers: int, microbatches: int) -> None:
        self._chain = chain
        self._layers = layers
        self._microbatches = microbatches
        slots = len(chain.islands)
        self._table = np.empty((slots + 1, layers + 1))
        self._source = np.zeros((slots, layers + 1), dtype=np.int64)

    def least(self, limit: float) -> float:
        """Least Sigma + after_0 with X at most `limit`; NONE where no cut has such an X."""
        chain = self._chain
        return float(
            least_downstream(
                chain.forward,
                chain.backward,
                chain.forward_dependency,
                chain.backward_dependency,
                chain.forward_serial,
                chain.backward_serial,
                chain.most_layers,
                chain.after[0],
                self._layers,
                self._microbatches,
                limit,
                self._table,
                self._source,
            )
        )

    def cut(self) -> tuple[int, ...]:
        """Layers per slot of the last call of `least` that found a cut."""
        at = self._layers
        found = []
        for s in range(len(self._chain.islands)):
            below = int(self._source[s, at])
            found.append(at - below)
            at = below
        return tuple(found)

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
        lower, cuts = NONE, dict[tuple[int, ...], None]()
        at = start
        while at + least_free < min(lower, ceiling):
            upper = at + step
            value = self.least(upper)
            if value < NONE:
                cuts[self.cut()] = None
                lower = min(lower, at + value)
            at = upper
        return ChainBound(lower_bound_seconds=min(lower, at + least_free), cuts=tuple(cuts))
