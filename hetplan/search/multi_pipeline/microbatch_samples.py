"""What can a stage of a pipeline with this tick be, and what does it cost at least?

A pipeline's tick G is the same for all of its stages. An option is (mesh, recomputation): a mesh of
tick G says which devices of which islands a stage has, so that the data-parallel ranks that share
its optimizer state are known. Everything else is a lower bound for every plan with such a stage:
passes of its slowest part without stragglers beyond one tensor-parallel group, transfers over the
fastest link that such a part can have. Islands of one class (`options`) have equal options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import most_units
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.options import island_classes, least_arrival, may_shard
from hetplan.search.space.allowed import mesh_matches
from hetplan.search.space.families import Families
from hetplan.search.space.family import Mesh
from hetplan.search.space.stage_pricer import Passes, StagePricer
from hetplan.search.space.stage_table import BOTH, FIRST, LAST


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tick:
    """All options of the pipelines of one tick: O options, C classes, Q parts of their stages."""

    samples: int
    """G: sequences of a microbatch."""
    most_microbatches: int
    """So that another pipeline has a part of the batch."""
    num_layers: int
    """Layer units."""
    fewest_stages: int
    most_stages: int
    enough_microbatches: bool
    """Whether a pipeline needs as many microbatches as stages."""
    rendezvous: bool
    devices: Floats
    """[C] usable ones."""
    alone: npt.NDArray[np.bool_]
    """[C] classes of one island."""
    meshes: tuple[Mesh, ...]
    """One of those that are alike."""
    mesh: Ints
    """[O] its position."""
    use: Floats
    """[O, C] devices that one sequence of a microbatch occupies."""
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
    option: Ints
    """[Q] whose part it is."""
    memory: Floats
    """[4, Q, 8] as `hetplan.cost.memory.lines.Lines.row`, without receive buffers."""
    received: Floats
    """[4, Q] receive buffers per microbatch, bytes."""
    available: Floats
    """[Q] bytes of a device that a plan may use."""
    may_have: npt.NDArray[np.bool_]
    """[4, O] whether the job's pins let a stage of this role be there."""

    def most_layers(self, num_microbatches: int, flights: int) -> Ints:
        """[4, O, flights + 1] units that fit with so many microbatches in flight; 0: none fits.

        Receive buffers are there for all microbatches of the step.
        """
        lines = self.memory.copy()
        # Receive buffers are there during every pass, not during the update.
        lines[..., 0] += self.received * num_microbatches
        lines[..., 2] += self.received * num_microbatches
        room = np.broadcast_to(self.available, lines.shape[:-1])
        counts = np.minimum(np.arange(flights + 1, dtype=np.int64), num_microbatches)
        fits = most_units(lines, room, self.num_layers, counts)
        found = np.full((4, len(self.forward), flights + 1), self.num_layers, dtype=np.int64)
        for q, o in enumerate(self.option.tolist()):
            np.minimum(found[:, o], fits[:, q], out=found[:, o])
        found[~self.may_have] = 0
        return found


def tick_meshes(model: ModelSpec, cluster: Cluster, job: Job) -> dict[int, tuple[Mesh, ...]]:
    """Meshes that may stand in one pipeline beside others, by tick, in the order of ticks."""
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


class Ticks:
    """Makes the options of one job, tick by tick."""

    def __init__(self, placed: StagePricer) -> None:
        self._placed = placed
        self._classes = island_classes(placed.cluster)
        self._class_of = {i: c for c, each in enumerate(self._classes) for i in each.islands}
        self._recompute = Families(
            model=placed.model, cluster=placed.cluster, job=placed.job
        ).recompute
        self._known: dict[tuple[int, int, int], tuple[Passes, tuple[float, float]]] = {}

    def all(self) -> tuple[Tick, ...]:
        """Every tick that leaves something of the batch for another pipeline."""
        placed = self._placed
        meshes = tick_meshes(placed.model, placed.cluster, placed.job)
        batch = placed.job.global_batch_size
        found = (self._tick(samples, each) for samples, each in meshes.items() if samples < batch)
        return tuple(tick for tick in found if tick is not None)

    def _tick(self, samples: int, meshes: Sequence[Mesh]) -> Tick | None:
        """None where no unit fits."""
        placed, job = self._placed, self._placed.job
        trainer, units = target(job.target), placed.units.count
        every = self._alike(meshes)
        options = [(m, again) for m in range(len(every)) for again in self._recompute]
        parts = [
            (o, p) for o, (m, _) in enumerate(options) for p in range(len(every[m].mesh.islands))
        ]
        slowest = [self._slowest(every[m], again) for m, again in options]
        memory, received = self._memory(
            [(every[options[o][0]], options[o][1], p) for o, p in parts]
        )
        use = np.zeros((len(options), len(self._classes)))
        may_have = np.ones((4, len(options)), dtype=np.bool_)
        for o, (m, _) in enumerate(options):
            one = every[m]
            for place, shape in zip(one.classes, one.mesh.shapes, strict=True):
                use[o, place] += shape.num_devices / samples
            may_have[[FIRST, BOTH], o] &= one.may_be_first
            may_have[[LAST, BOTH], o] &= one.may_be_last
        count = min(units, job.pin.pp or units, self._room(use * samples))
        found = Tick(
            samples=samples,
            most_microbatches=(job.global_batch_size - 1) // samples,
            num_layers=units,
            fewest_stages=job.pin.pp or 1,
            most_stages=count,
            enough_microbatches=not trainer.fewer_microbatches_than_stages,
            rendezvous=trainer.rendezvous_sends,
            devices=np.array([each.devices for each in self._classes], dtype=np.float64),
            alone=np.array([len(each.islands) == 1 for each in self._classes]),
            meshes=tuple(one.mesh for one in every),
            mesh=np.array([m for m, _ in options], dtype=np.int64),
            use=use,
            forward=np.array([each.forward[v] for each, v, _ in slowest]),
            backward=np.array([each.backward[v] for each, v, _ in slowest]),
            extra_forward=np.array([each.extra_forward[:, v] for each, v, _ in slowest]).T.copy(),
            extra_backward=np.array([each.extra_backward[:, v] for each, v, _ in slowest]).T.copy(),
            arrive_forward=np.array([arrive[0] for _, _, arrive in slowest]),
            arrive_backward=np.array([arrive[1] for _, _, arrive in slowest]),
            option=np.array([o for o, _ in parts], dtype=np.int64),
            memory=memory,
            received=received,
            available=np.array([self._available(every[options[o][0]].mesh, p) for o, p in parts]),
            may_have=may_have,
        )
        fits = found.most_layers(1, 1)[:, :, 1].max(axis=0) > 0
        return _only(found, fits) if fits.any() and count >= found.fewest_stages else None

    def _alike(self, meshes: Sequence[Mesh]) -> list[_Alike]:
        """One of all meshes on islands of the same classes with the same shapes."""
        cluster, pin = self._placed.cluster, self._placed.job.pin
        found: dict[object, _Alike] = {}
        for mesh in meshes:
            classes = tuple(self._class_of[island] for island in mesh.islands)
            key = tuple(sorted(zip(classes, mesh.shapes, strict=True)))
            known = found.get(key)
            found[key] = _Alike(
                mesh=mesh if known is None else known.mesh,
                classes=classes if known is None else known.classes,
                may_be_first=mesh_matches(mesh, cluster, pin.embedding_on)
                or (known is not None and known.may_be_first),
                may_be_last=mesh_matches(mesh, cluster, pin.head_on)
                or (known is not None and known.may_be_last),
            )
        return list(found.values())

    def _room(self, devices: Floats) -> int:
        """Most stages: of every class as many as its smallest stages have room; [O, C]."""
        total = 0
        for place, each in enumerate(self._classes):
            sizes = devices[devices[:, place] > 0, place]
            total += int(each.devices / sizes.min() + 1e-9) if sizes.size else 0
        return total

    def _slowest(
        self, one: _Alike, again: RecomputeGranularity
    ) -> tuple[Passes, int, tuple[float, float]]:
        """Passes of the part that takes longest for a unit, the recomputation's position in them,
        and the least arrivals there.
        """
        at = self._recompute.index(again)
        each = [
            self._of_part(self._class_of[island], shape)
            for island, shape in zip(one.mesh.islands, one.mesh.shapes, strict=True)
        ]
        passes, arrive = max(each, key=lambda e: float(e[0].forward[at] + e[0].backward[at]))
        return passes, at, arrive

    def _of_part(self, place: int, shape: Shape) -> tuple[Passes, tuple[float, float]]:
        key = (place, shape.tp, shape.microbatch_size)
        found = self._known.get(key)
        if found is None:
            one = replace(shape, dp=1)
            island = self._classes[place].islands[0]
            found = self._known[key] = (
                self._placed.passes(island, one, self._recompute),
                least_arrival(self._placed, self._classes[place], shape.tp, shape.microbatch_size),
            )
        return found

    def _memory(
        self, parts: Sequence[tuple[_Alike, RecomputeGranularity, int]]
    ) -> tuple[Floats, Floats]:
        """[4, Q, 8] and [4, Q] as in `Tick`."""
        placed = self._placed
        sharding = Sharding.OPTIMIZER if may_shard(placed) else Sharding.NONE
        lines, received = np.empty((4, len(parts), 8)), np.empty((4, len(parts)))
        known: dict[object, tuple[list[tuple[float, ...]], list[float]]] = {}
        for q, (one, again, p) in enumerate(parts):
            shape = one.mesh.shapes[p]
            shards = sum(each.dp for each in one.mesh.shapes)
            key = (shape.tp, shape.microbatch_size, again, shards)
            if key not in known:
                held = [placed.stage_bytes(shape, again, role) for role in range(4)]
                known[key] = (
                    [each.lines(sharding, shards, shards, 0).row() for each in held],
                    [each.received for each in held],
                )
            lines[:, q], received[:, q] = known[key]
        return lines, received

    def _available(self, mesh: Mesh, part: int) -> float:
        island = self._placed.cluster.islands[mesh.islands[part]]
        return island.memory_bytes * (1 - self._placed.job.memory_reserve_fraction)


def _only(tick: Tick, fits: npt.NDArray[np.bool_]) -> Tick:
    """The options that fit."""
    which = np.flatnonzero(fits)
    parts = np.flatnonzero(fits[tick.option])
    number = np.cumsum(fits) - 1
    return replace(
        tick,
        option=number[tick.option[parts]],
        memory=tick.memory[:, parts].copy(),
        received=tick.received[:, parts].copy(),
        available=tick.available[parts],
        **{
            name: getattr(tick, name)[which]
            for name in (
                *("mesh", "use", "forward", "backward"),
                *("arrive_forward", "arrive_backward"),
            )
        },
        **{
            name: getattr(tick, name)[:, which].copy()
            for name in ("extra_forward", "extra_backward", "may_have")
        },
    )
