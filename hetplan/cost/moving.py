"""What moves when a run goes on under another plan: who needs which bytes, from whom, how long.

The state of a run is its parameters and their optimizer state. A part of it, as all weights of some
layers that tensor parallelism cuts, is the unit square:

    x   the cut of tensor parallelism: rank t of d holds t / d to (t + 1) / d
    y   the cut of sharding: shard s of n holds s / n to (s + 1) / n, for what is sharded

Every device holds rectangles of every part. The edges of all rectangles, of the old plan and of the
new one, cut a part into cells that nobody holds in half; so sets of bytes are sets of cells:

    needed = held (the device has it already) + received (from a peer) + read (from the checkpoint)

Megatron-LM cuts the row of a bucket's parameters into shards, and tp cuts each parameter: so the
two are different axes. A bucket is about a layer, of which all layers are taken to be cut alike.
Where tp exceeds the key-value heads d is their number; norms have d = 1; the vocabulary may end
before the last slice does, and padding does not move; routed experts have x = (expert, slice of
it). A tied matrix is one part that both ends of a pipeline hold.

Each cell comes from the nearest copy: in the node, the island, the region, anywhere; a device that
has received it passes it on, so a cell enters a node once. Without a copy nearer than another
island, a run that starts from its checkpoint reads it once per island (as Megatron-LM's
`--ckpt-fully-parallel-load` does once per group).

    seconds = max over segments (bytes over it / its capacity) + latency

No order of sending is faster, and constant rates in proportion to the bytes reach it: what must
wait for a device that passes on is taken to follow at once, piece by piece. Segments are those of
`cost.network.group_shares`. Reads go beside it and are limited by the storage, and by NICs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.device import weights_at
from hetplan.cost.network.group_shares import paths
from hetplan.cost.network.segments import LinkName, nic_bytes_per_second
from hetplan.cost.traffic import checkpoint_bytes_per_parameter, links_between
from hetplan.job.spec import Job
from hetplan.model.layers import Attention, Experts
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.pieces import (
    Places,
    device_array,
    experts_as_the_rest,
    holders,
    stage_array,
    stage_shards,
)
from hetplan.plans.plan import DeviceRange, Plan, Replica, Sharding, Stage, compress

GONE = -1
"""The new number of a device that is no longer there."""
STORAGE = -2
"""The sender of what is read from the checkpoint."""


class Rectangle(NamedTuple):
    """What one device holds of a part: x from `left` to `right`, y from `low` to `high`.

    Edges are quotients of whole numbers, so equal edges are equal floats.
    """

    device: int
    left: float
    right: float
    low: float
    high: float


class Part(NamedTuple):
    """How a part of the state is cut."""

    what: str
    """`split`, `vocabulary` or `experts`."""
    most: int
    """Of `split`: into so many slices at most, 0: any number; otherwise rows or experts."""


class Cell(NamedTuple):
    """Bytes that no device holds in half, under the old plan or the new one."""

    size: float
    """Bytes."""
    holders: tuple[int, ...]
    """Devices that have it, by their new numbers; those that are gone are left out."""
    needers: tuple[int, ...]
    """Devices that need it, each once."""


class Delivery(NamedTuple):
    """One cell to one device."""

    source: int
    """`STORAGE`, or a device: `target` itself where it has the cell."""
    target: int
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """All that one device sends another, or reads from the checkpoint."""

    source: int
    """`STORAGE`, or a device."""
    target: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What crosses all links of one name."""

    link: LinkName
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """What moves before a run goes on under another plan."""

    needed_bytes: float
    """Of all devices of the new plan together."""
    held_bytes: float
    """Of these what the device has already."""
    read_bytes: float
    """From the checkpoint."""
    links: tuple[LinkBytes, ...]
    """What devices send each other."""
    send_seconds: float
    read_seconds: float

    @property
    def seconds(self) -> float:
        """Until all is there: reading and sending go beside each other."""
        return max(self.send_seconds, self.read_seconds)

    @property
    def sent_bytes(self) -> float:
        """From device to device, each byte once for each device that receives it."""
        return sum(each.bytes for each in self.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What was there before: the old plan, and where its devices are now."""

    plan: Plan
    now: tuple[int, ...]
    """New number of every device of the old cluster, or `GONE`."""


# ---- parts and who holds them


def parts_of(model: ModelSpec, position: int, tp: int) -> Iterator[tuple[Part, float]]:
    """The parts of a layer, and parameters of each; a tied head's matrix is the embedding's.

    `tp` is a degree above 1 that cuts the model, or 1 where no other is in use.
    """
    kind = model.kind_at(position)
    whole, cut = (weights_at(model, position, each, 1, 1) for each in (1, tp))
    if kind in (LayerKind.EMBEDDING, LayerKind.HEAD):
        rows = model.vocab_size
        matrix = 0.0 if kind is LayerKind.HEAD and model.tied_embeddings else 1.0
        bias = rows if kind is LayerKind.HEAD and model.head_bias else 0
        own = model.vocabulary_matrix() + bias
        yield Part("vocabulary", rows), matrix * model.vocabulary_matrix() + bias
        yield Part("split", 1), whole.dense - own
        return
    layer = model.layer_at(position)
    attention, rest, slice_ = layer.attention, whole.dense, cut.dense
    if isinstance(attention, Attention):
        width = 2 * (model.hidden_size + attention.qkv_bias)
        keys, mine = (width * attention.slice_sizes(each)[1] for each in (1, tp))
        rest, slice_ = rest - keys, slice_ - mine
        yield Part("split", attention.num_kv_heads), float(keys)
    alike = rest if tp == 1 else (tp * slice_ - rest) / (tp - 1)
    yield Part("split", 1), alike
    yield Part("split", 0), rest - alike
    if isinstance(layer.mlp, Experts):
        yield Part("experts", layer.mlp.num_experts), whole.routed


def rectangles(plan: Plan, stage: Stage, part: Part, *, sharded: bool) -> Iterator[Rectangle]:
    """What each device of a stage holds of a part of its layers."""
    copy, shards = 0, stage_shards(plan.optimizer_shards, stage)
    for replica in stage.replicas:
        own, first = shards, copy
        degree, expert = replica.tp, part.what == "experts"
        if expert:
            degree = replica.ep * replica.etp
            if not experts_as_the_rest(replica):
                first, own = 0, int(np.gcd(plan.optimizer_shards, replica.num_devices // degree))
        for at, device in enumerate(device_array(replica.devices).tolist()):
            number, slice_ = divmod(at, degree)
            shard = (first + number) % own
            low, high = (shard / own, (shard + 1) / own) if sharded else (0.0, 1.0)
            for left, right in _cuts(plan, replica, part, slice_):
                yield Rectangle(device, left, right, low, high)
        copy += replica.dp * replica.cp


def _cuts(plan: Plan, replica: Replica, part: Part, at: int) -> Iterator[tuple[float, float]]:
    """The intervals of x of the rank at this place among those that share one copy."""
    if part.what == "experts":
        ep, etp, count = replica.ep, replica.etp, part.most
        each = -(-count // ep)
        expert, slice_ = divmod(at, etp)
        mine = range(expert * each, min(count, (expert + 1) * each))
        if etp == 1 and mine:
            yield mine.start / count, mine.stop / count
        elif mine:
            for one in mine:
                first = one * etp + slice_
                yield first / (etp * count), (first + 1) / (etp * count)
    elif part.what == "vocabulary":
        rows, each = part.most, plan.padded_vocab_size // replica.tp
        if at * each < rows:
            yield at * each / rows, min(rows, (at + 1) * each) / rows
    else:
        slices = min(replica.tp, part.most or replica.tp)
        slice_ = at * slices // replica.tp
        yield slice_ / slices, (slice_ + 1) / slices


_Run = tuple[tuple[Stage, ...], tuple[Stage, ...]]
"""Stages of the old plan and of the new one that hold the same layers."""


def _runs(old: Plan | None, new: Plan, model: ModelSpec) -> list[tuple[_Run, Part, float]]:
    """Which stages hold a part, before and after, and parameters of it."""
    before = () if old is None else old.pipelines
    rows = [pipeline.stages for pipeline in (*before, *new.pipelines)]
    degrees = {each.tp for row in rows for stage in row for each in stage.replicas}
    tp = min(degrees - {1}, default=1)
    found: dict[tuple[tuple[int, ...], Part], list[float]] = defaultdict(list)
    runs: dict[tuple[int, ...], _Run] = {}
    ends: tuple[dict[int, Stage], dict[int, Stage]] = ({}, {})
    last = len(model.layers) - 1
    for held in holders(rows, len(model.layers), (1, last)):
        key = tuple(map(id, held.stages))
        run = runs[key] = held.stages[: len(before)], held.stages[len(before) :]
        for position in range(held.layers.start, held.layers.stop):
            for part, count in parts_of(model, position, tp):
                if model.tied_embeddings and part.what == "vocabulary":
                    for known, stages in zip(ends, run, strict=True):
                        known.update((id(stage), stage) for stage in stages)
                else:
                    found[key, part].append(count)
    result = [(runs[key], part, sum(counts)) for (key, part), counts in found.items()]
    if model.tied_embeddings:
        tied = tuple(ends[0].values()), tuple(ends[1].values())
        part = Part("vocabulary", model.vocab_size)
        result.append((tied, part, float(model.vocabulary_matrix())))
    return [(run, part, count) for run, part, count in result if count > 0]


def cells(held: Held | None, new: Plan, model: ModelSpec, job: Job) -> Iterator[Cell]:
    """All of the state that the new plan's devices need, cell by cell."""
    old = None if held is None else held.plan
    weight = job.precision.bytes_per_element
    state = checkpoint_bytes_per_parameter(job) - weight
    levels = tuple(Sharding)
    for (before, after), part, count in _runs(old, new, model):
        for size, level in ((weight, Sharding.PARAMETERS), (state, Sharding.OPTIMIZER)):
            if not size:
                continue
            asked = levels.index(level)
            was, now = (
                [
                    each
                    for stage in stages
                    for each in rectangles(
                        plan, stage, part, sharded=levels.index(plan.sharding) >= asked
                    )
                ]
                for plan, stages in ((old or new, before), (new, after))
            )
            yield from _cut(was, now, size * count, () if held is None else held.now)


def _cut(
    was: Sequence[Rectangle], need: Sequence[Rectangle], size: float, now: Sequence[int]
) -> Iterator[Cell]:
    """The cells of a part of so many bytes."""
    every = (*was, *need)
    xs = sorted({edge for each in every for edge in (each.left, each.right)})
    ys = sorted({edge for each in every for edge in (each.low, each.high)})
    columns = {edge: at for at, edge in enumerate(xs)}
    rows = {edge: at for at, edge in enumerate(ys)}

    def of(each: Rectangle) -> Iterator[tuple[int, int]]:
        for column in range(columns[each.left], columns[each.right]):
            for row in range(rows[each.low], rows[each.high]):
                yield column, row

    have: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in was:
        number = now[each.device]
        if number != GONE:
            for cell in of(each):
                have[cell].append(number)
    wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in need:
        for cell in of(each):
            wanted[cell].append(each.device)
    wide = [right - left for left, right in pairwise(xs)]
    high = [right - left for left, right in pairwise(ys)]
    for cell, needers in wanted.items():
        yield Cell(
            size * wide[cell[0]] * high[cell[1]],
            tuple(dict.fromkeys(have.get(cell, ()))),
            tuple(dict.fromkeys(needers)),
        )


# ---- from whom


def deliveries(found: Sequence[Cell], cluster: Cluster) -> Iterator[Delivery]:
    """Every cell to every device that needs it, from the nearest that has it.

    A source has its cell from the beginning, or has received it in a delivery before.
    """
    places = Places(cluster=cluster)
    every = np.arange(cluster.num_devices, dtype=np.int64)
    islands = places.islands(every)
    regions = [cluster.regions.index(each.region) for each in cluster.islands]
    near = [
        (*zip(("node", "island", "region"), key, strict=True), ("anywhere", 0))
        for key in zip(
            places.nodes(every).tolist(),
            islands.tolist(),
            np.array(regions, dtype=np.int64)[islands].tolist(),
            strict=True,
        )
    ]
    for number, cell in enumerate(found):
        have = set(cell.holders)
        latest: dict[tuple[str, int], int] = {}
        # Other cells begin at other copies.
        turn = number % len(cell.holders) if cell.holders else 0
        for holder in (*cell.holders[turn:], *cell.holders[:turn]):
            latest.update(dict.fromkeys(near[holder], holder))
        # A copy that is in place serves the others of its node first.
        for target in sorted(cell.needers, key=lambda each: each not in have):
            source = target
            if target not in have:
                reach = near[target] if cell.holders else near[target][:2]
                source = next((latest[key] for key in reach if key in latest), STORAGE)
            latest.update(dict.fromkeys(near[target], target))
            yield Delivery(source, target, cell.size)


# ---- how long


def transfers(found: Sequence[Cell], cluster: Cluster) -> tuple[Transfer, ...]:
    """Who gets how many bytes from whom; from itself what a device has already."""
    sizes: dict[tuple[int, int], float] = defaultdict(float)
    for source, target, size in deliveries(found, cluster):
        sizes[source, target] += size
    return tuple(
        Transfer(source=source, target=target, bytes=size)
        for (source, target), size in sorted(sizes.items())
    )


def moving(
    given: Sequence[Transfer], cluster: Cluster, *, storage_bytes_per_second: float
) -> Moving:
    """What these transfers take."""
    read = [each for each in given if each.source == STORAGE]
    sent = [each for each in given if each.source not in (STORAGE, each.target)]
    sources, targets = (
        np.array([getattr(each, end) for each in sent], dtype=np.int64)
        for end in ("source", "target")
    )
    sizes = np.array([each.bytes for each in sent], dtype=np.float64)
    total = math.fsum(each.bytes for each in read)
    return Moving(
        needed_bytes=math.fsum(each.bytes for each in given),
        held_bytes=math.fsum(each.bytes for each in given if each.source == each.target),
        read_bytes=total,
        links=_by_link(cluster, sources, targets, sizes),
        send_seconds=_send_seconds(cluster, sources, targets, sizes),
        read_seconds=max(total / storage_bytes_per_second, _into_nodes(cluster, read)),
    )


def _by_link(
    cluster: Cluster, sources: Ints, targets: Ints, sizes: Floats
) -> tuple[LinkBytes, ...]:
    found: dict[LinkName, float] = defaultdict(float)
    places = Places(cluster=cluster)
    pairs = np.stack([places.islands(sources), places.islands(targets)])
    near = places.nodes(sources) == places.nodes(targets)
    keys, group = np.unique(np.stack([*pairs, near]), axis=1, return_inverse=True)
    group = group.ravel()
    for at in range(keys.shape[1]):
        mine = np.flatnonzero(group == at)
        one = mine[:1]
        for link, _ in links_between(places, sources[one], targets[one]):
            found[link] += float(sizes[mine].sum())
    return tuple(LinkBytes(link=link, bytes=size) for link, size in sorted(found.items()))


def _send_seconds(cluster: Cluster, sources: Ints, targets: Ints, sizes: Floats) -> float:
    """Of the fullest segment."""
    if not sizes.size:
        return 0.0
    crossed = paths(cluster, sources, targets)
    load = np.bincount(
        crossed.segment, weights=sizes[crossed.flow], minlength=crossed.capacities.size
    )
    places = Places(cluster=cluster)
    pairs = {*zip(places.islands(sources).tolist(), places.islands(targets).tolist(), strict=True)}
    islands = cluster.islands
    latency = max(
        cluster.link_between(islands[one].name, islands[two].name).latency_seconds
        for one, two in pairs
    )
    return float((load / crossed.capacities).max()) + latency


def _into_nodes(cluster: Cluster, read: Sequence[Transfer]) -> float:
    """Seconds in which the NICs of the node that reads most take it in."""
    by_node: dict[tuple[str, int], float] = defaultdict(float)
    for each in read:
        island = cluster.island_of_device(each.target)
        by_node[island.name, cluster.node_of_device(each.target)] += each.bytes
    return max(
        (
            size / _nics_bytes_per_second(cluster, cluster.island(name))
            for (name, _), size in by_node.items()
        ),
        default=0.0,
    )


def _nics_bytes_per_second(cluster: Cluster, island: Island) -> float:
    """Of all NICs of a node."""
    if island.nics is not None:
        return island.nics.per_node * island.nics.bandwidth_bytes_per_second
    return island.devices_per_node * nic_bytes_per_second(cluster, island)


# ---- where a plan moves least


def laid_near(found: Sequence[Cell], plan: Plan, cluster: Cluster) -> Plan:
    """The plan on those nodes of its islands that have most of what it needs there.

    Nodes of an island are alike, so the step stays. An assignment of the nodes of each island, by
    the bytes that both the place in the plan needs and the node has.
    """
    places = Places(cluster=cluster)
    every = np.arange(cluster.num_devices, dtype=np.int64)
    node_of = places.nodes(every)
    count = int(node_of.max()) + 1
    need, have = np.zeros((2, count, len(found)))
    for at, cell in enumerate(found):
        need[node_of[list(cell.needers)], at] = cell.size
        have[node_of[list(cell.holders)], at] = 1.0
    now = every.copy()
    first_node = 0
    for island in cluster.islands:
        usable = np.array(island.usable_nodes, dtype=np.int64)
        if usable.size:
            shared = need[first_node + usable] @ have[first_node + usable].T
            # Where nothing is won a place stays as it was.
            stay = 1e-9 * (1.0 + shared.max()) * np.eye(usable.size)
            roles, nodes = linear_sum_assignment(shared + stay, maximize=True)
            first, each = cluster.first_device(island.name), island.devices_per_node
            for role, node in zip(usable[roles], usable[nodes], strict=True):
                start, stop = first + role * each, first + (role + 1) * each
                now[start:stop] = np.arange(first + node * each, first + (node + 1) * each)
        first_node += island.nodes
    return on_devices(plan, now.tolist(), cluster.num_devices)


def on_devices(plan: Plan, now: Sequence[int], num_devices: int) -> Plan:
    """The plan with device `now[k]` in place of device k, of a cluster of so many devices."""

    def moved(ranges: tuple[DeviceRange, ...]) -> tuple[DeviceRange, ...]:
        return compress([now[device] for device in device_array(ranges).tolist()])

    def placed(stage: Stage) -> Stage:
        return replace(
            stage, replicas=tuple(replace(r, devices=moved(r.devices)) for r in stage.replicas)
        )

    pipelines = tuple(
        replace(each, stages=tuple(map(placed, each.stages))) for each in plan.pipelines
    )
    outer = plan.outer
    taken = {now[device] for device in used(plan).tolist()}
    return replace(
        plan,
        pipelines=pipelines,
        reduction_groups=tuple(
            replace(each, members=moved(each.members)) for each in plan.reduction_groups
        ),
        outer=outer
        and replace(
            outer,
            reduction_groups=tuple(
                replace(each, members=moved(each.members)) for each in outer.reduction_groups
            ),
        ),
        tied_embedding_devices=moved(plan.tied_embedding_devices),
        unused_devices=compress([each for each in range(num_devices) if each not in taken]),
    )


def same_devices(old: Cluster, new: Cluster, *, leaving: bool = False) -> tuple[int, ...]:
    """The number in `new` of every device of `old`; `GONE` where its node is not usable there.

    A node is the one of its name, or of its number where nodes have no names, in the island of the
    same name, kind and number of devices. leaving: nodes that are out now can still send.
    """
    now = np.full(old.num_devices, GONE, dtype=np.int64)
    there = {island.name: island for island in new.islands}
    for island in old.islands:
        other = there.get(island.name)
        alike = other is not None and (other.device.kind, other.devices_per_node) == (
            island.device.kind,
            island.devices_per_node,
        )
        if other is None or not alike:
            continue
        each = island.devices_per_node
        names, others = island.names_of_nodes, other.names_of_nodes
        number = {name: at for at, name in enumerate(others)} if names and others else None
        for node in range(island.nodes):
            to = node if number is None else number.get(names[node], GONE)
            there_now = 0 <= to < other.nodes and (leaving or not other.is_out(to))
            if there_now and not island.is_out(node):
                first = old.first_device(island.name) + node * each
                start = new.first_device(island.name) + to * each
                now[first : first + each] = np.arange(start, start + each)
    return tuple(now.tolist())


def used(plan: Plan) -> Ints:
    """Every device of the plan."""
    return np.concatenate([stage_array(stage) for stage in plan.stages])
