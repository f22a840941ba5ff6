"""Every plan of the declared space of a small job, one pipeline at a time.

Written from docs/search.md's table: islands, shapes, meshes (stages on one island, unions, mixed
kinds), families, orders, stages per mesh, warm-up depths, layers per stage, recomputation per
stage, sharding, pins and forbids. A `Row` is a pipeline whose layers and recomputation are still
open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations, product

from oracle_price import PlacedPipeline, PlacedStage, Range, State

from hetplan.cluster.spec import Cluster, Island
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import Attention, Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Sharding,
    compress,
)
from hetplan.plans.targets import TARGETS, Target

NONE, FULL = Recompute(), Recompute(granularity=RecomputeGranularity.FULL)
MAX_CONTEXT = 16
MAX_PER_UNION = 4
MAX_EXTRA_DEPTH = 8
MAX_MIXED_DEVICES = 16


@dataclass(frozen=True)
class Mesh:
    """One way to run stages: its part on every island that it uses."""

    parts: tuple[tuple[int, Shape], ...]
    """(position of the island, shape), islands increasing."""
    most: int
    """Stages that have room."""

    @property
    def islands(self) -> frozenset[int]:
        """Positions of the islands."""
        return frozenset(island for island, _ in self.parts)

    @property
    def samples(self) -> int:
        """Sequences of a microbatch."""
        return sum(shape.samples for _, shape in self.parts)

    @property
    def dp(self) -> int:
        """Of all parts."""
        return sum(shape.dp for _, shape in self.parts)

    @property
    def tps(self) -> frozenset[int]:
        """Tensor-parallel degrees."""
        return frozenset(shape.tp for _, shape in self.parts)


@dataclass(frozen=True)
class Meshes:
    """Where stages may lie, alone or shared, and with which degrees."""

    model: ModelSpec
    cluster: Cluster
    job: Job

    @property
    def trainer(self) -> Target:
        """What the target can run, as data."""
        return TARGETS[self.job.target]

    @cached_property
    def usable(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of every island that may be used."""
        out = set(self.job.forbid.nodes)
        return tuple(
            ()
            if island.name in self.job.forbid.islands
            else tuple(
                node
                for node in range(island.nodes)
                if node not in island.nodes_out and f"{island.name}/{node}" not in out
            )
            for island in self.cluster.islands
        )

    @cached_property
    def experts(self) -> Experts | None:
        """The routed experts of the model's layers, all alike."""
        found = {
            run.layer.mlp for run in self.model.layer_runs if isinstance(run.layer.mlp, Experts)
        }
        return found.pop() if found else None

    def _slices(self, tp: int) -> bool:
        for run in self.model.layer_runs:
            attention, mlp = run.layer.attention, run.layer.mlp
            assert isinstance(attention, Attention)
            if attention.num_heads % tp:
                return False
            if attention.num_kv_heads % tp and tp % attention.num_kv_heads:
                return False
            width = mlp.expert_ffn_hidden_size if isinstance(mlp, Experts) else mlp.ffn_hidden_size
            if width % tp:
                return False
        return True

    def shapes(
        self, at: int, *, alike: bool, mixed: bool = False, whole: bool = True
    ) -> Iterator[Shape]:
        """What a part on this island can be; `alike`: of families whose stages share one shape.

        `mixed`: beside a part of another kind, where every split of a microbatch is possible. Not
        `whole`: beside parts of its own kind; all of them together divide the batch.
        """
        island, nodes = self.cluster.islands[at], len(self.usable[at])
        pin, batch = self.job.pin, self.job.global_batch_size
        total = nodes * island.devices_per_node
        wide = alike and self.trainer.context_parallel
        contexts = [1]
        if wide:
            contexts = [cp for cp in (1, 2, 4, 8, 16) if self._context(cp)]
        for tp, cp in product(range(1, island.devices_per_node + 1), contexts):
            if island.devices_per_node % tp or not self._slices(tp):
                continue
            if pin.tp not in (None, tp) or pin.cp not in (None, cp):
                continue
            for dp in range(1, total // (tp * cp) + 1):
                size, node = tp * cp * dp, island.devices_per_node
                if (node % size and size % node) or (whole and batch % dp):
                    continue
                sp = tp > 1 and self.trainer.sequence_parallel
                sp = sp and (self.job.sequence_length // cp) % tp == 0
                if pin.sequence_parallel is not None and tp > 1:
                    if pin.sequence_parallel and not sp:
                        continue
                    sp = pin.sequence_parallel
                needs = self.experts and self.trainer.experts_need_sequence_parallel
                if needs and tp > 1 and not sp:
                    continue
                for ep, etp in self._expert_degrees(tp, cp, dp, alike):
                    for size in range(1, batch // dp + 1):
                        splits = mixed or not whole or (batch // dp) % size == 0
                        if not splits or pin.microbatch_size not in (None, size):
                            continue
                        yield Shape(
                            tp=tp,
                            cp=cp,
                            dp=dp,
                            microbatch_size=size,
                            ep=ep,
                            etp=etp,
                            sequence_parallel=sp,
                        )

    def _context(self, cp: int) -> bool:
        return cp <= MAX_CONTEXT and (cp == 1 or self.job.sequence_length % (2 * cp) == 0)

    def _expert_degrees(self, tp: int, cp: int, dp: int, alike: bool) -> Iterator[tuple[int, int]]:
        pin = self.job.pin.ep
        if self.experts is None:
            if pin in (None, 1):
                yield 1, 1
            return
        if pin in (None, 1):
            yield 1, tp
        if not (alike and self.trainer.expert_parallel):
            return
        for ep in range(2, self.experts.num_experts + 1):
            for etp in sorted({1, tp}) if self.trainer.sequence_parallel else (tp,):
                ranks = cp * dp * tp
                fits = self.experts.num_experts % ep == 0 and ranks % etp == 0
                if fits and (ranks // etp) % ep == 0 and pin in (None, ep):
                    yield ep, etp

    def meshes(self, *, alike: bool) -> list[Mesh]:
        """Of one island, and of several that share every stage."""
        found = []
        pin = self.job.pin
        for at in range(len(self.cluster.islands)):
            if self.usable[at]:
                found += [
                    Mesh(((at, one),), self._room(at, one)) for one in self.shapes(at, alike=alike)
                ]
        if not pin.same_degrees:
            found += self._unions(alike=alike)
            if self.trainer.mixed_stages and not alike:
                found += self._mixed()
        batch = self.job.global_batch_size
        return [
            mesh
            for mesh in dict.fromkeys(found)
            if mesh.most > 0 and mesh.samples <= batch and pin.dp in (None, mesh.dp)
        ]

    def _room(self, at: int, shape: Shape) -> int:
        node, nodes, size = self.cluster.islands[at].devices_per_node, len(self.usable[at]), 0
        size = shape.num_devices
        return nodes * (node // size) if size <= node else nodes // (size // node)

    def _unions(self, *, alike: bool) -> Iterator[Mesh]:
        islands = self.cluster.islands
        for count in range(2, MAX_PER_UNION + 1):
            for chosen in combinations(range(len(islands)), count):
                kinds = {(islands[at].device.kind, islands[at].devices_per_node) for at in chosen}
                if len(kinds) > 1 or not all(self.usable[at] for at in chosen):
                    continue
                nodes = [len(self.usable[at]) for at in chosen]
                whole = math.gcd(*nodes)
                ways = {(1,) * count, tuple(n // whole for n in nodes)}
                choices = [set(self.shapes(at, alike=alike, whole=False)) for at in chosen]
                for one in choices[0]:
                    if one.ep > 1:
                        continue
                    for way in ways:
                        if one.dp % way[0]:
                            continue
                        parts = [replace(one, dp=one.dp // way[0] * k) for k in way]
                        if all(part in each for part, each in zip(parts, choices, strict=True)):
                            pairs = tuple(zip(chosen, parts, strict=True))
                            yield Mesh(pairs, min(self._room(at, part) for at, part in pairs))

    def _mixed(self) -> Iterator[Mesh]:
        islands = self.cluster.islands
        for one, two in combinations(range(len(islands)), 2):
            a, b = islands[one], islands[two]
            if a.region != b.region or a.device.kind == b.device.kind:
                continue
            many = sum(len(self.usable[at]) * islands[at].devices_per_node for at in (one, two))
            if not (self.usable[one] and self.usable[two]) or many > MAX_MIXED_DEVICES:
                continue
            choices = [[*self.shapes(at, alike=False, mixed=True)] for at in (one, two)]
            for pair in product(*choices):
                parts = tuple(zip((one, two), pair, strict=True))
                mesh = Mesh(parts, min(self._room(at, part) for at, part in parts))
                assert self.job.global_batch_size <= 8, "larger ticks have fewer splits"
                yield mesh


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
    split: str = ""
    """Schedule that runs the gradients of the weights apart; empty: none."""

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
                if not self._ends(order[0], order[-1]) or not self._one_library(order):
                    continue
                for held in product(*(range(1, mesh.most + 1) for mesh in order)):
                    if sum(held) <= limit and pp in (None, sum(held)):
                        yield from self._scheduled(order, held, m, interleaves)

    def _one_library(self, order: tuple[Mesh, ...]) -> bool:
        """Megatron-LM and torchtitan have one library; the oracle's vendors have one each."""
        if self.job.target not in ("megatron", "torchtitan") or self.job.trainer.mixed_libraries:
            return True
        used = frozenset().union(*(mesh.islands for mesh in order))
        return len({self.cluster.islands[at].device.vendor for at in used}) == 1

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
        if pin.schedule in ("zb-h1", "zbv", "dualpipev"):
            # torch's zero bubble takes groups of at least P microbatches.
            whole = pin.schedule != "zb-h1" or self.job.target == "any"
            v = 1 if pin.schedule == "zb-h1" else 2
            enough = m >= 2 * stages or pin.schedule != "dualpipev"
            enough = enough and (whole or m % max(1, m // stages) == 0)
            if stages > 1 and stages * v <= self.units.count and enough:
                yield Row(order, held, m, v, tuple(own), split=pin.schedule)
            return
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

    def recomputes(self, row: Row, *, several: bool = False) -> list[tuple[Recompute, ...]]:
        """Of every stage."""
        trainer, pin = self.trainer, self.job.pin.recompute
        named = self.job.pin.recompute_modules
        choices = [NONE] if pin in (None, False) else []
        if trainer.full_recompute and pin in (None, True):
            choices.append(FULL)
        if trainer.recompute_modules and pin is None:
            choices += self._selective(several=several)
        if named:
            choices = [Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=named)]
        slots = sum(row.stages)
        if trainer.recompute_per_stage:
            return list(product(choices, repeat=slots))
        return [(one,) * slots for one in choices]

    def _selective(self, *, several: bool) -> list[Recompute]:
        """Scores where they are written; then activations, with norms where no trainer fuses them;
        then MLPs and experts whole. Of several pipelines scores alone."""
        module = RecomputeModule
        unfused = self.job.trainer.fused_attention is False
        scores = (module.CORE_ATTENTION,) if unfused else ()
        mlps = {type(run.layer.mlp) for run in self.model.layer_runs}
        routed = mlps == {Experts} and self.job.precision is Precision.BFLOAT16
        light = (module.ACTIVATION,) if routed else ()
        norms = (module.NORMS,) if self.job.target == "any" else ()
        if self.job.target == "any":
            light = (module.NORMS, module.ACTIVATION)
        whole = [module.MLP] * (mlps != {Experts}) + [module.EXPERTS] * (Experts in mlps)
        sets = [scores, (*scores, *light), (*scores, *norms, *whole)]
        sets = [each for each in dict.fromkeys(sets[: 1 if several else 3]) if each]
        return [Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=s) for s in sets]

    def states(self, rows: Sequence[Row], copies: list[int]) -> list[State]:
        """Ways to share the optimizer's state, on the devices or in the memory of their hosts."""
        every, pin = [*map(State, self._shardings(rows[0], copies))], self.job.pin.optimizer_offload
        if len(rows) == 1 and len(rows[0].slots) == 1 and not rows[0].early:
            every += self._split(rows[0].slots[0])
        found = [] if pin else [*every]
        islands = {at for row in rows for mesh in row.meshes for at in mesh.islands}
        known = all(self.cluster.islands[at].host_memory_bytes for at in islands)
        if pin == 0 or len(rows) > 1 or not known or not self.trainer.optimizer_offload:
            return found
        for state in every:
            # Megatron-LM has it in the optimizer that copies share.
            alone = state.sharding is Sharding.NONE and max(copies) > 1
            if not (alone and self.job.target == "megatron"):
                found.append(state._replace(offload=1.0 if pin is None else pin))
        return found

    def _split(self, mesh: Mesh) -> list[State]:
        """Of a pipeline of one stage on one island: gradients, or parameters too, are split among
        all copies; with torchtitan also among those of a node of any island where it has room.
        """
        pin, (_, shape) = self.job.pin, mesh.parts[0]
        copies = shape.dp * shape.cp
        shares = pin.sharded_optimizer is not False and pin.sharding is not Sharding.NONE
        if len(mesh.parts) > 1 or copies == 1 or not shares:
            return []
        ranks = {0}
        if self.job.target == "torchtitan":
            alike = [m for m in self.meshes(alike=True) if [one for _, one in m.parts] == [shape]]
            for other in alike:
                size = self.cluster.islands[other.parts[0][0]].devices_per_node // shape.tp
                whole = size > 1 and size < copies and copies % size == 0 and size % shape.cp == 0
                experts = shape.num_devices // (shape.ep * shape.etp)
                if whole and not (self.experts and experts % (copies // size)):
                    ranks.add(size)
        levels = {*self.trainer.sharding} & {Sharding.GRADIENTS, Sharding.PARAMETERS}
        return [
            State(level, 0.0, size)
            for level in sorted(levels)
            for size in sorted(ranks)
            if pin.sharding in (None, level)
        ]

    def _shardings(self, row: Row, copies: list[int]) -> list[Sharding]:
        """Ways to share the optimizer's state; there is nothing to share among single copies."""
        pin, level = self.job.pin.sharded_optimizer, self.job.pin.sharding
        if pin is None and level is not None:
            pin = level is not Sharding.NONE
        found = [Sharding.NONE] if pin in (None, False) or max(copies) == 1 else []
        if self.job.target == "torchtitan" and row.meshes[0].parts[0][1].cp > 1:
            # Its context-parallel ranks are always among those that shard.
            found = []
        adam = self.job.optimizer is Optimizer.ADAMW or not self.trainer.shards_adam_only
        can = Sharding.OPTIMIZER in self.trainer.sharding and adam
        if can and max(copies) > 1 and pin is not False and level in (None, Sharding.OPTIMIZER):
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
            back = bool(row.split) and chunk == 1  # the V comes back up
            for s, n in list(enumerate(cut))[:: -1 if back else 1]:
                stop = at + n // v + (chunk < n % v)
                head = chunk == v - 1 and s == (0 if back else stages - 1)
                a, b = self.units.range(at, stop, embedding=at == 0, head=head)
                found[s].append((a, end if head else b))
                at = stop
        return [tuple(each) for each in found]

    def pipeline(
        self,
        row: Row,
        replicas: tuple[tuple[Replica, ...], ...],
        cut: tuple[int, ...],
        recompute: tuple[Recompute, ...],
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
