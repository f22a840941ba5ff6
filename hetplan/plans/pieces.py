"""Parts of plans that several rooms need: device arrays, copies of weights, warm-up depths.

Plans name up to a hundred thousand devices, so islands and nodes of devices are numpy arrays.

Pipelines may be cut differently. Between the cuts of all of them lie pieces of layers that one
stage of each pipeline holds (`holders`); the gradients of a piece are reduced over the same
devices.

`own_depth` gives the microbatches that a stage has in flight under a schedule's own warm-up. With
P stages, s a stage, v virtual stages on each, m microbatches:

    1f1b, zb-h1        min(P - s, m)               arXiv 2104.04473, 2401.10241 section 2.3
    gpipe              m                           arXiv 1811.06965
    V schedules        forward passes of both chunks before the first backward pass
    interleaved-1f1b   the first 2 (P - s - 1) + (v - 1) P + 1 chunk passes: the warm-up of arXiv
                       2104.04473, section 2.2, and the pass that follows it; with v = 1 as 1f1b.
                       Where P does not divide m they are counted in the order of the next multiple
                       of P, from which the microbatches that are not there are left out. zb-h1
                       with several chunks: (v - 1) P + P - s in the same order
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.cluster.spec import Cluster, Island, Transport
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import DeviceRange, LayerRange, Plan, Replica, Stage
from hetplan.plans.v_schedules import is_v, v_order

Devices = NDArray[np.int64]


def device_array(ranges: Sequence[DeviceRange]) -> Devices:
    """Every device number of these ranges, in order."""
    if not ranges:
        return np.empty(0, dtype=np.int64)
    return np.concatenate(
        [part.start + part.stride * np.arange(part.count, dtype=np.int64) for part in ranges]
    )


def stage_array(stage: Stage) -> Devices:
    """Device numbers of a stage, in the order of its replicas."""
    return device_array(stage.devices)


def used_devices(plan: Plan, cluster: Cluster) -> Iterator[tuple[Island, NDArray[np.bool_]]]:
    """Every island with [nodes, devices of a node]: whether the plan uses the device."""
    used = np.zeros(cluster.num_devices, dtype=np.bool_)
    for stage in plan.stages:
        used[stage_array(stage)] = True
    for island in cluster.islands:
        first = cluster.first_device(island.name)
        mine = used[first : first + island.num_devices]
        yield island, mine.reshape(island.nodes, island.devices_per_node)


@dataclass(frozen=True, kw_only=True)
class Places:
    """A cluster's devices by place; device numbers must exist."""

    cluster: Cluster

    @cached_property
    def _first(self) -> Devices:
        counts = [island.num_devices for island in self.cluster.islands]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)

    @cached_property
    def _per_node(self) -> Devices:
        return np.array([island.devices_per_node for island in self.cluster.islands])

    @cached_property
    def _first_node(self) -> Devices:
        counts = [island.nodes for island in self.cluster.islands]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)

    @cached_property
    def _usable(self) -> Devices:
        """Devices of each node that may be used, its first ones."""
        islands = self.cluster.islands
        usable = np.repeat(self._per_node, [island.nodes for island in islands])
        for first, island in zip(self._first_node, islands, strict=True):
            if island.node_parts:
                usable[first : first + island.nodes] = island.node_parts
            usable[first + np.array(island.nodes_out, dtype=np.int64)] = 0
        return usable

    def islands(self, devices: Devices) -> Devices:
        """Position of each device's island in `cluster.islands`."""
        return np.searchsorted(self._first, devices, side="right") - 1

    def nodes(self, devices: Devices) -> Devices:
        """Node of each device, counted through the whole cluster."""
        at = self.islands(devices)
        found: Devices = self._first_node[at] + (devices - self._first[at]) // self._per_node[at]
        return found

    def out(self, devices: Devices) -> Devices:
        """Those of the devices that must not be used."""
        at = self.islands(devices)
        local = (devices - self._first[at]) % self._per_node[at]
        return devices[local >= self._usable[self.nodes(devices)]]

    def transports(self, devices: Devices) -> tuple[Transport, ...]:
        """Transports between the nodes of these devices, or inside the one that they share; an
        InputError where two of their islands have no link.
        """
        nodes = np.unique(self.nodes(devices))
        islands = [self.cluster.islands[at] for at in np.unique(self.islands(devices))]
        if len(nodes) == 1:
            return (islands[0].intra_node.transport,)
        if len(islands) == 1:
            return (islands[0].inter_node.transport,)
        return tuple(
            {
                self.cluster.link_between(one.name, two.name).transport
                for at, one in enumerate(islands)
                for two in islands[at + 1 :]
            }
        )

    def group_transport(self, devices: Devices) -> Transport:
        """Transport of a whole group: host-staged where any link between its members is."""
        found = self.transports(devices)
        staged = Transport.HOST_STAGED
        return staged if staged in found else found[0]


def data_ranks(stage: Stage) -> int:
    """Data-parallel degree of a stage: dp of all its replicas."""
    return sum(replica.dp for replica in stage.replicas)


def transformer_layers_of(stage: Stage, num_layers: int) -> int:
    """Transformer layers of a stage, of `num_layers` in the model; no others are counted."""
    # Position 0 is the embedding; head and multi-token prediction stand behind.
    stop = num_layers + 1
    return sum(max(0, min(chunk.stop, stop) - max(chunk.start, 1)) for chunk in stage.chunks)


def stage_copies(stage: Stage) -> int:
    """Copies of the weights that a stage's ranks hold: dp * cp of all its replicas."""
    return sum(replica.dp * replica.cp for replica in stage.replicas)


def stage_shards(optimizer_shards: int, stage: Stage) -> int:
    """Ranks of a stage over which `Plan.optimizer_shards` splits its optimizer state.

    Shards that divide the copies of every stage are groups of that size; the least common multiple
    of the copies of all stages means all ranks of each.
    """
    return math.gcd(optimizer_shards, stage_copies(stage))


def expert_copies(stage: Stage) -> int:
    """The same of one routed expert: dp * cp * tp / (ep * etp) of all its replicas."""
    return sum(each.num_devices // (each.ep * each.etp) for each in stage.replicas)


def experts_as_the_rest(replica: Replica | Shape) -> bool:
    """Whether each rank holds the same slice of every expert as of the other weights."""
    return replica.ep == 1 and replica.etp == replica.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Neighbouring layers that the same stages hold, one stage of each pipeline."""

    layers: LayerRange
    stages: tuple[Stage, ...]

    @property
    def copies(self) -> int:
        """Copies of the weights, experts left out."""
        return sum(stage_copies(stage) for stage in self.stages)

    @property
    def expert_copies(self) -> int:
        """Copies of one routed expert."""
        return sum(expert_copies(stage) for stage in self.stages)

    @property
    def experts_apart(self) -> bool:
        """Whether experts are reduced by groups of their own."""
        return not all(
            experts_as_the_rest(replica) for stage in self.stages for replica in stage.replicas
        )


def holders(
    pipelines: Sequence[Sequence[Stage]], total: int, cuts: Sequence[int] = ()
) -> Iterator[Holders]:
    """Who holds which layers: pieces between the cuts of all pipelines, and these cuts, in order.

    Every pipeline must hold every one of the `total` layers once.
    """
    at = {0, total, *(cut for cut in cuts if 0 < cut < total)}
    owner: list[list[tuple[int, Stage]]] = []
    for stages in pipelines:
        chunks = sorted(
            ((chunk.start, stage) for stage in stages for chunk in stage.chunks),
            key=lambda pair: pair[0],
        )
        owner.append(chunks)
        at |= {start for start, _ in chunks}
    place = [0] * len(owner)
    for start, stop in pairwise(sorted(at)):
        for p, chunks in enumerate(owner):
            while place[p] + 1 < len(chunks) and chunks[place[p] + 1][0] <= start:
                place[p] += 1
        yield Holders(
            layers=LayerRange(start=start, stop=stop),
            stages=tuple(chunks[place[p]][1] for p, chunks in enumerate(owner)),
        )


def islands_in_use(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Names of the islands that the plan uses, in its order."""
    firsts = (replica.devices[0].start for replica in plan.replicas)
    return tuple(dict.fromkeys(cluster.island_of_device(first).name for first in firsts))


def own_depth(
    schedule: str, stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
) -> int:
    """Most microbatches in flight on this stage, each chunk's counted by itself.

    Of several chunks: forward passes before the first backward pass.
    """
    if schedule == "gpipe":
        return num_microbatches
    if is_v(schedule):
        # All backward passes begin within the first 4 P + 4 microbatches.
        order = v_order(schedule, stage, num_stages, min(num_microbatches, 4 * num_stages + 4))
        return next(at for at, one in enumerate(order) if one.kind != "F")
    left = num_stages - stage
    if virtual_stages > 1:
        left += left - 1 if schedule == "interleaved-1f1b" else 0
        left += (virtual_stages - 1) * num_stages
        return _in_groups(left, num_stages, num_microbatches, virtual_stages)
    return min(left, num_microbatches)


def _in_groups(left: int, num_stages: int, num_microbatches: int, virtual_stages: int) -> int:
    """Of the first `left` passes in groups of microbatches, those of microbatches that exist."""
    found = 0
    for first in range(0, num_microbatches, num_stages):
        if left == 0:
            break
        there = min(num_stages, num_microbatches - first)
        chunks, rest = divmod(min(left, virtual_stages * num_stages), num_stages)
        found += chunks * there + min(rest, there)
        left -= chunks * num_stages + rest
    return found
