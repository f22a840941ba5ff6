"""The host of each device, and the cluster that is left when hosts are gone.

Devices are named by their numbers in the cluster. A host is one node of an island; its name is the
one in `node_names`, or ISLAND-NODE.

A cluster without some hosts (`part_left`) keeps every island, link and device number: the nodes
that are gone are out (`nodes_out`), even where they are all nodes of an island. So a plan for what
is left names the same devices as a plan for the whole, and nothing is numbered back.
"""

from __future__ import annotations

from collections import Counter
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


def part_left(cluster: Cluster, gone: Collection[str]) -> Cluster:
    """The cluster with the hosts of these names out; device numbers and names stay.

    InputError where a host has an unknown name, or one that two hosts have.
    """
    counts = Counter(name for _, _, name in _all_hosts(cluster))
    for name in sorted(gone):
        if name not in counts:
            raise InputError(f"{cluster.name}: {unknown(name, counts, 'host')}")
        if counts[name] > 1:
            raise InputError(
                f"{cluster.name} has {counts[name]} hosts of the name {name}; give every node a "
                "name of its own in node_names"
            )
    out: dict[str, set[int]] = {}
    for island, node, name in _all_hosts(cluster):
        if name in gone and not island.is_out(node):
            out.setdefault(island.name, set(island.nodes_out)).add(node)
    return replace(
        cluster,
        islands=tuple(
            replace(island, nodes_out=tuple(sorted(out[island.name])))
            if island.name in out
            else island
            for island in cluster.islands
        ),
    )


def part_back(cluster: Cluster, name: str) -> Cluster | None:
    """The cluster with a host of this name that was out in use again; None where none is out."""
    for island, node, known in _all_hosts(cluster):
        if known == name and island.is_out(node):
            out = tuple(each for each in island.nodes_out if each != node)
            return cluster.with_island(replace(island, nodes_out=out))
    return None


def _all_hosts(cluster: Cluster) -> Iterator[tuple[Island, int, str]]:
    """(island, node, name) of every host, those that are out included."""
    for island in cluster.islands:
        for node in range(island.nodes):
            yield island, node, node_name(island, node)
