"""Every way to run a stage of a small job: shapes on one island, unions, mixed kinds.

Written from the table of the declared space in docs/search.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.layers import Attention, Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity
from hetplan.plans.targets import TARGETS, Target

NONE, FULL = RecomputeGranularity.NONE, RecomputeGranularity.FULL
SELECTIVE = RecomputeGranularity.SELECTIVE
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

    def shapes(self, at: int, *, alike: bool, mixed: bool = False) -> Iterator[Shape]:
        """What a part on this island can be; `alike`: of families whose stages share one shape.

        `mixed`: beside a part of another kind, where every split of a microbatch is possible.
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
                if (node % size and size % node) or batch % dp:
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
                        splits = mixed or (batch // dp) % size == 0
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
            for etp in sorted({1, tp}):
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
                choices = [set(self.shapes(at, alike=alike)) for at in chosen]
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
