"""Names of links and of traffic classes, and the segments of limited bandwidth of a transfer.

Every segment has one direction: links are full duplex, so what is sent never slows what is
received. Three cases (`hetplan.cost.network.group_shares` lists them for many transfers at once):

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

A group at several PCIe switches has less than its devices' ports have
(`uplinks_bytes_per_second`), with n ranks, d of them at the switch with most to send, and U bytes/s
of an uplink between devices:

    rings            U: they visit one switch after the other, so each uplink carries one transfer
                     in each direction
    every pair       U (n - 1) / (d (n - d)): d devices send the parts of n - d others over it
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from hetplan.cluster.hosts import place_of
from hetplan.cluster.spec import Cluster, Island, Link


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One thing of limited bandwidth in one direction."""

    kind: SegmentKind
    place: str
    """Island; of a link between islands or regions the one that sends."""
    node: int = -1
    """In the island; -1: of no node."""
    number: int = -1
    """Of the NIC in its node; -1: there is one."""
    to: str = ""
    """The island or region that receives, of links."""
    outgoing: bool = True
    """Whether it carries what leaves the node; links are named by who sends."""


def nics_crossed(cluster: Cluster, source: int, target: int) -> tuple[Segment, ...]:
    """The described NICs of a transfer between two devices: the sender's, then the receiver's."""
    one, two = place_of(cluster, source), place_of(cluster, target)
    same_island = one.island is two.island
    if same_island and one.node == two.node:
        return ()
    leaves_by = one.local
    if same_island and rail_of_local(one.island, one.local) != rail_of_local(two.island, two.local):
        leaves_by = two.local
    return tuple(
        Segment(
            kind=SegmentKind.NIC,
            place=end.island.name,
            node=end.node,
            number=first_nic(end.island, local),
            outgoing=end is one,
        )
        for end, local in ((one, leaves_by), (two, two.local))
        if end.island.nics is not None
    )


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


_THROUGH_HOST_BRIDGE = 6 / 5
"""Bytes of an uplink per byte between devices of two switches: a host bridge cuts packets to 64
bytes (NCCL, src/graph/topo.h, INTEL_P2P_OVERHEAD, which is of Intel's; others are taken alike)."""
_PCIE_SLACK = 1.1
"""PCIe 4.0 x16 is written as 32 GB/s, too; its lanes have 31.5."""


def crosses_pcie(island: Island) -> bool:
    """Whether devices of one node reach each other over PCIe switches only: what one device has is
    no more than its lanes, and no part of a mesh.
    """
    link, host = island.intra_node, host_bytes_per_second(island)
    if not island.switch_of_device or link.one_peer_bytes_per_second is not None:
        return False
    return link.bandwidth_bytes_per_second <= _PCIE_SLACK * host < math.inf


def uplinks_bytes_per_second(island: Island, ranks: int, *, every_pair: bool = False) -> float:
    """What PCIe switches leave each of so many ranks of a node, at most; infinite where there are
    none, or no group has ranks at two.

    Groups are neighbouring devices, one group after the other from the node's first; of these the
    one that has least counts.
    """
    if not crosses_pcie(island):
        return math.inf
    uplink = host_bytes_per_second(island) / _THROUGH_HOST_BRIDGE
    switches, least = island.switch_of_device, math.inf
    for start in range(0, len(switches) - ranks + 1, ranks):
        held = Counter(switches[start : start + ranks]).values()
        if len(held) > 1:
            most = max(each * (ranks - each) for each in held)
            least = min(least, uplink * (ranks - 1) / most if every_pair else uplink)
    return least


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


def shared_bytes_per_second(link: Link) -> float:
    """What all who send over the link at one time share, in one direction."""
    shared = link.shared_bandwidth_bytes_per_second
    return math.inf if shared is None else shared / link.oversubscription
