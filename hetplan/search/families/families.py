"""Which families of one-pipeline plans can the job's target run?

Everything that divides, before any time or memory is known. Degrees: tp divides what it slices and
the devices of a node; cp is 1 or a power of two up to 16 of which twice divides the sequence; ep
divides the experts and cp * dp * tp / etp; dp * microbatch size divides the batch. Targets that
need equal degrees have a family per shape, others one per tick (sequences of a microbatch), whose
meshes differ in tp, dp and microbatch size. `any` has both. Each comes once per schedule, per
sharding and, where all stages must recompute alike, per recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, RecomputeModule, Sharding
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target
from hetplan.search.families.allowed import divisors, stage_limit, tensor_degrees
from hetplan.search.families.family import Family, Mesh
from hetplan.search.families.rooms import Room, Rooms

MOST_CONTEXT_PARALLEL = 16
LEAST_INTERLEAVED = 3
"""Stages from which interleaving is searched: Megatron-LM has no fewer, and two stages gain
little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    """What all stages of a family of one shape share."""

    tp: int
    cp: int
    dp: int
    sequence_parallel: bool
    rooms: tuple[Room, ...]


@dataclass(frozen=True, kw_only=True)
class Families:
    """The families of one question; `cluster` is what `allowed_cluster` left of the user's."""

    model: ModelSpec
    cluster: Cluster
    job: Job

    @cached_property
    def _all(self) -> tuple[Family, ...]:
        pin = self.job.pin
        if pin.pipelines not in (None, 1):
            return ()
        found = []
        if self.one_shape:
            found += [*self._of_one_shape()]
        if self.unlike_shapes:
            found += [*self._of_one_tick()]
        found.sort(key=_order)
        return tuple(found)

    def families(self) -> tuple[Family, ...]:
        """Every family, sorted by tick, schedule, sharding and recomputation; made once."""
        return self._all

    # ---- what is searched

    @cached_property
    def unlike_shapes(self) -> bool:
        """Whether there are families whose stages may differ in their degrees."""
        return self._trainer.stages_differ and not self.job.pin.same_degrees

    @cached_property
    def one_shape(self) -> bool:
        """Whether there are families whose stages have one shape.

        With a target whose stages may differ these are what equal degrees are pinned for, or what
        only they are searched with.
        """
        trainer = self._trainer
        more = trainer.context_parallel or trainer.expert_parallel
        return not self.unlike_shapes or more

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Degrees that the model, the nodes and the pins allow."""
        return _kept(self.job.pin.tp, tensor_degrees(self.model, self.cluster))

    @cached_property
    def context_degrees(self) -> tuple[int, ...]:
        """1, and what divides the sequence where the target has context parallelism."""
        found, length = [1], self.job.sequence_length
        cp = 2
        while self._trainer.context_parallel and cp <= MOST_CONTEXT_PARALLEL:
            if length % (2 * cp) == 0:
                found.append(cp)
            cp *= 2
        return _kept(self.job.pin.cp, found)

    @cached_property
    def recompute(self) -> tuple[RecomputeGranularity, ...]:
        """What a stage may recompute."""
        trainer, pin = self._trainer, self.job.pin.recompute
        found = [] if pin else [RecomputeGranularity.NONE]
        alone = RecomputeModule.CORE_ATTENTION in trainer.recompute_modules
        if pin is None and alone and not trainer_settings(self.job).fused_attention:
            found.append(RecomputeGranularity.SELECTIVE)
        if pin is not False and trainer.full_recompute:
            found.append(RecomputeGranularity.FULL)
        return tuple(found)

    @cached_property
    def rooms(self) -> Rooms:
        """Where stages have room."""
        return Rooms(
            cluster=self.cluster,
            most_stages=self.model.num_layers,
            unions=not self.job.pin.same_degrees,
        )

    @cached_property
    def batch_divisors(self) -> tuple[int, ...]:
        """Of the global batch size."""
        return divisors(self.job.global_batch_size)

    @property
    def _trainer(self) -> Target:
        return target(self.job.target)

    # ---- families of one shape

    def _of_one_shape(self) -> Iterator[Family]:
        pin, batch = self.job.pin, self.job.global_batch_size
        for each in self._degrees():
            alone = tuple(room for room in each.rooms if len(room.islands) == 1)
            for size in _kept(pin.microbatch_size, divisors(batch // each.dp)):
                count = batch // (each.dp * size)
                if not self._long_enough(count, each.rooms):
                    continue
                for ep, etp in self._expert_degrees(each):
                    rooms = each.rooms if ep == 1 else alone
                    if rooms:
                        meshes = _meshes_of(each, size, ep, etp, rooms)
                        yield from self._with_schedules(
                            each.dp * size, count, meshes, copies=each.dp * each.cp
                        )

    def _degrees(self) -> Iterator[_Degrees]:
        few = not self.job.pin.same_degrees and self._trainer.stages_differ
        for tp in self.tensor_degrees:
            for cp in self.context_degrees:
                parallel = self._sequence_parallel(tp, cp)
                if parallel is None:
                    continue
                for dp in _kept(self.job.pin.dp, self.batch_divisors):
                    rooms = self.rooms.of(tp, cp, dp)
                    if rooms:
                        yield _Degrees(
                            tp=tp, cp=cp, dp=dp, sequence_parallel=parallel, rooms=rooms
                        )

    def _sequence_parallel(self, tp: int, cp: int) -> bool | None:
        """Whether ranks of these degrees are sequence parallel; None: there are no such ranks."""
        trainer, pin = self._trainer, self.job.pin.sequence_parallel
        if tp == 1:
            return False
        divides = self.job.sequence_length // cp % tp == 0
        found = trainer.sequence_parallel and divides and pin is not False
        needed = pin or (trainer.experts_need_sequence_parallel and self._experts is not None)
        return None if needed and not found else found

    @cached_property
    def _experts(self) -> int | None:
        """What the numbers of experts of all layers have in common; None without experts."""
        found = experts_of(self.model, 0, len(self.model.layers))
        return math.gcd(*(each.num_experts for each in found)) if found else None

    def _expert_degrees(self, each: _Degrees) -> Iterator[tuple[int, int]]:
        """(ep, etp)"""
        pin, experts = self.job.pin.ep, self._experts
        if experts is None:
            yield from [(1, 1)] if pin in (None, 1) else []
            return
        if pin in (None, 1):
            yield 1, each.tp
        if not self._trainer.expert_parallel:
            return
        for etp in sorted({1, each.tp}):
            ranks = each.cp * each.dp * each.tp // etp
            for ep in _kept(pin, divisors(experts)):
                if ep > 1 and ranks % ep == 0:
                    yield ep, etp

    # ---- families of one tick

    def _of_one_tick(self) -> Iterator[Family]:
        batch = self.job.global_batch_size
        for samples in self.batch_divisors:
            meshes = tuple(sorted(self._meshes_of_tick(samples), key=_mesh_order))
            count = batch // samples
            if meshes and self._long_enough(count, self._whole_rooms(meshes)):
                copies = max(sum(each.dp for each in mesh.shapes) for mesh in meshes)
                yield from self._with_schedules(samples, count, meshes, copies=copies)
