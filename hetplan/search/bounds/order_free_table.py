"""The order-free bounds of thousands of families at once.

Families that differ in schedule only have a base in common: a block of the table, a way to
recompute, shard and offload. Memory is that of all blocks in a few array operations; only shapes
that fit are priced; and the longest stage is found by one compiled loop over all bases. The meshes
of block k are those from start[k] to start[k + 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.job.spec import SPLIT_WEIGHTS
from hetplan.kernels import kernel
from hetplan.plans.check_job import MIN_INTERLEAVED_STAGES, SEARCHED_SPLIT
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Recompute, Sharding
from hetplan.search.bounds.order_free_bound import (
    BESIDE_SLOW_HOP,
    CHUNKS,
    UnitCosts,
    Way,
    caps,
    holds,
    least_bottleneck,
    least_chunked,
    lines_of,
)
from hetplan.search.space.allowed import is_one_stage, most_stages_of
from hetplan.search.space.family import FamilyTable, Kind, Mesh

Bools = npt.NDArray[np.bool_]


@kernel
def fitting(
    blocks: Ints,
    start: Ints,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: Ints,
    positions: Ints,
    some: Bools,
) -> Bools:
    """[B] whether the meshes of a block have room for all units, however long stages take."""
    # Many arguments: columns of the whole table, each of its own kind.
    found = np.zeros(blocks.shape[0], np.bool_)
    for k in range(blocks.shape[0]):
        a, b = start[blocks[k]], start[blocks[k] + 1]
        if not some[a:b].any():
            continue
        cap = caps(rows[:, a:b], room[a:b], units, microbatches[blocks[k]], positions[blocks[k]])
        ones = np.ones((cap.shape[0], cap.shape[1]))
        found[k] = holds(np.inf, ones, cap, first[a:b], most[a:b], units)
    return found


@kernel
def bottlenecks(
    blocks: Ints,
    start: Ints,
    cost: Floats,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: Ints,
    positions: Ints,
) -> Floats:
    """[2, B] K and S of `least_bottleneck`."""
    # Many arguments: columns of the whole table, each of its own kind.
    found = np.zeros((2, blocks.shape[0]))
    for k in range(blocks.shape[0]):
        a, b = start[blocks[k]], start[blocks[k] + 1]
        cap = caps(rows[:, a:b], room[a:b], units, microbatches[blocks[k]], positions[blocks[k]])
        longest, whole = least_bottleneck(cost[:, a:b], cap, first[a:b], most[a:b], units)
        found[0, k], found[1, k] = longest, whole
    return found


_ROUNDING = 1e-12
"""Part by which a bound that ends a family is above what it must reach."""


@kernel
def chunked(
    blocks: Ints,
    start: Ints,
    cost: Floats,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: Ints,
    positions: Ints,
    chunks: Ints,
    longest: Floats,
    whole: Floats,
    hop: Floats,
    pinned: int,
    below: float,
) -> Floats:
    """[B, most chunks + 1, 2] of `least_chunked`; chunks[B]: most of a block, 0 where it has none.

    pinned: stages, 0 where any number of them will do; below: a step from which it is not said how
    long it is.
    """
    # Many arguments: columns of the whole table, each of its own kind.
    found = np.full((blocks.shape[0], chunks.max() + 1 if chunks.size else 1, 2), np.inf)
    for k in range(blocks.shape[0]):
        if chunks[k] == 0:
            continue
        a, b, m = start[blocks[k]], start[blocks[k] + 1], microbatches[blocks[k]]
        counts = np.zeros(units + 1, np.int64)
        size = 0
        for p in range(MIN_INTERLEAVED_STAGES, min(positions[blocks[k]], units // 2) + 1):
            if m % p == 0 and (pinned == 0 or pinned == p):
                counts[size] = p
                size += 1
        found[k, : chunks[k] + 1] = least_chunked(
            cost[:, a:b], rows[:, a:b], room[a:b], first[a:b], most[a:b], units, m, chunks[k],
            counts[:size], longest[k], whole[k], hop[k],
            below * (1.0 + _ROUNDING) / m,
        )  # fmt: skip
    return found


_IDLE_SPLIT = 0.25
"""A guess at what split passes leave of 1F1B's bubble: 1/3 zb-h1, 1/6 zbv with F = B = W."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderFreeTable:
    """[N] per family."""

    bounds: Floats
    """No plan of the family has a shorter step; infinite where none fits."""
    estimates: Floats
    """Guesses; infinite where none fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fits:
    """Meshes of all blocks that recompute, shard and offload in one way."""

    rows: Floats
    """[V, M, 8] lines of memory."""
    room: Floats
    """[M] of the part with least room."""
    some: Bools
    """[M] whether one unit fits in any way."""
    host: Floats
    """[M] least seconds in which the host updates the optimizer of a unit; 0: it does not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """[P] parts of all meshes, one mesh behind the other."""

    mesh: Ints
    island: Ints
    line: Ints
    """Which of `lines` has its memory."""
    unit: Ints
    """Which of `units` has its time."""
    spread: Floats
    """tp over (ep * etp)."""
    lines: tuple[tuple[int, Shape], ...]
    """An island and a shape, one for all that need the same memory."""
    units: tuple[tuple[int, Shape], ...]
    """The same of each island."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bases:
    """What families have in common that differ in schedule only, [B] each."""

    at: Ints
    """Blocks of the table."""
    positions: Ints
    """Most stages of a plan without virtual stages, which has the most."""
    longest: Floats
    """K, or K'"""
    whole: Floats
    """S, of a' where the host updates."""
    least: Floats
    """Most over the meshes: the shorter pass over both."""
    grown: Floats
    """What embedding and head make of K, where all stages can carry a part of them: a guess."""
    after: Floats
    """Seconds per part of the model that a stage holds: a guess."""
    passes: Floats
    """[2, B] K and S of passes alone."""
    hop: Floats
    """Seconds of a transfer over the slowest hop between islands that all of them need: a guess."""
    cost: Floats
    """[V, M] of a unit, of all meshes of the table; infinite where none fits."""
    updated: Floats
    """[V, M] the same with the host's update, spread over the microbatches: a'."""
    rows: Floats
    """[V, M, 8] lines of memory."""
    room: Floats
    """[M]"""
    first: Ints
    """[M] first island of every mesh."""
    most: Ints
    """[M] most stages of every mesh."""

    def one(self, at: int, meshes: slice) -> Bases:
        """That of the block in this place alone, of these meshes."""
        here = slice(at, at + 1)
        of_block = ("at", "positions", "longest", "whole", "least", "grown", "after", "hop")
        found = {name: getattr(self, name)[here] for name in of_block}
        for name in ("cost", "updated", "rows"):
            found[name] = np.ascontiguousarray(getattr(self, name)[:, meshes])
        for name in ("room", "first", "most"):
            found[name] = getattr(self, name)[meshes]
        return Bases(passes=self.passes[:, here], **found)


@dataclass(frozen=True, eq=False)
class Columns:
    """The meshes of a table's blocks in columns: M meshes, one block behind the other, P parts."""

    costs: UnitCosts
    table: FamilyTable
    check: Callable[[], None]
    """Called every few milliseconds; raises at the deadline."""
    _kept: dict[Way, Bases] = field(default_factory=dict, repr=False)
    _held: dict[Way, _Fits] = field(default_factory=dict, repr=False)

    def order_free(self, below: float = math.inf) -> OrderFreeTable:
        """All bounds and guesses. Of families that have no step below `below` by those which they
        share with all that are alike (`loosest`), these.
        """
        table, loading = self.table, self.costs.placed.job.data_loading_seconds
        bounds, estimates = np.full((2, len(table)), np.inf)
        left = np.arange(len(table))
        if below < math.inf:
            loosest = self.loosest
            bounds, estimates = loosest.bounds - loading, loosest.estimates - loading
            left = np.flatnonzero(loosest.bounds < below)
        bounds[left], estimates[left] = self._of(left, table.kinds, below - loading)
        return OrderFreeTable(bounds=bounds + loading, estimates=estimates + loading)

    def estimates(self, families: Ints) -> Floats:
        """Guesses of these families alone."""
        _, found = self._of(families, self.table.kinds, math.inf)
        return found + self.costs.placed.job.data_loading_seconds

    @cached_property
    def loosest(self) -> OrderFreeTable:
        """Bounds that families share with all that are alike (`FamilyTable.loosest`), and guesses.

        What an order-free bound takes of a family is no more for the loosest one. Of its chunks
        nothing is asked.
        """
        table, loading = self.table, self.costs.placed.job.data_loading_seconds
        kinds = [table.loosest_kind(each) or each for each in table.kinds]
        bounds, estimates = self._of(np.arange(len(table)), kinds, 0.0)
        return OrderFreeTable(bounds=bounds + loading, estimates=estimates + loading)

    def _of(self, families: Ints, kinds: Sequence[Kind], below: float) -> tuple[Floats, Floats]:
        """Bounds and guesses of these families, sorted, as if the table had these kinds."""
        table = self.table
        found = np.full((2, len(table)), np.inf)
        for way, mine in self._alike(kinds, families):
            bases = self._kept[way] = self.bases(way, np.unique(table.block[mine]))
            self._bound(bases, mine, kinds, found, below)
        return found[0, families], found[1, families]

    def _bound(
        self, bases: Bases, mine: Ints, kinds: Sequence[Kind], found: Floats, below: float
    ) -> None:
        """Fill in bounds and guesses of these families, which have these bases. Chunks count where
        stages of one chunk leave a step below `below`.
        """
        table = self.table
        place = np.full(len(table.blocks), -1)
        place[bases.at] = np.arange(len(bases.at))
        mine = mine[place[table.block[mine]] >= 0]
        kind, block = table.kind[mine], table.block[mine]
        at, m = place[block], self._microbatches[block].astype(np.float64)
        virtual = np.array([each.virtual_stages for each in kinds], dtype=np.int64)[kind]
        splits = np.array([each.schedule in SEARCHED_SPLIT for each in kinds], dtype=np.bool_)[kind]
        # 1F1B's second inequality holds for none of the others.
        splits |= (virtual > 1) & (m * bases.longest[at] >= below)
        virtual = np.where(splits, 1, virtual)
        many = np.zeros(len(table.blocks), dtype=np.int64)
        np.maximum.at(many, block, virtual)
        self.check()
        found[:, mine] = family_bounds(
            bases,
            self.chunks(bases, many, below),
            at,
            m,
            np.array([each.most_extra_depth for each in kinds])[kind],
            np.array([each.early_sends for each in kinds])[kind],
            virtual,
            splits,
        )

    def base(self, way: Way, meshes: tuple[Mesh, ...]) -> Bases | None:
        """Of the block that has these meshes, if it is known."""
        bases, at = self._kept.get(way), self._numbers.get(id(meshes))
        if bases is None or at is None:
            return None
        place = int(np.searchsorted(bases.at, at))
        if place == len(bases.at) or bases.at[place] != at:
            return None
        return bases.one(place, slice(self._start[at], self._start[at + 1]))

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Of blocks, by the identity of their meshes."""
        return {id(each.meshes): at for at, each in enumerate(self.table.blocks)}

    def with_room(self) -> Ints:
        """Families whose meshes have room for all units; no time is priced for that."""
        table, found = self.table, []
        for way, mine in self._alike(table.kinds, np.arange(len(table))):
            _, blocks = self._fitting(way, np.unique(table.block[mine]))
            found.append(mine[np.isin(table.block[mine], blocks)])
        return np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)

    def _alike(self, kinds: Sequence[Kind], families: Ints) -> Iterator[tuple[Way, Ints]]:
        """(way, those of these families) of every way of these kinds."""
        ways = [Way.of(each) for each in kinds]
        for way in dict.fromkeys(ways):
            self.check()
            same = np.array([each == way for each in ways])
            mine = families[same[self.table.kind[families]]]
            if len(mine):
                yield way, mine

    def _positions(self, way: Way) -> Ints:
        one = way.sharding in SPLIT_WEIGHTS
        return np.ones_like(self.positions) if one else self.positions  # `Family.one_stage`

    def _fitting(self, way: Way, blocks: Ints) -> tuple[_Fits, Ints]:
        """What fits on each mesh, and those of these blocks with room for all units."""
        held, positions = self._memory(way), self._positions(way)
        meshes = (held.rows, held.room, self.first, self.most, self.costs.placed.units.count)
        may = fitting(
            blocks, self._start, *meshes, self._microbatches, positions, held.some
        )  # fmt: skip
        return held, blocks[may]

    def bases(self, way: Way, blocks: Ints) -> Bases:
        """Of those of these blocks that have room for all units."""
        count = self.costs.placed.units.count
        held, blocks = self._fitting(way, blocks)
        positions = self._positions(way)
        meshes = (held.rows, held.room, self.first, self.most, count)
        self.check()
        cost, least, ends = self._costs(way.recompute, held, blocks)
        after = np.where(held.some, self._after(way), np.inf)
        updated = cost + held.host / np.repeat(self._microbatches, np.diff(self._start))
        longest, whole = bottlenecks(
            blocks, self._start, updated, *meshes, self._microbatches, positions
        )
        passes = np.stack((longest, whole))
        if way.offload:
            passes = bottlenecks(blocks, self._start, cost, *meshes, self._microbatches, positions)
        return Bases(
            at=blocks,
            positions=positions[blocks],
            longest=longest,
            whole=whole,
            least=np.maximum.reduceat(least, self._start[:-1])[blocks],
            grown=1.0 + np.maximum.reduceat(ends, self._start[:-1])[blocks] / count,
            after=np.minimum.reduceat(after, self._start[:-1])[blocks],
            hop=self._hops[blocks],
            passes=passes,
            cost=cost,
            updated=updated,
            rows=held.rows,
            room=held.room,
            first=self.first,
            most=self.most,
        )

    def chunks(self, bases: Bases, many: Ints, below: float = math.inf) -> Floats:
        """[B, v + 1, 2] of `chunked`; `many`: [blocks] most virtual stages, 1 or less: none."""
        most = many[bases.at]
        return chunked(
            bases.at, self._start, bases.updated, bases.rows, bases.room, self.first, self.most,
            self.costs.placed.units.count, self._microbatches, self.positions,
            np.where(most > 1, np.maximum(most, CHUNKS), 0),
            bases.longest, bases.whole, bases.hop, self.costs.placed.job.pin.pp or 0, below,
        )  # fmt: skip

    def _costs(
        self, recompute: tuple[Recompute, ...], held: _Fits, blocks: Ints
    ) -> tuple[Floats, Floats, Floats]:
        """(cost [V, M] of a unit, least [M], ends [M]) of the meshes that fit in these blocks."""
        wanted = np.zeros(len(held.some), dtype=np.bool_)
        for at in blocks.tolist():
            wanted[self._start[at] : self._start[at + 1]] = True
        wanted &= held.some
        forward, backward, ends = self._priced
        for at in np.unique(self._parts.unit[wanted[self._parts.mesh]]).tolist():
            if ends[at] < 0.0:
                self.check()
                island, shape = self._parts.units[at]
                unit = self.costs.unit(island, shape, self._recompute)
                forward[at], backward[at], ends[at] = unit
        columns = [self._recompute.index(each) for each in recompute]
        passes = forward[:, columns], backward[:, columns]
        cost = passes[0] + passes[1]
        with np.errstate(invalid="ignore"):
            least = (np.minimum(*passes) / cost).max(axis=1)
        found = np.column_stack((cost, least, ends))
        found = np.maximum.reduceat(found[self._parts.unit], self._part_start, axis=0)
        found[~wanted, :-2], found[~wanted, -2:] = np.inf, 0.0
        return found[:, :-2].T.copy(), found[:, -2].copy(), found[:, -1].copy()

    @cached_property
    def _recompute(self) -> tuple[Recompute, ...]:
        """All that stages of the table's families may choose."""
        return tuple(dict.fromkeys(each for kind in self.table.kinds for each in kind.recompute))

    @cached_property
    def _priced(self) -> tuple[Floats, Floats, Floats]:
        """(forward [U, R], backward [U, R], ends [U]) of `UnitCosts.unit`; negative: not priced."""
        count = len(self._parts.units)
        passes = np.full((2, count, len(self._recompute)), np.inf)
        return passes[0], passes[1], np.full(count, -1.0)

    def _memory(self, way: Way) -> _Fits:
        """Of every mesh the part with least room counts, and the shortest update on the host."""
        if way not in self._held:
            self._held[way] = self._room(way)
        return self._held[way]

    def _room(self, way: Way) -> _Fits:
        alone = way.sharding is Sharding.NONE
        base = np.array([self.costs.bytes_of(*each, way.recompute) for each in self._parts.lines])
        copies = self._copies[self._parts.mesh]
        if way.sharing_ranks:
            copies = np.full_like(copies, float(way.sharing_ranks))
        ones = np.ones_like(copies)
        shards = ones if alone else copies
        experts = ones if alone else np.maximum(1.0, copies * self._parts.spread)
        columns = np.moveaxis(base[self._parts.line], 2, 0)
        own = columns[0] / shards[:, None] + columns[1] / experts[:, None]
        made = lines_of(tuple(columns), way.sharding, way.offload, own)
        rows = np.stack(np.broadcast_arrays(*made), axis=2)
        room = np.array([self.costs.placed.room_bytes(at) for at in range(len(self._islands))])[
            self._parts.island
        ]
        left = room - rows[:, 0, 0] - rows[:, 0, 1]
        tightest = np.lexsort((left, self._parts.mesh))[self._part_start]
        rows, room = rows[tightest].swapaxes(0, 1).copy(), room[tightest]
        have = room * (1.0 + 1e-12)
        one = rows[..., 0] + rows[..., 1] + rows[..., 7] <= have
        some = (one & (rows[..., 4] + rows[..., 5] <= have)).any(axis=0)
        host = np.zeros(len(room))
        if way.offload:
            each = np.array([self.costs.host_seconds(at) for at in range(len(self._islands))])
            seconds = way.offload * own[:, 0] * each[self._parts.island]
            host = np.minimum.reduceat(seconds, self._part_start)
        return _Fits(rows=rows, room=room, some=some, host=host)

    def _after(self, way: Way) -> Floats:
        """[M] a guess at the reduction of the whole model, by bytes alone."""
        times = np.repeat(self._microbatches, np.diff(self._start))
        passes = self.costs.passes_of_gradients(way.sharding, times)
        count = self.costs.placed.units.count
        return self._weights * count * passes * (1.0 - 1.0 / self._copies) / self._goodput

    # ---- columns

    @cached_property
    def _islands(self) -> tuple[object, ...]:
        return self.costs.placed.cluster.islands

    @cached_property
    def _microbatches(self) -> Ints:
        return np.array([each.num_microbatches for each in self.table.blocks], dtype=np.int64)

    @cached_property
    def _start(self) -> Ints:
        """[blocks + 1] first mesh of every block."""
        lengths = [0, *(len(each.meshes) for each in self.table.blocks)]
        return np.cumsum(np.array(lengths, dtype=np.int64))

    @cached_property
    def _meshes(self) -> tuple[Mesh, ...]:
        return self.table.meshes()

    @cached_property
    def first(self) -> Ints:
        """[M] first island of every mesh."""
        return np.array([mesh.islands[0] for mesh in self._meshes], dtype=np.int64)

    @cached_property
    def most(self) -> Ints:
        """[M] most stages of every mesh."""
        most = np.array([mesh.max_stages for mesh in self._meshes], dtype=np.int64)
        return np.minimum(most, self.costs.placed.units.count)

    @cached_property
    def positions(self) -> Ints:
        """[blocks] most stages of a plan without virtual stages, which has the most."""
        islands = len(self._islands)
        block = np.repeat(np.arange(len(self._start) - 1), np.diff(self._start))
        best = np.zeros((len(self._start) - 1, islands), dtype=np.int64)
        np.maximum.at(best, (block, self.first), self.most)
        placed = self.costs.placed
        job, units, one = placed.job, placed.units, is_one_stage(placed.job, placed.model)
        limit = np.array(
            [
                job.pin.pp or most_stages_of(job, units, m, 1, one=one)
                for m in self._microbatches.tolist()
            ],
            dtype=np.int64,
        )
        found: Ints = np.maximum(1, np.minimum(best.sum(axis=1), limit))
        return found

    @cached_property
    def _parts(self) -> _Parts:
        lines: dict[tuple[object, ...], int] = {}
        units: dict[tuple[int, int], int] = {}
        line_shapes: list[tuple[int, Shape]] = []
        unit_shapes: list[tuple[int, Shape]] = []
        found: list[tuple[int, int, int, int]] = []
        spread: list[float] = []
        for at, mesh in enumerate(self._meshes):
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True):
                key = (
                    self.costs.placed.memory_class(island),
                    *(shape.tp, shape.cp, shape.ep, shape.etp),
                    *(shape.microbatch_size, shape.sequence_parallel),
                )
                line = lines.setdefault(key, len(lines))
                if line == len(line_shapes):
                    line_shapes.append((island, shape))
                unit = units.setdefault((island, line), len(units))
                if unit == len(unit_shapes):
                    unit_shapes.append((island, shape))
                found.append((at, island, line, unit))
                spread.append(shape.tp / (shape.ep * shape.etp))
        mesh_at, island_at, line_at, unit_at = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return _Parts(
            mesh=mesh_at,
            island=island_at,
            line=line_at,
            unit=unit_at,
            spread=np.array(spread),
            lines=tuple(line_shapes),
            units=tuple(unit_shapes),
        )

    @cached_property
    def _part_start(self) -> Ints:
        """[M] first part of every mesh."""
        found = np.searchsorted(self._parts.mesh, np.arange(len(self._meshes)))
        return found.astype(np.int64)

    @cached_property
    def _copies(self) -> Floats:
        """[M] of the weights."""
        return np.array(
            [float(sum([each.dp * each.cp for each in mesh.shapes])) for mesh in self._meshes]
        )

    @cached_property
    def _hops(self) -> Floats:
        """[blocks] of `BottleneckLinks`."""
        return np.array([self.costs.hops.of(each.meshes) for each in self.table.blocks])

    @cached_property
    def _goodput(self) -> Floats:
        """[M] bytes per second of gradients."""
        return np.array([self.costs.goodput(mesh) for mesh in self._meshes])

    @cached_property
    def _weights(self) -> Floats:
        """[M] parameters of a unit on a rank of the first part."""
        return np.array([sum(self.costs.placed.weights(m.shapes[0]).unit) for m in self._meshes])


def family_bounds(
    bases: Bases,
    chunks: Floats,
    at: Ints,
    m: Floats,
    depth: Ints,
    early: Bools,
    virtual: Ints,
    splits: Bools,
) -> tuple[Floats, Floats]:
    """(bounds, estimates) of families whose bases stand `at` these places, without data loading.

    Of every family: microbatches, extra depth, early sends, virtual stages (1 where backward passes
    are split) and whether they are.
    """
    longest, whole, positions = bases.longest[at], bases.whole[at], bases.positions[at]
    busy, every = bases.passes[:, at]
    in_flight = np.minimum(positions + depth, m)
    other = every + (m - 1) * busy - (in_flight - 1) * bases.least[at] * busy
    bound = np.maximum(m * longest, other)
    estimate = m * longest + np.maximum(0.0, whole - longest)
    waits = 2.0 * m * bases.hop[at] * np.minimum(1.0, BESIDE_SLOW_HOP / positions)
    estimate = np.where(early, estimate, estimate + waits)
    bound = np.where(splits, m * longest, bound)
    idle = _IDLE_SPLIT * np.maximum(0.0, whole - longest)
    estimate = np.where(splits, m * longest + idle, estimate)
    several = np.flatnonzero(virtual > 1)
    if several.size:
        longest = longest.copy()
        found = chunks[at[several], virtual[several]]
        longest[several], estimate[several] = found[:, 0], found[:, 1]
        bound[several] = m[several] * longest[several]
    estimate = estimate * bases.grown[at]
    fits = longest < np.inf
    more = bases.after[at] * np.where(fits, longest, 0.0) / whole
    return bound, np.where(fits, estimate + more, np.inf)
