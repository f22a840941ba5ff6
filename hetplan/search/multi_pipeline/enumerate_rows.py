"""Pipelines that may stand beside each other, before devices are numbered, and when they end.

A *row* is one pipeline without its cuts: meshes in order, stages of each, microbatches. A
*sequence* is two rows or more whose samples make up the batch and whose devices are there. Order
counts, because stages are placed in it.

The variants of a row (cuts and recomputations) have the numbers of `stage_options`, and the
fastest transfers that its stages can have; both are lower bounds wherever the row lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise, product

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import StageTimes, pipeline_ends
from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.kernels import kernel
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.stage_options import (
    MeshOptions,
    MeshOptionsMaker,
    meshes_by_samples,
)
from hetplan.search.space.allowed import mesh_matches
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_table import FIRST, LAST
from hetplan.search.table_maker import TableMaker


def cuts(units: int, stages: int) -> Ints:
    """[C, P] every way to deal so many units out, at least one to each stage."""
    found = [
        [b - a for a, b in pairwise((0, *inner, units))]
        for inner in combinations(range(1, units), stages - 1)
    ]
    return np.array(found, dtype=np.int64).reshape(len(found), stages)


def number_of_variants(units: int, recompute: int, stages: int) -> int:
    """Cuts and recomputations of a pipeline with so many stages."""
    return math.comb(units - 1, stages - 1) * int(recompute**stages)


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
    """Rows and sequences of one job."""

    maker: TableMaker
    most: int
    """Rows, or rows put one after the other, above which TooManyError is raised."""
    simple: bool = False
    """Only rows of one mesh, with few cuts and rounded shares."""
    counted: int = 0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every pipeline that leaves something of the batch for others."""
        maker, batch = self.maker, self.maker.job.global_batch_size
        return tuple(
            row
            for meshes in meshes_by_samples(maker.model, maker.cluster, maker.job).values()
            for m in self._microbatches((batch - 1) // meshes[0].samples)
            for row in self._of_meshes(meshes, m)
            if not maker.job.pin.same_degrees or len(row.shapes) == 1
        )

    def _microbatches(self, most: int) -> range:
        step = 1 if not self.simple else max(1, -(-(most + 1) // _SHARES))
        return range(step, most + 1, step)

    def _of_meshes(self, meshes: Sequence[Mesh], m: int) -> Iterator[Row]:
        pin, units = self.maker.job.pin, self.maker.units().count
        trainer = target(self.maker.job.target)
        limit = units if trainer.fewer_microbatches_than_stages else min(units, m)
        limit = limit if pin.pp is None else min(limit, pin.pp)
        if self.simple and pin.pp is None:
            limit = min(limit, _FEW_STAGES)
        for order, held in self._orders(meshes, limit, (), (), 0):
            ends = ((order[0], pin.embedding_on), (order[-1], pin.head_on))
            if pin.pp not in (None, sum(held)):
                continue
            if not all(mesh_matches(mesh, self.maker.cluster, place) for mesh, place in ends):
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
        islands = self.maker.cluster.islands
        needs = [(row, row.devices(len(islands))) for row in rows]
        room = tuple(island.num_usable_devices for island in islands)
        return self._longer((), self.maker.job.global_batch_size, room, needs, prices)

    def _longer(
        self,
        taken: tuple[Row, ...],
        left: int,
        room: tuple[int, ...],
        needs: Sequence[tuple[Row, tuple[int, ...]]],
        prices: Sequence[float],
    ) -> Iterator[tuple[Row, ...]]:
        wanted = self.maker.job.pin.pipelines
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
        return not self.maker.job.pin.same_degrees or first.shapes == row.shapes

    def _count(self) -> None:
        self.counted += 1
        if self.counted > self.most:
            raise TooManyError


# ---- when they end


@kernel
def _ends(
    forward: Floats,
    backward: Floats,
    hops: Floats,
    depths: Ints,
    microbatches: int,
    rendezvous: bool,
) -> Floats:
    """[V, P] when every stage ends; passes [V, P]; hops [4, P - 1] as `pipeline_ends` has them."""
    ends = np.empty(forward.shape)
    for v in range(forward.shape[0]):
        times = StageTimes(
            forward[v], backward[v], hops[0], hops[1], hops[2], hops[3], depths, microbatches
        )
        ends[v] = pipeline_ends(times, rendezvous)
    return ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variants:
    """Cuts and recomputations of a row that fit and end below a limit; V of them, P stages."""

    units: Ints
    """[V, P]"""
    recompute: Ints
    """[V, P] of the job's recomputations."""
    ends: Floats
    """[V, P] seconds at which every stage ends, at least."""

    @property
    def last(self) -> Floats:
        """[V] when the pipeline ends, at least."""
        last: Floats = self.ends.max(axis=1)
        return last


@dataclass(kw_only=True)
class RowTables:
    """Makes variants of one job's rows."""

    maker: TableMaker
    recompute: tuple[RecomputeGranularity, ...]
    _options: dict[Sharding, dict[int, MeshOptions]] = field(default_factory=dict)
    _most: dict[tuple[int, Sharding, int], Ints] = field(default_factory=dict)
    _hop_times: dict[tuple[Mesh, Mesh], tuple[float, ...]] = field(default_factory=dict)
    _variants: dict[tuple[Row, Sharding], Variants] = field(default_factory=dict)

    @cached_property
    def clips(self) -> bool:
        """Whether all stages wait for the norm of all gradients."""
        return clips_gradients(self.maker.job)

    def positions(self, units: Ints) -> Ints:
        """[V, P + 1] layers where the stages of [V, P] units begin, and the number of layers."""
        how = self.maker.units()
        found = np.zeros((len(units), units.shape[1] + 1), dtype=np.int64)
        found[:, 1:] = 1 + how.front_layers + np.cumsum(units, axis=1) * how.layers_per_unit
        found[:, -1] = len(self.maker.model.layers)
        return found

    def variants(self, row: Row, sharding: Sharding, limit: float) -> Variants:
        """Those below the limit, or below that of an earlier call; limits do not rise."""
        found = self._variants.get((row, sharding))
        if found is None:
            found = self._variants[row, sharding] = self._made(row, sharding, limit)
        return found

    def _made(self, row: Row, sharding: Sharding, limit: float) -> Variants:
        options, slots, m = self._table(row, sharding), row.slots, row.microbatches
        units = cuts(self.maker.units().count, len(slots))
        choices = np.array([*product(range(len(self.recompute)), repeat=len(slots))])
        if options is None:
            return Variants(units=units[:0], recompute=units[:0], ends=np.zeros((0, len(slots))))
        most = self._most_layers(options, sharding, m)
        shape = (len(units), len(choices))
        forward, backward = np.zeros((*shape, len(slots))), np.zeros((*shape, len(slots)))
        fits, before, busy = np.ones(shape, dtype=np.bool_), np.zeros(shape), np.zeros(shape)
        for s, mesh in enumerate(slots):
            role = FIRST * (s == 0) + LAST * (s == len(slots) - 1)
            number, n = options.alike[mesh], units[:, None, s]
            for k in range(len(self.recompute)):
                mine = choices[:, s] == k
                at = np.flatnonzero((options.mesh == number) & (options.recompute == k))
                if not at.size:
                    fits[:, mine] = False
                    continue
                o = int(at[0])
                fits[:, mine] &= n <= most[role, o, row.depths[s]]
                forward[:, mine, s] = options.extra_forward[role, o] + n * options.forward[o]
                backward[:, mine, s] = options.extra_backward[role, o] + n * options.backward[o]
            own = forward[..., s] + backward[..., s]
            np.maximum(busy, before + m * own, out=busy)
            before += own
        c, r = np.nonzero(fits & (busy < limit))
        ends = _ends(
            np.ascontiguousarray(forward[c, r]),
            np.ascontiguousarray(backward[c, r]),
            self._hops(row),
            np.array(row.depths, dtype=np.int64),
            m,
            options.rendezvous,
        )
        below = ends.max(axis=1, initial=0.0) < limit
        return Variants(units=units[c[below]], recompute=choices[r[below]], ends=ends[below])

    def _table(self, row: Row, sharding: Sharding) -> MeshOptions | None:
        """None where no stage with so many samples fits."""
        if sharding not in self._options:
            made = MeshOptionsMaker(self.maker.stage_pricer, sharding).all()
            self._options[sharding] = {each.samples: each for each in made}
        return self._options[sharding].get(row.meshes[0].samples)

    def _most_layers(self, options: MeshOptions, sharding: Sharding, microbatches: int) -> Ints:
        """[4, O, W + 1] units that fit."""
        key = (options.samples, sharding, microbatches)
        if key not in self._most:
            self._most[key] = options.most_layers(microbatches, options.num_layers)
        return self._most[key]

    def _hops(self, row: Row) -> Floats:
        """[4, P - 1] the fastest transfers that the row can have."""
        found = np.zeros((4, len(row.slots) - 1))
        for s, pair in enumerate(pairwise(row.slots)):
            if pair not in self._hop_times:
                self._hop_times[pair] = self._hop(*pair)
            found[:, s] = self._hop_times[pair]
        return found

    def _hop(self, left: Mesh, right: Mesh) -> tuple[float, ...]:
        """Least of each of a hop's times over all places of the two stages."""
        if len(left.islands) > 1 or len(right.islands) > 1:
            return (0.0,) * 4
        transfers = self.maker.transfers
        links, node_links, _, _ = transfers.between((left, right))
        if left != right:
            return tuple(links[:, 0, 1].tolist())
        times = node_links[:, 0].tolist()
        if transfers.side(left).stages_per_node == 1:
            return tuple(times)
        inside = links[:, 0, 0].tolist()
        return tuple(min(pair) for pair in zip(times, inside, strict=True))
