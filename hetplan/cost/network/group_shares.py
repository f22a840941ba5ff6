"""How much groups that communicate at the same time slow each other down.

What a group's collective costs alone comes from the figures or measurements of its links. Here is
the part of that speed which is left while other groups are active: the rates of all transfers, max-
min fair, over the rates when the group has the cluster for itself. In both no device takes more of
a link than the link's figure says, so devices that merely use their shares of a NIC at the same
time do not slow each other; groups whose devices send over one uplink do.

A collective sends in lanes: in every node the group's devices pass data around, and the k-th of
each node sends to the k-th of the next node that the group has, and so on around; between nodes
that have unequal numbers as many lanes as the smaller has. A group with one device per node is the
plain ring.

Rates x of transfers f over segments s of capacity C are max-min fair when sum(x_f over s) <= C_s
and no rate can grow unless one that is no larger shrinks. Equivalently every transfer has a
bottleneck: a full segment on which none has a larger x (Bertsekas and Gallager, Data Networks, 2nd
edition, section 6.5.2).

Progressive filling raises all rates together and freezes the transfers of each segment that fills
up. Here every segment that is the first to fill for all its transfers is frozen in the same round,
because its level cannot change: all its transfers wait for it, and levels elsewhere only rise.
Equal transfers on equal parts of a cluster therefore take one round of array arithmetic together,
however many they are: 10,000 groups on 100,000 devices take less than a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Flags, Floats, Ints
from hetplan.cost.network.paths import Paths, paths
from hetplan.errors import InputError

# Levels this close are one level: it saves rounds, and rates stay far more exact than figures are.
_SAME_LEVEL = 1 + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """What the slowest transfer of a group gets."""

    bytes_per_second: float
    """While all groups are active; infinite where the group sends nothing."""
    alone_bytes_per_second: float
    """While no other group is."""

    @property
    def share(self) -> float:
        """Part of its speed alone that is left, at most 1."""
        if math.isinf(self.alone_bytes_per_second):
            return 1.0
        return min(1.0, self.bytes_per_second / self.alone_bytes_per_second)


def group_shares(cluster: Cluster, groups: Sequence[Sequence[int]]) -> tuple[GroupShare, ...]:
    """What each of these groups gets while all of them are active, and what it would get alone."""
    owner, sources, targets = _rings(cluster, groups)
    found = paths(cluster, sources, targets)
    least = [np.full(len(groups), math.inf) for _ in range(2)]
    for crossed, slowest in zip((found, _apart(found, owner)), least, strict=True):
        np.minimum.at(slowest, owner, fill(crossed))
    return tuple(
        GroupShare(bytes_per_second=one, alone_bytes_per_second=two)
        for one, two in zip(least[0].tolist(), least[1].tolist(), strict=True)
    )


def group_share(cluster: Cluster, groups: Sequence[Sequence[int]]) -> float:
    """Part of its speed alone that the slowest of these groups keeps, at most 1."""
    return min((each.share for each in group_shares(cluster, groups)), default=1.0)


def fill(crossed: Paths) -> Floats:
    """Max-min fair rates by progressive filling; infinite for a transfer that nothing limits."""
    rates = np.full(crossed.num_flows, math.inf)
    left = crossed.capacities.astype(np.float64).copy()
    bounded = np.isfinite(left)[crossed.segment]
    flow, segment = crossed.flow[bounded], crossed.segment[bounded]
    active = np.ones(crossed.num_flows, dtype=bool)
    while np.any(active):
        load = np.bincount(segment, minlength=left.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(load > 0, np.maximum(left, 0.0) / load, math.inf)
        least = np.full(crossed.num_flows, math.inf)
        np.minimum.at(least, flow, level[segment])
        first = level.copy()
        np.minimum.at(first, segment, least[flow])
        # Segments no transfer of which is held up elsewhere first.
        full = level <= first * _SAME_LEVEL
        done = np.zeros(crossed.num_flows, dtype=bool)
        done[flow[full[segment]]] = True
        done &= active
        if not np.any(done):
            break
        rates[done] = least[done]
        active &= ~done
        gone = done[flow]
        left -= np.bincount(segment[gone], weights=rates[flow[gone]], minlength=left.size)
        flow, segment = flow[~gone], segment[~gone]
    return rates


def _apart(crossed: Paths, owner: Ints) -> Paths:
    """The transfers with every group on segments of its own."""
    own = owner[crossed.flow] * max(crossed.capacities.size, 1) + crossed.segment
    numbers, firsts, segment = np.unique(own, return_index=True, return_inverse=True)
    return Paths(
        flow=crossed.flow,
        segment=segment.astype(np.int64),
        numbers=numbers,
        capacities=crossed.capacities[crossed.segment[firsts]],
        num_flows=crossed.num_flows,
    )


def _rings(cluster: Cluster, groups: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """(group, source, target) of every transfer."""
    owner = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
    devices = np.array([device for each in groups for device in each], dtype=np.int64)
    if not devices.size:
        return owner, devices, devices
    if devices.min() < 0:
        raise InputError(f"a group has device {devices.min()}; devices are counted from 0")
    order = np.lexsort((devices, owner))
    owner, devices = owner[order], devices[order]
    nodes = _first_of_node(cluster, devices)
    begins = np.flatnonzero(_changes(owner) | _changes(nodes))  # of the part in each node
    lengths = np.diff(np.append(begins, owner.size))
    part = np.repeat(np.arange(begins.size), lengths)
    lane = np.arange(owner.size) - begins[part]
    inside = begins[part] + (lane + 1) % lengths[part]
    # The next part of the same group, the first after the last.
    firsts = np.flatnonzero(_changes(owner[begins]))
    of_group = np.repeat(firsts, np.diff(np.append(firsts, begins.size)))
    after = np.arange(begins.size) + 1
    last = np.append(owner[begins][1:] != owner[begins][:-1], True)
    after[last] = of_group[last]
    crosses = (after[part] != part) & (lane < lengths[after[part]])
    over = begins[after[part]][crosses] + lane[crosses]
    sources = np.concatenate([devices, devices[crosses]])
    targets = np.concatenate([devices[inside], devices[over]])
    owners = np.concatenate([owner, owner[crosses]])
    moves = sources != targets
    return owners[moves], sources[moves], targets[moves]


def _first_of_node(cluster: Cluster, devices: Ints) -> Ints:
    """Number of the first device of each device's node: it names the node."""
    starts = np.array([cluster.first_device(each.name) for each in cluster.islands], dtype=np.int64)
    each = np.array([island.devices_per_node for island in cluster.islands], dtype=np.int64)
    places = np.searchsorted(starts, devices, side="right") - 1
    return devices - (devices - starts[places]) % each[places]


def _changes(numbers: Ints) -> Flags:
    """Where a run of equal numbers begins."""
    return np.append(True, numbers[1:] != numbers[:-1])
