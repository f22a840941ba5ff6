"""Costs of stages by Sailor's formula, as arrays over their first and last layer, and their cut.

For rows of stages that are cut many times (`evaluation.search.sailor_search`): of a set of classes
(room, tp) that share a stage, `ticks[a, e]` are the forward and backward seconds of one microbatch
over layers a to e - 1 on the slowest class, infinite where a class has no memory for it with so
many microbatches in flight; `reductions[a, e]` the seconds of the stage's reduction. The formula is
that of `evaluation.search.sailor`, which scores whatever is chosen.

`cut` places the boundaries of a row of P stages with dp replicas and N microbatches. With c_s[a, e]
the seconds of one microbatch on layers a to e - 1 (sends included) and r_s[a, e] the reduction,

    step = (N - 1) max_s c_s + sum_s c_s + max_s r_s

It first finds the least possible max_s c_s by a program over stages and layers, and among cuts with
it a least sum; then it moves every boundary, by one or two layers, as long as the step falls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from evaluation.search.cases import Case, SailorRoom
from evaluation.search.sailor import (
    BUCKET_BYTES,
    BYTES_PER_PARAMETER,
    FLOAT_BYTES,
    MEMORY_BYTES,
    Fit,
    LayerSizes,
    SailorFiles,
)
from hetplan.cost.arrays import Floats, Ints
from hetplan.errors import InputError
from hetplan.kernels import kernel


@kernel
def _step(ticks: Floats, reductions: Floats, count: int, ends: Ints) -> float:
    longest = total = reduced = 0.0
    first = 0
    for s in range(len(ends)):
        if ends[s] <= first:
            return np.inf
        tick = ticks[s, first, ends[s]]
        longest = max(longest, tick)
        total += tick
        reduced = max(reduced, reductions[s, first, ends[s]])
        first = ends[s]
    return (count - 1) * longest + total + reduced


@kernel
def _cut(ticks: Floats, limit: float, ends: Ints) -> float:
    """The least max_s c_s (limit inf), or the cut of least sum with no c_s above the limit."""
    stages, layers = ticks.shape[0], ticks.shape[1] - 1
    by_sum = limit < np.inf
    best = np.full((stages + 1, layers + 1), np.inf)
    came = np.zeros((stages + 1, layers + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for s in range(stages):
        for e in range(s + 1, layers - (stages - 1 - s) + 1):
            for a in range(s, e):
                tick = ticks[s, a, e]
                if tick > limit or best[s, a] == np.inf:
                    continue
                value = best[s, a] + tick if by_sum else max(best[s, a], tick)
                if value < best[s + 1, e]:
                    best[s + 1, e] = value
                    came[s + 1, e] = a
    found = best[stages, layers]
    if found < np.inf:
        e = layers
        for s in range(stages - 1, -1, -1):
            ends[s] = e
            e = came[s + 1, e]
    return float(found)


@kernel
def cut(ticks: Floats, reductions: Floats, count: int, ends: Ints) -> float:
    """Fills `ends` (the layer after each stage's last); the step, infinite where none fits."""
    longest = _cut(ticks, np.inf, ends)
    if longest == np.inf:
        return np.inf
    _cut(ticks, longest * (1 + 1e-12), ends)
    best = _step(ticks, reductions, count, ends)
    moved = True
    while moved:
        moved = False
        for s in range(len(ends) - 1):
            for by in (-2, -1, 1, 2):
                ends[s] += by
                step = _step(ticks, reductions, count, ends)
                if step < best:
                    best = step
                    moved = True
                else:
                    ends[s] -= by
    return best


_GIB = dict(MEMORY_BYTES)
_RING_BYTES = 16e6
"""Part of a bucket of 500 MB that each of some tens of replicas sends at a time."""


@dataclass(frozen=True, slots=True, order=True)
class ReplicaClass:
    """One way to run a replica."""

    room: int
    tp: int


Stage = tuple[tuple[ReplicaClass, int], ...]
"""Runs of equal replicas, in order."""


def rings_of(stage: Stage) -> frozenset[tuple[int, int]]:
    """Pairs of rooms between which neighbouring replicas of the stage lie, in order."""
    found = {(each.room, each.room) for each, number in stage if number > 1}
    found |= {(stage[k][0].room, stage[k + 1][0].room) for k in range(len(stage) - 1)}
    return frozenset(found)


@dataclass(kw_only=True)
class Tables:
    """Figures of one case at one microbatch size; each made once."""

    files: SailorFiles
    rooms: tuple[SailorRoom, ...]
    devices_per_node: int
    microbatch_size: int
    _ticks: dict[tuple[frozenset[ReplicaClass], int], Floats] = field(default_factory=dict)
    _seconds: dict[frozenset[ReplicaClass], Floats] = field(default_factory=dict)
    _reductions: dict[tuple[frozenset[tuple[int, int]], int, int], Floats] = field(
        default_factory=dict
    )
    _sends: dict[tuple[ReplicaClass, ReplicaClass], float] = field(default_factory=dict)

    def classes(self, room: int) -> tuple[ReplicaClass, ...]:
        """Of a room, what was profiled and whose memory is known, by tp."""
        gpu = self.rooms[room].gpu
        return tuple(
            ReplicaClass(room, tp)
            for tp in sorted(self.files.sizes)
            if (gpu, self.microbatch_size, tp) in self.files.times
            and tp <= self.devices_per_node
            and self.devices_per_node % tp == 0
        )

    def layer_seconds(self, each: ReplicaClass) -> Floats:
        """Forward and backward of one microbatch, by layer."""
        gpu = self.rooms[each.room].gpu
        times = self.files.times[gpu, self.microbatch_size, each.tp]
        return np.asarray(np.array(times.forward_seconds) + np.array(times.backward_seconds))

    def row(self, stages: tuple[Stage, ...], sends: list[float]) -> tuple[Floats, Floats]:
        """Ticks with their sends, and reductions, of a row's stages.

        Infinite where the first stage has the embedding alone or the last the head alone: a stage
        of hetplan has a transformer layer.
        """
        ticks = [
            self.ticks(frozenset(each for each, _ in stage), len(stages) - s) + sends[s]
            for s, stage in enumerate(stages)
        ]
        reductions = [
            self.reductions(
                rings_of(stage),
                min(each.tp for each, _ in stage),
                sum(number for _, number in stage),
            )
            for stage in stages
        ]
        if len(stages) > 1:
            ticks[0][0, 1] = ticks[-1][self.files.num_layers - 1, self.files.num_layers] = np.inf
        return np.stack(ticks), np.stack(reductions)

    def least_update(self) -> float:
        """Seconds of the shortest update that was profiled at this size."""
        return min(
            (
                min(times.update_seconds)
                for (_, size, _), times in self.files.times.items()
                if size == self.microbatch_size
            ),
            default=0.0,
        )

    def ticks(self, classes: frozenset[ReplicaClass], in_flight: int) -> Floats:
        """Of a stage; rows are first layers, columns the layer after the last."""
        key = (classes, in_flight)
        if key not in self._ticks:
            found = np.zeros((self.files.num_layers + 1,) * 2)
            for each in classes:
                span = self.seconds(frozenset([each]))
                memory = self._memory(each, in_flight)
                room = self.rooms[each.room]
                span = np.where(memory <= _GIB[room.gpu] * 1024**3, span, np.inf)
                found = np.maximum(found, span)
            self._ticks[key] = found
        return self._ticks[key]

    def seconds(self, classes: frozenset[ReplicaClass]) -> Floats:
        """The same without regard to memory."""
        if classes not in self._seconds:
            found = [_spans(self.layer_seconds(each)) for each in classes]
            self._seconds[classes] = np.asarray(np.max(found, axis=0))
        return self._seconds[classes]

    def _memory(self, each: ReplicaClass, in_flight: int) -> Floats:
        sizes: LayerSizes = self.files.sizes[each.tp]
        kept = _spans(np.array(sizes.kept_activations)) * self.microbatch_size * FLOAT_BYTES
        weights = _spans(np.array(sizes.parameters)) * BYTES_PER_PARAMETER
        return weights + kept * in_flight + (2e9 if each.tp == 1 else 3e9)

    def send(self, one: ReplicaClass, other: ReplicaClass) -> float:
        """Activations of one microbatch from a replica to another; infinite without a path."""
        key = (one, other)
        if key not in self._sends:
            size = max(self.files.sizes[1].output_activations[:-1])
            ends = [
                (self.rooms[each.room].zone, self.rooms[each.room].gpu, each.tp) for each in key
            ]
            try:
                fit = self.files.fit(ends[0], ends[1])
                self._sends[key] = fit.seconds(size * self.microbatch_size * FLOAT_BYTES)
            except InputError:
                self._sends[key] = np.inf
        return self._sends[key]

    def ring(self, rooms: Sequence[int]) -> float:
        """Seconds of some megabytes over the slowest path between neighbours of these rooms."""
        slowest = 0.0
        for one, other in pairwise(rooms):
            ends = [(self.rooms[at].zone, self.rooms[at].gpu, 1) for at in (one, other)]
            try:
                slowest = max(slowest, self.files.fit(ends[0], ends[1]).seconds(_RING_BYTES))
            except InputError:
                slowest = math.inf
        return slowest

    def reductions(self, rings: frozenset[tuple[int, int]], tp: int, dp: int) -> Floats:
        """Of a stage whose neighbouring replicas lie in these pairs of rooms, smallest tp first."""
        key = (rings, min(4, tp), dp)
        if key not in self._reductions:
            weights = np.array(self.files.sizes[1].parameters) * FLOAT_BYTES / min(4, tp)
            found = np.zeros((self.files.num_layers + 1,) * 2)
            for one, other in sorted(rings) if dp > 1 else ():
                ends = [(self.rooms[at].zone, self.rooms[at].gpu, 1) for at in (one, other)]
                try:
                    seconds = _reduced(_spans(weights), dp, self.files.fit(ends[0], ends[1]))
                except InputError:
                    seconds = np.full_like(found, np.inf)
                found = np.maximum(found, seconds)
            self._reductions[key] = found
        return self._reductions[key]


def tables_of(case: Case, files: SailorFiles) -> list[Tables]:
    """One for every microbatch size that was profiled."""
    return [
        Tables(
            files=files, rooms=case.rooms, microbatch_size=size,
            devices_per_node=case.devices_per_node,
        )
        for size in sorted({key[1] for key in files.times})
    ]  # fmt: skip


def _spans(values: Floats) -> Floats:
    """Sums over layers a to e - 1; 0 where e <= a."""
    summed = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(np.maximum(summed[None, :] - summed[:, None], 0.0))


def _reduced(size_bytes: Floats, dp: int, fit: Fit) -> Floats:
    """Sum over buckets of 2 (dp - 1) t(bucket / dp); infinite where the fit is not above zero."""
    whole = np.floor(size_bytes / BUCKET_BYTES)
    rest = size_bytes - whole * BUCKET_BYTES
    # A path without a rate takes no time for nothing.
    each = float(_seconds(np.array(BUCKET_BYTES / dp), fit))
    full = whole * each if each < math.inf else np.where(whole > 0, np.inf, 0.0)
    return np.asarray(2 * (dp - 1) * (full + _seconds(rest / dp, fit)))


def _seconds(size_bytes: Floats, fit: Fit) -> Floats:
    some = np.maximum(size_bytes, 1.0)
    exponent = np.log2(some / 1e6)
    rate = fit.a * exponent**2 + fit.b * exponent + fit.c
    with np.errstate(divide="ignore"):
        seconds = np.where(rate > 0, some / 1e9 / np.where(rate > 0, rate, 1.0), np.inf)
    return np.asarray(np.where(size_bytes > 0, seconds, 0.0))


def sends_of(stages: tuple[Stage, ...], table: Tables) -> list[float]:
    """x_s of every stage of a row; infinite where a path is not known."""
    last = len(stages) - 1
    found = []
    for s in range(len(stages)):
        forward = slowest_send(stages[s], stages[s + 1], table) if s < last else 0.0
        backward = slowest_send(stages[s], stages[s - 1], table) if s > 0 else 0.0
        if s == 0:
            found.append(forward if last <= 2 else 2 * forward)
        else:
            found.append(2 * backward if s == last else forward + backward)
    return found


def slowest_send(one: Stage, other: Stage, table: Tables) -> float:
    """Seconds of the slowest send between stages of equal dp; replica j meets replica j."""
    worst, i, j = 0.0, 0, 0
    left, right = one[0][1], other[0][1]
    while True:
        worst = max(worst, table.send(one[i][0], other[j][0]))
        both = min(left, right)
        left, right = left - both, right - both
        if not left:
            i += 1
            if i == len(one):
                return worst
            left = one[i][1]
        if not right:
            j += 1
            right = other[j][1]
