"""What hangs where: node, NIC, rail, PCIe switch, NUMA node and site of a device, and who shares.

Devices are named by their numbers in the cluster. An answer of None, or an empty one, means that
the cluster does not describe it. Every question is answered in a time that does not grow with the
cluster; those that list devices, with the list.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.spec import Cluster, Island


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """Where a device is."""

    island: Island
    node: int
    """In its island."""
    local: int
    """In its node."""


def place_of(cluster: Cluster, device: int) -> DevicePlace:
    """Island, node and local number; an InputError where there is no such device."""
    island = cluster.island_of_device(device)
    node, local = divmod(device - cluster.first_device(island.name), island.devices_per_node)
    return DevicePlace(island=island, node=node, local=local)


def node_name(cluster: Cluster, device: int) -> str | None:
    """Name of the device's node, for launchers."""
    place = place_of(cluster, device)
    names = place.island.names_of_nodes
    return names[place.node] if names else None
