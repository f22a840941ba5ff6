"""How a cluster file and its links are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.cluster.catalogue import DeviceForm
from hetplan.cluster.fabrics import Fabric
from hetplan.cluster.launch_form import LaunchDomainForm
from hetplan.cluster.links import LossRecovery, Transport
from hetplan.cluster.node import NODE_NAMES_PATTERN, RingNics
from hetplan.cluster.spec import ClockRatio, LogSpread
from hetplan.files.quantities import (
    Bandwidth,
    Count,
    EnergyPrice,
    FileForm,
    Fraction,
    HourlyPrice,
    Memory,
    Name,
    Ratio,
    Seconds,
    TrafficPrice,
    Watts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForm(FileForm):
    """One direction between two devices of one island."""

    bandwidth: Bandwidth | None = None
    """What one device can count on while the others send too. Required, except between nodes of an
    island with `nics`: there it is the device's share of them."""
    latency: Seconds | None = None
    """One way. Either this or round_trip."""
    round_trip: Seconds | None = None
    """There and back: twice the latency. Either this or latency."""
    transport: Transport | None = None
    """device-direct (nccl, rccl, hccl, ...) or host-staged (gloo over host memory). Left out:
    device-direct inside an island (host-staged for kind cpu), host-staged between islands."""
    samples: Name | None = None
    """Name of measured link samples in the profile store. They replace the figures, which then
    serve only for operations and sizes that were not measured."""
    oversubscription: Ratio | None = None
    """What may be sent over what the path carries, as 32; the
    bandwidth is divided by it. Left out: 1."""
    streams: Count | None = None
    """Connections of one device's transfer; needs window or loss."""
    window: Memory | None = None
    """Most bytes of one stream that are under way; a stream carries window / round trip."""
    loss: Fraction | None = None
    """Fraction of packets that are lost; with TCP a stream carries 1.22
    * segment / (round trip * sqrt(loss))."""
    segment: Memory | None = None
    """Payload of one packet, for loss. Left out: 1460 B, TCP over Ethernet."""
    loss_recovery: LossRecovery | None = None
    """After lost packets: reno (TCP slows down), go-back-n (RoCE sends all again) or selective
    (BBR, newer RDMA cards). Left out: reno."""
    price: TrafficPrice | None = None
    """What traffic over the link costs."""
    compute_share: Fraction | None = None
    """Part of a device's compute units that a transfer takes, as 0.15. Left out: 0, the transport
    copies without them."""
    equal_cost_paths: Count | None = None
    """Parallel paths to which flows are hashed. Some collide. Left out: none
    do."""
    measured: bool | None = None
    """The figures are what transfers reached, and count as they are. Left out: they are the
    hardware's, and device-direct transfers reach the part of them that such links are known to
    reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenForm(LinkForm):
    """One direction between two devices of different islands."""

    bandwidth: Bandwidth | None = None
    """Only in files of form 1, where it is bandwidth_per_device."""
    bandwidth_per_device: Bandwidth | None = None
    """What one device can count on, whatever the others send. This, bandwidth_shared, or both."""
    bandwidth_shared: Bandwidth | None = None
    """Capacity that all devices share that send at once."""


CLUSTER_SCHEMA = "hetplan.cluster/4"
FIRST_SCHEMA = "hetplan.cluster/1"
"""The form whose links between islands have a plain `bandwidth`, one device's share."""

NodeNumber: TypeAlias = Annotated[int, Field(ge=0)]
NodeNames: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=200),
    WithJsonSchema({"type": "string", "pattern": NODE_NAMES_PATTERN}),
]


def _spread(value: object) -> int | tuple[int, ...]:
    """A count, or for every device a number from 0."""
    whole = value if isinstance(value, list) else [value]
    if all(isinstance(each, int) and not isinstance(each, bool) for each in whole):
        numbers = tuple(each for each in whole if isinstance(each, int))
        if isinstance(value, list) and numbers and min(numbers) >= 0:
            return numbers
        if not isinstance(value, list) and 1 <= numbers[0] <= 10**9:
            return numbers[0]
    raise PydanticCustomError(
        "spread",
        "write how many there are in a node, or a list with the number of each device's own, "
        "from 0: [0, 0, 1, 1]",
    )


Spread: TypeAlias = Annotated[
    int | tuple[int, ...],
    PlainValidator(_spread),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            ]
        }
    ),
]
"""How many there are in a node, spread evenly over its devices, or the number of each device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicsForm(FileForm):
    """Network cards of a node; its devices share them."""

    per_node: Count
    """NICs in one node, those for training only."""
    bandwidth: Bandwidth
    """Of one NIC, in one direction."""
    most_per_device: Count | None = None
    """NICs that one device sends over at once.
    Left out: 1."""
    rails: Count | None = None
    """Separate networks: NIC n of every node is on rail n modulo this. Left out: one network."""
    of_device: list[NodeNumber] = field(default_factory=list)
    """For every device of a node its NIC, from 0. Left out: spread evenly, in
    order."""
    rings: RingNics | None = None
    """NICs of a group with several, but not all, devices of a node. Those of its devices, that of
    the first of them, or the node's first for all such groups. Left out: first-device where
    devices share NICs without rails, else own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandForm(FileForm):
    """Nodes of one kind on one fast fabric."""

    name: Name
    """Unique in the cluster."""
    nodes: Count
    """Number of nodes (hosts)."""
    node: Name | None = None
    """What a node is, as `dgx-h100` (`hetplan doctor --nodes`). It fills in device,
    devices_per_node, intra_node, inter_node and nics; what the island says itself stands."""
    device: Name | None = None
    """Device kind of the catalogue or of `devices`. Required
    without node."""
    devices_per_node: Count | None = None
    """Devices in one node. Required without node."""
    fabric: Fabric | None = None
    """What joins the devices of a node (nvlink: a hybrid cube). It fills in intra_node, where what
    the island says itself stands. Not with node."""
    link: Bandwidth | None = None
    """Of one link of the fabric in one direction. To one other device of a mesh, to one neighbour
    of a ring, a device's lanes of a pcie-tree. Left out: as the catalogue has it."""
    intra_node: LinkForm | None = None
    """Between two devices of one node. Required without node or fabric."""
    inter_node: LinkForm | None = None
    """Between two devices of different nodes of this island. Required for more than one node."""
    memory: Memory | None = None
    """Memory of one device that a job may use; left out: all that the device has."""
    nodes_out: list[NodeNumber] = field(default_factory=list)
    """Numbers, from 0, of nodes that are out."""
    node_names: list[NodeNames] = field(default_factory=list)
    """Names of the nodes in order, as node[001-016]."""
    nics: NicsForm | None = None
    """Network cards of a node."""
    pcie_switches: Spread | None = None
    """How many a node has, or the number of each device's own."""
    numa_nodes: Spread | None = None
    """How many a node has, or the number of each device's own."""
    price: HourlyPrice | None = None
    """Of one device for one hour, its part of the node included."""
    power: Watts | None = None
    """What one device draws under load with its part of node and cooling. Left
    out: power_cap, or the limit of the device's board, where the catalogue has it."""
    host_launch: Seconds | None = None
    """Time of the host to launch one operator. Left out: 29 us, as published
    trainers took on their hosts."""
    host_memory: Memory | None = None
    """Of one node's host, for an optimizer that is kept there; its devices
    have equal parts of it. Left out: unknown, and no searched plan keeps an optimizer there."""
    power_cap: Watts | None = None
    """Limit that is set on each device. At most that of its board; it lowers the clock."""
    clock_ratio: ClockRatio = 1.0
    """Clock held under load over that of rates and samples. Without power_cap. Left out: 1."""
    speed_spread: LogSpread | None = None
    """Standard deviation of the logarithm of the devices' times. 0.03 is about 3 %. Left out:
    unknown."""
    cpu_cores: Count | None = None
    """Of one node's host. Goes with cpu_cores_per_device of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionForm(FileForm):
    """A data centre, or an availability zone."""

    name: Name
    """Unique in the cluster."""
    site: Name | None = None
    """Site whose power it draws."""
    islands: Annotated[list[IslandForm], Field(min_length=1)]
    """Islands of the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageForm(FileForm):
    """What keeps a site's checkpoints and data."""

    read: Bandwidth
    """All hosts of the site together."""
    write: Bandwidth
    """The same."""
    shares_uplink: bool = False
    """It is reached over the NICs that training uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteForm(FileForm):
    """A place with one supply of power, for one or more regions."""

    name: Name
    """Unique in the cluster; regions name it."""
    power_limit: Watts | None = None
    """Most that a plan may draw there. At the meter, with pue."""
    energy_price: EnergyPrice | None = None
    """Of energy, where it is paid apart."""
    pue: Ratio = 1.0
    """Power usage effectiveness. Energy of the whole site over that of its nodes, cooling included.
    Left out: 1, no overhead."""
    max_nodes: Count | None = None
    """Most nodes of a plan. Its control plane has room for no more."""
    storage: StorageForm | None = None
    """Of checkpoints and data. Left out: run.storage of the job, or its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLinkForm(BetweenForm):
    """The link between two islands, the same in both directions."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Names of the two islands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLinkForm(BetweenForm):
    """The link between any two islands of two regions, the same in both directions."""

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Names of the two regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksDefaultForm(FileForm):
    """Links between islands that neither `links` nor `region_links` lists."""

    within_region: BetweenForm | None = None
    """Between any two islands of one region."""
    across_regions: BetweenForm | None = None
    """Between any two islands of different regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterForm(FileForm):
    """Everything a job may use."""

    name: Name
    """In reports."""
    sites: list[SiteForm] = field(default_factory=list)
    """Sites with their power."""
    regions: Annotated[list[RegionForm], Field(min_length=1)]
    """Regions with their islands."""
    links: list[IslandLinkForm] = field(default_factory=list)
    """Links between two islands; every two islands need one, here, in region_links or in
    links_default."""
    region_links: list[RegionLinkForm] = field(default_factory=list)
    """Links between islands of two regions that `links` does not list."""
    links_default: LinksDefaultForm | None = None
    """Links of pairs that neither `links` nor `region_links` lists."""
    devices: list[DeviceForm] = field(default_factory=list)
    """Device kinds of this file's own; one with a catalogue name replaces it."""
    launch: list[LaunchDomainForm] = field(default_factory=list)
    """How hosts are started. Islands that no entry names are plain hosts, reached by ssh under
    their node names."""
    max_nodes: Count | None = None
    """Most nodes of a plan. All sites together."""
