"""Every plan of the declared space of a small job, one pipeline at a time.

Written from docs/search.md's table: islands, shapes, meshes, unions, families, orders, stages per
mesh, warm-up depths, layers per stage, recomputation per stage, sharding, pins and forbids. A `Row`
is a pipeline whose devices are placed and whose layers and recomputation are still open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations, product

from oracle_costs import PlacedPipeline, PlacedStage, Range
from oracle_meshes import Mesh, Meshes

from hetplan.cluster.spec import Island
from hetplan.job.spec import Optimizer
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, RecomputeModule, Replica, Sharding, compress

NONE, FULL = RecomputeGranularity.NONE, RecomputeGranularity.FULL
SELECTIVE = RecomputeGranularity.SELECTIVE
MAX_CONTEXT = 16
MAX_PER_UNION = 4
MAX_EXTRA_DEPTH = 8
MAX_MIXED_DEVICES = 16


@dataclass(frozen=True)
class Row:
    """Stages in order, before devices: what one pipeline of a plan is."""

    meshes: tuple[Mesh, ...]
    stages: tuple[int, ...]
    """Of each mesh."""
    microbatches: int
    virtual: int
    depths: tuple[int, ...]
    """Warm-up depth of every stage."""
    early: bool = False
    """Sends do not hold their stage."""

    @property
    def slots(self) -> tuple[Mesh, ...]:
        """The mesh of every stage."""
        pairs = zip(self.meshes, self.stages, strict=True)
        return tuple(mesh for mesh, count in pairs for _ in range(count))

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return self.meshes[0].samples * self.microbatches


@dataclass(frozen=True)
class Units:
    """Where a model may be cut."""

    count: int
    layers: int
    """Transformer layers of a unit."""
    front: int
    back: int

    def range(self, first: int, stop: int, *, embedding: bool, head: bool) -> Range:
        """Layer positions of units `first` up to `stop`."""
        start = 1 + self.front + first * self.layers
        end = 1 + self.front + stop * self.layers
        # Behind the last unit: back layers, multi-token prediction, head.
        return (0 if embedding else start, -1 if head else end)


def units_of(model: ModelSpec) -> Units:
    """Most units, then fewest layers outside of them, then fewest before them."""
    row = [model.layer_at(at) for at in range(1, model.num_layers + 1)]
    best: tuple[tuple[int, int, int], Units] | None = None
    for front in range(len(row)):
        if any(layer != row[0] for layer in row[:front]):
            break
        for period in range(1, len(row) - front + 1):
            count = 1
            while (
                row[front + count * period : front + (count + 1) * period]
                == row[front : front + period]
            ):
                count += 1
            back = row[front + count * period :]
            if (count < 2 and len(row) > period) or any(layer != row[-1] for layer in back):
                continue
            key = (count, -front - len(back), -front)
            if best is None or key > best[0]:
                best = (key, Units(count, period, front, len(back)))
    assert best is not None, "the oracle's models have units"
    return best[1]


def place(sizes: list[int], per_node: int, nodes: int) -> list[int] | None:
    """Where stages of these sizes begin on an island: as they come, each at a multiple of its size.

    Where that has no room, largest first; where that has none either, each where there is room.
    """
    for order in ([*range(len(sizes))], sorted(range(len(sizes)), key=lambda at: -sizes[at])):
        starts, free = [0] * len(sizes), 0
        for at in order:
            grain = min(sizes[at], per_node)
            starts[at] = math.ceil(free / grain) * grain
            free = starts[at] + sizes[at]
        if free <= nodes * per_node:
            return starts
    room = [per_node] * nodes
    starts = [0] * len(sizes)
    used = 0
    for at in order:
        size = sizes[at]
        if size >= per_node:
            starts[at] = used * per_node
            for _ in range(size // per_node):
                if used >= nodes:
                    return None
                room[used] = 0
                used += 1
            continue
        node = next((k for k in range(used) if room[k] >= size), used)
        if node >= nodes:
            return None
        used = max(used, node + 1)
        starts[at] = node * per_node + per_node - room[node]
        room[node] -= size
    return starts


@dataclass(frozen=True)
class SmallSpace(Meshes):
    """The plans of one job."""

    @cached_property
    def units(self) -> Units:
        """Where the model may be cut."""
        return units_of(self.model)

    def families(self) -> Iterator[tuple[list[Mesh], bool]]:
        """(meshes that may stand in one pipeline, whether it may be interleaved)."""
        if not self.trainer.stages_differ:
            for group in self._alike(self.meshes(alike=True)):
                yield group, True
            return
        if self.trainer.context_parallel or self.trainer.expert_parallel:
            # Target any: the other targets' spaces together.
            for group in self._alike(self.meshes(alike=True)):
                yield group, True
        by_samples: dict[int, list[Mesh]] = {}
        for mesh in self.meshes(alike=False):
            by_samples.setdefault(mesh.samples, []).append(mesh)
        if self.job.pin.same_degrees:
            for group in self._alike(self.meshes(alike=False)):
                yield group, True
            return
        for group in by_samples.values():
            yield group, True

    def _alike(self, meshes: list[Mesh]) -> Iterator[list[Mesh]]:
        groups: dict[object, list[Mesh]] = {}
        for mesh in meshes:
            shape = mesh.parts[0][1]
            groups.setdefault((replace(shape, dp=1), mesh.dp), []).append(mesh)
        yield from groups.values()

    def rows(self) -> Iterator[Row]:
        """Every pipeline that trains the whole batch by itself."""
        batch = self.job.global_batch_size
        seen = set()
        for meshes, interleaves in self.families():
            samples = meshes[0].samples
            if batch % samples:
                continue
            for row in self.arranged(meshes, batch // samples, interleaves):
                if row not in seen:
                    seen.add(row)
                    yield row

    def arranged(self, meshes: list[Mesh], m: int, interleaves: bool) -> Iterator[Row]:
        """Orders of meshes, stages of each, depths and virtual stages."""
        limit = self.units.count
        if not self.trainer.fewer_microbatches_than_stages:
            limit = min(limit, m)
        if self.job.target == "torchtitan" and self.model.tied_embeddings:
            # It has no way to add up the gradients of both ends of a pipeline.
            limit = 1
        pp = self.job.pin.pp
        for used in range(1, len(self.cluster.islands) + 1):
            for order in permutations(meshes, used):
                if len(frozenset().union(*(mesh.islands for mesh in order))) < sum(
                    len(mesh.parts) for mesh in order
                ):
                    continue
                if not self._ends(order[0], order[-1]):
                    continue
                for held in product(*(range(1, mesh.most + 1) for mesh in order)):
                    if sum(held) <= limit and pp in (None, sum(held)):
                        yield from self._scheduled(order, held, m, interleaves)

    def _ends(self, first: Mesh, last: Mesh) -> bool:
        pin, islands = self.job.pin, self.cluster.islands
        for mesh, where in ((first, pin.embedding_on), (last, pin.head_on)):
            names = [{islands[at].name, islands[at].device.kind} for at in mesh.islands]
            if where is not None and not all(where in each for each in names):
                return False
        if self.trainer.equal_ends and (self.model.tied_embeddings or self.model.num_mtp_layers):
            return first.tps == last.tps and last.dp % first.dp == 0
        return True

    def _scheduled(
        self, order: tuple[Mesh, ...], held: tuple[int, ...], m: int, interleaves: bool
    ) -> Iterator[Row]:
        stages, pin = sum(held), self.job.pin
        own = [min(stages - s, m) for s in range(stages)]
        if pin.virtual_stages in (None, 1):
            if not self.trainer.other_warmup or pin.depth in (None, 0):
                yield Row(order, held, m, 1, tuple(own))
            early = []
            for extra in self._extras(len(order), m):
                more = [e for e, count in zip(extra, held, strict=True) for _ in range(count)]
                early.append(tuple(min(stages - s + more[s], m) for s in range(stages)))
            for depths in dict.fromkeys(early):
                yield Row(order, held, m, 1, depths, early=True)
        if not interleaves or "interleaved-1f1b" not in self.trainer.schedules:
            return
        for v in range(2, min(self.units.count, self.trainer.most_virtual_stages) + 1):
            whole = m % stages == 0 and stages >= 3
            if pin.virtual_stages in (None, v) and stages * v <= self.units.count and whole:
                yield Row(order, held, m, v, tuple(own))

    def _extras(self, meshes: int, microbatches: int) -> Iterator[tuple[int, ...]]:
        """Depth beyond the schedule's own, per mesh, where sends do not wait: none on the last
        mesh, never less on an earlier one."""
        if not self.trainer.other_warmup or self.job.pin.depth == 0:
            return
        most = MAX_EXTRA_DEPTH if self.job.pin.depth is None else self.job.pin.depth
        # No stage has more in flight than there are.
        most = min(most, microbatches)
        for extra in product(range(most + 1), repeat=meshes - 1):
            if list(extra) == sorted(extra, reverse=True):
                yield (*extra, 0)

    # ---- what is open in a row

    def cuts(self, row: Row) -> list[tuple[int, ...]]:
        """Units of every stage."""
        slots, units = sum(row.stages), self.units.count - sum(row.stages) * (row.virtual - 1)
        found = []
        for inner in combinations(range(1, units), slots - 1):
            edges = (0, *inner, units)
            found.append(tuple(b - a + row.virtual - 1 for a, b in pairwise(edges)))
        return found

    def recomputes(self, row: Row) -> list[tuple[RecomputeGranularity, ...]]:
        """Of every stage."""
        trainer, pin = self.trainer, self.job.pin.recompute
        choices = [NONE] if pin in (None, False) else []
        if trainer.full_recompute and pin in (None, True):
            choices.append(FULL)
        unfused = self.job.trainer.fused_attention is False
        core = RecomputeModule.CORE_ATTENTION in trainer.recompute_modules
        if unfused and core and pin is None:
            choices.append(SELECTIVE)
        slots = sum(row.stages)
        if trainer.recompute_per_stage:
            return list(product(choices, repeat=slots))
        return [(one,) * slots for one in choices]

    def shardings(self, row: Row, copies: list[int]) -> list[Sharding]:
        """Ways to share the optimizer's state; there is nothing to share among single copies."""
        pin = self.job.pin.sharded_optimizer
        found = [Sharding.NONE] if pin in (None, False) or max(copies) == 1 else []
        if self.job.target == "torchtitan" and row.meshes[0].parts[0][1].cp > 1:
            # Its context-parallel ranks are always among those that shard.
            found = []
        adam = self.job.optimizer is Optimizer.ADAMW or not self.trainer.shards_adam_only
        can = Sharding.OPTIMIZER in self.trainer.sharding and adam
        if can and max(copies) > 1 and pin is not False:
            found.append(Sharding.OPTIMIZER)
        return found

    # ---- devices

    def placed(self, rows: tuple[Row, ...]) -> tuple[tuple[tuple[Replica, ...], ...], ...] | None:
        """Replicas of every stage of these pipelines; None where they have no room together."""
        wanted: dict[int, list[tuple[int, int, int, Shape]]] = {}
        for p, row in enumerate(rows):
            for s, mesh in enumerate(row.slots):
                for at, shape in mesh.parts:
                    wanted.setdefault(at, []).append((p, s, at, shape))
        found: dict[tuple[int, int, int], Replica] = {}
        for at, parts in wanted.items():
            island = self.cluster.islands[at]
            sizes = [shape.num_devices for *_, shape in parts]
            starts = place(sizes, island.devices_per_node, len(self.usable[at]))
            if starts is None:
                return None
            for start, (p, s, _, shape) in zip(starts, parts, strict=True):
                found[p, s, at] = self._replica(island, at, start, shape)
        return tuple(
            tuple(
                tuple(found[p, s, at] for at, _ in mesh.parts) for s, mesh in enumerate(row.slots)
            )
            for p, row in enumerate(rows)
        )

    def _replica(self, island: Island, at: int, start: int, shape: Shape) -> Replica:
        first, node = self.cluster.first_device(island.name), island.devices_per_node
        devices = [
            first + self.usable[at][position // node] * node + position % node
            for position in range(start, start + shape.num_devices)
        ]
        return Replica(
            devices=compress(devices),
            tp=shape.tp,
            cp=shape.cp,
            ep=shape.ep,
            etp=shape.etp,
            microbatch_size=shape.microbatch_size,
            sequence_parallel=shape.sequence_parallel,
        )

    def ranges(self, row: Row, cut: tuple[int, ...]) -> list[tuple[Range, ...]]:
        """Layer positions of every stage's chunks."""
        stages, v, end = len(cut), row.virtual, len(self.model.layers)
        found: list[list[Range]] = [[] for _ in cut]
        at = 0
        for chunk in range(v):
            for s, n in enumerate(cut):
                stop = at + n // v + (chunk < n % v)
                head = chunk == v - 1 and s == stages - 1
                a, b = self.units.range(at, stop, embedding=at == 0, head=head)
                found[s].append((a, end if head else b))
                at = stop
        return [tuple(each) for each in found]

    def pipeline(
        self,
        row: Row,
        replicas: tuple[tuple[Replica, ...], ...],
        cut: tuple[int, ...],
        recompute: tuple[RecomputeGranularity, ...],
    ) -> PlacedPipeline:
        """The pipeline with all that was open."""
        ranges = self.ranges(row, cut)
        return PlacedPipeline(
            tuple(
                PlacedStage(replicas[s], ranges[s], recompute[s], row.depths[s])
                for s in range(len(cut))
            ),
            row.microbatches,
            row.early,
        )
