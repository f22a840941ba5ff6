"""The least price of a pipeline that does so many microbatches within a time.

A pipeline of m microbatches is built from its last stage on. Position r counts from the back, as
microbatches in flight do: W = min(r, m). Of the stages so far are known

    l      layer units of all of them
    price  of all of them
    D      sum of their C: a microbatch's passes with the messages that they wait for
    Z      least seconds from when the first microbatch reaches the topmost of them until the last
           gradient leaves it

and of one more stage on top of them, by (a), (b) and (c) of `hetplan.cost.bounds`,

    Z' = max(Z + C, m C, D + m C - (W - 1) min(F, B), D + m C + k (D + C - W C))

with k = 1 and k = (m - 1) // W where that is at least 1. With the stage above it each chain of a
stage has one more C. So Z of the whole pipeline is a lower bound of its step.

Z' does not fall where D or Z grow. So states of one position and number of layers whose D and Z lie
close together may be merged: the least D, Z and price of them stand for all. More bins make the
answer surer, none makes it wrong.

Stages of unlike numbers of samples per microbatch may be mixed here, each at the price of what one
sequence of a microbatch occupies: these pipelines stand for those of every number at once.

A state is left out where even the cheapest way to place the other layers upstream costs too much.
With h(mu) the least sum of price + mu C of stages that hold them, a rest that ends in time costs
at least h(mu) - mu (seconds - Z), for any mu >= 0: they have no more than seconds - Z together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.multi_pipeline.stage_options import MeshOptions
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, MIDDLE, ROLES


class _Choices(NamedTuple):
    """What stages of one role can be: of n units at position r those from `start[r, n]` on, the
    cheapest first.
    """

    start: Ints
    """[R + 1, L + 2]"""
    option: Ints
    turn: Floats
    """C, seconds."""
    shorter: Floats
    """The shorter pass of it."""
    price: Floats


@kernel
def _choices(
    forward: Floats,
    backward: Floats,
    extra_forward: Floats,
    extra_backward: Floats,
    most_layers: Ints,
    price: Floats,
    start: Ints,
    most_turn: float,
    option: Ints,
    numbers: Floats,
) -> int:
    """Number of choices that no other one of the same position and units beats; the first of them
    are filled into option [K] and numbers [3, K].

    One beats another where neither of its passes takes longer and it costs no more. The options
    are in order of their price; most_layers: [O, W + 1].
    """
    rows, layers, found = start.shape[0] - 1, start.shape[1] - 2, 0
    for r in range(1, rows + 1):
        for n in range(1, layers + 1):
            first = found
            start[r, n] = min(found, len(option))
            for o in range(forward.shape[0]):
                if most_layers[o, r] < n:
                    continue
                f = forward[o] * n + extra_forward[o]
                b = backward[o] * n + extra_backward[o]
                if f + b > most_turn:
                    continue
                beaten = False
                for k in range(first, min(found, len(option))):
                    least = numbers[1, k]
                    if numbers[0, k] - least <= max(f, b) and least <= min(f, b):
                        beaten = True
                        break
                if not beaten:
                    if found < len(option):
                        option[found], numbers[0, found] = o, f + b
                        numbers[1, found], numbers[2, found] = min(f, b), price[o]
                    found += 1
        start[r, layers + 1] = min(found, len(option))
    return found


@kernel
def _rests(middle: _Choices, first: _Choices, worth: Floats, rests: Floats) -> None:
    """Fill rests [R + 1, L + 1, M] with the least sum of price + worth C, upstream of position r,
    of stages that hold so many units.
    """
    rows, layers = rests.shape[0] - 1, rests.shape[1] - 1
    single = np.empty(layers + 1)
    for a in range(rests.shape[2]):
        for r in range(rows - 1, 0, -1):
            longest = 0
            for n in range(1, layers + 1):
                rests[r, n, a] = single[n] = np.inf
                for k in range(first.start[r + 1, n], first.start[r + 1, n + 1]):
                    value = first.price[k] + worth[a] * first.turn[k]
                    rests[r, n, a] = min(rests[r, n, a], value)
                for k in range(middle.start[r + 1, n], middle.start[r + 1, n + 1]):
                    single[n] = min(single[n], middle.price[k] + worth[a] * middle.turn[k])
                    longest = n
            for held in range(2, layers + 1):
                least = rests[r, held, a]
                for n in range(1, min(longest, held - 1) + 1):
                    least = min(least, single[n] + rests[r + 1, held - n, a])
                rests[r, held, a] = least


@kernel
def with_stage(
    below: float, ends: float, turn: float, shorter: float, microbatches: int, in_flight: int
) -> float:
    """Z' of a stage on top of stages with D = `below` and Z = `ends`."""
    alone = microbatches * turn
    value = max(ends + turn, alone, below + alone - (in_flight - 1) * shorter)
    trips = (microbatches - 1) // in_flight
    if trips >= 1:
        gain = below + turn - in_flight * turn
        value = max(value, below + alone + max(gain, trips * gain))
    return value


@kernel
def _too_dear(rests: Floats, worth: Floats, price: float, left: float, limit: float) -> bool:
    """Whether no rest that ends within `left` seconds keeps the price below the limit; [M]."""
    dear = False
    for a in range(len(worth)):
        dear = dear or price + rests[a] - worth[a] * left >= limit
    return dear


@kernel
def cheapest_within(
    last: _Choices,
    middle: _Choices,
    first: _Choices,
    both: _Choices,
    rests: Floats,
    worth: Floats,
    microbatches: int,
    seconds: float,
    limit: float,
    fewest: int,
    bins: tuple[int, int],
    path: Ints,
) -> float:
    """Least price below the limit of a pipeline of `fewest` or more stages; the limit for none.

    bins: of Z and of D. path [2, R] is filled with (option, layers) from the back on; -1 ends it.
    """
    rows, layers = rests.shape[0] - 1, rests.shape[1] - 1
    # By parity of the position: least D, Z and price of every bin.
    states = np.full((2, 3, layers + 1, bins[0] * bins[1]), np.inf)
    came = np.empty((rows + 1, layers + 1, bins[0] * bins[1], 3), np.int32)
    low, wide = np.empty((2, layers + 1)), np.empty((2, layers + 1))
    end = np.zeros(4, np.int64)  # position, units below, their bin, option of the best first stage
    best = limit
    if fewest <= 1:
        for k in range(both.start[1, layers], both.start[1, layers + 1]):
            if both.price[k] < best and microbatches * both.turn[k] <= seconds:
                best = both.price[k]
                end[0], end[1], end[3] = 1, 0, both.option[k]
    for r in range(1, rows):
        in_flight, now, before = min(r, microbatches), r % 2, (r - 1) % 2
        here, there = states[now], states[before]
        choices = last if r == 1 else middle
        here[:] = np.inf
        low[:], wide[:] = np.inf, 0.0
        # First the range of D and Z is found, then states are put into its bins.
        for turn in range(2):
            for held in range(0 if r == 1 else r - 1, 1 if r == 1 else layers):
                for x in range(1 if r == 1 else there.shape[2]):
                    below, ends, price = 0.0, 0.0, 0.0
                    if r > 1:
                        below, ends, price = there[0, held, x], there[1, held, x], there[2, held, x]
                    if price == np.inf:
                        continue
                    for n in range(1, layers - held):
                        rest = rests[r, layers - held - n]
                        for k in range(choices.start[r, n], choices.start[r, n + 1]):
                            cost = price + choices.price[k]
                            if cost + rest[0] >= best:
                                break  # the others cost no less
                            c = choices.turn[k]
                            z = with_stage(
                                below, ends, c, choices.shorter[k], microbatches, in_flight
                            )
                            if z > seconds or _too_dear(rest, worth, cost, seconds - z, best):
                                continue
                            to, d = held + n, below + c
                            if turn == 0:
                                low[0, to], low[1, to] = min(low[0, to], z), min(low[1, to], d)
                                wide[0, to], wide[1, to] = max(wide[0, to], z), max(wide[1, to], d)
                                continue
                            i = (z - low[0, to]) / max(wide[0, to] - low[0, to], 1e-12) * bins[0]
                            j = (d - low[1, to]) / max(wide[1, to] - low[1, to], 1e-12) * bins[1]
                            at = min(int(i), bins[0] - 1) * bins[1] + min(int(j), bins[1] - 1)
                            here[0, to, at] = min(here[0, to, at], d)
                            here[1, to, at] = min(here[1, to, at], z)
                            if cost < here[2, to, at]:
                                here[2, to, at] = cost
                                came[r, to, at, 0], came[r, to, at, 1] = n, choices.option[k]
                                came[r, to, at, 2] = x
        # A first stage on top of them.
        in_flight = min(r + 1, microbatches)
        some = False
        for held in range(r, layers):
            n = layers - held
            for x in range(here.shape[2]):
                price = here[2, held, x]
                if price == np.inf:
                    continue
                some = True
                if r + 1 < fewest:
                    continue
                for k in range(first.start[r + 1, n], first.start[r + 1, n + 1]):
                    cost = price + first.price[k]
                    if cost >= best:
                        continue
                    z = with_stage(
                        here[0, held, x],
                        here[1, held, x],
                        first.turn[k],
                        first.shorter[k],
                        microbatches,
                        in_flight,
                    )
                    if z <= seconds:
                        best = cost
                        end[0], end[1], end[2], end[3] = r + 1, held, x, first.option[k]
        if not some:
            break
    path[:] = -1
    if end[0]:
        r, held, x = end[0], end[1], end[2]
        path[0, r - 1], path[1, r - 1] = end[3], layers - held
        for at in range(r - 1, 0, -1):
            n, o, x = came[at, held, x, 0], came[at, held, x, 1], came[at, held, x, 2]
            path[0, at - 1], path[1, at - 1] = o, n
            held -= n
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The cheapest pipeline of one number of microbatches; of merged states, so that it may take
    longer than the time.
    """

    microbatches: int
    price: float
    """For one sequence of a microbatch; of a pipeline that is worth it no more than the number of
    microbatches."""
    options: tuple[tuple[int, int], ...]
    """(sequences of a microbatch, option) of its stages, the last stage first."""
    use: tuple[float, ...]
    """Devices of each class that one sequence of a microbatch occupies."""


_RATIO = 1.04
"""Numbers of microbatches above 25 are asked together up to this ratio: a pipeline is asked to do
the fewest of them in time, and counts as the most of them."""

_WORTHS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Price of a second of the rest of a pipeline, in microbatches per step. Twice as much is about
what a bottleneck costs that has a second less; any numbers are valid."""


_STATE_BYTES = 12
"""Of `came` in `cheapest_within`."""

_MOST_BYTES = 400_000_000
"""Of all states of a program; with more of them they are put into fewer bins."""


class WithinPricer:
    """Cheapest pipelines that end within a time."""

    def __init__(self, tables: Sequence[MeshOptions], batch: int) -> None:
        """tables: by samples per microbatch, at least one; stages of all of them are mixed."""
        self._tables, self._batch = tables, batch
        self.num_layers, self.devices = tables[0].num_layers, tables[0].devices
        self.use = np.concatenate([each.use for each in tables])
        """[O, C] devices that one sequence of a microbatch occupies."""
        self._forward = np.concatenate([each.forward for each in tables])
        self._backward = np.concatenate([each.backward for each in tables])
        self.layer = self._forward + self._backward
        """[O] seconds per layer unit."""
        self._extra_forward = np.concatenate([each.extra_forward for each in tables], axis=1)
        self._extra_backward = np.concatenate([each.extra_backward for each in tables], axis=1)
        """[4, O] what a stage of this role has besides, with messages that it waits for."""
        for role in range(ROLES):
            # Sends that do not wait keep no stage busy.
            if tables[0].rendezvous and not role & FIRST:
                self._extra_forward[role] += np.concatenate([t.arrive_forward for t in tables])
            if tables[0].rendezvous and not role & LAST:
                self._extra_backward[role] += np.concatenate([t.arrive_backward for t in tables])
        extra = self._extra_forward + self._extra_backward
        self._shortest = float((self.layer + extra.min(axis=0)).min())
        self._most_stages = max(each.most_stages for each in tables)
        self._most_microbatches = max(each.most_microbatches for each in tables)
        self._samples = np.repeat([t.samples for t in tables], [len(t.forward) for t in tables])
        self._places = np.concatenate([np.arange(len(t.forward)) for t in tables])
        self._fits: dict[int, Ints] = {}
        way = float(self.layer.max()) * self.num_layers + float(extra.max()) * self._most_stages
        self.latest = 2 * self._most_microbatches * way
        """Seconds within which every pipeline ends: no chain above has a C more than 2 m times."""

    def counts(self, seconds: float) -> list[tuple[int, int]]:
        """(fewest, most) microbatches that are asked together, of all that can end in this time."""
        most = min(self._most_microbatches, int(seconds / self._shortest * (1 + 1e-9)))
        found, count = [], 1
        while count <= most:
            last = min(most, int(count * _RATIO))
            found.append((count, last))
            count = last + 1
        return found

    def cheapest(
        self, counts: tuple[int, int], seconds: float, prices: Floats, bins: tuple[int, int]
    ) -> Worth | None:
        """None where every pipeline that does the fewest in time costs more than the most."""
        (fewest, most), least_stages = counts, self._tables[0].fewest_stages
        limit = most * (1 + 1e-9)
        price = self.use @ prices
        spare = seconds - (fewest - 1) * self._shortest
        rows = min(self._most_stages, self.num_layers, int(spare / self._shortest + 1e-9))
        if self._tables[0].enough_microbatches:
            rows = min(rows, most)
        if price.min() > 0.0:
            rows = min(rows, int(limit / float(price.min())))
        if rows < max(1, least_stages):
            return None
        order = np.argsort(price, kind="stable")
        # Another pipeline has a part of the batch.
        order = order[self._samples[order] * fewest < self._batch]
        last, middle, first, both = (
            self._choices(role, fewest, seconds, price, order, rows)
            for role in (LAST, MIDDLE, FIRST, BOTH)
        )
        worth = np.array(_WORTHS) * (fewest / seconds)
        rests = np.full((rows + 1, self.num_layers + 1, len(worth)), np.inf)
        _rests(middle, first, worth, rests)
        path = np.empty((2, rows), dtype=np.int64)
        while bins[0] * bins[1] * (rows + 1) * (self.num_layers + 1) * _STATE_BYTES > _MOST_BYTES:
            bins = max(1, bins[0] // 2), max(1, bins[1] // 2)
            if bins == (1, 1):
                break
        found = cheapest_within(
            last,
            middle,
            first,
            both,
            rests,
            worth,
            fewest,
            seconds,
            limit,
            least_stages,
            bins,
            path,
        )
        if found >= limit:
            return None
        chosen = order[path[0][path[0] >= 0]]
        pairs = zip(self._samples[chosen].tolist(), self._places[chosen].tolist(), strict=True)
        return Worth(
            microbatches=most,
            price=found,
            options=tuple(pairs),
            use=tuple(self.use[chosen].sum(axis=0).tolist()),
        )

    def _choices(
        self, role: int, microbatches: int, seconds: float, price: Floats, order: Ints, rows: int
    ) -> _Choices:
        # A grid of few numbers, from below, so that few tables of memory are made.
        grid = max(1, int(1.06 ** np.floor(np.log(microbatches) / np.log(1.06) + 1e-9)))
        if grid not in self._fits:
            flights = min(grid, self._most_stages)
            fits = [each.memory.most_layers(grid, flights) for each in self._tables]
            self._fits[grid] = np.concatenate(fits, axis=1)
        known = self._fits[grid].shape[2] - 1
        most_layers = self._fits[grid][role][order][:, np.minimum(np.arange(rows + 1), known)]
        start = np.zeros((rows + 1, self.num_layers + 2), dtype=np.int64)
        room = 4096
        while True:
            option, numbers = np.empty(room, dtype=np.int64), np.empty((3, room))
            count = _choices(
                self._forward[order],
                self._backward[order],
                self._extra_forward[role][order],
                self._extra_backward[role][order],
                most_layers,
                price[order],
                start,
                seconds / microbatches * (1 + 1e-12),
                option,
                numbers,
            )
            if count <= room:
                return _Choices(start, option, numbers[0], numbers[1], numbers[2])
            room = count
