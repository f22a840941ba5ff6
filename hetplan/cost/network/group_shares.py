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

Paths. Which segments a transfer crosses is found for many transfers at once, as arrays.
`hetplan.cost.network.segments` says which they are. Figures of islands and of pairs of islands are
looked up once, those of devices by array arithmetic. Every segment gets a number made of what it
is: a device, a NIC or a switch stands at its node's first device plus its own number in the node,
so numbers stay below those of devices.

    number = (kind, outgoing, other island, place)

NICs of rings. A library lays the rings of one group without knowing of the others. A group with
one device in a node leaves it by that device's NIC, and one with all of its devices by all NICs. Of
a group with some of them it depends on the machine (`cluster.node.RingNics`):

    own            every ring by the NIC of a device of its own
    first-device   all rings of a group by the NIC of its first device in the node
    one            all rings of all such groups by the node's first NIC, and those of groups of
                   more than two whole nodes

all_reduce in two nodes of 8 A100 with two NICs of 25 GB/s each, one group at a time (Galvatron,
`allreduce_bandwidth_2nodes_8gpus_per_node`): bus bandwidth 8.1, 16.2, 20.8 and 44.7 GB/s with one,
two, four and eight devices in each node, where one device alone sends 8.1 GB/s: four of eight reach
one NIC's rate and not that of their own two, all eight that of both. Hence the first device's NIC
where nothing else is said and devices share NICs; a NIC for each device, or rails, were not
measured, and rings are taken to use their own.

What lanes get is the part of `Link.bandwidth` that the NICs leave them:

    share = least over NICs of  NIC's bandwidth / (lanes over it * one device's bandwidth)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.node import RingNics
from hetplan.cluster.spec import MAX_DEVICES, Cluster, Island, Transport
from hetplan.cost.arrays import Flags, Floats, Ints
from hetplan.cost.network.segments import (
    SegmentKind,
    crosses_pcie,
    first_nic,
    host_bytes_per_second,
    nic_bytes_per_second,
    rail_bytes_per_second,
    rail_of_local,
    shared_bytes_per_second,
    shared_link,
    switch_of_nic,
)
from hetplan.errors import InputError

_PLACE_BITS = (MAX_DEVICES - 1).bit_length()  # an island has at least one device
_KINDS = tuple(SegmentKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Which transfer crosses which segment; one entry per crossing, sorted by transfer."""

    flow: Ints
    segment: Ints
    """Numbered from 0."""
    numbers: Ints
    """What each segment is, as at the top of this file."""
    capacities: Floats
    """Bytes per second, per segment."""
    num_flows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Islands:
    """What is known of the islands that occur, one entry each; and of the devices of a node."""

    place: Ints
    """In the cluster."""
    first: Ints
    devices_per_node: Ints
    fabric: Floats
    host: Floats
    nic: Floats
    rail: Floats
    """Capacities."""
    has_nics: Flags
    has_host: Flags
    crosses_pcie: Flags
    offset: Ints
    """Of the island's node in the lists by device below."""
    nic_of: Ints
    rail_of: Ints
    switch_of: Ints
    """-1: not described."""
    nic_elsewhere: Flags
    """Whether the NIC hangs at another switch than the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One end of every transfer."""

    island: Ints
    """Number in _Islands."""
    node_first: Ints
    """First device of the node."""
    local: Ints
    outgoing: bool

    def number(self, kind: SegmentKind, numbers: Ints, to: Ints | int = 0) -> Ints:
        """Of segments of the node."""
        return _number(kind, self.outgoing, self.node_first + numbers, to)


Column = tuple[Ints, Ints, Floats]
"""(which transfers, their segments, the capacity of each)."""


def paths(cluster: Cluster, sources: Ints, targets: Ints) -> Paths:
    """The segments of every transfer from sources[i] to targets[i].

    InputError where a device does not exist or two islands have no link.
    """
    columns: list[Column] = []
    if not sources.size:
        return _together(columns, 0)
    devices = np.stack([sources, targets])
    wrong = devices[(devices < 0) | (devices >= cluster.num_devices)]
    if wrong.size:
        cluster.island_of_device(int(wrong[0]))  # says what is wrong
    starts = np.array([cluster.first_device(each.name) for each in cluster.islands], dtype=np.int64)
    used, numbers = np.unique(
        np.searchsorted(starts, devices, side="right") - 1, return_inverse=True
    )
    islands = _islands(cluster, used, starts)
    numbers = numbers.reshape(devices.shape)
    one, two = (
        _side(islands, devices[side], numbers[side], outgoing=side == 0) for side in range(2)
    )
    near = one.node_first == two.node_first
    _inside(islands, np.flatnonzero(near & (one.local != two.local)), one, two, columns)
    _outside(cluster, islands, np.flatnonzero(~near), (one, two), columns)
    return _together(columns, len(sources))


def _islands(cluster: Cluster, used: Ints, starts: Ints) -> _Islands:
    members = [cluster.islands[place] for place in used.tolist()]
    sizes = np.array([each.devices_per_node for each in members], dtype=np.int64)
    return _Islands(
        place=used,
        first=starts[used],
        devices_per_node=sizes,
        fabric=np.array([each.intra_node.goodput_bytes_per_second for each in members]),
        host=np.array([host_bytes_per_second(each) for each in members]),
        nic=np.array([nic_bytes_per_second(cluster, each) for each in members]),
        rail=np.array([rail_bytes_per_second(each) for each in members]),
        has_nics=np.array([each.nics is not None for each in members]),
        has_host=np.array([each.device.host is not None for each in members]),
        crosses_pcie=np.array([crosses_pcie(each) for each in members]),
        offset=np.cumsum(sizes) - sizes,
        # NICs and switches may have any numbers; ranks stay below the devices of a node.
        nic_of=_by_device(members, lambda each: _ranks(_locals(each, first_nic))),
        rail_of=_by_device(members, lambda each: _locals(each, rail_of_local)),
        switch_of=_by_device(members, _switches),
        nic_elsewhere=_by_device(members, _nics_elsewhere) > 0,
    )


def _by_device(members: list[Island], of: Callable[[Island], Ints]) -> Ints:
    return np.concatenate([of(each) for each in members])


def _locals(island: Island, of: Callable[[Island, int], int]) -> Ints:
    return np.array([of(island, local) for local in range(island.devices_per_node)], dtype=np.int64)


def _ranks(numbers: Ints) -> Ints:
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


def _switches(island: Island) -> Ints:
    if not island.switch_of_device:
        return np.full(island.devices_per_node, -1, dtype=np.int64)
    return _ranks(np.array(island.switch_of_device, dtype=np.int64))


def _nics_elsewhere(island: Island) -> Ints:
    def elsewhere(island: Island, local: int) -> int:
        switch = switch_of_nic(island, first_nic(island, local))
        return int(switch is not None and switch != island.switch_of_device[local])

    return _locals(island, elsewhere)


def _side(islands: _Islands, devices: Ints, numbers: Ints, *, outgoing: bool) -> _Side:
    first, each = islands.first[numbers], islands.devices_per_node[numbers]
    local = (devices - first) % each
    return _Side(island=numbers, node_first=devices - local, local=local, outgoing=outgoing)


def _nic(islands: _Islands, side: _Side, leaves_by: Ints) -> Ints:
    return side.number(SegmentKind.NIC, islands.nic_of[islands.offset[side.island] + leaves_by])


def _inside(islands: _Islands, at: Ints, one: _Side, two: _Side, columns: list[Column]) -> None:
    for side in (one, two):
        port = side.number(SegmentKind.FABRIC_PORT, side.local)
        _add(columns, at, port, islands.fabric[side.island])
    switches = [islands.switch_of[islands.offset[side.island] + side.local] for side in (one, two)]
    across = at[(islands.crosses_pcie[one.island] & (switches[0] != switches[1]))[at]]
    for side, switch in zip((one, two), switches, strict=True):
        uplink = side.number(SegmentKind.PCIE_SWITCH, switch)
        _add(columns, across, uplink, islands.host[side.island])


def _outside(
    cluster: Cluster,
    islands: _Islands,
    at: Ints,
    sides: tuple[_Side, _Side],
    columns: list[Column],
) -> None:
    """Transfers between nodes, the same island or not."""
    one, two = sides
    count = len(islands.place)
    pairs, pair_of = np.unique((one.island * count + two.island)[at], return_inverse=True)
    regions = {name: number for number, name in enumerate(cluster.regions)}
    figures = np.array(
        [_pair(cluster, islands, regions, *divmod(key, count)) for key in pairs.tolist()]
    )
    figures = figures.reshape(-1, 4)[pair_of]
    goodput, staged = np.zeros(one.island.size), np.zeros(one.island.size, dtype=bool)
    goodput[at], staged[at] = figures[:, 0], figures[:, 1] > 0
    shared = figures[:, 2] >= 0
    columns.append((at[shared], figures[shared, 2].astype(np.int64), figures[shared, 3]))
    leaves_by = _rails(islands, at, one, two, staged, columns)
    for side, other, local in ((one, two, leaves_by), (two, one, two.local)):
        port = side.number(SegmentKind.DEVICE_PORT, side.local, islands.place[other.island])
        _add(columns, at, port, goodput)
        _add(columns, at, _nic(islands, side, local), islands.nic[side.island])
        _over_pcie(islands, at, side, local, staged, columns)


def _pair(
    cluster: Cluster, islands: _Islands, regions: Mapping[str, int], left: int, right: int
) -> tuple[float, float, float, float]:
    """(goodput, whether staged, number of what is shared or -1, its capacity).

    Numbers are below 2**53, so they are exact as floats.
    """
    one, two = (cluster.islands[int(islands.place[each])] for each in (left, right))
    link = cluster.link_between(one.name, two.name)
    staged = float(link.transport is Transport.HOST_STAGED)
    shared = shared_link(cluster, one, two) if one is not two else None
    if shared is None:
        return link.goodput_bytes_per_second, staged, -1.0, math.inf
    ends = [int(islands.place[left]), int(islands.place[right])]
    if shared.kind is SegmentKind.REGION_LINK:
        ends = [regions[each.region] for each in (one, two)]
    number = float(_number(shared.kind, True, np.array(ends[:1], dtype=np.int64), ends[1])[0])
    return link.goodput_bytes_per_second, staged, number, shared_bytes_per_second(link)


def _rails(
    islands: _Islands, at: Ints, one: _Side, two: _Side, staged: Flags, columns: list[Column]
) -> Ints:
    """The local device by whose NIC each transfer leaves its node; adds fabrics and rails."""
    rails = [islands.rail_of[islands.offset[side.island] + side.local] for side in (one, two)]
    same = one.island == two.island
    crosses = same & (rails[0] != rails[1])
    over_fabric = at[(crosses & ~staged)[at]]
    out = one.number(SegmentKind.FABRIC_PORT, one.local)
    # Of a node that sends, the device with the receiver's number takes the bytes in.
    into = _number(SegmentKind.FABRIC_PORT, False, one.node_first + two.local, 0)
    for ports in (out, into):
        _add(columns, over_fabric, ports, islands.fabric[one.island])
    railed = at[(same & islands.has_nics[one.island])[at]]
    rail = _number(SegmentKind.RAIL, True, islands.first[one.island] + rails[1], 0)
    _add(columns, railed, rail, islands.rail[one.island])
    return np.where(crosses, two.local, one.local)


def _over_pcie(
    islands: _Islands,
    at: Ints,
    side: _Side,
    leaves_by: Ints,
    staged: Flags,
    columns: list[Column],
) -> None:
    capacity = islands.host[side.island]
    has_host, offset = islands.has_host[side.island], islands.offset[side.island]
    by_host = at[(staged & has_host)[at]]
    _add(columns, by_host, side.number(SegmentKind.HOST_PORT, side.local), capacity)
    for devices, asked in (
        (side.local, staged),
        (leaves_by, ~staged & islands.nic_elsewhere[offset + leaves_by]),
    ):
        switch = islands.switch_of[offset + devices]
        which = at[(asked & has_host & (switch >= 0))[at]]
        _add(columns, which, side.number(SegmentKind.PCIE_SWITCH, switch), capacity)


def _add(columns: list[Column], at: Ints, numbers: Ints, capacities: Floats) -> None:
    if at.size:
        columns.append((at, numbers[at], capacities[at]))


def _number(kind: SegmentKind, outgoing: bool, position: Ints, to: Ints | int) -> Ints:
    code = (_KINDS.index(kind) << 1) | int(outgoing)
    of_kind = np.int64(code << 2 * _PLACE_BITS)
    found: Ints = of_kind + (np.asarray(to, dtype=np.int64) << _PLACE_BITS) + position
    return found


def _together(columns: list[Column], num_flows: int) -> Paths:
    if not columns:
        none = np.zeros(0, dtype=np.int64)
        columns = [(none, none, np.zeros(0))]
    flow, crossed = (np.concatenate([each[part] for each in columns]) for part in range(2))
    capacity = np.concatenate([figures for _, _, figures in columns])
    numbers, firsts, segment = np.unique(crossed, return_index=True, return_inverse=True)
    order = np.argsort(flow, kind="stable")
    return Paths(
        flow=flow[order],
        segment=segment.astype(np.int64)[order],
        numbers=numbers,
        capacities=capacity[firsts],
        num_flows=num_flows,
    )


def ring_share(cluster: Cluster, groups: Sequence[Sequence[int]]) -> float:
    """Part of their devices' bandwidth between nodes that rings of these groups get, at most 1.

    All groups communicate at the same time.
    """
    islands = [each for each in cluster.islands if _matters(each)]
    if not islands:
        return 1.0
    owner = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
    devices = np.array([device for each in groups for device in each], dtype=np.int64)
    least = 1.0
    for island in islands:
        first = cluster.first_device(island.name)
        here = (devices >= first) & (devices < first + island.num_devices)
        if here.any():
            least = min(least, _share_in(island, owner[here], devices[here] - first))
    return least


def _matters(island: Island) -> bool:
    """Whether rings use other NICs there than those of their devices, or share them."""
    direct = island.inter_node.transport is Transport.DEVICE_DIRECT
    if island.nics is None or not direct:
        return False
    shared = island.devices_per_node > island.nics.per_node
    return shared or island.nics.ring_nics(island.devices_per_node) is not RingNics.OWN


def _share_in(island: Island, owner: Ints, devices: Ints) -> float:
    nics = island.nics
    if nics is None:
        return 1.0
    each = island.devices_per_node
    node, local = devices // each, devices % each
    # Devices of one group in one node follow each other.
    order = np.lexsort((local, node, owner))
    owner, node, local = owner[order], node[order], local[order]
    begins = np.flatnonzero(np.append(True, (owner[1:] != owner[:-1]) | (node[1:] != node[:-1])))
    lanes = np.diff(np.append(begins, owner.size))
    part = np.repeat(np.arange(begins.size), lanes)
    own = np.array([nics.of(number, each)[0] for number in range(each)], dtype=np.int64)
    one, kept = (nics.ring_nics(each) is way for way in (RingNics.ONE, RingNics.OWN))
    # Whole nodes, two of them, reach the rate of all their NICs (Galvatron's table above).
    many = np.bincount(owner[begins], minlength=int(owner.max()) + 1)[owner[begins]] > 2
    moved = (lanes > 1) & ((lanes < each) | (one & many)) & (not kept)
    to = np.zeros(begins.size, dtype=np.int64) if one else own[local[begins]]
    nic = node * nics.per_node + np.where(moved[part], to[part], own[local])
    # Between nodes of unequal parts there are as many lanes as the smaller has.
    fewest = np.full(int(owner.max()) + 1, each)
    np.minimum.at(fewest, owner[begins], lanes)
    weight = fewest[owner] / lanes[part]
    _, place = np.unique(nic, return_inverse=True)
    fullest = float(np.bincount(place, weights=weight).max())
    demand = fullest * island.inter_node.bandwidth_bytes_per_second
    return min(1.0, nics.bandwidth_bytes_per_second / demand)


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
