"""What one part of a stage can be, and what it costs at least: what templates are made of.

An option is (class of islands, tp, microbatch size, recomputation). Islands of one class have equal
devices, nodes and links, so that a part costs the same on each. Everything is a lower bound for
every plan that uses the option: passes without stragglers beyond one tensor-parallel group,
transfers over the fastest link that such a stage can have, memory with the optimizer's state split
over every device there is, where the target can split it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.lines import most_units
from hetplan.cost.step_model.hops import boundary_costs_over
from hetplan.errors import InputError
from hetplan.plans.build import Degrees
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import Target, target
from hetplan.search.space.allowed import divisors, matches
from hetplan.search.space.families import Families
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import BOTH, FIRST, LAST


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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Option:
    """One way to run a part of a stage."""

    place: int
    """Position in the classes."""
    tp: int
    microbatch_size: int
    recompute: RecomputeGranularity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """All options of a job; O options, C classes."""

    classes: tuple[IslandClass, ...]
    options: tuple[Option, ...]
    num_layers: int
    """Layer units."""
    batch: int
    """Sequences of one step."""
    use: Floats
    """[O] devices that one sequence of a microbatch occupies."""
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
    memory: Floats
    """[4, O, 8] as `hetplan.cost.memory.lines.Lines.row`, without optimizer state that ranks share
    and without receive buffers."""
    shared_state: Floats
    """[4, O, 8] what one rank adds to that where it shares with nobody."""
    received: Floats
    """[4, O] receive buffers per microbatch of the step, bytes."""
    available: Floats
    """[O] bytes of a device that a plan may use."""
    may_have: npt.NDArray[np.bool_]
    """[4, O] whether the job's pins let a stage of this role be there."""
    most_shards: int
    """Ranks that could share the optimizer's state; 1 where the target cannot share it."""
    rendezvous: bool
    enough_microbatches: bool
    """Whether a pipeline needs as many microbatches as stages."""
    stage_limit: int
    """Most stages of a pipeline."""

    def most_layers(
        self,
        num_microbatches: int,
        rows: int,
        shards: int | None = None,
    ) -> Ints:
        """[4, O, rows + 1] units that fit with so many microbatches in flight; 0: none fits.

        `shards`: ranks that share the optimizer's state; as many as there could be unless given.
        """
        lines = self.memory + self.shared_state / (self.most_shards if shards is None else shards)
        # Receive buffers are there during every pass, not during the update.
        lines[..., 0] += self.received * num_microbatches
        lines[..., 2] += self.received * num_microbatches
        room = np.broadcast_to(self.available, lines.shape[:-1])
        flights = np.minimum(np.arange(rows + 1, dtype=np.int64), num_microbatches)
        found = most_units(lines, room, self.num_layers, flights)
        found[~self.may_have] = 0
        return found


def island_classes(cluster: Cluster) -> tuple[IslandClass, ...]:
    """Islands with usable nodes, equal ones together, in the cluster's order."""
    found: dict[object, list[int]] = {}
    for index, island in enumerate(cluster.islands):
        if island.usable_nodes:
            found.setdefault(_likeness(cluster, island), []).append(index)
    return tuple(
        IslandClass(
            islands=tuple(members),
            devices_per_node=cluster.islands[members[0]].devices_per_node,
            nodes=tuple(len(cluster.islands[index].usable_nodes) for index in members),
        )
        for members in found.values()
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


def make_options(placed: StagePricer) -> Options:
    """Every option of which one unit fits with one microbatch in flight.

    InputError where there is none.
    """
    job, cluster = placed.job, placed.cluster
    trainer = target(job.target)
    classes = island_classes(cluster)
    options, passes = [], []
    for option in _choices(placed, classes):
        options.append(option)
        island = classes[option.place].islands[0]
        passes.append(placed.passes(island, shape_of(placed, option), (option.recompute,)))
    if not options:
        raise InputError(
            "no layer of the model can be placed on any island of the cluster; free a pin (tp, "
            "microbatch_size) or allow another island"
        )
    memory, shared, received = _memory(placed, options, trainer)
    usable = sum(each.devices for each in classes)
    arrive = np.array(
        [
            least_arrival(placed, classes[each.place], each.tp, each.microbatch_size)
            for each in options
        ]
    )
    found = Options(
        classes=classes,
        options=tuple(options),
        num_layers=placed.units.count,
        batch=job.global_batch_size,
        use=np.array([each.tp / each.microbatch_size for each in options]),
        forward=np.array([each.forward[0] for each in passes]),
        backward=np.array([each.backward[0] for each in passes]),
        extra_forward=np.array([each.extra_forward[:, 0] for each in passes]).T.copy(),
        extra_backward=np.array([each.extra_backward[:, 0] for each in passes]).T.copy(),
        arrive_forward=arrive[:, 0].copy(),
        arrive_backward=arrive[:, 1].copy(),
        memory=memory,
        shared_state=shared,
        received=received,
        may_have=_may_have(placed, classes, options),
        most_shards=usable if may_shard(placed) else 1,
        available=np.array([_room(placed, classes[each.place]) for each in options]),
        rendezvous=trainer.rendezvous_sends,
        enough_microbatches=not trainer.fewer_microbatches_than_stages,
        stage_limit=min(placed.units.count, job.pin.pp or placed.units.count),
    )
    fits = found.most_layers(1, 1)[:, :, 1].max(axis=0) > 0
    return _only(found, np.flatnonzero(fits))


def shape_of(placed: StagePricer, option: Option, dp: int = 1) -> Shape:
    """The option's shape with so many data-parallel ranks."""
    experts = bool(experts_of(placed.model, 0, len(placed.model.layers)))
    return Shape(
        tp=option.tp,
        dp=dp,
        microbatch_size=option.microbatch_size,
        etp=option.tp if experts else 1,
        sequence_parallel=_sequence_parallel(placed, option.tp),
    )


def _sequence_parallel(placed: StagePricer, tp: int) -> bool:
    has = target(placed.job.target).sequence_parallel
    return has and tp > 1 and placed.job.sequence_length % tp == 0


def _choices(placed: StagePricer, classes: tuple[IslandClass, ...]) -> Iterator[Option]:
    job, pin = placed.job, placed.job.pin
    legal = Families(model=placed.model, cluster=placed.cluster, job=job)
    for place, each in enumerate(classes):
        for tp in divisors(each.devices_per_node):
            if placed.model.slicing_faults(tp) or pin.tp not in (None, tp):
                continue
            for size in divisors(job.global_batch_size):
                if pin.microbatch_size not in (None, size):
                    continue
                for again in legal.recompute:
                    yield Option(place=place, tp=tp, microbatch_size=size, recompute=again)


def _room(placed: StagePricer, place: IslandClass) -> float:
    island = placed.cluster.islands[place.islands[0]]
    return island.memory_bytes * (1 - placed.job.memory_reserve_fraction)


_NOBODY, _EVERYBODY = 1, 2**60
"""Ranks that share the state; so many that nothing is left of it on one."""


def _memory(
    placed: StagePricer, options: list[Option], trainer: Target
) -> tuple[Floats, Floats, Floats]:
    """[4, O, 8], [4, O, 8], [4, O] as in `Options`."""
    lines = np.empty((2, 4, len(options), 8))
    received = np.empty((4, len(options)))
    sharding = Sharding.OPTIMIZER if may_shard(placed) else Sharding.NONE
    for o, option in enumerate(options):
        shape = shape_of(placed, option)
        for role in range(4):
            held = placed.stage_bytes(shape, option.recompute, role)
            lines[0, role, o] = held.lines(sharding, _EVERYBODY, _EVERYBODY, 0).row()
            lines[1, role, o] = held.lines(sharding, _NOBODY, _NOBODY, 0).row()
            received[role, o] = held.received
    # Nothing stands before the units of most stages: both are minus infinity.
    with np.errstate(invalid="ignore"):
        shared = np.nan_to_num(lines[1] - lines[0], nan=0.0)
    return lines[0], shared, received


def may_shard(placed: StagePricer) -> bool:
    """Whether ranks may share the optimizer's state."""
    can = target(placed.job.target).shardings(placed.job.optimizer)
    return Sharding.OPTIMIZER in can and placed.job.pin.sharded_optimizer is not False


def _may_have(
    placed: StagePricer, classes: tuple[IslandClass, ...], options: list[Option]
) -> npt.NDArray[np.bool_]:
    found = np.ones((4, len(options)), dtype=np.bool_)
    pin = placed.job.pin
    for o, option in enumerate(options):
        members = [placed.cluster.islands[i] for i in classes[option.place].islands]
        if not any(matches(island, pin.embedding_on) for island in members):
            found[[FIRST, BOTH], o] = False
        if not any(matches(island, pin.head_on) for island in members):
            found[[LAST, BOTH], o] = False
    return found


def least_arrival(
    placed: StagePricer, place: IslandClass, tp: int, microbatch_size: int
) -> tuple[float, float]:
    """Least seconds of a message (forward, backward) into a stage there."""
    cluster = placed.cluster
    island = cluster.islands[place.islands[0]]
    links = [
        (cluster.link_between(island.name, other.name), (island, other))
        for other in cluster.islands
        if other.name != island.name and other.usable_nodes
    ]
    if len(island.usable_nodes) > 1:
        links.append((island.inter_node, (island, island)))
    if tp < island.devices_per_node:
        links.append((island.intra_node, (island, island)))
    degrees = Degrees(tp=tp, dp=1, microbatch_size=microbatch_size)
    hops = [
        boundary_costs_over(link, placed.model, placed.job, degrees, placed.predictor, ends)
        for link, ends in links
    ]
    if not hops:
        return 0.0, 0.0  # the only stage that there can be
    return (
        min(hop.send_forward_seconds + hop.wire_latency_seconds for hop in hops),
        min(hop.send_backward_seconds + hop.wire_latency_seconds for hop in hops),
    )


def _only(options: Options, which: Ints) -> Options:
    """Those options alone; an InputError where there is none."""
    if not which.size:
        raise InputError(
            "no layer of the model fits on any device of the cluster; raise tp, allow recompute, "
            "or use devices with more memory"
        )
    return replace(
        options,
        options=tuple(options.options[o] for o in which.tolist()),
        **{
            name: getattr(options, name)[which]
            for name in (
                "use",
                "forward",
                "backward",
                "arrive_forward",
                "arrive_backward",
                "available",
            )
        },
        **{
            name: getattr(options, name)[:, which].copy()
            for name in (
                "extra_forward",
                "extra_backward",
                "memory",
                "shared_state",
                "received",
                "may_have",
            )
        },
    )
