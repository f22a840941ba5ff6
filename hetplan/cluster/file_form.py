"""How a cluster file is written; its links: `hetplan.cluster.link_form`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from hetplan.cluster.device_form import DeviceForm
from hetplan.cluster.launch_form import LaunchDomainForm
from hetplan.cluster.link_form import BetweenForm, LinkForm
from hetplan.cluster.node import RingNics
from hetplan.cluster.node_names import NODE_NAMES_PATTERN
from hetplan.cluster.spec import MAX_CLOCK_RATIO, MAX_SPEED_SPREAD
from hetplan.files.quantities import (
    Bandwidth,
    Count,
    HourlyPrice,
    Memory,
    Name,
    Watts,
)

CLUSTER_SCHEMA = "hetplan.cluster/4"
FIRST_SCHEMA = "hetplan.cluster/1"
"""The form whose links between islands have a plain `bandwidth`, one device's share."""

ClockRatio: TypeAlias = Annotated[float, Field(gt=0, le=MAX_CLOCK_RATIO)]
"""A sustained clock over the one of the printed rates."""
LogSpread: TypeAlias = Annotated[float, Field(ge=0, le=MAX_SPEED_SPREAD)]
"""Standard deviation of the logarithm of times."""

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
class NicsForm:
    """Network cards of a node; its devices share them."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    per_node: Count
    """NICs in one node, those for training only."""
    bandwidth: Bandwidth
    """Of one NIC, in one direction."""
    most_per_device: Count | None = None
    """NICs that one device sends over at the same time, where there are more NICs than devices.
    Left out: 1."""
    rails: Count | None = None
    """Separate networks: NIC n of every node is on rail n modulo this. Left out: one network."""
    of_device: list[NodeNumber] = field(default_factory=list)
    """For every device of a node the number of its NIC, from 0. Left out: spread evenly, in
    order."""
    rings: RingNics | None = None
    """By which NICs a device-direct collective leaves a node that holds several, but not all, of
    its devices: `own` (those of its devices), `first-device` (that of the first of them) or `one`
    (the node's first, for all such groups together). Left out: first-device where devices share
    NICs without rails, else own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandForm:
    """Nodes of one kind on one fast fabric."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the island, unique in the cluster."""
    device: Name
    """Device kind: of the catalogue (configs/devices) or of `devices` in this file."""
    nodes: Count
    """Number of nodes (hosts)."""
    devices_per_node: Count
    """Devices in one node."""
    intra_node: LinkForm
    """Between two devices of one node."""
    inter_node: LinkForm | None = None
    """Between two devices of different nodes of this island. Required for more than one node."""
    memory: Memory | None = None
    """Memory of one device that a job may use; left out: all that the device has."""
    nodes_out: list[NodeNumber] = field(default_factory=list)
    """Numbers, from 0, of nodes that must not be used."""
    node_names: list[NodeNames] = field(default_factory=list)
    """Names of the nodes in order, for launchers: words or ranges such as node[001-016]."""
    nics: NicsForm | None = None
    """Network cards of a node."""
    pcie_switches: Spread | None = None
    """How many a node has, spread evenly over its devices, or the number of each device's own."""
    numa_nodes: Spread | None = None
    """How many a node has, spread evenly over its devices, or the number of each device's own."""
    price: HourlyPrice | None = None
    """Of one device for one hour, its part of the node included."""
    power: Watts | None = None
    """What one device draws under load, its part of the node and of the cooling included. Left
    out: power_cap, or the limit of the device's board, where the catalogue has it."""
    power_cap: Watts | None = None
    """Limit that is set on each device, at most the limit of its board; it lowers the clock."""
    clock_ratio: ClockRatio = 1.0
    """Clock that the devices hold under load, without power_cap, over the clock at which their
    rates are given or their samples were measured. Left out: 1."""
    speed_spread: LogSpread | None = None
    """Spread of the devices' speeds: standard deviation of the logarithm of the times that they
    take for the same work, such as 0.03 for about 3 %. Left out: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionForm:
    """A data centre, or an availability zone."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the region, unique in the cluster."""
    site: Name | None = None
    """Site whose power the region draws: a name of `sites`."""
    islands: Annotated[list[IslandForm], Field(min_length=1)]
    """Islands of the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteForm:
    """A place with one supply of power, for one or more regions."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the site, unique in the cluster; regions name it."""
    power_limit: Watts | None = None
    """Most that all devices of its regions may draw together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLinkForm(BetweenForm):
    """The link between two islands, the same in both directions."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Names of the two islands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLinkForm(BetweenForm):
    """The link between any two islands of two regions, the same in both directions."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Names of the two regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksDefaultForm:
    """Links between islands that neither `links` nor `region_links` lists."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    within_region: BetweenForm | None = None
    """Between any two islands of one region."""
    across_regions: BetweenForm | None = None
    """Between any two islands of different regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterForm:
    """Everything a job may use."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the cluster in reports."""
    sites: list[SiteForm] = field(default_factory=list)
    """Sites with their power."""
    regions: Annotated[list[RegionForm], Field(min_length=1)]
    """Regions with their islands."""
    links: list[IslandLinkForm] = field(default_factory=list)
    """Links between two islands; every two islands need one, here, in region_links or in
    links_default."""
    region_links: list[RegionLinkForm] = field(default_factory=list)
    """Links between the islands of two regions that `links` does not list."""
    links_default: LinksDefaultForm | None = None
    """Links for pairs of islands that neither `links` nor `region_links` lists."""
    devices: list[DeviceForm] = field(default_factory=list)
    """Device kinds of this file's own; one with a catalogue name replaces it."""
    launch: list[LaunchDomainForm] = field(default_factory=list)
    """How hosts are started. Islands that no entry names are plain hosts, reached by ssh under
    their node names."""
