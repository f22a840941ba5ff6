"""What a stage costs on one island: passes of its layers, by placement and shape, priced once.

Stages of an island lie alike, so the first one stands for all. The layers are priced as those of a
plan are (`hetplan.cost.step_model`), so that sums of these numbers are what the plan costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.arrays import Floats
from hetplan.cost.memory.lines import StageBytes, stage_bytes
from hetplan.cost.memory.values import MemoryLayout
from hetplan.cost.step_model.groups import (
    Groups,
    KnownCollectives,
    KnownGroups,
    groups_of,
    known_of,
)
from hetplan.cost.step_model.layer_compute import layer_parameters
from hetplan.cost.step_model.layers import LayerCost, LayerPricer
from hetplan.cost.step_model.units import Settings, copies_within, layer_kinds, with_sharding
from hetplan.cost.terms import seconds_of_parts
from hetplan.errors import InputError
from hetplan.job.kernels import job_on
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.layer_units import LayerUnits, layer_units, planning_faults
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import device_ranges
from hetplan.plans.build import overlap_of, replica_of
from hetplan.plans.chosen import Shape
from hetplan.plans.formats import reduction_precision
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    LayerRange,
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Sharding,
)
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor
from hetplan.search.space.forwarding_predictor import CachingPredictor
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, ROLES

Sharing: TypeAlias = tuple[Sharding, int]
"""What is split of weights that microbatches reduce or gather, and among how many ranks."""

_FORWARD, _BACKWARD, _AGAIN = range(3)


class Passes(NamedTuple):
    """Seconds of one microbatch on one part of a stage; V counts the recomputations."""

    forward: Floats
    """[V] one layer unit."""
    backward: Floats
    """[V] recomputation included."""
    extra_forward: Floats
    """[4, V] what the stage has besides, by role."""
    extra_backward: Floats
    """[4, V]"""


Modules: TypeAlias = tuple[RecomputeModule, ...]
"""What a stage repeats in its backward pass; none: whole layers, if anything."""


def _recompute(modules: Modules) -> Recompute:
    """Of these modules, or of whole layers."""
    if not modules:
        return FULL_RECOMPUTE
    return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)


class Weights(NamedTuple):
    """Parameters on one rank: (all but experts that are cut or copied otherwise, those)."""

    unit: tuple[float, float]
    extra: tuple[tuple[float, float], ...]
    """By role."""


@dataclass(frozen=True, kw_only=True)
class StagePricer:
    """Prices stages of one job on the islands of one cluster; keeps what it has priced."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor = field(repr=False)
    chain: tuple[Modules, ...] = ((),)
    """Sets of modules that will be asked for: they are priced together."""
    _groups: dict[tuple[int, ...], Groups] = field(default_factory=dict, repr=False, compare=False)
    _known_groups: KnownGroups = field(default_factory=dict, repr=False, compare=False)
    _seconds: dict[tuple[object, ...], dict[Modules, Floats]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _weights: dict[tuple[int, ...], Weights] = field(
        default_factory=dict, repr=False, compare=False
    )
    _bytes: dict[tuple[object, ...], StageBytes] = field(
        default_factory=dict, repr=False, compare=False
    )
    _padded: dict[int, ModelSpec] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def units(self) -> LayerUnits:
        """How the layers are cut; an InputError where they have no units."""
        found = layer_units(self.model, self.job.sequence_length)
        if found is None:
            raise InputError(*planning_faults(self.model, self.job.sequence_length))
        return found

    @cached_property
    def known(self) -> KnownCollectives:
        """Collectives that were priced before."""
        return known_of(self.cluster, self.job, self.predictor)

    @cached_property
    def _jobs(self) -> tuple[Job, ...]:
        """The job as it runs on each island."""
        return tuple([job_on(each.device, self.job) for each in self.cluster.islands])

    @cached_property
    def _caching(self) -> CachingPredictor:
        return CachingPredictor(self.predictor)

    @cached_property
    def _kinds(self) -> tuple[tuple[int, ...], Floats, Floats]:
        """Positions of each kind of layer; how many of each a unit has, and each role besides."""
        kinds, kind_at = layer_kinds(self.model, self.job.sequence_length)
        units, last = self.units, len(kind_at) - 1

        def counted(positions: Sequence[int]) -> Floats:
            found = np.zeros(len(kinds))
            for at in positions:
                found[kind_at[at]] += 1
            return found

        first = counted((0, *units.front_positions))
        behind = counted(range(units.back_positions.start, last + 1))
        extra = np.zeros((ROLES, len(kinds)))
        extra[[FIRST, BOTH]] += first
        extra[[LAST, BOTH]] += behind
        return kinds, counted(units.unit_positions), extra

    def memory_class(self, island: int) -> int:
        """Stages that are alike need the same memory on islands of one class."""
        return int(self._jobs[island] is not self.job)

    def room_bytes(self, island: int) -> float:
        """Bytes of a device there that a plan may fill."""
        return self.cluster.islands[island].memory_bytes * (1 - self.job.memory_reserve_fraction)

    def host_bytes(self, island: int) -> float:
        """Bytes of a device's part of its host there; infinite where they are not known."""
        found = self.cluster.islands[island].host_bytes_per_device
        return math.inf if found is None else found

    def padded(self, tp: int) -> ModelSpec:
        """The model with the vocabulary that the target trains under this tp."""
        if tp not in self._padded:
            size = target(self.job.target).padded_vocab_size(self.model.vocab_size, tp)
            same = size == self.model.vocab_size
            self._padded[tp] = self.model if same else replace(self.model, vocab_size=size)
        return self._padded[tp]

    def replica(self, island: int, shape: Shape, number: int = 0) -> Replica:
        """The devices of the stage of this number where all stages before it are like it."""
        place, size = self.cluster.islands[island], shape.num_devices
        per_node = place.filled_node // size or 1
        start = number // per_node * max(size, place.filled_node) + number % per_node * size
        return replica_of(shape, device_ranges(self.cluster, place, start, size))

    def groups(self, island: int, shape: Shape) -> Groups:
        """Who communicates inside the first stage."""
        key = (island, shape.tp, shape.cp, shape.dp, shape.ep, shape.etp)
        if key not in self._groups:
            replica = self.replica(island, shape)
            self._groups[key] = groups_of(self.cluster, replica, self._known_groups)
        return self._groups[key]

    def passes(
        self,
        island: int,
        shape: Shape,
        recompute: Sequence[Recompute],
        padded_for: int = 0,
        sharing: Sharing | None = None,
    ) -> Passes:
        """Passes of stages of this shape with each of these recomputations.

        `padded_for`: the tp that the vocabulary is padded for; 0: the shape's own. `sharing`: what
        is reduced and gathered in them.
        """
        _, unit, extra = self._kinds
        kinds = tuple(range(unit.size))
        forward, backward = self._both(island, shape, recompute, kinds, padded_for, sharing)
        return Passes(
            forward=forward @ unit,
            backward=backward @ unit,
            extra_forward=extra @ forward.T,
            extra_backward=extra @ backward.T,
        )

    def unit_passes(
        self, island: int, shape: Shape, recompute: Sequence[Recompute]
    ) -> tuple[Floats, Floats]:
        """(forward, backward) of one layer unit, [V] each; no other layers are priced."""
        unit = self._kinds[1]
        kinds = tuple(np.flatnonzero(unit).tolist())
        forward, backward = self._both(island, shape, recompute, kinds)
        return forward @ unit[list(kinds)], backward @ unit[list(kinds)]

    def _both(
        self,
        island: int,
        shape: Shape,
        recompute: Sequence[Recompute],
        kinds: tuple[int, ...],
        padded_for: int = 0,
        sharing: Sharing | None = None,
    ) -> tuple[Floats, Floats]:
        """Passes [V, kinds] of these kinds of layers."""
        model = self.padded(padded_for or shape.tp)
        known = self._kind_seconds(
            island, shape, kinds, model, sharing, [each.modules for each in recompute]
        )
        every = [known[each.modules] for each in recompute]
        full = [each.granularity is RecomputeGranularity.FULL for each in recompute]
        backward = [
            seconds[_BACKWARD] + seconds[_AGAIN] * (whole or bool(each.modules))
            for seconds, each, whole in zip(every, recompute, full, strict=True)
        ]
        return np.array([seconds[_FORWARD] for seconds in every]), np.array(backward)

    def _kind_seconds(
        self,
        island: int,
        shape: Shape,
        kinds: tuple[int, ...],
        model: ModelSpec,
        sharing: Sharing | None,
        modules: Sequence[Modules],
    ) -> dict[Modules, Floats]:
        """[forward, backward, of that modules, or whole layers, once more][kinds] of each set."""
        place = self.cluster.islands[island]
        groups = self.groups(island, shape)
        key = (
            island,
            shape.tp,
            shape.cp,
            shape.ep,
            shape.etp,
            shape.microbatch_size,
            shape.sequence_parallel,
            groups,
            shape.num_devices if place.speed_spread or sharing else 0,
            sharing,
            kinds,
            model.vocab_size,
        )
        found = self._seconds.setdefault(key, {})
        missing = [each for each in modules if each not in found]
        if missing:
            chain = self.chain if set(missing) <= set(self.chain) else tuple(missing)
            pricer = self._pricer(place, shape, groups, model)
            shared = self._shared(island, shape, model, sharing) if sharing else None
            every = [self._priced(pricer, self._kinds[0][k], shared, chain) for k in kinds]
            for at, each in enumerate(chain):
                found[each] = np.array([(*both, again[at]) for both, again in every]).T
        return found

    def _pricer(self, place: Island, shape: Shape, groups: Groups, model: ModelSpec) -> LayerPricer:
        beside = trainer_settings(self.job).tp_comm_overlap and shape.sequence_parallel
        return LayerPricer(
            model=model,
            real_vocab_size=self.model.vocab_size,
            island=place,
            job=job_on(place.device, self.job),
            shape=shape,
            recompute=FULL_RECOMPUTE,
            overlap=OverlapSettings(tensor_parallel=beside),
            groups=groups,
            known=self.known,
            predictor=self._caching,
        )

    def _shared(
        self, island: int, shape: Shape, model: ModelSpec, sharing: Sharing
    ) -> Callable[[LayerCost, int], LayerCost]:
        """A layer's cost with what its ranks reduce and gather in every microbatch."""
        sharding, shards = sharing
        job, place = self.job, self.cluster.islands[island]
        precision = reduction_precision(job)
        settings = Settings(
            model=model,
            real_vocab_size=self.model.vocab_size,
            cluster=self.cluster,
            job=job,
            reduction_precision=precision,
            tied_precision=precision,
            predictor=self._caching,
            sharding=sharding,
            shards=shards,
            offload=0.0,
            overlap=overlap_of(job, (shape,), sharding),
            known=self.known,
        )
        copies = copies_within(settings, self.replica(island, shape), shape)

        def shared(cost: LayerCost, position: int) -> LayerCost:
            counts = layer_parameters(model, position, shape)
            return with_sharding(settings, cost, counts, copies, place)

        return shared

    def _priced(
        self,
        pricer: LayerPricer,
        position: int,
        shared: Callable[[LayerCost, int], LayerCost] | None,
        chain: tuple[Modules, ...],
    ) -> tuple[tuple[float, float], list[float]]:
        """(forward, backward), and what is repeated of each set of modules."""
        model = self.model
        if position in (0, len(model.layers) - 1):
            cost = pricer.head() if position else pricer.embedding()
            cost = shared(cost, position) if shared else cost
            return (cost.forward_seconds, cost.backward_seconds), [0.0] * len(chain)
        layer = model.layer_at(position).at(self.job.sequence_length)
        inside = pricer.transformer_with(layer, [_recompute(modules) for modules in chain])
        cost = inside[0] if position <= model.num_layers else pricer.multi_token_prediction(layer)
        cost = replace(cost, again=())
        cost = shared(cost, position) if shared else cost
        # What is repeated of a multi-token prediction is its transformer layer.
        again = [seconds_of_parts(each.again) for each in inside]
        return (cost.forward_seconds, cost.backward_seconds), again

    def weights(self, shape: Shape) -> Weights:
        """Parameters of stages of this shape, as their gradients are reduced."""
        key = (shape.tp, shape.ep, shape.etp)
        if key not in self._weights:
            self._weights[key] = self._counted(shape)
        return self._weights[key]

    def _counted(self, shape: Shape) -> Weights:
        model = self.padded(shape.tp)
        positions, unit, extra = self._kinds
        each = np.array([layer_parameters(model, at, shape) for at in positions])
        besides = extra @ each
        if model.tied_embeddings:
            besides[BOTH, 0] -= model.vocabulary_matrix(shape.tp)
        return Weights(tuple((unit @ each).tolist()), tuple(map(tuple, besides.tolist())))

    def stage_bytes(
        self,
        island: int,
        shape: Shape,
        recompute: Recompute,
        role: int,
        chunks: int = 1,
    ) -> StageBytes:
        """Memory of stages of this shape, role and number of chunks."""
        key = (
            self.memory_class(island),
            shape.tp,
            shape.cp,
            shape.ep,
            shape.etp,
            shape.microbatch_size,
            shape.sequence_parallel,
            recompute,
            role,
            chunks,
        )
        found = self._bytes.get(key)
        if found is None:
            layout = MemoryLayout(
                chunks=(LayerRange(start=0, stop=1),) * chunks,
                shape=shape,
                num_microbatches=1,
                recompute=recompute,
            )
            found = self._bytes[key] = stage_bytes(
                self.padded(shape.tp), self._jobs[island], layout, self.units, role
            )
        return found
