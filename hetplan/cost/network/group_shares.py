"""How much groups that communicate at the same time slow each other down.

What a group's collective costs alone comes from the figures or measurements of its links. Here is
the part of that speed which is left while other groups are active: the rates of all transfers, max-
min fair (`sharing`), over the rates when the group has the cluster for itself. In both no device
takes more of a link than the link's figure says, so devices that merely use their shares of a NIC
at the same time do not slow each other; groups whose devices send over one uplink do.

A collective sends in lanes: in every node the group's devices pass data around, and the k-th of
each node sends to the k-th of the next node that the group has, and so on around; between nodes
that have unequal numbers as many lanes as the smaller has. A group with one device per node is the
plain ring.

Paths and rates are found by array arithmetic over all transfers at once, in rounds that equal
groups share: 10,000 groups on 100,000 devices take less than a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Flags, Floats, Ints
from hetplan.cost.network.max_min import fill
from hetplan.cost.network.paths import STORAGE, Paths, paths
from hetplan.cost.network.segments import TrafficClass
from hetplan.errors import InputError

_MAX_PEERS = 64
"""Peers of a device in an exchange that are looked at; of more, evenly spaced ones stand for
all."""

_MICROBATCHES = (
    TrafficClass.TENSOR_PARALLEL,
    TrafficClass.CONTEXT_PARALLEL,
    TrafficClass.EXPERT_PARALLEL,
    TrafficClass.PIPELINE,
)
_END_OF_STEP = (TrafficClass.DATA_PARALLEL, TrafficClass.EMBEDDING)
_STORAGE = (TrafficClass.CHECKPOINT, TrafficClass.DATA)


class Pattern(StrEnum):
    """Who of a group sends to whom."""

    RING = "ring"
    """A collective: around each node and, lane by lane, around the nodes."""
    CHAIN = "chain"
    """Pipeline: each device to the next of the group."""
    EXCHANGE = "exchange"
    """all_to_all: each device to all others, which share the device's rate."""
    READ = "read"
    """Every device reads from storage."""
    WRITE = "write"
    """Every device writes to storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveGroup:
    """A group of devices that communicates in the phase in question."""

    devices: tuple[int, ...]
    traffic: TrafficClass
    pattern: Pattern = Pattern.RING
    demand_bytes_per_second: float = math.inf
    """Most that one of its transfers can use, such as what a data loader reads."""


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


def group_shares(cluster: Cluster, groups: Sequence[ActiveGroup]) -> tuple[GroupShare, ...]:
    """What each of these groups gets while all of them are active, and what it would get alone."""
    owner, sources, targets, weights = _transfers(cluster, groups)
    found = paths(cluster, sources, targets)
    demands = np.array([group.demand_bytes_per_second for group in groups])[owner] * weights
    together = fill(found, demands, weights) / weights
    alone = fill(_apart(found, owner), demands, weights) / weights
    least = [np.full(len(groups), math.inf) for _ in range(2)]
    for rates, slowest in zip((together, alone), least, strict=True):
        np.minimum.at(slowest, owner, rates)
    return tuple(
        GroupShare(bytes_per_second=one, alone_bytes_per_second=two)
        for one, two in zip(least[0].tolist(), least[1].tolist(), strict=True)
    )


def group_share(
    cluster: Cluster,
    groups: Sequence[Sequence[int]],
    traffic: TrafficClass = TrafficClass.DATA_PARALLEL,
    pattern: Pattern = Pattern.RING,
    others: Sequence[ActiveGroup] = (),
) -> float:
    """Part of its speed alone that the slowest of these groups keeps, at most 1.

    `others` are active in the same phase and are slowed too, but their share does not count.
    """
    asked = [
        ActiveGroup(devices=tuple(group), traffic=traffic, pattern=pattern) for group in groups
    ]
    found = group_shares(cluster, (*asked, *others))
    return min((each.share for each in found[: len(asked)]), default=1.0)


class StepPhase(StrEnum):
    """A part of the step in which certain kinds of traffic are under way together."""

    MICROBATCHES = "microbatches"
    """Passes of the pipeline: tensor, context, expert and pipeline traffic."""
    OVERLAP = "overlap"
    """The last microbatch's backward pass, while gradients are already reduced: all kinds."""
    END_OF_STEP = "end of step"
    """Gradient reduction and parameter gathering after the pipeline has drained."""


def active_in(phase: StepPhase) -> tuple[TrafficClass, ...]:
    """Kinds of traffic of a phase; reading data and writing checkpoints go on in every one."""
    if phase is StepPhase.MICROBATCHES:
        return (*_MICROBATCHES, *_STORAGE)
    if phase is StepPhase.END_OF_STEP:
        return (*_END_OF_STEP, *_STORAGE)
    return (*_MICROBATCHES, *_END_OF_STEP, *_STORAGE)


def phase_shares(
    cluster: Cluster, groups: Sequence[ActiveGroup], phase: StepPhase
) -> tuple[GroupShare | None, ...]:
    """What each group gets in a phase beside all others that are active in it; None: not active.

    Groups of one kind that take turns must not be given together: pass those that meet.
    """
    kinds = active_in(phase)
    active = [group for group in groups if group.traffic in kinds]
    found = iter(group_shares(cluster, active))
    return tuple(next(found) if group.traffic in kinds else None for group in groups)


def _apart(crossed: Paths, owner: Ints) -> Paths:
    """The same transfers, each group on segments of its own."""
    own = owner[crossed.flow] * max(crossed.capacities.size, 1) + crossed.segment
    _, firsts, segment = np.unique(own, return_index=True, return_inverse=True)
    return Paths(
        flow=crossed.flow,
        segment=segment.astype(np.int64),
        capacities=crossed.capacities[crossed.segment[firsts]],
        num_flows=crossed.num_flows,
    )


Transfers = tuple[Ints, Ints, Ints, Floats]
"""(group, source, target, weight) of each; a weight of n stands for n alike transfers."""


def _transfers(cluster: Cluster, groups: Sequence[ActiveGroup]) -> Transfers:
    parts: list[Transfers] = []
    for pattern in Pattern:
        numbers = [n for n, group in enumerate(groups) if group.pattern is pattern]
        if not numbers:
            continue
        members = [groups[n].devices for n in numbers]
        owner = np.repeat(np.array(numbers, dtype=np.int64), [len(each) for each in members])
        devices = np.array([device for each in members for device in each], dtype=np.int64)
        if devices.size and devices.min() < 0:
            raise InputError(f"a group has device {devices.min()}; devices are counted from 0")
        parts.append(_PATTERNS[pattern](cluster, owner, devices))
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, np.zeros(0)
    owner, sources, targets = (np.concatenate([part[n] for part in parts]) for n in range(3))
    weights = np.concatenate([part[3] for part in parts])
    moves = sources != targets
    return owner[moves], sources[moves], targets[moves], weights[moves]


def _ring(cluster: Cluster, owner: Ints, devices: Ints) -> Transfers:
    order = np.lexsort((devices, owner))
    owner, devices = owner[order], devices[order]
    nodes = _first_of_node(cluster, devices)
    begins = np.flatnonzero(_changes(owner) | _changes(nodes))  # of the part in each node
    lengths = np.diff(np.append(begins, owner.size))
    part = np.repeat(np.arange(begins.size), lengths)
    lane = np.arange(owner.size) - begins[part]
    inside = begins[part] + (lane + 1) % lengths[part]
    # The next part of the same group, the first after the last.
    groups = np.flatnonzero(_changes(owner[begins]))
    of_group = np.repeat(groups, np.diff(np.append(groups, begins.size)))
    after = np.arange(begins.size) + 1
    last = np.append(owner[begins][1:] != owner[begins][:-1], True)
    after[last] = of_group[last]
    crosses = (after[part] != part) & (lane < lengths[after[part]])
    over = begins[after[part]][crosses] + lane[crosses]
    sources = np.concatenate([devices, devices[crosses]])
    targets = np.concatenate([devices[inside], devices[over]])
    owners = np.concatenate([owner, owner[crosses]])
    return owners, sources, targets, np.ones(owners.size)


def _chain(cluster: Cluster, owner: Ints, devices: Ints) -> Transfers:
    follows = owner[1:] == owner[:-1]
    sources, targets = devices[:-1][follows], devices[1:][follows]
    return owner[:-1][follows], sources, targets, np.ones(sources.size)


def _exchange(cluster: Cluster, owner: Ints, devices: Ints) -> Transfers:
    begins = np.flatnonzero(_changes(owner))
    parts: list[Transfers] = []
    for begin, end in zip(begins.tolist(), [*begins.tolist()[1:], owner.size], strict=True):
        count = end - begin
        looked_at = min(count - 1, _MAX_PEERS)
        if not looked_at:
            continue
        shifts = 1 + np.arange(looked_at) * (count - 1) // looked_at
        members = devices[begin:end]
        peers = members[(np.arange(count)[:, None] + shifts) % count]
        size = count * looked_at
        parts.append(
            (
                np.full(size, owner[begin]),
                np.repeat(members, looked_at),
                peers.ravel(),
                np.full(size, (count - 1) / looked_at),
            )
        )
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, np.zeros(0)
    owners, sources, targets = (np.concatenate([part[n] for part in parts]) for n in range(3))
    return owners, sources, targets, np.concatenate([part[3] for part in parts])


def _read(cluster: Cluster, owner: Ints, devices: Ints) -> Transfers:
    return owner, np.full(devices.size, STORAGE, dtype=np.int64), devices, np.ones(devices.size)


def _write(cluster: Cluster, owner: Ints, devices: Ints) -> Transfers:
    return owner, devices, np.full(devices.size, STORAGE, dtype=np.int64), np.ones(devices.size)


_PATTERNS: dict[Pattern, Callable[[Cluster, Ints, Ints], Transfers]] = {
    Pattern.RING: _ring,
    Pattern.CHAIN: _chain,
    Pattern.EXCHANGE: _exchange,
    Pattern.READ: _read,
    Pattern.WRITE: _write,
}


def _first_of_node(cluster: Cluster, devices: Ints) -> Ints:
    """Number of the first device of each device's node: it names the node."""
    starts = np.array([cluster.first_device(each.name) for each in cluster.islands], dtype=np.int64)
    each = np.array([island.devices_per_node for island in cluster.islands], dtype=np.int64)
    places = np.searchsorted(starts, devices, side="right") - 1
    return devices - (devices - starts[places]) % each[places]


def _changes(numbers: Ints) -> Flags:
    """Where a run of equal numbers begins."""
    return np.append(True, numbers[1:] != numbers[:-1])
