"""The host of each device, and the cluster that is left when hosts are gone.

Devices are named by their numbers in the cluster. A host is one node of an island; its name is the
one in `node_names`, or ISLAND-NODE.

A cluster without some hosts (`part_left`) keeps every island, link and device number: the nodes
that are gone are out (`nodes_out`), even where they are all nodes of an island. So a plan for what
is left names the same devices as a plan for the whole, and nothing is numbered back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.places import unknown
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import InputError


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


def written_node_name(cluster: Cluster, device: int) -> str | None:
    """Name of the device's node, for launchers."""
    place = place_of(cluster, device)
    names = place.island.names_of_nodes
    return names[place.node] if names else None


def node_name(island: Island, node: int) -> str:
    """Name of the host that is this node of the island."""
    names = island.names_of_nodes
    return names[node] if names else f"{island.name}-{node}"


def host_names(cluster: Cluster) -> tuple[str, ...]:
    """Names of the hosts that may be used, in the order of their devices."""
    return tuple(
        node_name(island, node) for island in cluster.islands for node in island.usable_nodes
    )


def host_of_device(cluster: Cluster, device: int) -> str:
    """Name of the host that holds the device of this number."""
    return node_name(cluster.island_of_device(device), cluster.node_of_device(device))


def find_node(cluster: Cluster, text: str) -> tuple[Island, int]:
    """The node that a user means by `ISLAND/NODE` or a host's name.

    InputError where there is none, or two hosts have the name.
    """
    name, slash, number = text.rpartition("/")
    islands = {each.name: each for each in cluster.islands}
    if name in islands:
        nodes = islands[name].nodes
        if number.isdecimal() and len(number) < 10 and int(number) < nodes:
            return islands[name], int(number)
        message = f"island {name} has no node {number[:60]}; it has {name}/0 to {name}/{nodes - 1}"
        raise InputError(message)
    if slash:
        raise InputError(f"{cluster.name}: {unknown(name, islands, 'island')}")
    hosts = [*_all_hosts(cluster)]
    found = [(island, node) for island, node, known in hosts if known == text]
    if not found:
        raise InputError(f"{cluster.name}: {unknown(text, {each[2] for each in hosts}, 'host')}")
    if len(found) > 1:
        message = f"{cluster.name} has {len(found)} hosts of the name {text}; write ISLAND/NODE, "
        raise InputError(f"{message}or give every node a name of its own in node_names")
    return found[0]


def part_left(cluster: Cluster, gone: Collection[str]) -> Cluster:
    """The cluster with these nodes out (`find_node`); device numbers and names stay."""
    out: dict[str, set[int]] = {}
    for island, node in (find_node(cluster, name) for name in sorted(gone)):
        out.setdefault(island.name, set(island.nodes_out)).add(node)
    islands = (
        replace(each, nodes_out=tuple(sorted(out.get(each.name, each.nodes_out))))
        for each in cluster.islands
    )
    return replace(cluster, islands=tuple(islands))


def part_back(cluster: Cluster, name: str) -> Cluster | None:
    """The cluster with this node (`find_node`) that was out in use again; None where it was not."""
    try:
        island, node = find_node(cluster, name)
    except InputError:
        return None
    if not island.is_out(node):
        return None
    out = tuple(each for each in island.nodes_out if each != node)
    return cluster.with_island(replace(island, nodes_out=out))


def _all_hosts(cluster: Cluster) -> Iterator[tuple[Island, int, str]]:
    """(island, node, name) of every host, those that are out included."""
    for island in cluster.islands:
        for node in range(island.nodes):
            yield island, node, node_name(island, node)
