"""Which pipelines may stand beside each other, before layers are cut and devices are numbered?

A *row* is one pipeline without its cuts: meshes in order, stages of each, microbatches. A
*sequence* is two rows or more whose samples make up the batch and whose devices are there. Order
counts, because stages are placed in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.step_model.hops import Hop
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Replica
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.microbatch_samples import tick_meshes
from hetplan.search.space.allowed import mesh_matches
from hetplan.search.space.family import Mesh

Replicas = tuple[tuple[Replica, ...], ...]
"""Of every stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variants:
    """Cuts and recomputations of a row that fit; V of them, P stages."""

    positions: Ints
    """[V, P + 1] layers where stages begin."""
    units: Ints
    """[V, P]"""
    choices: Ints
    """[V, P] of the recomputations of the tables."""
    slow: Ints
    """[V, P] the part that counts."""
    forward: Floats
    """[V, P]"""
    backward: Floats
    """[V, P]"""
    busy: Floats
    """[V] seconds; no pipeline of it ends earlier."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ended:
    """Variants of a placed row in the order in which they end, W of those below some limit."""

    which: Ints
    """[W] of the variants."""
    ends: Floats
    """[W, P]"""
    last: Floats
    """[W]"""
    limit: float
    """Those that end no earlier are left out."""
    hops: tuple[Hop, ...]


NO_TIMES = (0.0, 0.0, 0.0, 0.0)


def times_of(hop: Hop) -> tuple[float, float, float, float]:
    """Seconds on the wire there and back, until arrived, and of a waiting sender."""
    return (
        hop.send_forward_seconds,
        hop.send_backward_seconds,
        hop.wire_latency_seconds,
        hop.rendezvous_extra_seconds,
    )


def least_of(
    hops: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """The least of each of the times."""
    a, b, c, d = (min(each) for each in zip(*hops, strict=True))
    return a, b, c, d


def cuts(units: int, stages: int) -> Ints:
    """[C, P] every way to deal so many units out, at least one to each stage."""
    found = [
        [b - a for a, b in pairwise((0, *inner, units))]
        for inner in combinations(range(1, units), stages - 1)
    ]
    return np.array(found, dtype=np.int64).reshape(len(found), stages)


def number_of_variants(units: int, recompute: int, stages: Sequence[int]) -> int:
    """Cuts and recomputations of pipelines with so many stages, all together."""
    return math.prod(math.comb(units - 1, count - 1) * recompute**count for count in stages)


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One pipeline without its cuts."""

    meshes: tuple[Mesh, ...]
    stages: tuple[int, ...]
    """Of each mesh."""
    microbatches: int

    @cached_property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.meshes[0].samples * self.microbatches

    @cached_property
    def slots(self) -> tuple[Mesh, ...]:
        """The mesh of every stage."""
        pairs = zip(self.meshes, self.stages, strict=True)
        return tuple(mesh for mesh, count in pairs for _ in range(count))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Warm-up depth of every stage."""
        total = sum(self.stages)
        return tuple(min(total - s, self.microbatches) for s in range(total))

    @cached_property
    def shapes(self) -> frozenset[Shape]:
        """Of all parts."""
        return frozenset(shape for mesh in self.meshes for shape in mesh.shapes)

    def devices(self, islands: int) -> tuple[int, ...]:
        """Of every island."""
        found = [0] * islands
        for mesh, count in zip(self.meshes, self.stages, strict=True):
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True):
                found[island] += count * shape.num_devices
        return tuple(found)


_SHARES = 8
"""Simple rows do whole eighths of a batch."""
_FEW_STAGES = 3

_SURE = 1e-7
"""Accuracy of prices."""


class TooManyError(Exception):
    """There are more than it is worth to list."""


@dataclass(kw_only=True)
class Rows:
    """Rows and sequences of one job; `cluster` as `allowed_cluster` left it."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    units: int
    """Layer units of the model."""
    most: int
    """Rows, or rows put one after the other, above which TooManyError is raised."""
    simple: bool = False
    """Only rows of one mesh, with few cuts and rounded shares."""
    counted: int = 0

    def ticks(self) -> tuple[tuple[Mesh, ...], ...]:
        """Meshes that may stand in one pipeline."""
        return tuple(tick_meshes(self.model, self.cluster, self.job).values())

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every pipeline that leaves something of the batch for others."""
        batch = self.job.global_batch_size
        return tuple(
            row
            for meshes in self.ticks()
            for m in self._microbatches((batch - 1) // meshes[0].samples)
            for row in self._of_tick(meshes, m)
            if not self.job.pin.same_degrees or len(row.shapes) == 1
        )

    def _microbatches(self, most: int) -> range:
        step = 1 if not self.simple else max(1, -(-(most + 1) // _SHARES))
        return range(step, most + 1, step)

    def _of_tick(self, meshes: Sequence[Mesh], m: int) -> Iterator[Row]:
        trainer, pin = target(self.job.target), self.job.pin
        limit = self.units if trainer.fewer_microbatches_than_stages else min(self.units, m)
        limit = limit if pin.pp is None else min(limit, pin.pp)
        if self.simple and pin.pp is None:
            limit = min(limit, _FEW_STAGES)
        for order, held in self._orders(meshes, limit, (), (), 0):
            ends = ((order[0], pin.embedding_on), (order[-1], pin.head_on))
            if pin.pp not in (None, sum(held)):
                continue
            if not all(mesh_matches(mesh, self.cluster, place) for mesh, place in ends):
                continue
            self._count()
            yield Row(meshes=order, stages=held, microbatches=m)

    def _orders(
        self,
        meshes: Sequence[Mesh],
        room: int,
        order: tuple[Mesh, ...],
        held: tuple[int, ...],
        mask: int,
    ) -> Iterator[tuple[tuple[Mesh, ...], tuple[int, ...]]]:
        self._count()
        if order:
            yield order, held
        if order and self.simple:
            return
        for mesh in meshes:
            if mask & mesh.mask:
                continue
            for count in range(1, min(mesh.max_stages, room) + 1):
                yield from self._orders(
                    meshes, room - count, (*order, mesh), (*held, count), mask | mesh.mask
                )

    def sequences(self, rows: Sequence[Row], prices: Sequence[float]) -> Iterator[tuple[Row, ...]]:
        """Every sequence of these rows that may have room.

        prices: of a device of every island, so that no row has more samples than its devices cost.
        """
        islands = self.cluster.islands
        needs = [(row, row.devices(len(islands))) for row in rows]
        room = tuple(island.num_usable_devices for island in islands)
        return self._longer((), self.job.global_batch_size, room, needs, prices)

    def _longer(
        self,
        taken: tuple[Row, ...],
        left: int,
        room: tuple[int, ...],
        needs: Sequence[tuple[Row, tuple[int, ...]]],
        prices: Sequence[float],
    ) -> Iterator[tuple[Row, ...]]:
        wanted = self.job.pin.pipelines
        if left == 0:
            if len(taken) > 1 and wanted in (None, len(taken)):
                yield taken
            return
        worth = sum(price * free for price, free in zip(prices, room, strict=True))
        if len(taken) == wanted or worth < left * (1 - _SURE):
            return
        for row, need in needs:
            samples = row.samples
            if samples > left or (len(taken) + 1 == wanted and samples < left):
                continue
            rest = tuple([a - b for a, b in zip(room, need, strict=True)])
            if min(rest) >= 0 and (not taken or self._together(taken[0], row)):
                self._count()
                yield from self._longer((*taken, row), left - samples, rest, needs, prices)

    def _together(self, first: Row, row: Row) -> bool:
        return not self.job.pin.same_degrees or first.shapes == row.shapes

    def _count(self) -> None:
        self.counted += 1
        if self.counted > self.most:
            raise TooManyError
