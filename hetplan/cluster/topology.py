"""What hangs where: node, NIC, rail, PCIe switch, NUMA node and site of a device, and who shares.

Devices are named by their numbers in the cluster. An answer of None, or an empty one, means that
the cluster does not describe it. Every question is answered in a time that does not grow with the
cluster; those that list devices, with the list.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.spec import Cluster, Island, Link, Site


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


def nics_of(cluster: Cluster, device: int) -> tuple[int, ...]:
    """NICs of its node that the device sends over."""
    place = place_of(cluster, device)
    nics = place.island.nics
    return nics.of(place.local, place.island.devices_per_node) if nics else ()


def rail_of(cluster: Cluster, device: int) -> int | None:
    """Rail of the device's first NIC; None where the island has no rails."""
    nics = cluster.island_of_device(device).nics
    if nics is None or nics.rails is None:
        return None
    return nics.rail(nics_of(cluster, device)[0])


def switch_of(cluster: Cluster, device: int) -> int | None:
    """PCIe switch of its node at which the device hangs."""
    place = place_of(cluster, device)
    switches = place.island.switch_of_device
    return switches[place.local] if switches else None


def numa_node_of(cluster: Cluster, device: int) -> int | None:
    """NUMA node of its node at which the device hangs."""
    place = place_of(cluster, device)
    numa_nodes = place.island.numa_node_of_device
    return numa_nodes[place.local] if numa_nodes else None


def site_of(cluster: Cluster, island: str) -> Site | None:
    """The site of an island."""
    return cluster.site_of_region(cluster.island(island).region)


def domain_of_island(cluster: Cluster, island: str) -> LaunchDomain:
    """How the hosts of an island are started: plain hosts where no launch domain names it."""
    return cluster.domain_of_island(island)


def devices_of_node(cluster: Cluster, device: int) -> range:
    """Every device of the device's node."""
    place = place_of(cluster, device)
    first = device - place.local
    return range(first, first + place.island.devices_per_node)


def devices_sharing_nic(cluster: Cluster, device: int) -> tuple[int, ...]:
    """Devices of its node that send over a NIC of this device, itself included."""
    own = set(nics_of(cluster, device))
    place = place_of(cluster, device)
    nics, count = place.island.nics, place.island.devices_per_node
    if nics is None:
        return ()
    return tuple(
        device - place.local + local
        for local in range(count)
        if not own.isdisjoint(nics.of(local, count))
    )


def devices_sharing_switch(cluster: Cluster, device: int) -> tuple[int, ...]:
    """Devices of its node at the PCIe switch of this device, itself included."""
    place = place_of(cluster, device)
    switches = place.island.switch_of_device
    return tuple(
        device - place.local + local
        for local, switch in enumerate(switches)
        if switch == switches[place.local]
    )


def path_link(cluster: Cluster, left: int, right: int) -> Link:
    """The link between two different devices: inside a node, between nodes, between islands.

    An InputError where a device does not exist or the islands have no link.
    """
    one, two = place_of(cluster, left), place_of(cluster, right)
    if one.island.name == two.island.name and one.node == two.node:
        return one.island.intra_node
    return cluster.link_between(one.island.name, two.island.name)
