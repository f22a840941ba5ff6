"""Which link bytes cross and what they are for: the names that costs, traffic and reports share.

Which physical things a transfer between two devices uses, and what each of them carries.

A path is a tuple of segments. Every segment has one direction: links are full duplex, so what is
sent never slows what is received. Three cases:

    inside a node     fabric port of the sender (out) and of the receiver (in); where the fabric is
                      PCIe itself, also the uplinks of both PCIe switches if they are two
    between nodes     the device's own port (the link's figure), the NIC and the rail, mirrored
    between islands   the same ports, less the rails, and the link between the islands or regions
                      where all who send share a capacity (`shared_bandwidth`)

Rails are separate networks, so a transfer between devices of two rails first crosses its node's
fabric to the device that has the receiver's number there and leaves by that one's NIC (as NCCL's
PXN does). Where the cluster does not describe NICs a device has a port of its own. Bytes that are
staged in host memory cross the device's PCIe port and its switch's uplink; bytes that go straight
from device to NIC cross an uplink only where the NIC hangs at another switch (NICs are taken to be
spread evenly over the switches). An uplink is as wide as one device's PCIe port.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from hetplan.cluster.hosts import DevicePlace, place_of
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.errors import InputError


class TrafficClass(StrEnum):
    """What bytes are for."""

    TENSOR_PARALLEL = "tp"
    CONTEXT_PARALLEL = "cp"
    EXPERT_PARALLEL = "ep"
    PIPELINE = "pp"
    DATA_PARALLEL = "dp"
    EMBEDDING = "embedding"
    """Sums of a tied matrix's gradient between first and last stage."""
    CHECKPOINT = "checkpoint"
    DATA = "data"
    """Training data."""


class LinkScope(StrEnum):
    """How far a link reaches."""

    NODE = "inside a node"
    ISLAND = "between nodes"
    ISLANDS = "between islands"
    STORAGE = "to storage"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LinkName:
    """All links of one kind: those inside the nodes of an island, between its nodes, or between
    two islands.
    """

    scope: LinkScope
    left: str
    """Island."""
    right: str
    """The other island, with `left` in order of the alphabet; `left` itself inside one."""

    def __str__(self) -> str:
        if self.scope is LinkScope.ISLANDS:
            return f"{self.left} to {self.right}"
        return f"{self.left}, {self.scope.value}"


def link_name(cluster: Cluster, left: int, right: int) -> LinkName:
    """Name of the link between two different devices."""
    one, two = place_of(cluster, left), place_of(cluster, right)
    if one.island.name != two.island.name:
        return between_islands(one.island.name, two.island.name)
    scope = LinkScope.NODE if one.node == two.node else LinkScope.ISLAND
    return island_link(one.island.name, scope)


def island_link(island: str, scope: LinkScope) -> LinkName:
    """Name of an island's own links: inside its nodes, between them, or to storage."""
    return LinkName(scope=scope, left=island, right=island)


def between_islands(left: str, right: str) -> LinkName:
    """Name of the link between two different islands."""
    first, second = sorted((left, right))
    return LinkName(scope=LinkScope.ISLANDS, left=first, right=second)


class SegmentKind(StrEnum):
    """What a segment is."""

    FABRIC_PORT = "port inside the node"
    HOST_PORT = "port to the host"
    PCIE_SWITCH = "uplink of PCIe switch"
    DEVICE_PORT = "port to"
    NIC = "NIC"
    RAIL = "rail"
    ISLAND_LINK = "link to island"
    REGION_LINK = "link to region"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """One thing of limited bandwidth in one direction."""

    kind: SegmentKind
    place: str
    """Island; of a link between islands or regions the one that sends."""
    node: int = -1
    """In the island; -1: of no node."""
    number: int = -1
    """Of the device, switch or NIC in its node, or of the rail in its island; -1: there is one."""
    outgoing: bool = True
    """Whether it carries what leaves the node; links are named by who sends, rails have no side."""
    to: str = ""
    """The island or region that receives, of links; the island at the other end, of ports."""

    def __str__(self) -> str:
        node = f" node {self.node}" if self.node >= 0 else ""
        what = self.kind.value + (f" {self.to}" if self.to else "")
        if self.kind in (SegmentKind.NIC, SegmentKind.PCIE_SWITCH, SegmentKind.RAIL):
            what += f" {self.number}"
        elif self.number >= 0:
            what = f"device {self.number}: {what}"
        way = "" if self.node < 0 else " (out)" if self.outgoing else " (in)"
        return f"{self.place}{node}, {what}{way}"


def segments(cluster: Cluster, source: int | None, target: int | None) -> tuple[Segment, ...]:
    """What a transfer from one device to another crosses, from the sender on; () to itself.

    None stands for storage outside the islands: it is reached over the device's NIC. An InputError
    where a device does not exist, the islands have no link, or both ends are storage.
    """
    if source is None or target is None:
        return _to_storage(cluster, source, target)
    one, two = place_of(cluster, source), place_of(cluster, target)
    if one.island is two.island and one.node == two.node:
        return _inside(one, two) if one.local != two.local else ()
    link = cluster.link_between(one.island.name, two.island.name)
    staged = link.transport is Transport.HOST_STAGED
    if one.island is not two.island:
        middle = shared_link(cluster, one.island, two.island)
        return (
            *_end(one, one.local, two.island.name, staged, outgoing=True),
            *((middle,) if middle else ()),
            *_end(two, two.local, one.island.name, staged, outgoing=False),
        )
    return _between_nodes(one, two, staged)


def capacity(cluster: Cluster, segment: Segment) -> float:
    """Bytes per second in the segment's direction; oversubscription of its link is taken off."""
    if segment.kind is SegmentKind.ISLAND_LINK:
        return shared_bytes_per_second(cluster.link_between(segment.place, segment.to))
    if segment.kind is SegmentKind.REGION_LINK:
        return shared_bytes_per_second(_region_link(cluster, segment.place, segment.to))
    island = cluster.island(segment.place)
    if segment.kind is SegmentKind.FABRIC_PORT:
        return island.intra_node.goodput_bytes_per_second
    if segment.kind is SegmentKind.DEVICE_PORT:
        return cluster.link_between(island.name, segment.to).goodput_bytes_per_second
    if segment.kind in (SegmentKind.HOST_PORT, SegmentKind.PCIE_SWITCH):
        return host_bytes_per_second(island)
    if segment.kind is SegmentKind.RAIL:
        return rail_bytes_per_second(island)
    return nic_bytes_per_second(cluster, island)


def host_bytes_per_second(island: Island) -> float:
    """Of a device's PCIe port, and of a switch's uplink; infinite where the kind has no figure."""
    host = island.device.host
    return host.bandwidth_bytes_per_second if host else math.inf


def nic_bytes_per_second(cluster: Cluster, island: Island) -> float:
    """Of the NICs that one device sends over; where none are described, of the device's own.

    Its own is then as fast as the fastest figure of one device on any link of its island: nothing
    else is known of it, and transfers over several links share it.
    """
    nics = island.nics
    if nics is not None:
        return nics.bandwidth_bytes_per_second * len(nics.of(0, island.devices_per_node))
    links = [entry.link for entry in cluster.links if island.name in entry.between]
    links += [entry.link for entry in cluster.region_links if island.region in entry.between]
    links += [link for link in (cluster.within_region, cluster.across_regions) if link]
    figures = [
        link.bandwidth_bytes_per_second
        for link in links
        # Otherwise the figure is the line's and not one device's.
        if link.bandwidth_bytes_per_second < (link.shared_bandwidth_bytes_per_second or math.inf)
    ]
    if island.nodes > 1 or not figures:
        figures.append(island.inter_node.bandwidth_bytes_per_second)
    return max(figures)


def rail_bytes_per_second(island: Island) -> float:
    """All ports of a rail together, less oversubscription."""
    nics = island.nics
    if nics is None:
        return math.inf
    ports = island.nodes * nics.per_node / (nics.rails or 1)
    return ports * nics.bandwidth_bytes_per_second / island.inter_node.oversubscription


def first_nic(island: Island, local: int) -> int:
    """The first NIC of a device; where it has several, nobody else has them."""
    nics = island.nics
    return nics.of(local, island.devices_per_node)[0] if nics else local


def rail_of_local(island: Island, local: int) -> int:
    """The rail of a device of this number in its node; 0 where all are on one network."""
    return island.nics.rail(first_nic(island, local)) if island.nics else 0


def switch_of_nic(island: Island, nic: int) -> int | None:
    """PCIe switch of a NIC where NICs are spread evenly over them; None: not described."""
    if island.nics is None or not island.switch_of_device:
        return None
    switches = sorted(set(island.switch_of_device))
    return switches[nic * len(switches) // island.nics.per_node]


def crosses_pcie(island: Island) -> bool:
    """Whether devices of one node reach each other over PCIe switches only."""
    fabric = island.device.scale_up
    reaches_all = fabric and (not fabric.peers or fabric.peers >= island.devices_per_node - 1)
    return not reaches_all and bool(island.switch_of_device) and island.device.host is not None


def shared_link(cluster: Cluster, one: Island, two: Island) -> Segment | None:
    """What all who send from one island to the other share; None where they share nothing.

    A link that was listed for two islands is theirs; one of two regions is shared by all islands of
    the two; a default within a region is one link per pair of islands.
    """
    link = cluster.link_between(one.name, two.name)
    if link.shared_bandwidth_bytes_per_second is None:
        return None
    if crosses_region_link(cluster, one.name, two.name):
        return Segment(kind=SegmentKind.REGION_LINK, place=one.region, to=two.region)
    return Segment(kind=SegmentKind.ISLAND_LINK, place=one.name, to=two.name)


def crosses_region_link(cluster: Cluster, one: str, two: str) -> bool:
    """Whether two islands use the link of their regions, and share it with all islands there."""
    apart = cluster.island(one).region != cluster.island(two).region
    return apart and not cluster.lists_link(one, two)


def _inside(one: DevicePlace, two: DevicePlace) -> tuple[Segment, ...]:
    island = one.island
    found = [_of(SegmentKind.FABRIC_PORT, one, one.local, outgoing=True)]
    if crosses_pcie(island):
        left, right = (island.switch_of_device[place.local] for place in (one, two))
        if left != right:
            found.append(_of(SegmentKind.PCIE_SWITCH, one, left, outgoing=True))
            found.append(_of(SegmentKind.PCIE_SWITCH, one, right, outgoing=False))
    return (*found, _of(SegmentKind.FABRIC_PORT, two, two.local, outgoing=False))


def _between_nodes(one: DevicePlace, two: DevicePlace, staged: bool) -> tuple[Segment, ...]:
    island = one.island
    leaves_by = one.local
    found: list[Segment] = []
    if rail_of_local(island, one.local) != rail_of_local(island, two.local):
        leaves_by = two.local
        # Staged bytes are in host memory, and every NIC of the node can send them.
        if not staged:
            found.append(_of(SegmentKind.FABRIC_PORT, one, one.local, outgoing=True))
            found.append(_of(SegmentKind.FABRIC_PORT, one, two.local, outgoing=False))
    found += _end(one, leaves_by, island.name, staged, outgoing=True)
    if island.nics is not None:
        rail = rail_of_local(island, two.local)
        found.append(Segment(kind=SegmentKind.RAIL, place=island.name, number=rail))
    return (*found, *_end(two, two.local, island.name, staged, outgoing=False))


def _end(
    place: DevicePlace, leaves_by: int, to: str, staged: bool, *, outgoing: bool
) -> tuple[Segment, ...]:
    """Ports of one end: the device's own, to the host where bytes are staged, and its NIC."""
    island = place.island
    own = Segment(
        kind=SegmentKind.DEVICE_PORT,
        place=island.name,
        node=place.node,
        number=place.local,
        outgoing=outgoing,
        to=to,
    )
    nic = first_nic(island, leaves_by)
    switch = island.switch_of_device[leaves_by] if island.switch_of_device else None
    found = [own]
    if staged and island.device.host is not None:
        found.append(_of(SegmentKind.HOST_PORT, place, place.local, outgoing=outgoing))
        if switch is not None:
            own_switch = island.switch_of_device[place.local]
            found.append(_of(SegmentKind.PCIE_SWITCH, place, own_switch, outgoing=outgoing))
    elif switch is not None and island.device.host is not None:
        at = switch_of_nic(island, nic)
        if at is not None and at != switch:
            found.append(_of(SegmentKind.PCIE_SWITCH, place, switch, outgoing=outgoing))
    found.append(_of(SegmentKind.NIC, place, nic, outgoing=outgoing))
    return tuple(found) if outgoing else tuple(reversed(found))


def _to_storage(cluster: Cluster, source: int | None, target: int | None) -> tuple[Segment, ...]:
    device = source if source is not None else target
    if device is None:
        raise InputError("a transfer from storage to storage crosses no device; name one device")
    place = place_of(cluster, device)
    nic = first_nic(place.island, place.local)
    return (_of(SegmentKind.NIC, place, nic, outgoing=target is None),)


def _of(kind: SegmentKind, place: DevicePlace, number: int, *, outgoing: bool) -> Segment:
    return Segment(
        kind=kind, place=place.island.name, node=place.node, number=number, outgoing=outgoing
    )


def _region_link(cluster: Cluster, left: str, right: str) -> Link:
    """The link between islands of two regions that no closer entry covers."""
    pair = {left, right}
    for entry in cluster.region_links:
        if set(entry.between) == pair:
            return entry.link
    if cluster.across_regions is None:
        raise InputError(f"the cluster has no link between regions {left} and {right}")
    return cluster.across_regions


def shared_bytes_per_second(link: Link) -> float:
    """What all who send over the link at one time share, in one direction."""
    shared = link.shared_bandwidth_bytes_per_second
    return math.inf if shared is None else shared / link.oversubscription
