"""What a stage of one of several pipelines can be, and what it costs at least.

Two tables of options, with the same numbers of every option (`StageCosts`):

    PartOptions   (class of islands, tp, microbatch size, recomputation): a part of a stage whose
                  data-parallel degree is open; columns of the heuristic are made of them
    MeshOptions   (mesh, recomputation) of pipelines with so many samples per microbatch: a mesh
                  says which devices of which islands a stage has, so that the ranks that share its
                  optimizer state are known; pipelines of the bound and enumerated pipelines

Islands of one class have equal devices, nodes and links, so that a part costs the same on each.
Every number is a lower bound for every plan that uses the option: passes of the slowest part
without stragglers beyond one tensor-parallel group, transfers over the fastest link that such a
part can have, memory with the optimizer's state split over every rank that can share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import most_units
from hetplan.cost.step_model.hops import boundary_costs_over
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Recompute, Sharding
from hetplan.plans.targets import target
from hetplan.search.space.allowed import divisors, kept, matches, mesh_matches
from hetplan.search.space.families import Families
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_pricer import Passes, StagePricer
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, ROLES

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandClass:
    """Islands on which every part of a stage costs the same."""

    islands: tuple[int, ...]
    """Positions in the cluster's islands."""
    devices: int
    """Usable ones of all of them."""


def island_classes(cluster: Cluster) -> tuple[IslandClass, ...]:
    """Islands with usable nodes, equal ones together, in the cluster's order."""
    classes: dict[object, list[int]] = {}
    for index, island in enumerate(cluster.islands):
        if island.usable_nodes:
            classes.setdefault(_likeness(cluster, island), []).append(index)
    return tuple(
        IslandClass(
            islands=tuple(members),
            devices=sum(cluster.islands[index].num_usable_devices for index in members),
        )
        for members in classes.values()
    )


def _likeness(cluster: Cluster, island: Island) -> object:
    """Equal for islands between which no option can tell; one with one node has no link there."""
    parts = (island.filled_node,)
    alone = replace(island, name="", nodes=1, nodes_out=(), node_names=(), node_parts=parts)
    links = frozenset(
        cluster.link_between(island.name, other.name)
        for other in cluster.islands
        if other.name != island.name and other.usable_nodes
    )
    return alone, links, len(island.usable_nodes) > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """How many layer units fit on stages of O options, which have Q parts."""

    num_layers: int
    """Layer units of the model."""
    may_have: Bools
    """[4, O] whether the job's pins let a stage of this role be there."""
    option: Ints
    """[Q] whose part it is."""
    lines: Floats
    """[4, Q, 8] as `hetplan.cost.memory.lines.Lines.row`, without receive buffers, and without the
    optimizer state in `shared_state`."""
    shared_state: Floats
    """[4, Q, 8] what one rank adds to that where it shares with nobody."""
    received: Floats
    """[4, Q] receive buffers per microbatch of the step, bytes."""
    available: Floats
    """[Q] bytes of a device that a plan may use."""
    _known: dict[tuple[int, int, int], Ints] = field(default_factory=dict)

    def most_layers(self, num_microbatches: int, flights: int, shards: int = 1) -> Ints:
        """[4, O, flights + 1] units that fit with so many microbatches in flight; 0: none fits.

        `shards`: ranks that share the optimizer's state of `shared_state`.
        """
        key = (num_microbatches, flights, shards)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._most_layers(*key)
        return found

    def _most_layers(self, num_microbatches: int, flights: int, shards: int) -> Ints:
        lines = self.lines + self.shared_state / shards
        # Receive buffers are there during every pass, not during the update.
        lines[..., 0] += self.received * num_microbatches
        lines[..., 2] += self.received * num_microbatches
        room = np.broadcast_to(self.available, lines.shape[:-1])
        counts = np.minimum(np.arange(flights + 1, dtype=np.int64), num_microbatches)
        fits = most_units(lines, room, self.num_layers, counts)
        most = np.full((*self.may_have.shape, flights + 1), self.num_layers, dtype=np.int64)
        for q, o in enumerate(self.option.tolist()):
            np.minimum(most[:, o], fits[:, q], out=most[:, o])
        most[~self.may_have] = 0
        return most

    def of_options(self, chosen: Bools) -> StageMemory:
        """The same of these options alone; chosen: [O]."""
        parts = chosen[self.option]
        return replace(
            self,
            may_have=self.may_have[:, chosen],
            option=(np.cumsum(chosen) - 1)[self.option[parts]],
            lines=self.lines[:, parts],
            shared_state=self.shared_state[:, parts],
            received=self.received[:, parts],
            available=self.available[parts],
            _known={},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Numbers of every option; O options."""

    num_layers: int
    """Layer units of the model."""
    enough_microbatches: bool
    """Whether a pipeline needs as many microbatches as stages."""
    rendezvous: bool
    forward: Floats
    """[O] seconds of one layer unit, one microbatch."""
    backward: Floats
    """[O] recomputation included."""
    extra_forward: Floats
    """[4, O] of embedding, head, front and back layers by role."""
    extra_backward: Floats
    """[4, O]"""
    arrive_forward: Floats
    """[O] least seconds of an activation from another stage."""
    arrive_backward: Floats
    """[O] the same of a gradient."""
    memory: StageMemory


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Option:
    """One way to run a part of a stage."""

    place: int
    """Position in the classes."""
    shape: Shape
    """With one data-parallel rank."""
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartOptions(StageCosts):
    """All parts of stages of a job; O options with one part each."""

    classes: tuple[IslandClass, ...]
    options: tuple[Option, ...]
    most_shards: int
    """Ranks that could share the optimizer's state; 1 where the target cannot share it."""
    stage_limit: int
    """Most stages of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeshOptions(StageCosts):
    """All stages of pipelines with so many samples per microbatch; C classes of islands."""

    samples: int
    """Sequences of a microbatch."""
    most_microbatches: int
    """So that another pipeline has a part of the batch."""
    fewest_stages: int
    most_stages: int
    devices: Floats
    """[C] usable ones."""
    meshes: tuple[Mesh, ...]
    """One of those that are alike."""
    alike: dict[Mesh, int]
    """Position in `meshes` of every mesh with so many samples."""
    mesh: Ints
    """[O] position in `meshes`."""
    recompute: Ints
    """[O] position in what the job may recompute."""
    use: Floats
    """[O, C] devices that one sequence of a microbatch occupies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """What an option is, before its numbers are arrays."""

    parts: tuple[tuple[int, Shape], ...]
    """(island, shape) of each."""
    recompute: int
    """Position in what the job may recompute."""
    shards: int
    """Ranks that share the optimizer's state."""
    may_be_first: bool
    may_be_last: bool


_NOBODY, _EVERYBODY = 1, 2**60
"""Ranks that share the state; so many that nothing is left of it on one."""


@dataclass(kw_only=True)
class OptionsMaker:
    """Makes the options of one job; keeps what they share."""

    pricer: StagePricer
    check: Callable[[], None] = lambda: None
    """Called for every stage that is priced; may raise."""
    _stages: dict[Sharding, dict[int, MeshOptions]] = field(default_factory=dict)
    _priced: dict[tuple[int, Shape], tuple[Passes, tuple[float, float]]] = field(
        default_factory=dict
    )

    @cached_property
    def legal(self) -> Families:
        """What the job's stages may be."""
        pricer = self.pricer
        return Families(model=pricer.model, cluster=pricer.cluster, job=pricer.job)

    @cached_property
    def classes(self) -> tuple[IslandClass, ...]:
        """Those of the islands."""
        return island_classes(self.pricer.cluster)

    @cached_property
    def class_of(self) -> dict[int, int]:
        """Position in the classes of every island with usable nodes."""
        return {island: c for c, each in enumerate(self.classes) for island in each.islands}

    @property
    def _sharding(self) -> Sharding:
        """With which a plan needs least memory."""
        job = self.pricer.job
        can = Sharding.OPTIMIZER in target(job.target).shardings(job.optimizer)
        may = can and job.pin.shares is not False
        return Sharding.OPTIMIZER if may else Sharding.NONE

    # ---- parts of stages

    def parts(self) -> PartOptions | None:
        """Every option of which one unit fits with one microbatch in flight; None for none."""
        pricer, islands = self.pricer, self.pricer.cluster.islands
        pin, units = pricer.job.pin, pricer.units.count
        options = [*self._part_options()]
        stages = [
            _Stage(
                parts=((self.classes[option.place].islands[0], option.shape),),
                recompute=self.legal.plain_recompute.index(option.recompute),
                shards=_EVERYBODY,
                may_be_first=any(matches(islands[at], pin.embedding_on) for at in members),
                may_be_last=any(matches(islands[at], pin.head_on) for at in members),
            )
            for option in options
            for members in (self.classes[option.place].islands,)
        ]
        most_shards = 1
        if self._sharding is Sharding.OPTIMIZER:
            most_shards = sum(each.devices for each in self.classes)
        memory = self._memory(stages, self._sharding)
        whole = self._memory([replace(each, shards=_NOBODY) for each in stages], self._sharding)
        # Nothing stands before the units of most stages: both are minus infinity.
        with np.errstate(invalid="ignore"):
            shared = np.nan_to_num(whole.lines - memory.lines, nan=0.0)
        fits, costs = self._costs(stages, replace(memory, shared_state=shared), most_shards)
        if not fits:
            return None
        return PartOptions(
            **costs,
            classes=self.classes,
            options=tuple(options[o] for o in fits),
            most_shards=most_shards,
            stage_limit=min(units, pin.pp or units),
        )

    def _part_options(self) -> Iterator[Option]:
        job = self.pricer.job
        for place, island_class in enumerate(self.classes):
            island = self.pricer.cluster.islands[island_class.islands[0]]
            sizes = kept(job.pin.microbatch_size, divisors(job.global_batch_size))
            for tp, size in product(self.legal.tensor_degrees, sizes):
                shape = self.legal.plain_shape(tp, 1, size)
                if shape is not None and island.devices_per_node % tp == 0:
                    for recompute in self.legal.plain_recompute:
                        yield Option(place=place, shape=shape, recompute=recompute)

    # ---- whole stages

    @cached_property
    def meshes(self) -> dict[int, tuple[Mesh, ...]]:
        """Those that may stand in one pipeline beside others, by samples per microbatch."""
        job, pin = self.pricer.job, self.pricer.job.pin
        # Their sends wait, and warm-ups are as usual.
        if pin.virtual_stages not in (None, 1) or pin.depth:
            return {}
        # A pipeline with few microbatches may have more stages than one with all of them.
        free = replace(pin, pipelines=None, pp=None, virtual_stages=1, depth=0)
        table = replace(self.legal, job=replace(job, pin=free)).families()
        found: dict[int, dict[Mesh, None]] = {}
        for at in dict.fromkeys(table.block.tolist()):
            self.check()
            for mesh in table.blocks[at].meshes:
                # Context and expert parallelism are for one pipeline.
                if all(shape.cp == shape.ep == 1 for shape in mesh.shapes):
                    found.setdefault(table.blocks[at].samples, {})[mesh] = None
        return {samples: tuple(found[samples]) for samples in sorted(found)}

    def stages(self, sharding: Sharding | None = None) -> dict[int, MeshOptions]:
        """By every number of samples that leaves something of the batch for another pipeline; kept.

        `sharding`: who shares the optimizer's state; unless given, everybody where that is legal.
        """
        how, batch = sharding or self._sharding, self.pricer.job.global_batch_size
        if how not in self._stages:
            made = {n: self._of(n, each, how) for n, each in self.meshes.items() if n < batch}
            self._stages[how] = {n: each for n, each in made.items() if each is not None}
        return self._stages[how]

    def _of(self, samples: int, meshes: Sequence[Mesh], sharding: Sharding) -> MeshOptions | None:
        """None where no unit fits."""
        job, classes = self.pricer.job, self.classes
        every = self._alike(meshes)
        variants = [
            (m, v) for m in range(len(every)) for v in range(len(self.legal.plain_recompute))
        ]
        stages = [self._stage(every[m], v) for m, v in variants]
        fits, costs = self._costs(stages, self._memory(stages, sharding))
        use = np.zeros((len(stages), len(classes)))
        for o, stage in enumerate(stages):
            for island, shape in stage.parts:
                use[o, self.class_of[island]] += shape.num_devices / samples
        devices = np.array([each.devices for each in classes], dtype=np.float64)
        units, fewest = self.pricer.units.count, job.pin.pp or 1
        most_stages = min(units, job.pin.pp or units, self._room(use * samples))
        if not fits or most_stages < fewest:
            return None
        return MeshOptions(
            **costs,
            samples=samples,
            most_microbatches=(job.global_batch_size - 1) // samples,
            fewest_stages=fewest,
            most_stages=most_stages,
            devices=devices,
            meshes=tuple(alike[0] for alike in every),
            alike={mesh: m for m, alike in enumerate(every) for mesh in alike},
            mesh=np.array([variants[o][0] for o in fits], dtype=np.int64),
            recompute=np.array([variants[o][1] for o in fits], dtype=np.int64),
            use=use[fits],
        )

    def _alike(self, meshes: Sequence[Mesh]) -> list[list[Mesh]]:
        """Meshes on islands of the same classes with the same shapes together."""
        found: dict[object, list[Mesh]] = {}
        for mesh in meshes:
            classes = [self.class_of[island] for island in mesh.islands]
            key = tuple(sorted(zip(classes, mesh.shapes, strict=True)))
            found.setdefault(key, []).append(mesh)
        return [*found.values()]

    def _stage(self, alike: Sequence[Mesh], recompute: int) -> _Stage:
        mesh, cluster, pin = alike[0], self.pricer.cluster, self.pricer.job.pin
        return _Stage(
            parts=tuple(zip(mesh.islands, mesh.shapes, strict=True)),
            recompute=recompute,
            shards=sum(shape.dp for shape in mesh.shapes),
            may_be_first=any(mesh_matches(each, cluster, pin.embedding_on) for each in alike),
            may_be_last=any(mesh_matches(each, cluster, pin.head_on) for each in alike),
        )

    def _room(self, devices: Floats) -> int:
        """Most stages: of every class as many as its smallest stages have room; [O, C]."""
        total = 0
        for place, each in enumerate(self.classes):
            sizes = devices[devices[:, place] > 0, place]
            total += int(each.devices / sizes.min() + 1e-9) if sizes.size else 0
        return total

    # ---- numbers of both

    def _memory(self, stages: Sequence[_Stage], sharding: Sharding) -> StageMemory:
        """With nothing in `shared_state`."""
        pricer = self.pricer
        parts = [(o, *part) for o, stage in enumerate(stages) for part in stage.parts]
        lines, received = np.empty((ROLES, len(parts), 8)), np.empty((ROLES, len(parts)))
        known: dict[object, tuple[list[tuple[float, ...]], list[float]]] = {}
        for q, (o, island, shape) in enumerate(parts):
            recompute, shards = (
                self.legal.plain_recompute[stages[o].recompute],
                stages[o].shards,
            )
            key = (pricer.memory_class(island), replace(shape, dp=1), recompute, shards)
            if key not in known:
                roles = [
                    pricer.stage_bytes(island, shape, recompute, role) for role in range(ROLES)
                ]
                known[key] = (
                    [each.lines(sharding, shards, shards, 0).row() for each in roles],
                    [each.received for each in roles],
                )
            lines[:, q], received[:, q] = known[key]
        may_have = np.ones((ROLES, len(stages)), dtype=np.bool_)
        may_have[[FIRST, BOTH]] &= np.array([each.may_be_first for each in stages], np.bool_)
        may_have[[LAST, BOTH]] &= np.array([each.may_be_last for each in stages], np.bool_)
        return StageMemory(
            num_layers=pricer.units.count,
            may_have=may_have,
            option=np.array([o for o, _, _ in parts], dtype=np.int64),
            lines=lines,
            shared_state=np.zeros_like(lines),
            received=received,
            available=np.array([pricer.room_bytes(at) for _, at, _ in parts]),
        )

    def _costs(
        self, stages: Sequence[_Stage], memory: StageMemory, shards: int = 1
    ) -> tuple[list[int], dict[str, Any]]:
        """(options of which one unit fits, fields of `StageCosts` of these)."""
        fits = memory.most_layers(1, 1, shards)[:, :, 1].max(axis=0) > 0
        which, trainer = np.flatnonzero(fits).tolist(), target(self.pricer.job.target)
        priced = [(*self._slowest(stages[o]), stages[o].recompute) for o in which]
        arrivals = np.array([arrive for _, arrive, _ in priced]).reshape(len(which), 2)
        return which, {
            "num_layers": self.pricer.units.count,
            "enough_microbatches": not trainer.fewer_microbatches_than_stages,
            "rendezvous": trainer.rendezvous_sends,
            "forward": np.array([passes.forward[v] for passes, _, v in priced]),
            "backward": np.array([passes.backward[v] for passes, _, v in priced]),
            "extra_forward": np.array([each.extra_forward[:, v] for each, _, v in priced]).T.copy(),
            "extra_backward": np.array(
                [each.extra_backward[:, v] for each, _, v in priced]
            ).T.copy(),
            "arrive_forward": arrivals[:, 0].copy(),
            "arrive_backward": arrivals[:, 1].copy(),
            "memory": memory.of_options(fits),
        }

    def _slowest(self, stage: _Stage) -> tuple[Passes, tuple[float, float]]:
        """Passes of the part that takes longest for a unit, and the least arrivals there."""
        at = stage.recompute
        parts = [self._of_part(*part) for part in stage.parts]
        return max(parts, key=lambda part: float(part[0].forward[at] + part[0].backward[at]))

    def _of_part(self, island: int, shape: Shape) -> tuple[Passes, tuple[float, float]]:
        """By what the job may recompute; (forward, backward) seconds of the least arrivals."""
        place = self.class_of[island]
        first, alone = self.classes[place].islands[0], replace(shape, dp=1)
        found = self._priced.get((place, alone))
        if found is None:
            self.check()
            passes = self.pricer.passes(first, alone, self.legal.plain_recompute)
            found = self._priced[place, alone] = passes, least_arrival(self.pricer, first, alone)
        return found


def least_arrival(pricer: StagePricer, island_number: int, shape: Shape) -> tuple[float, float]:
    """Least seconds of a message (forward, backward) into a stage of this shape there."""
    cluster = pricer.cluster
    island = cluster.islands[island_number]
    links = [
        (cluster.link_between(island.name, other.name), (island, other))
        for other in cluster.islands
        if other.name != island.name and other.usable_nodes
    ]
    if len(island.usable_nodes) > 1:
        links.append((island.inter_node, (island, island)))
    if shape.tp < island.devices_per_node:
        links.append((island.intra_node, (island, island)))
    message = replace(shape, dp=1)  # sequence parallel ranks receive a part each
    hops = [
        boundary_costs_over(link, pricer.model, pricer.job, message, pricer.predictor, ends)
        for link, ends in links
    ]
    if not hops:
        return 0.0, 0.0  # the only stage that there can be
    return (
        min(hop.send_forward_seconds + hop.wire_latency_seconds for hop in hops),
        min(hop.send_backward_seconds + hop.wire_latency_seconds for hop in hops),
    )
