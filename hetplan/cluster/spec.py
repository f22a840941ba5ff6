"""What the model is trained on: devices in nodes, nodes in islands, islands in regions, links.

Every device of the cluster has a number: islands in file order, in each island node by node, in
each node by its local number. Plans name devices by these numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError

MOST_DEVICES = 1 << 21
"""Most devices of a cluster: twenty times the largest that was built, and a plan of them still
takes seconds and fits in memory. More is a slip in a count."""


def too_many_devices(count: int) -> str:
    """The fault of a cluster with more devices than can be."""
    return (
        f"{count:,} devices; a cluster has at most {MOST_DEVICES:,}: check nodes and "
        "devices_per_node"
    )


class Transport(StrEnum):
    """How bytes cross a link.

    device-direct: the accelerator's own library (nccl, rccl, hccl, ...) moves device memory.
    host-staged: copied to host memory, sent by gloo, copied back; works between any two kinds.
    """

    DEVICE_DIRECT = "device-direct"
    HOST_STAGED = "host-staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path between two devices, one direction: what one device can count on of it."""

    bandwidth_bytes_per_second: float
    latency_seconds: float
    """From the first byte sent to the first byte received."""
    transport: Transport
    samples: str | None = None
    """Name of measured link samples in the profile store that replace the two figures."""

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_second < math.inf:
            raise InputError(
                f"bandwidth_bytes_per_second is {self.bandwidth_bytes_per_second}; it must be "
                "above 0 and finite"
            )
        if not 0 <= self.latency_seconds < math.inf:
            raise InputError(
                f"latency_seconds is {self.latency_seconds}; it must be at least 0 and finite"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Devices of one kind on one fast fabric."""

    name: str
    region: str
    device: DeviceKind
    nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    """Between nodes of the island, per device."""
    memory_bytes: float
    """Memory of one device that a job may use."""
    nodes_out: tuple[int, ...] = ()
    """Nodes that exist and must not be used; they keep their device numbers."""

    def __post_init__(self) -> None:
        for field in ("nodes", "devices_per_node"):
            if getattr(self, field) < 1:
                raise InputError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if not 0 < self.memory_bytes < math.inf:
            raise InputError(f"memory_bytes is {self.memory_bytes}; it must be above 0 and finite")
        wrong = [node for node in self.nodes_out if not 0 <= node < self.nodes]
        if wrong:
            raise InputError(
                f"nodes_out has {wrong[0]}; the island has the nodes 0 to {self.nodes - 1}"
            )

    @property
    def num_devices(self) -> int:
        """Devices of the island, those of nodes that are out included."""
        return self.nodes * self.devices_per_node

    @property
    def usable_nodes(self) -> tuple[int, ...]:
        """Node numbers that may be used."""
        return tuple(node for node in range(self.nodes) if node not in self.nodes_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLink:
    """The link between devices of two islands, the same both ways."""

    between: tuple[str, str]
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything the job may use."""

    name: str
    islands: tuple[Island, ...]
    links: tuple[IslandLink, ...] = ()

    def __post_init__(self) -> None:
        names = [island.name for island in self.islands]
        if len(set(names)) < len(names):
            raise InputError(f"two islands have one name; the names are {self._names()}")
        if self.num_devices > MOST_DEVICES:
            raise InputError(too_many_devices(self.num_devices))

    @property
    def num_devices(self) -> int:
        """Devices of all islands."""
        return sum(island.num_devices for island in self.islands)

    @property
    def regions(self) -> tuple[str, ...]:
        """Region names in file order."""
        return tuple(dict.fromkeys(island.region for island in self.islands))

    def island(self, name: str) -> Island:
        """The island of this name."""
        for island in self.islands:
            if island.name == name:
                return island
        raise InputError(f"no island is named {name}; the cluster has {self._names()}")

    def first_device(self, name: str) -> int:
        """Number of the first device of the island of this name."""
        first = 0
        for island in self.islands:
            if island.name == name:
                return first
            first += island.num_devices
        raise InputError(f"no island is named {name}; the cluster has {self._names()}")

    def island_of_device(self, device: int) -> Island:
        """The island that holds the device of this number."""
        first = 0
        for island in self.islands:
            if first <= device < first + island.num_devices:
                return island
            first += island.num_devices
        raise InputError(f"there is no device {device}; the cluster has 0 to {first - 1}")

    def node_of_device(self, device: int) -> int:
        """Number of the device's node inside its island."""
        island = self.island_of_device(device)
        return (device - self.first_device(island.name)) // island.devices_per_node

    def link_between(self, left: str, right: str) -> Link:
        """The link between two islands; inside one island, the link between its nodes."""
        if left == right:
            return self.island(left).inter_node
        for entry in self.links:
            if set(entry.between) == {left, right}:
                return entry.link
        raise InputError(f"the cluster has no link between islands {left} and {right}")

    def _names(self) -> str:
        return ", ".join(island.name for island in self.islands)
