"""What a stage of one of several pipelines can be, and what it costs at least.

Two tables of options, with the same numbers of every option (`StageCosts`):

    PartOptions   (class of islands, tp, microbatch size, recomputation): a part of a stage whose
                  data-parallel degree is open; columns of the heuristic are made of them
    MeshOptions   (mesh, recomputation) of pipelines with so many samples per microbatch: a mesh
                  says which devices of which islands a stage has, so that the ranks that share its
                  optimizer state are known; paths of the bound and enumerated pipelines

Islands of one class have equal devices, nodes and links, so that a part costs the same on each.
Every number is a lower bound for every plan that uses the option: passes of the slowest part
without stragglers beyond one tensor-parallel group, transfers over the fastest link that such a
part can have, memory with the optimizer's state split over every rank that can share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import most_units
from hetplan.cost.step_model.hops import boundary_costs_over
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target
from hetplan.search.space.allowed import divisors, matches, mesh_matches
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
    devices_per_node: int
    nodes: tuple[int, ...]
    """Usable nodes of each."""

    @property
    def devices(self) -> int:
        """Usable devices of all of them."""
        return sum(self.nodes) * self.devices_per_node


def island_classes(cluster: Cluster) -> tuple[IslandClass, ...]:
    """Islands with usable nodes, equal ones together, in the cluster's order."""
    classes: dict[object, list[int]] = {}
    for index, island in enumerate(cluster.islands):
        if island.usable_nodes:
            classes.setdefault(_likeness(cluster, island), []).append(index)
    return tuple(
        IslandClass(
            islands=tuple(members),
            devices_per_node=cluster.islands[members[0]].devices_per_node,
            nodes=tuple(len(cluster.islands[index].usable_nodes) for index in members),
        )
        for members in classes.values()
    )


def _likeness(cluster: Cluster, island: Island) -> object:
    """Equal for islands between which no option can tell; one with one node has no link there."""
    alone = replace(island, name="", nodes=1, nodes_out=(), node_names=())
    links = frozenset(
        cluster.link_between(island.name, other.name)
        for other in cluster.islands
        if other.name != island.name and other.usable_nodes
    )
    return alone, links, len(island.usable_nodes) > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Numbers of every option; O options, Q parts of their stages."""

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
    may_have: Bools
    """[4, O] whether the job's pins let a stage of this role be there."""
    option: Ints
    """[Q] whose part it is."""
    memory: Floats
    """[4, Q, 8] as `hetplan.cost.memory.lines.Lines.row`, without receive buffers, and without the
    optimizer state in `shared_state`."""
    shared_state: Floats
    """[4, Q, 8] what one rank adds to that where it shares with nobody."""
    received: Floats
    """[4, Q] receive buffers per microbatch of the step, bytes."""
    available: Floats
    """[Q] bytes of a device that a plan may use."""

    def most_layers(self, num_microbatches: int, flights: int, shards: int = 1) -> Ints:
        """[4, O, flights + 1] units that fit with so many microbatches in flight; 0: none fits.

        `shards`: ranks that share the optimizer's state of `shared_state`.
        """
        lines = self.memory + self.shared_state / shards
        # Receive buffers are there during every pass, not during the update.
        lines[..., 0] += self.received * num_microbatches
        lines[..., 2] += self.received * num_microbatches
        room = np.broadcast_to(self.available, lines.shape[:-1])
        counts = np.minimum(np.arange(flights + 1, dtype=np.int64), num_microbatches)
        fits = most_units(lines, room, self.num_layers, counts)
        most = np.full((ROLES, len(self.forward), flights + 1), self.num_layers, dtype=np.int64)
        for q, o in enumerate(self.option.tolist()):
            np.minimum(most[:, o], fits[:, q], out=most[:, o])
        most[~self.may_have] = 0
        return most

    def only(self, kept: Bools, **changes: Any) -> Self:
        """These options alone; `changes`: the fields that a subclass has of every option."""
        which, parts = np.flatnonzero(kept), np.flatnonzero(kept[self.option])
        return replace(
            self,
            option=(np.cumsum(kept) - 1)[self.option[parts]],
            available=self.available[parts],
            **{name: getattr(self, name)[which] for name in _PER_OPTION},
            **{name: getattr(self, name)[:, which].copy() for name in _PER_ROLE},
            **{name: getattr(self, name)[:, parts].copy() for name in _PER_PART},
            **changes,
        )


_PER_OPTION = ("forward", "backward", "arrive_forward", "arrive_backward")
_PER_ROLE = ("extra_forward", "extra_backward", "may_have")
_PER_PART = ("memory", "shared_state", "received")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Option:
    """One way to run a part of a stage."""

    place: int
    """Position in the classes."""
    shape: Shape
    """With one data-parallel rank."""
    recompute: RecomputeGranularity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartOptions(StageCosts):
    """All parts of stages of a job; O options with one part each."""

    classes: tuple[IslandClass, ...]
    options: tuple[Option, ...]
    batch: int
    """Sequences of one step."""
    use: Floats
    """[O] devices that one sequence of a microbatch occupies."""
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
    alone: Bools
    """[C] classes of one island."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """One part of an option, before the numbers are arrays."""

    island: int
    shape: Shape
    recompute: RecomputeGranularity
    shards: int
    """Ranks of its stage that share the optimizer's state."""


_NOBODY, _EVERYBODY = 1, 2**60
"""Ranks that share the state; so many that nothing is left of it on one."""


def may_shard(pricer: StagePricer) -> bool:
    """Whether ranks may share the optimizer's state."""
    can = target(pricer.job.target).shardings(pricer.job.optimizer)
    return Sharding.OPTIMIZER in can and pricer.job.pin.sharded_optimizer is not False


def _legal(pricer: StagePricer) -> Families:
    return Families(model=pricer.model, cluster=pricer.cluster, job=pricer.job)


def _memory(
    pricer: StagePricer, parts: Sequence[_Part], sharding: Sharding
) -> tuple[Floats, Floats]:
    """`memory` and `received` of `StageCosts`."""
    lines, received = np.empty((ROLES, len(parts), 8)), np.empty((ROLES, len(parts)))
    known: dict[object, tuple[list[tuple[float, ...]], list[float]]] = {}
    for q, part in enumerate(parts):
        key = (replace(part.shape, dp=1), part.recompute, part.shards)
        if key not in known:
            roles = [pricer.stage_bytes(part.shape, part.recompute, role) for role in range(ROLES)]
            known[key] = (
                [each.lines(sharding, part.shards, part.shards, 0).row() for each in roles],
                [each.received for each in roles],
            )
        lines[:, q], received[:, q] = known[key]
    return lines, received


def _available(pricer: StagePricer, parts: Sequence[_Part]) -> Floats:
    kept = 1 - pricer.job.memory_reserve_fraction
    return np.array([pricer.cluster.islands[each.island].memory_bytes * kept for each in parts])


def _costs(
    pricer: StagePricer, options: Sequence[tuple[Passes, int, tuple[float, float]]]
) -> dict[str, Any]:
    """Fields of `StageCosts` without memory: of every option its passes, the position of its
    recomputation in them, and the least arrivals.
    """
    trainer = target(pricer.job.target)
    each = [(passes, v) for passes, v, _ in options]
    return {
        "num_layers": pricer.units.count,
        "enough_microbatches": not trainer.fewer_microbatches_than_stages,
        "rendezvous": trainer.rendezvous_sends,
        "forward": np.array([passes.forward[v] for passes, v in each]),
        "backward": np.array([passes.backward[v] for passes, v in each]),
        "extra_forward": np.array([passes.extra_forward[:, v] for passes, v in each]).T.copy(),
        "extra_backward": np.array([passes.extra_backward[:, v] for passes, v in each]).T.copy(),
        "arrive_forward": np.array([forward for _, _, (forward, _) in options]),
        "arrive_backward": np.array([backward for _, _, (_, backward) in options]),
    }


# ---- parts of stages


def part_options(pricer: StagePricer) -> PartOptions:
    """Every option of which one unit fits with one microbatch in flight.

    InputError where there is none.
    """
    job, units = pricer.job, pricer.units.count
    classes = island_classes(pricer.cluster)
    options = tuple(_options(pricer, classes))
    if not options:
        raise InputError(
            "no layer of the model can be placed on any island of the cluster; free a pin (tp, "
            "microbatch_size) or allow another island"
        )
    islands = [classes[each.place].islands[0] for each in options]
    numbers = [
        (pricer.passes(at, o.shape, (o.recompute,)), 0, least_arrival(pricer, at, o.shape))
        for at, o in zip(islands, options, strict=True)
    ]
    shards = may_shard(pricer)
    sharding = Sharding.OPTIMIZER if shards else Sharding.NONE
    parts = [
        _Part(island=at, shape=o.shape, recompute=o.recompute, shards=_EVERYBODY)
        for at, o in zip(islands, options, strict=True)
    ]
    split, received = _memory(pricer, parts, sharding)
    whole, _ = _memory(pricer, [replace(each, shards=_NOBODY) for each in parts], sharding)
    # Nothing stands before the units of most stages: both are minus infinity.
    with np.errstate(invalid="ignore"):
        shared = np.nan_to_num(whole - split, nan=0.0)
    found = PartOptions(
        **_costs(pricer, numbers),
        classes=classes,
        options=options,
        batch=job.global_batch_size,
        use=np.array([each.shape.tp / each.shape.microbatch_size for each in options]),
        option=np.arange(len(options)),
        memory=split,
        shared_state=shared,
        received=received,
        may_have=_may_have(pricer, classes, options),
        most_shards=sum(each.devices for each in classes) if shards else 1,
        available=_available(pricer, parts),
        stage_limit=min(units, job.pin.pp or units),
    )
    fits = found.most_layers(1, 1, found.most_shards)[:, :, 1].max(axis=0) > 0
    if not fits.any():
        raise InputError(
            "no layer of the model fits on any device of the cluster; raise tp, allow recompute, "
            "or use devices with more memory"
        )
    which = np.flatnonzero(fits).tolist()
    return found.only(fits, options=tuple(options[o] for o in which), use=found.use[which])


def _options(pricer: StagePricer, classes: Sequence[IslandClass]) -> Iterator[Option]:
    job, legal = pricer.job, _legal(pricer)
    experts = bool(experts_of(pricer.model, 0, len(pricer.model.layers)))
    for place, island_class in enumerate(classes):
        for tp in legal.tensor_degrees:
            parallel = legal.sequence_parallel(tp)
            if island_class.devices_per_node % tp or parallel is None:
                continue
            for size in divisors(job.global_batch_size):
                if job.pin.microbatch_size not in (None, size):
                    continue
                shape = Shape(
                    tp=tp,
                    dp=1,
                    microbatch_size=size,
                    etp=tp if experts else 1,
                    sequence_parallel=parallel,
                )
                for recompute in legal.recompute:
                    yield Option(place=place, shape=shape, recompute=recompute)


def _may_have(
    pricer: StagePricer, classes: Sequence[IslandClass], options: Sequence[Option]
) -> Bools:
    may = np.ones((ROLES, len(options)), dtype=np.bool_)
    pin = pricer.job.pin
    for o, option in enumerate(options):
        members = [pricer.cluster.islands[i] for i in classes[option.place].islands]
        if not any(matches(island, pin.embedding_on) for island in members):
            may[[FIRST, BOTH], o] = False
        if not any(matches(island, pin.head_on) for island in members):
            may[[LAST, BOTH], o] = False
    return may


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
    degrees = Shape(tp=shape.tp, dp=1, microbatch_size=shape.microbatch_size)
    hops = [
        boundary_costs_over(link, pricer.model, pricer.job, degrees, pricer.predictor, ends)
        for link, ends in links
    ]
    if not hops:
        return 0.0, 0.0  # the only stage that there can be
    return (
        min(hop.send_forward_seconds + hop.wire_latency_seconds for hop in hops),
        min(hop.send_backward_seconds + hop.wire_latency_seconds for hop in hops),
    )


# ---- whole stages


def meshes_by_samples(model: ModelSpec, cluster: Cluster, job: Job) -> dict[int, tuple[Mesh, ...]]:
    """Meshes that may stand in one pipeline beside others, by increasing samples per microbatch."""
    pin = job.pin
    # Their sends wait, and warm-ups are as usual.
    if pin.virtual_stages not in (None, 1) or pin.depth:
        return {}
    # A pipeline with few microbatches may have more stages than one with all of them.
    free = replace(pin, pipelines=None, pp=None, virtual_stages=1, depth=0)
    found: dict[int, dict[Mesh, None]] = {}
    for family in Families(model=model, cluster=cluster, job=replace(job, pin=free)).families():
        for mesh in family.meshes:
            # Context and expert parallelism are for one pipeline.
            if all(shape.cp == shape.ep == 1 for shape in mesh.shapes):
                found.setdefault(family.samples, {})[mesh] = None
    return {samples: tuple(found[samples]) for samples in sorted(found)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Meshes between which no option can tell."""

    mesh: Mesh
    classes: tuple[int, ...]
    """Of its islands."""
    may_be_first: bool
    may_be_last: bool


class MeshOptionsMaker:
    """Makes the options of one job, by samples per microbatch.

    `sharding`: who shares the optimizer's state; unless given, everybody where that is legal.
    """

    def __init__(self, pricer: StagePricer, sharding: Sharding | None = None) -> None:
        self._pricer = pricer
        self._classes = island_classes(pricer.cluster)
        self._class_of = {i: c for c, each in enumerate(self._classes) for i in each.islands}
        self._recompute = _legal(pricer).recompute
        best = Sharding.OPTIMIZER if may_shard(pricer) else Sharding.NONE
        self._sharding = best if sharding is None else sharding
        self._known: dict[tuple[int, int, int], tuple[Passes, tuple[float, float]]] = {}

    def all(self) -> tuple[MeshOptions, ...]:
        """Every number of samples that leaves something of the batch for another pipeline."""
        pricer = self._pricer
        meshes = meshes_by_samples(pricer.model, pricer.cluster, pricer.job)
        batch = pricer.job.global_batch_size
        found = (self._of(samples, each) for samples, each in meshes.items() if samples < batch)
        return tuple(each for each in found if each is not None)

    def _of(self, samples: int, meshes: Sequence[Mesh]) -> MeshOptions | None:
        """None where no unit fits."""
        pricer, job = self._pricer, self._pricer.job
        units = pricer.units.count
        numbers, every = self._alike(meshes)
        options = [(m, v) for m in range(len(every)) for v in range(len(self._recompute))]
        parts, owners = self._parts(every, options)
        slowest = [self._slowest(every[m], v) for m, v in options]
        memory, received = _memory(pricer, parts, self._sharding)
        use = np.zeros((len(options), len(self._classes)))
        may_have = np.ones((ROLES, len(options)), dtype=np.bool_)
        for o, (m, _) in enumerate(options):
            for place, shape in zip(every[m].classes, every[m].mesh.shapes, strict=True):
                use[o, place] += shape.num_devices / samples
            may_have[[FIRST, BOTH], o] &= every[m].may_be_first
            may_have[[LAST, BOTH], o] &= every[m].may_be_last
        most_stages = min(units, job.pin.pp or units, self._room(use * samples))
        found = MeshOptions(
            **_costs(pricer, slowest),
            samples=samples,
            most_microbatches=(job.global_batch_size - 1) // samples,
            fewest_stages=job.pin.pp or 1,
            most_stages=most_stages,
            devices=np.array([each.devices for each in self._classes], dtype=np.float64),
            alone=np.array([len(each.islands) == 1 for each in self._classes]),
            meshes=tuple(each.mesh for each in every),
            alike=numbers,
            mesh=np.array([m for m, _ in options], dtype=np.int64),
            recompute=np.array([v for _, v in options], dtype=np.int64),
            use=use,
            option=np.array(owners, dtype=np.int64),
            memory=memory,
            shared_state=np.zeros_like(memory),
            received=received,
            available=_available(pricer, parts),
            may_have=may_have,
        )
        fits = found.most_layers(1, 1)[:, :, 1].max(axis=0) > 0
        if not fits.any() or most_stages < found.fewest_stages:
            return None
        which = np.flatnonzero(fits)
        per_option = {name: getattr(found, name)[which] for name in ("mesh", "recompute", "use")}
        return found.only(fits, **per_option)

    def _alike(self, meshes: Sequence[Mesh]) -> tuple[dict[Mesh, int], list[_Alike]]:
        """One of all meshes on islands of the same classes with the same shapes, by number."""
        cluster, pin = self._pricer.cluster, self._pricer.job.pin
        numbers: dict[object, int] = {}
        of_mesh: dict[Mesh, int] = {}
        every: list[_Alike] = []
        for mesh in meshes:
            classes = tuple(self._class_of[island] for island in mesh.islands)
            key = tuple(sorted(zip(classes, mesh.shapes, strict=True)))
            first = mesh_matches(mesh, cluster, pin.embedding_on)
            last = mesh_matches(mesh, cluster, pin.head_on)
            at = of_mesh[mesh] = numbers.setdefault(key, len(every))
            if at == len(every):
                every.append(
                    _Alike(mesh=mesh, classes=classes, may_be_first=first, may_be_last=last)
                )
            else:
                every[at] = replace(
                    every[at],
                    may_be_first=first or every[at].may_be_first,
                    may_be_last=last or every[at].may_be_last,
                )
        return of_mesh, every

    def _parts(
        self, every: Sequence[_Alike], options: Sequence[tuple[int, int]]
    ) -> tuple[list[_Part], list[int]]:
        """All parts of the options' stages, and the option of each."""
        parts, owners = [], []
        for o, (m, v) in enumerate(options):
            mesh = every[m].mesh
            shards = sum(shape.dp for shape in mesh.shapes)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True):
                recompute = self._recompute[v]
                parts.append(_Part(island=island, shape=shape, recompute=recompute, shards=shards))
                owners.append(o)
        return parts, owners

    def _room(self, devices: Floats) -> int:
        """Most stages: of every class as many as its smallest stages have room; [O, C]."""
        total = 0
        for place, each in enumerate(self._classes):
            sizes = devices[devices[:, place] > 0, place]
            total += int(each.devices / sizes.min() + 1e-9) if sizes.size else 0
        return total

    def _slowest(self, alike: _Alike, at: int) -> tuple[Passes, int, tuple[float, float]]:
        """Passes of the part that takes longest for a unit, the recomputation's position in them,
        and the least arrivals there.
        """
        parts = [
            self._of_part(self._class_of[island], shape)
            for island, shape in zip(alike.mesh.islands, alike.mesh.shapes, strict=True)
        ]
        passes, arrive = max(
            parts, key=lambda part: float(part[0].forward[at] + part[0].backward[at])
        )
        return passes, at, arrive

    def _of_part(self, place: int, shape: Shape) -> tuple[Passes, tuple[float, float]]:
        key = (place, shape.tp, shape.microbatch_size)
        found = self._known.get(key)
        if found is None:
            island, alone = self._classes[place].islands[0], replace(shape, dp=1)
            found = self._known[key] = (
                self._pricer.passes(island, alone, self._recompute),
                least_arrival(self._pricer, island, alone),
            )
        return found
