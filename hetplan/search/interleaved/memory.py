"""How many layer units fit on each slot of an interleaved pipeline (`hetplan.cost.memory`)?

The formulas are those of `hetplan.cost.memory.device` for stages of several chunks; a test holds
the two equal. Of a stage on several islands the part with least room counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.memory.activations import cut_of
from hetplan.cost.memory.device import boundary_bytes, messages, state_bytes
from hetplan.cost.memory.lines import StageBytes, stage_bytes
from hetplan.cost.memory.values import MemoryLayout, job_memory
from hetplan.job.spec import Job
from hetplan.model.layer_units import LayerUnits
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import LayerRange, RecomputeGranularity, Sharding
from hetplan.plans.targets import target
from hetplan.search.costs.placed import RECOMPUTE
from hetplan.search.families.family import Family, Mesh
from hetplan.search.families.space import FIRST, LAST, Floats, Ints
from hetplan.search.interleaved.moments import Kept, moments, most_that_fit

_INSIDE = 1e-12
"""A sum in another order differs by less than this part of itself."""

_SEVERAL = (LayerRange(start=0, stop=1), LayerRange(start=1, stop=2))
"""Stands for chunks; only that there are several counts."""


class MemoryRoom(Protocol):
    """Says what fits on the slots of a pipeline."""

    def most_units(self, family: Family, mesh: Sequence[int], units: int) -> Ints:
        """[P, V] layer units that fit on each slot of these meshes; 0: none fits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Memory of one part of a stage: what stands there, what is kept, and the room for it."""

    kept: Kept
    base: Floats
    update: Floats
    room: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMemory:
    """`MemoryRoom` of a job's stages; keeps what families share."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    units: LayerUnits
    _bytes: dict[tuple[object, ...], tuple[StageBytes, StageBytes, float]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _parts: dict[tuple[object, ...], tuple[Mesh, list[_Part]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _most: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def most_units(self, family: Family, mesh: Sequence[int], units: int) -> Ints:
        """[P, V] layer units that fit on each slot of these meshes; 0: none fits."""
        slots = len(mesh)
        found = np.zeros((slots, len(family.recompute)), dtype=np.int64)
        for s, at in enumerate(mesh):
            role = FIRST * (s == 0) + LAST * (s == slots - 1)
            for v, recompute in enumerate(family.recompute):
                found[s, v] = self._fits(family, family.meshes[at], recompute, role, s, slots)
        return np.minimum(found, units)

    def _fits(
        self,
        family: Family,
        mesh: Mesh,
        recompute: RecomputeGranularity,
        role: int,
        slot: int,
        slots: int,
    ) -> int:
        m, chunks = family.num_microbatches, family.virtual_stages
        place = (id(mesh), family.sharding, recompute, role, m)
        parts = self._parts.get(place)
        if parts is None:
            # The mesh is kept with them, so that its identity stays its own.
            parts = self._parts[place] = (
                mesh,
                [
                    self._part(family, mesh, number, recompute, role)
                    for number in range(len(mesh.islands))
                ],
            )
        key = (*place, slot, slots, chunks)
        found = self._most.get(key)
        if found is None:
            places = moments(slot, slots, m, chunks)
            found = self._most[key] = min(
                most_that_fit(
                    places, part.kept, part.base, part.update, part.room, self.units.count
                )
                for part in parts[1]
            )
        return int(found)

    def _part(
        self, family: Family, mesh: Mesh, number: int, recompute: RecomputeGranularity, role: int
    ) -> _Part:
        shape = mesh.shapes[number]
        island = self.cluster.islands[mesh.islands[number]]
        middle, own, beside = self._stage(shape, recompute, role)
        shards = experts = 1
        if family.sharding is not Sharding.NONE:
            shards = sum(each.dp * each.cp for each in mesh.shapes)
            experts = _expert_shards(shape, shards)
        # The state of a stage is the same however many chunks it is dealt over.
        lines = own.lines(family.sharding, shards, experts, family.num_microbatches)
        fixed = lines.last.fixed - own.working
        sent = middle.kept.fixed
        return _Part(
            kept=Kept(
                each=own.kept.each,
                fixed=sent,
                working=middle.working + beside,
                first_fixed=own.kept.fixed if role & FIRST else sent,
                first_before=own.before if role & FIRST else -math.inf,
                first_released=own.released,
                last_fixed=own.kept.fixed if role & LAST else sent,
                last_working=own.working if role & LAST else middle.working + beside,
            ),
            base=np.array([fixed, lines.last.each]),
            update=np.array([lines.update.fixed, lines.update.each]),
            room=island.memory_bytes * (1 - self.job.memory_reserve_fraction) * (1 + _INSIDE),
        )

    def _stage(
        self, shape: Shape, recompute: RecomputeGranularity, role: int
    ) -> tuple[StageBytes, StageBytes, float]:
        """Of a stage in the middle, of one in this role, and what messages of the latter take
        beside a pass more than those of the former.
        """
        key = (replace(shape, dp=1), recompute, role)
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = self._priced(shape, recompute, role)
        return found

    def _priced(
        self, shape: Shape, recompute: RecomputeGranularity, role: int
    ) -> tuple[StageBytes, StageBytes, float]:
        job, model = self.job, self.model
        size = target(job.target).padded_vocab_size(model.vocab_size, shape.tp)
        model = replace(model, vocab_size=size)
        layout = MemoryLayout(
            chunks=_SEVERAL,
            tp=shape.tp,
            cp=shape.cp,
            ep=shape.ep,
            etp=shape.tp if experts_as_the_rest(shape) else shape.etp,
            microbatch_size=shape.microbatch_size,
            num_microbatches=1,
            sequence_parallel=shape.sequence_parallel,
            recompute=RECOMPUTE[recompute],
        )
        habits = job_memory(job)
        cut = cut_of(
            layout, job.sequence_length, state_bytes(job, habits).parameter, job.expert_load_factor
        )
        tokens = layout.microbatch_size * job.sequence_length / layout.cp
        message = boundary_bytes(model, cut, tokens)
        beside = [
            messages(
                layout, habits, message, first=bool(each & FIRST), last=bool(each & LAST)
            ).beside
            for each in (role, 0)
        ]
        return (
            stage_bytes(model, job, layout, self.units, 0),
            stage_bytes(model, job, layout, self.units, role),
            beside[0] - beside[1],
        )


def _expert_shards(shape: Shape, shards: int) -> int:
    """Ranks that share the state of routed experts (`hetplan.cost.step_model.pricer`)."""
    if experts_as_the_rest(shape):
        return shards
    return math.gcd(shards, shape.num_devices // (shape.ep * shape.etp))
