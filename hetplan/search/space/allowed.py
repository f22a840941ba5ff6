"""What a job's pins and forbids leave of its cluster, and which islands have room for stages.

A trainer with one library of collectives has plans on islands of one library only.

A stage of degrees (tp, cp, dp) lies on one island, or on 2 to 4 islands of one device kind and one
node size: its data-parallel ranks are then dealt out equally, or in proportion to the usable nodes
(reduced by their greatest common divisor). Targets with mixed stages also have parts on two islands
of unlike kinds in one region, each with its own degrees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from itertools import combinations, product
from operator import itemgetter
from typing import NamedTuple

from hetplan.cluster.hosts import part_left
from hetplan.cluster.libraries import libraries_of
from hetplan.cluster.spec import Cluster, Island
from hetplan.job.spec import Job
from hetplan.job.trainer import mixes_libraries
from hetplan.model.layer_units import LayerUnits
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import stages_with_room
from hetplan.plans.check_target import MAX_PASSES, ends_agree
from hetplan.plans.limits import unlimited
from hetplan.plans.targets import Target, target
from hetplan.search.space.family import Mesh


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def kept(pin: int | None, choices: Sequence[int]) -> tuple[int, ...]:
    """The choices that a pin leaves."""
    return tuple(choice for choice in choices if pin in (None, choice))


def tensor_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Tensor-parallel degrees that the model's shape and at least one island's nodes allow."""
    sizes = {island.devices_per_node for island in cluster.islands if island.num_usable_devices}
    nodes = {d for size in sizes for d in divisors(size)}
    return tuple(tp for tp in sorted(nodes) if not model.slicing_faults(tp))


def is_one_stage(job: Job, model: ModelSpec) -> bool:
    """Whether the job's target trains the model in one stage only: its ends share a matrix."""
    return model.tied_embeddings and not target(job.target).tied_stages


def stage_limit(job: Job, model: ModelSpec, num_microbatches: int, chunks: int = 1) -> int:
    """Most stages of the model that the job's target can run with this many microbatches; 0 where
    one has too many passes already.
    """
    most = 1 if is_one_stage(job, model) else model.num_layers
    return _with_passes(job, most, num_microbatches, chunks)


def _with_passes(job: Job, most: int, num_microbatches: int, chunks: int) -> int:
    """So many stages, as far as microbatches and the passes of a step allow them."""
    most = min(most, MAX_PASSES // (num_microbatches * chunks))
    if target(job.target).fewer_microbatches_than_stages:
        return most
    return min(most, num_microbatches)


def most_stages_of(
    job: Job, units: LayerUnits, num_microbatches: int, chunks: int, *, one: bool = False
) -> int:
    """Most stages that the target can run: a unit in every chunk, and microbatches enough.

    one: it trains the model in one stage only (`is_one_stage`, `Family.one_stage`).
    """
    return _with_passes(job, 1 if one else units.count // chunks, num_microbatches, chunks)


def allowed_cluster(cluster: Cluster, job: Job) -> Cluster:
    """The cluster with every node out that the job forbids; device numbers stay."""
    islands = tuple(
        replace(island, nodes_out=tuple(range(island.nodes)))
        if island.name in job.forbid.islands
        else island
        for island in cluster.islands
    )
    return part_left(replace(cluster, islands=islands), job.forbid.nodes)


def searched_cluster(cluster: Cluster, job: Job) -> Cluster:
    """The same without the limits of its sites, which `hetplan.whatif.within_limits` keeps."""
    return unlimited(allowed_cluster(cluster, job), job)


def apart(cluster: Cluster, job: Job) -> tuple[str, ...]:
    """The cluster's libraries of collectives where a plan may have one of them; empty: all."""
    found = tuple(libraries_of(cluster))
    return () if len(found) < 2 or mixes_libraries(job) else found


def together(cluster: Cluster, job: Job) -> tuple[frozenset[int], ...]:
    """Sets of islands with usable nodes, each with all whose devices may be in one plan."""
    groups = libraries_of(cluster).values()
    if not apart(cluster, job):
        return (frozenset().union(*groups),)
    return tuple(map(frozenset, groups))


def matches(island: Island, place: str | None) -> bool:
    """Whether `place`, an island's name, a device kind or None for anywhere, means this island."""
    return place is None or place in (island.name, island.device.kind)


def mesh_matches(mesh: Mesh, cluster: Cluster, place: str | None) -> bool:
    """The same of every island of a mesh."""
    return all(matches(cluster.islands[island], place) for island in mesh.islands)


def ends_allowed(trainer: Target, model: ModelSpec, first: Mesh, last: Mesh) -> bool:
    """Whether the target runs pipelines that begin on one of these meshes and end on the other."""
    if not trainer.equal_ends or not (model.tied_embeddings or model.num_mtp_layers):
        return True
    return ends_agree(
        (first.shapes[0].tp, last.shapes[0].tp),
        (sum(each.dp for each in first.shapes), sum(each.dp for each in last.shapes)),
    )


MAX_ISLANDS_PER_UNION = 4
FEW_ISLANDS = 3
"""Up to so many islands of one kind every union is tried; of more, those that stand next to each
other when islands are sorted by region, whose number grows with the islands and no faster."""
FEW_DEVICES = 8
"""Up to so many usable devices on two islands of unlike kinds every pair of parts is tried; above,
parts of equal numbers of devices, or in proportion to the usable ones."""
FEW_SAMPLES = 8
"""Up to here every split of a microbatch between unlike parts is tried; above, the two that are
nearest to the ratio of their peak rates."""
MAX_MIXED, MIN_MIXED = 24, 2
"""Meshes of one tick on pairs of islands with more than `FEW_DEVICES`, dealt out equally over the
pairs, and fewest of each pair: those whose parts are nearest to taking as long as each other by
their peak rates. Each further mesh costs the search time with every other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Islands that have room for stages of some degrees."""

    islands: tuple[int, ...]
    dps: tuple[int, ...]
    """Data-parallel ranks on each."""
    stages: int
    """How many such stages."""


class MixedPart(NamedTuple):
    """One island's part of a mixed stage."""

    island: int
    tp: int
    dp: int
    microbatch_size: int


MixedRoom = tuple[tuple[MixedPart, MixedPart], int]
"""Two islands of unlike kinds that have room for stages with a part on each, and for how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Degrees of one island's part of a mixed stage."""

    tp: int
    dp: int
    size: int
    """Devices."""
    stages: int
    rate: float
    """Peak operations per second of all its devices."""


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """Answers for one cluster, as `allowed_cluster` left it."""

    cluster: Cluster
    most_stages: int
    """Stages beyond this are not counted."""
    unions: bool
    """Whether stages may lie on several islands."""
    _found: dict[tuple[int, int, int], tuple[Room, ...]] = field(default_factory=dict)
    _pairs_found: dict[tuple[int, int], tuple[tuple[_Side, _Side, int], ...]] = field(
        default_factory=dict
    )

    @cached_property
    def usable(self) -> tuple[tuple[int, Island], ...]:
        """Islands with at least one usable node, with their positions."""
        return tuple(
            (at, island)
            for at, island in enumerate(self.cluster.islands)
            if island.num_usable_devices
        )

    @cached_property
    def _unions(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """(islands, weights of their data-parallel ranks) of every union of one kind."""
        if not self.unions:
            return ()
        alike: dict[tuple[str, int], list[int]] = {}
        for at, island in self.usable:
            alike.setdefault((island.device.kind, island.devices_per_node), []).append(at)
        found = []
        for group in alike.values():
            for count in range(2, min(len(group), MAX_ISLANDS_PER_UNION) + 1):
                for islands in self._together(group, count):
                    nodes = [len(self.cluster.islands[at].usable_nodes) for at in islands]
                    shared = math.gcd(*nodes)
                    weights = {(1,) * count, tuple(each // shared for each in nodes)}
                    found += [(islands, each) for each in sorted(weights)]
        return tuple(sorted(found))

    def _together(self, group: list[int], count: int) -> list[tuple[int, ...]]:
        """So many islands of a kind: any of few, neighbours in one or two regions of many."""
        if len(group) <= FEW_ISLANDS:
            return [*combinations(group, count)]
        regions = self.cluster.regions
        row = sorted(group, key=lambda at: (regions.index(self.cluster.islands[at].region), at))
        return [tuple(sorted(row[k : k + count])) for k in range(len(row) - count + 1)]

    def of(self, tp: int, cp: int, dp: int) -> tuple[Room, ...]:
        """Every room for stages of these degrees, by islands."""
        key = (tp, cp, dp)
        if key not in self._found:
            self._found[key] = self._rooms(tp, cp, dp)
        return self._found[key]

    def _rooms(self, tp: int, cp: int, dp: int) -> tuple[Room, ...]:
        found = []
        for at, island in self.usable:
            stages = stages_with_room(island, tp, tp * cp * dp)
            if stages:
                found.append(Room(islands=(at,), dps=(dp,), stages=min(stages, self.most_stages)))
        for islands, weights in self._unions:
            share, rest = divmod(dp, sum(weights))
            if rest:
                continue
            dps = tuple(share * weight for weight in weights)
            stages = self.most_stages
            for at, ranks in zip(islands, dps, strict=True):
                room = stages_with_room(self.cluster.islands[at], tp, tp * cp * ranks)
                stages = min(stages, room)
            if stages:
                found.append(Room(islands=islands, dps=dps, stages=stages))
        return tuple(found)

    def mixed(self, samples: int, batch: int, tps: tuple[int, ...]) -> tuple[MixedRoom, ...]:
        """Every room for stages of two unlike kinds that share microbatches of so many samples.

        The data-parallel ranks of each part divide the batch.
        """
        if samples < 2 or not self.unions:
            return ()
        found: list[MixedRoom] = []
        many = sum(not self._few(*pair) for pair in self._mixed_pairs)
        for left, right in self._mixed_pairs:
            close = []
            for one, two, stages in self._pairs(left, right, batch, tps):
                ratio = one.rate / (one.rate + two.rate)
                for a, b in splits(samples, one.dp, two.dp, ratio):
                    close.append((abs(one.dp * a / samples - ratio), one, two, a, b, stages))
            if not self._few(left, right):
                # Equally near ones stay in the order of their degrees.
                most = max(MIN_MIXED, MAX_MIXED // many)
                close = nsmallest(most, close, key=itemgetter(0))
            for _, one, two, a, b, stages in close:
                parts = MixedPart(left, one.tp, one.dp, a), MixedPart(right, two.tp, two.dp, b)
                found.append((parts, stages))
        return tuple(found)

    @cached_property
    def _mixed_pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (left, right)
            for (left, one), (right, two) in combinations(self.usable, 2)
            if one.device.kind != two.device.kind and one.region == two.region
        )

    def _few(self, left: int, right: int) -> bool:
        islands = self.cluster.islands
        return islands[left].num_usable_devices + islands[right].num_usable_devices <= FEW_DEVICES

    def _pairs(
        self, left: int, right: int, batch: int, tps: tuple[int, ...]
    ) -> tuple[tuple[_Side, _Side, int], ...]:
        """Parts on two islands that go together, and how many such stages have room."""
        key = (left, right)
        if key not in self._pairs_found:
            one, two = (self.cluster.islands[at].num_usable_devices for at in key)
            shared = math.gcd(one, two)
            ratios = {(1, 1), (one // shared, two // shared)}
            every = self._few(left, right)
            self._pairs_found[key] = tuple(
                (a, b, min(a.stages, b.stages, self.most_stages))
                for a, b in product(self._sides(left, batch, tps), self._sides(right, batch, tps))
                if every or any(a.size * second == b.size * first for first, second in ratios)
            )
        return self._pairs_found[key]

    def _sides(self, at: int, batch: int, tps: tuple[int, ...]) -> list[_Side]:
        """Every part of a mixed stage on one island."""
        island = self.cluster.islands[at]
        rate = max((rate for _, rate in island.device.peak_flops_per_second), default=1.0)
        found = []
        for tp, dp in product(tps, divisors(batch)):
            size = tp * dp
            if size <= island.num_usable_devices:
                stages = stages_with_room(island, tp, size)
                if stages:
                    found.append(_Side(tp=tp, dp=dp, size=size, stages=stages, rate=rate * size))
        return found


def splits(samples: int, left: int, right: int, ratio: float) -> list[tuple[int, int]]:
    """Microbatch sizes (a, b) with left * a + right * b = samples.

    All of few samples; of more the two for which left * a / samples is nearest to the ratio.
    """
    shared = math.gcd(left, right)
    if samples % shared:
        return []
    step = right // shared
    first = samples // shared * pow(left // shared, -1, step) % step if step > 1 else 0
    first = first or step
    most = (samples - right) // left
    if samples <= FEW_SAMPLES:
        return [(a, (samples - left * a) // right) for a in range(first, most + 1, step)]
    # Of the numbers first, first + step, ... up to `most` those around the wanted one.
    wanted = ratio * samples / left
    below = first + step * math.floor((wanted - first) / step)
    near = [a for a in range(below - step, below + 3 * step, step) if first <= a <= most]
    if not near:
        near = [a for a in (first, first + step) if a <= most]
        near += [a for a in (most - (most - first) % step,) if a >= first and a not in near]
    near.sort(key=lambda a: (abs(a - wanted), a))
    return sorted((a, (samples - left * a) // right) for a in near[:2])
