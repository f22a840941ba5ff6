"""Which families of one-pipeline plans can the job's target run?

Everything that divides, before any time or memory is known. Degrees: tp divides what it slices and
the devices of a node; cp = 2^k <= 16 with 2 cp dividing the sequence length; ep
divides the experts and cp * dp * tp / etp; dp * microbatch size divides the batch. Targets that
need equal degrees have a family per shape; others have one per tick (sequences of a microbatch),
whose meshes differ in tp, dp and microbatch size, with cp = ep = 1. `any` has both. Each comes once
per schedule, per sharding, with and without an optimizer in host memory (where the cluster says
what hosts can keep) and, where all stages must recompute alike, per recomputation; for a trainer
with one library of collectives once per library of the cluster.

Schedules with split backward passes are searched where they are pinned, from 2 stages on.
Interleaving is searched with 2 to `Target.most_virtual_stages` chunks of at least one layer per
stage, from 3 stages on, of which microbatches are a multiple. Deeper warm-up hides latency before a
boundary between meshes, so it needs two islands, and is no deeper than a step has microbatches. It
goes with sends that do not wait for their receivers: while they wait, more in flight is no use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from hetplan.cluster.spec import Cluster, Island
from hetplan.job.kernels import context_parallel_fault, job_on
from hetplan.job.spec import SPLIT_WEIGHTS, Job, Precision, RecomputeModule
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Experts, Mlp
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_job import MIN_INTERLEAVED_STAGES, SEARCHED_SPLIT
from hetplan.plans.check_target import copied_heads_fault
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    Sharding,
)
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import Target, target
from hetplan.plans.v_schedules import is_v
from hetplan.search.space.allowed import (
    Room,
    Rooms,
    divisors,
    is_one_stage,
    kept,
    stage_limit,
    tensor_degrees,
    together,
)
from hetplan.search.space.family import Block, FamilyTable, Kind, Mesh, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is neither mesh nor sharding nor recomputation."""

    schedule: str
    virtual_stages: int = 1
    early_sends: bool = False
    most_extra_depth: int = 0


class State(NamedTuple):
    """Where the state of weights lies."""

    sharding: Sharding
    offload: float = 0.0
    """Part of the optimizer state in host memory."""
    sharing_ranks: int = 0
    """As of a `Family`."""


MAX_CONTEXT_PARALLEL = 16
"""As published at most: 16 for sequences of 131,072 (Llama 3, arXiv 2407.21783, table 4)."""


@dataclass(frozen=True, kw_only=True)
class Families:
    """The families of one question; `cluster` is what `allowed_cluster` left of the user's."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    _kinds_found: dict[tuple[tuple[Variant, ...], tuple[State, ...]], tuple[Kind, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def families(self) -> FamilyTable:
        """Every family, sorted by tick, schedule, sharding and recomputation; made once."""
        return self._all

    @cached_property
    def _all(self) -> FamilyTable:
        found: list[tuple[Block, Sequence[Kind]]] = []
        if self.job.pin.pipelines in (None, 1):
            found += self._of_one_shape() if self._one_shape else ()
            found += self._of_one_tick() if self._unlike_shapes else ()
        # Equal ones stay in the order in which they were made: by tp, cp, dp, ep, etp.
        return table_of(found)

    # ---- what is searched

    @cached_property
    def _trainer(self) -> Target:
        return target(self.job.target)

    @cached_property
    def _unlike_shapes(self) -> bool:
        return self._trainer.stages_differ and not self.job.pin.same_degrees

    @cached_property
    def _one_shape(self) -> bool:
        """With cp or ep above 1, or where unlike shapes are not searched."""
        trainer = self._trainer
        return not self._unlike_shapes or trainer.context_parallel or trainer.expert_parallel

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Degrees that the model, the nodes and the pins allow."""
        found = tensor_degrees(self.model, self.cluster)
        if not self._trainer.copied_heads:
            found = tuple(tp for tp in found if not copied_heads_fault(self.model, tp))
        return kept(self.job.pin.tp, found)

    @cached_property
    def context_degrees(self) -> tuple[int, ...]:
        """1, and what divides the sequence where target and devices have context parallelism."""
        length, pin = self.job.sequence_length, self.job.pin.cp
        tried = [2**k for k in range(1, MAX_CONTEXT_PARALLEL.bit_length())]
        if pin is not None:
            tried = [pin] if pin > 1 else []
        if not self._trainer.context_parallel or not any(can for _, can in self._together):
            tried = []
        return kept(pin, [1, *(cp for cp in tried if length % (2 * cp) == 0)])

    @cached_property
    def recompute(self) -> tuple[Recompute, ...]:
        """What a stage may recompute; a pin leaves one. Modules come in one chain, each step with
        those of the step before, in the order of the bytes that they give back for a second of
        compute: sets that leave out an earlier module, and take a later one, keep more and take
        longer than a step of the chain or lie between two of them.
        """
        pin = self.job.pin
        if pin.recompute_modules:
            return (_selective(pin.recompute_modules),)
        free = pin.recompute is None
        return (
            *([NO_RECOMPUTE] if not pin.recompute else []),
            *([_selective(each) for each in self._module_sets()] if free else []),
            *([FULL_RECOMPUTE] if pin.recompute is not False and self._can_repeat else []),
        )

    @property
    def _can_repeat(self) -> bool:
        return self._trainer.full_recompute

    @cached_property
    def plain_recompute(self) -> tuple[Recompute, ...]:
        """The same of plans of several pipelines, which are searched without MLPs and norms."""
        if self.job.pin.recompute_modules:
            return self.recompute
        core = (RecomputeModule.CORE_ATTENTION,)
        return tuple([each for each in self.recompute if each.modules in ((), core)])

    def _module_sets(self) -> Iterator[tuple[RecomputeModule, ...]]:
        """The chain: scores, which are most of a layer where they are written; what is elementwise,
        almost for nothing; MLPs and experts, which are most of a layer's compute.
        """
        can, found = self._trainer.recompute_modules, tuple[RecomputeModule, ...]()
        if RecomputeModule.CORE_ATTENTION in can and any(
            map(self._keeps_scores, self.cluster.islands)
        ):
            found = (RecomputeModule.CORE_ATTENTION,)
            yield found
        light = self._elementwise() if can else ()
        if light:
            found = (*found, *light)
            yield found
        mlps = {type(run.layer.mlp) for run in self.model.layer_runs}
        whole = [RecomputeModule.MLP] if Mlp in mlps else []
        whole += [RecomputeModule.EXPERTS] if Experts in mlps else []
        if can:
            yield (*(each for each in found if each is not RecomputeModule.ACTIVATION), *whole)

    def _elementwise(self) -> tuple[RecomputeModule, ...]:
        """Norms and activations; with Megatron-LM activations of routed experts alone that run as
        one grouped product (transformer_config.py), and no norms: those of Transformer Engine that
        are fused with the product behind them are not recomputed (gpt_layer_specs.py).
        """
        if self._trainer.other_formats:
            return RecomputeModule.NORMS, RecomputeModule.ACTIVATION
        mlps = [run.layer.mlp for run in self.model.layer_runs]
        grouped = self.job.precision is Precision.BFLOAT16
        if grouped and all(isinstance(mlp, Experts) and mlp.shared is None for mlp in mlps):
            return (RecomputeModule.ACTIVATION,)
        return ()

    def _keeps_scores(self, island: Island) -> bool:
        return not trainer_settings(job_on(island.device, self.job)).fused_attention

    def shardings(self, copies: int, cp: int = 1) -> tuple[Sharding, ...]:
        """What the target, the pins and this many copies of the weights allow of pipelines of any
        number of stages.
        """
        pin, can = self.job.pin.shares, self._trainer.shardings(self.job.optimizer)
        if copies == 1:
            return (Sharding.NONE,)
        found = [] if pin or (cp > 1 and self._trainer.context_shards) else [Sharding.NONE]
        if pin is not False and Sharding.OPTIMIZER in can:
            found.append(Sharding.OPTIMIZER)
        return tuple([each for each in found if self.job.pin.sharding in (None, each)])

    def sequence_parallel(self, tp: int, cp: int = 1) -> bool | None:
        """Whether ranks of these degrees are sequence parallel; None: there are no such ranks."""
        trainer, pin = self._trainer, self.job.pin.sequence_parallel
        if tp == 1:
            return False
        divides = self.job.sequence_length // cp % tp == 0
        found = trainer.sequence_parallel and divides and pin is not False
        needed = pin or (trainer.experts_need_sequence_parallel and self._experts is not None)
        return None if needed and not found else found

    def plain_shape(self, tp: int, dp: int, microbatch_size: int) -> Shape | None:
        """Shape of ranks without context and expert parallelism; None: there are no such ranks."""
        parallel = self.sequence_parallel(tp)
        if parallel is None:
            return None
        return Shape(
            tp=tp,
            dp=dp,
            microbatch_size=microbatch_size,
            etp=1 if self._experts is None else tp,
            sequence_parallel=parallel,
        )

    @cached_property
    def rooms(self) -> Rooms:
        """Where stages have room."""
        return Rooms(
            cluster=self.cluster,
            most_stages=self.model.num_layers,
            unions=not self.job.pin.same_degrees,
        )

    @cached_property
    def _batch_divisors(self) -> tuple[int, ...]:
        return divisors(self.job.global_batch_size)

    @cached_property
    def _experts(self) -> int | None:
        """What the numbers of experts of all layers have in common; None without experts."""
        found = experts_of(self.model, 0, len(self.model.layers))
        return math.gcd(*(each.num_experts for each in found)) if found else None

    # ---- families of one shape

    def _of_one_shape(self) -> Iterator[tuple[Block, Sequence[Kind]]]:
        pin, batch = self.job.pin, self.job.global_batch_size
        dps = kept(pin.dp, self._batch_divisors)
        for tp, cp, dp in product(self.tensor_degrees, self.context_degrees, dps):
            parallel, rooms = self.sequence_parallel(tp, cp), self.rooms.of(tp, cp, dp)
            if parallel is None or not rooms:
                continue
            for size in kept(pin.microbatch_size, divisors(batch // dp)):
                for ep, etp in self._expert_degrees(tp, cp * dp):
                    if self._unlike_shapes and cp == ep == 1:
                        continue  # plans of a family of one tick
                    shape = Shape(
                        tp=tp, cp=cp, dp=dp, microbatch_size=size, ep=ep, etp=etp,
                        sequence_parallel=parallel,
                    )  # fmt: skip
                    # Experts are not dealt out over islands.
                    meshes = _meshes(shape, rooms if ep == 1 else _alone(rooms))
                    yield from self._varied(dp * size, batch // (dp * size), meshes)

    def _expert_degrees(self, tp: int, copies: int) -> Iterator[tuple[int, int]]:
        """(ep, etp); without expert parallelism experts are cut like the other weights, and with
        it too where tensor-parallel ranks have the same tokens (no sequence parallelism).
        """
        pin, experts = self.job.pin.ep, self._experts
        if pin in (None, 1):
            yield 1, 1 if experts is None else tp
        if experts is None or not self._trainer.expert_parallel:
            return
        for etp in sorted({1, tp}) if self._trainer.sequence_parallel else (tp,):
            for ep in kept(pin, divisors(experts)):
                if ep > 1 and copies * tp // etp % ep == 0:
                    yield ep, etp

    # ---- families of one tick

    def _of_one_tick(self) -> Iterator[tuple[Block, Sequence[Kind]]]:
        pin, batch = self.job.pin, self.job.global_batch_size
        if pin.cp not in (None, 1) or pin.ep not in (None, 1):
            return
        for samples in self._batch_divisors:
            yield from self._varied(samples, batch // samples, self._tick(samples))

    def _tick(self, samples: int) -> tuple[Mesh, ...]:
        """Every mesh whose stages take so many sequences at a time."""
        pin = self.job.pin
        meshes: list[Mesh] = []
        for tp in self.tensor_degrees:
            for dp in kept(pin.dp, divisors(samples)):
                shape = self.plain_shape(tp, dp, samples // dp)
                if shape is not None and pin.microbatch_size in (None, samples // dp):
                    meshes += _meshes(shape, self.rooms.of(tp, 1, dp))
        if self._trainer.mixed_stages:
            meshes += self._mixed(samples)
        return tuple(sorted(meshes, key=_mesh_order))

    def _mixed(self, samples: int) -> list[Mesh]:
        """Meshes of two unlike kinds."""
        pin, found = self.job.pin, []
        batch = self.job.global_batch_size
        for parts, stages in self.rooms.mixed(samples, batch, self.tensor_degrees):
            if pin.dp not in (None, sum(part.dp for part in parts)):
                continue
            if any(pin.microbatch_size not in (None, part.microbatch_size) for part in parts):
                continue
            shapes = [self.plain_shape(part.tp, part.dp, part.microbatch_size) for part in parts]
            possible = tuple(shape for shape in shapes if shape is not None)
            if len(possible) == len(parts):
                islands = tuple(part.island for part in parts)
                found.append(Mesh(islands=islands, shapes=possible, max_stages=stages))
        return found

    # ---- schedules, sharding, recomputation

    def _long_enough(self, num_microbatches: int, meshes: Sequence[Mesh]) -> bool:
        """Whether a pipeline of the pinned number of stages, or of one, may have room."""
        pp = self.job.pin.pp
        limit = stage_limit(self.job, self.model, num_microbatches)
        return limit > 0 if pp is None else pp <= min(limit, _capacity(meshes))

    @cached_property
    def _together(self) -> tuple[tuple[frozenset[int], bool], ...]:
        """(islands that may be in one plan, whether all of them can run with cp above 1)."""
        found = []
        for islands in together(self.cluster, self.job):
            kinds = {self.cluster.islands[at].device for at in islands}
            found.append((islands, not context_parallel_fault(kinds, self.job.target)))
        return tuple(found)

    def _varied(
        self, samples: int, num_microbatches: int, meshes: tuple[Mesh, ...]
    ) -> Iterator[tuple[Block, Sequence[Kind]]]:
        """The blocks of each set of islands that may be in one plan."""
        for islands, context in self._together:
            own = meshes
            if len(self._together) > 1:
                own = tuple(mesh for mesh in meshes if islands.issuperset(mesh.islands))
            if own and (context or own[0].shapes[0].cp == 1):
                yield from self._blocks(samples, num_microbatches, own)

    def _blocks(
        self, samples: int, num_microbatches: int, meshes: tuple[Mesh, ...]
    ) -> Iterator[tuple[Block, Sequence[Kind]]]:
        """Of all meshes; of those on one island, inside which weights are split; and of those whose
        hosts can keep an optimizer.
        """
        groups: list[tuple[tuple[Mesh, ...], list[State]]] = []
        inside = tuple([mesh for mesh in meshes if len(mesh.islands) == 1])
        cp = meshes[0].shapes[0].cp
        copies = max(sum(each.dp for each in mesh.shapes) for mesh in meshes) * cp
        states = [*map(State, self.shardings(copies, cp))]
        split = [*self._split(inside, copies)] if inside and copies > 1 else []
        for of, found in ((meshes, states), (inside, split)):
            hosted = tuple([mesh for mesh in of if self._hosts.issuperset(mesh.islands)])
            groups.append((of, [] if self.job.pin.optimizer_offload else found))
            groups.append((hosted, [*self._offloaded(found, copies)]))
        for at, (of, found) in enumerate(groups):
            # Meshes that are the same share a block.
            for later, more in groups[at + 1 :]:
                if later == of:
                    found += more
                    more.clear()
            if found and of and self._long_enough(num_microbatches, of):
                block = Block(samples=samples, num_microbatches=num_microbatches, meshes=of)
                yield block, self._kinds(tuple(self._variants(num_microbatches, of)), tuple(found))

    def _split(self, meshes: Sequence[Mesh], copies: int) -> Iterator[State]:
        """States whose gradients, or parameters as well, are split among all copies; where stages
        have one shape also among those of a node, so that only sums cross nodes (HSDP, MiCS).
        """
        pin, can = self.job.pin, self._trainer.shardings(self.job.optimizer)
        if (pin.pp or 1) > 1 or pin.shares is False:
            return
        few: set[int] = set()
        if not self._trainer.stages_differ:
            nodes = {self.cluster.islands[mesh.islands[0]].filled_node for mesh in meshes}
            few = {self._in_node(meshes[0].shapes[0], node) for node in nodes}
        for sharding in SPLIT_WEIGHTS:
            if sharding in can and pin.sharding in (None, sharding):
                yield State(sharding)
                yield from (State(sharding, 0.0, ranks) for ranks in sorted(few - {1, copies}))

    def _in_node(self, shape: Shape, node: int) -> int:
        """Copies of a weight in a node, if they are whole context-parallel groups and divide all of
        them, and those of the experts; else 1.
        """
        ranks, copies = node // shape.tp, shape.dp * shape.cp
        if ranks < 1 or copies % ranks or ranks % shape.cp:
            return 1
        of_expert = shape.num_devices // (shape.ep * shape.etp)
        return 1 if self._experts and of_expert % (copies // ranks) else ranks

    def _offloaded(self, states: Sequence[State], copies: int) -> Iterator[State]:
        """The states with an optimizer in host memory: all of it, unless the job says how much."""
        pin, shares = self.job.pin.optimizer_offload, self._trainer.offload_shares and copies > 1
        for state in states:
            if pin != 0 and not (shares and state.sharding is Sharding.NONE):
                yield state._replace(offload=1.0 if pin is None else pin)

    @cached_property
    def _hosts(self) -> frozenset[int]:
        """Islands whose hosts can keep an optimizer, if the target and its update rule can."""
        trainer = self._trainer
        if not (
            trainer.optimizer_offload
            and Sharding.OPTIMIZER in trainer.shardings(self.job.optimizer)
        ):
            return frozenset()
        islands = enumerate(self.cluster.islands)
        return frozenset(at for at, island in islands if island.can_offload)

    def _variants(self, num_microbatches: int, meshes: Sequence[Mesh]) -> Iterator[Variant]:
        """What the target and the pins allow, plain 1F1B first."""
        trainer, pin = self._trainer, self.job.pin
        if pin.virtual_stages in (None, 1) and pin.schedule in (None, "1f1b"):
            if not pin.depth:
                yield Variant(schedule="1f1b")
            if trainer.most_extra_depth and pin.depth != 0:
                depth = self._extra_depth(num_microbatches, meshes)
                yield Variant(schedule="1f1b", early_sends=True, most_extra_depth=depth)
        yield from self._split_backward(num_microbatches, meshes)
        interleaves = pin.schedule in (None, "interleaved-1f1b")
        if "interleaved-1f1b" not in trainer.schedules or pin.depth or not interleaves:
            return
        choices = range(2, trainer.most_virtual_stages + 1)
        stages = self._interleaved_stages(num_microbatches, meshes)
        for virtual in choices if pin.virtual_stages is None else [pin.virtual_stages]:
            limit = stage_limit(self.job, self.model, num_microbatches, virtual)
            if virtual > 1 and 0 < stages <= min(limit, self.model.num_layers // virtual):
                yield Variant(schedule="interleaved-1f1b", virtual_stages=virtual)

    def _split_backward(self, num_microbatches: int, meshes: Sequence[Mesh]) -> Iterator[Variant]:
        """The pinned schedule where it delays the gradients of the weights, from two stages on."""
        name, pp = self.job.pin.schedule, self.job.pin.pp
        if name not in SEARCHED_SPLIT or pp == 1:
            return
        chunks = 2 if is_v(name) else 1
        most = min(_capacity(meshes), stage_limit(self.job, self.model, num_microbatches, chunks))
        most = min(most, num_microbatches // 2) if name == "dualpipev" else most
        if min(most, self.model.num_layers // chunks) >= (pp or 2):
            yield Variant(schedule=name, virtual_stages=chunks)

    def _extra_depth(self, num_microbatches: int, meshes: Sequence[Mesh]) -> int:
        pin = self.job.pin.depth
        most = self._trainer.most_extra_depth if pin is None else pin
        several = len({mesh.islands for mesh in meshes}) > 1
        # The first of two stages has 2 in flight by itself, and never more than all.
        return min(most, max(0, num_microbatches - 2)) if several else 0

    def _interleaved_stages(self, num_microbatches: int, meshes: Sequence[Mesh]) -> int:
        """Fewest stages of an interleaved pipeline that these meshes have room for; 0: none."""
        room = min(_capacity(meshes), self.model.num_layers, num_microbatches)
        pinned = 1 if is_one_stage(self.job, self.model) else self.job.pin.pp
        for stages in kept(pinned, range(MIN_INTERLEAVED_STAGES, room + 1)):
            if num_microbatches % stages == 0:
                return stages
        return 0

    def _kinds(self, variants: tuple[Variant, ...], states: tuple[State, ...]) -> tuple[Kind, ...]:
        found = self._kinds_found.get((variants, states))
        if found is None:
            per_stage = self._trainer.recompute_per_stage
            recompute = (self.recompute,) if per_stage else tuple((one,) for one in self.recompute)
            found = self._kinds_found[variants, states] = tuple(
                Kind(
                    schedule=each.schedule,
                    virtual_stages=each.virtual_stages,
                    early_sends=each.early_sends,
                    most_extra_depth=each.most_extra_depth,
                    sharding=state.sharding,
                    offload=state.offload,
                    sharing_ranks=state.sharing_ranks,
                    recompute=choices,
                )
                for each in variants
                for state in states
                if state.sharding not in SPLIT_WEIGHTS or each == Variant(schedule="1f1b")
                for choices in recompute
            )
        return found


def _selective(modules: tuple[RecomputeModule, ...]) -> Recompute:
    return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)


def _alone(rooms: Sequence[Room]) -> list[Room]:
    return [room for room in rooms if len(room.islands) == 1]


def _meshes(shape: Shape, rooms: Sequence[Room]) -> tuple[Mesh, ...]:
    """Those of stages of this shape, whose data-parallel ranks are dealt out as rooms say."""
    shapes = {shape.dp: shape}
    for room in rooms:
        for dp in room.dps:
            if dp not in shapes:
                shapes[dp] = replace(shape, dp=dp)
    return tuple(
        Mesh(
            islands=room.islands,
            shapes=tuple([shapes[dp] for dp in room.dps]),
            max_stages=room.stages,
        )
        for room in rooms
    )


def _mesh_order(mesh: Mesh) -> tuple[object, ...]:
    return mesh.islands, [(s.tp, s.dp, s.microbatch_size) for s in mesh.shapes]


def _capacity(meshes: Sequence[Mesh]) -> int:
    """No pipeline has more stages: every island's most, whatever else lies on it."""
    most: dict[int, int] = {}
    for mesh in meshes:
        for island in mesh.islands:
            most[island] = max(most.get(island, 0), mesh.max_stages)
    return sum(most.values())
