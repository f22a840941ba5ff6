"""Which devices of a plan exchange data with each other, group by group.

The ranks of a replica stand in (dp, cp, tp) order, tp fastest; for experts the same ranks stand in
(copies, ep, etp) order, etp fastest. Of groups only the shapes are kept, and how many groups have
each: all that the bytes of a collective depend on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import GroupShape, group_shape
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link
from hetplan.plans.pieces import Devices, Places, device_array
from hetplan.plans.plan import Replica


class GroupKind(Enum):
    """What the ranks of a group have in common."""

    TENSOR = auto()
    CONTEXT = auto()
    EXPERT = auto()
    EXPERT_TENSOR = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Groups that do the same at the same time."""

    size: int
    """Ranks of each."""
    count: tuple[tuple[GroupShape, int], ...]
    """How many groups have which shape; empty where a group is one rank."""


def shapes_of(cluster: Cluster, groups: Devices) -> Shapes:
    """The shapes of these groups, [groups, ranks]."""
    size = groups.shape[1]
    if size == 1:
        return Shapes(size=1, count=())
    counted = Counter(group_shape(cluster, group) for group in groups.tolist())
    return Shapes(size=size, count=tuple(counted.items()))


def replica_groups(cluster: Cluster, replica: Replica, kind: GroupKind) -> Shapes:
    """The groups of one kind among the devices of a replica."""
    size, stride = {
        GroupKind.TENSOR: (replica.tp, 1),
        GroupKind.CONTEXT: (replica.cp, replica.tp),
        GroupKind.EXPERT: (replica.ep, replica.etp),
        GroupKind.EXPERT_TENSOR: (replica.etp, 1),
    }[kind]
    if size == 1:
        return Shapes(size=1, count=())
    devices = device_array(replica.devices).reshape(-1, size, stride)
    return shapes_of(cluster, devices.transpose(0, 2, 1).reshape(-1, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyGroups:
    """Ranks that hold copies of the same weights."""

    whole: Shapes
    shard: Shapes
    """Ranks that split one copy of what is sharded."""
    across: Shapes
    """Ranks with the same shard."""
    part: float
    """What one group reduces, as a part of what a rank holds where the weights are cut into the
    fewest slices."""


def copy_groups(
    cluster: Cluster, replicas: Sequence[Replica], shards: int, *, expert: bool
) -> CopyGroups:
    """Copies among these replicas, in their order.

    Replicas that cut the weights into different numbers of slices meet in groups of the finest
    common slices: rank i of t holds those from i / t to (i + 1) / t.
    """
    slices = [each.ep * each.etp if expert else each.tp for each in replicas]
    finest = math.lcm(*slices)
    rows = [
        np.repeat(device_array(each.devices).reshape(-1, count), finest // count, axis=1)
        for each, count in zip(replicas, slices, strict=True)
    ]
    groups = np.concatenate(rows).T
    size = groups.shape[1]
    own = math.gcd(shards, size)
    blocks = groups.reshape(finest, size // own, own)
    return CopyGroups(
        whole=shapes_of(cluster, groups),
        shard=shapes_of(cluster, blocks.reshape(-1, own)),
        across=shapes_of(cluster, blocks.transpose(0, 2, 1).reshape(-1, size // own)),
        part=min(slices) / finest,
    )


def partners(senders: Devices, receivers: Devices) -> tuple[Devices, Devices]:
    """(from, to) of one message to every receiver, from the sender of its position."""
    position = np.arange(receivers.size) * senders.size // receivers.size
    return senders[position], receivers


def links_between(places: Places, left: Devices, right: Devices) -> Iterable[tuple[LinkName, int]]:
    """How many of these pairs of devices use which link; a device itself uses none."""
    islands = places.cluster.islands
    one, two = places.islands(left), places.islands(right)
    scope = np.where(one != two, 2, np.where(places.nodes(left) != places.nodes(right), 1, 0))
    rows, counts = np.unique(
        np.stack([np.where(left == right, -1, scope), one, two]), axis=1, return_counts=True
    )
    for (what, first, second), count in zip(rows.T.tolist(), counts.tolist(), strict=True):
        if what == 2:
            yield between_islands(islands[first].name, islands[second].name), count
        elif what >= 0:
            name, reach = islands[first].name, (LinkScope.NODE, LinkScope.ISLAND)[what]
            yield island_link(name, reach), count
