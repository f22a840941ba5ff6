"""How a cluster file and the device catalogue are written.

Figures of a link are what ONE device can count on, in one direction: where eight devices share
one 200 Gbit/s card, each has a link of 25 Gbit/s, because all of them send in the same phases of a
step and estimates do not divide a link by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field

from hetplan.cluster.device_form import DeviceForm
from hetplan.cluster.spec import Transport
from hetplan.files.quantities import Bandwidth, Count, Memory, Name, Seconds

CLUSTER_SCHEMA = "hetplan.cluster/1"

NodeNumber: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForm:
    """One direction between two devices: what one device can count on while the others send too."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    bandwidth: Bandwidth
    """Per device and direction; of a card or uplink that devices share, one device's share."""
    latency: Seconds
    """One way: from the first byte sent to the first byte received; half a round trip."""
    transport: Transport | None = None
    """device-direct (nccl, rccl, hccl, ...) or host-staged (gloo over host memory). Left out:
    device-direct inside an island (host-staged for kind cpu), host-staged between islands."""
    samples: Name | None = None
    """Name of measured link samples in the profile store. They replace bandwidth and latency, which
    then serve only for operations and sizes that were not measured."""


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
    inter_node: LinkForm
    """Between two devices of different nodes of this island."""
    memory: Memory | None = None
    """Memory of one device that a job may use; left out: all that the device has."""
    nodes_out: list[NodeNumber] = field(default_factory=list)
    """Numbers, from 0, of nodes that must not be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionForm:
    """A data centre or site."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the region, unique in the cluster."""
    islands: Annotated[list[IslandForm], Field(min_length=1)]
    """Islands of the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLinkForm:
    """The link between two islands, the same in both directions."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    between: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Names of the two islands."""
    bandwidth: Bandwidth
    """Per device and direction; of a card or uplink that devices share, one device's share."""
    latency: Seconds
    """One way: from the first byte sent to the first byte received; half a round trip."""
    transport: Transport | None = None
    """device-direct or host-staged; left out: host-staged, which works between any two kinds."""
    samples: Name | None = None
    """Name of measured link samples in the profile store; see LinkForm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksDefaultForm:
    """Links between islands that `links` does not list."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    within_region: LinkForm | None = None
    """Between any two islands of one region."""
    across_regions: LinkForm | None = None
    """Between any two islands of different regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterForm:
    """Everything a job may use."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    name: Name
    """Name of the cluster in reports."""
    regions: Annotated[list[RegionForm], Field(min_length=1)]
    """Regions with their islands."""
    links: list[IslandLinkForm] = field(default_factory=list)
    """Links between islands; every two islands need one, here or in links_default."""
    links_default: LinksDefaultForm | None = None
    """Links for pairs of islands that `links` does not list."""
    devices: list[DeviceForm] = field(default_factory=list)
    """Device kinds of this file's own; one with a catalogue name replaces it."""
