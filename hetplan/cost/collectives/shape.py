"""How a group of ranks lies in the cluster: how many ranks in how many nodes of which islands.

That is all a collective's cost depends on: devices of one kind behind equal links can change
places. A shape is as long as there are different node populations, whatever the number of ranks.

Rails are separate networks: a byte for a device on another rail of another node first crosses the
sender's node to the device that has this rail (as NCCL's PXN and `hetplan.cost.network.segments`
do). Ranks of two nodes that hold equal parts of a message are paired by rail as far as they can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.network.segments import rail_of_local
from hetplan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NodeRanks:
    """`nodes` nodes that hold the same ranks of the group."""

    ranks: int
    """In each of them."""
    nodes: int
    rails: tuple[int, ...] = ()
    """Ranks on each rail of such a node, up to the last rail that has one; empty: any device
    reaches every device of another node without a detour."""


def off_rails(one: NodeRanks, other: NodeRanks) -> float:
    """Part of what two nodes of an island send each other that changes rails on its way."""
    if one.rails == other.rails:
        return 0.0
    pairs = zip(one.rails, other.rails, strict=False)
    return 1.0 - sum(min(own / one.ranks, there / other.ranks) for own, there in pairs)


@dataclass(frozen=True, kw_only=True)
class IslandRanks:
    """Ranks of the group in one island."""

    region: str
    island: str
    nodes: tuple[NodeRanks, ...]
    """Most ranks first; every population once."""

    @cached_property
    def num_nodes(self) -> int:
        """Nodes with at least one rank."""
        return sum(each.nodes for each in self.nodes)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks in this island."""
        return sum(each.nodes * each.ranks for each in self.nodes)

    def around(self, *, closed: bool) -> Iterator[tuple[NodeRanks, NodeRanks]]:
        """Neighbours of unlike populations where the nodes stand in order, in a ring if closed."""
        yield from pairwise(self.nodes)
        if closed and len(self.nodes) > 1:
            yield self.nodes[-1], self.nodes[0]

    @property
    def most_ranks(self) -> int:
        """Ranks of the fullest node."""
        return self.nodes[0].ranks

    @property
    def fewest_ranks(self) -> int:
        """Ranks of the emptiest node that has any."""
        return self.nodes[-1].ranks


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Where the ranks of a group are. Algorithms take them in this order: region by region, island
    by island, node by node, so that a ring or a tree leaves each of them as rarely as it can.
    """

    islands: tuple[IslandRanks, ...]
    """In order of region and name."""

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return sum(each.num_ranks for each in self.islands)

    @cached_property
    def num_nodes(self) -> int:
        """Nodes with at least one rank."""
        return sum(each.num_nodes for each in self.islands)

    @cached_property
    def regions(self) -> tuple[tuple[IslandRanks, ...], ...]:
        """The islands of each region."""
        return tuple(
            tuple(found) for _, found in groupby(self.islands, key=lambda each: each.region)
        )

    @property
    def fewest_ranks(self) -> int:
        """Ranks of the emptiest node that has any: as many devices of every node can send out of it
        at the same time.
        """
        return min(each.fewest_ranks for each in self.islands)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple((each.region, each.island, each.nodes) for each in self.islands))

    def __hash__(self) -> int:
        return self._hash


def group_shape(cluster: Cluster, devices: Iterable[int]) -> GroupShape:
    """The shape of a group of different devices; an InputError where one is missing or named twice.

    Takes a time that grows with the devices, not with the cluster.
    """
    populations: dict[str, dict[int, list[int]]] = {}
    known: set[int] = set()
    # Devices of one node mostly follow each other: the node is looked up when it changes.
    start, stop, locals_here = 0, 0, list[int]()
    for device in devices:
        if not start <= device < stop:
            island = cluster.island_of_device(device)
            node = (device - cluster.first_device(island.name)) // island.devices_per_node
            start = cluster.first_device(island.name) + node * island.devices_per_node
            stop = start + island.devices_per_node
            locals_here = populations.setdefault(island.name, {}).setdefault(node, [])
        if device in known:
            raise InputError(f"device {device} is in the group twice; name it once")
        known.add(device)
        locals_here.append(device - start)
    if not known:
        raise InputError("a group without devices; name at least one")
    islands = (
        _island_ranks(cluster.island(name), nodes.values()) for name, nodes in populations.items()
    )
    return GroupShape(islands=tuple(sorted(islands, key=lambda each: (each.region, each.island))))


def _island_ranks(island: Island, nodes: Iterable[list[int]]) -> IslandRanks:
    # Bytes that are staged in host memory leave by any NIC.
    direct = island.inter_node.transport is Transport.DEVICE_DIRECT
    railed = direct and island.nics is not None and island.nics.rails is not None
    counted = Counter(
        (len(members), _rails(island, members) if railed else ()) for members in nodes
    )
    return IslandRanks(
        region=island.region,
        island=island.name,
        nodes=tuple(
            NodeRanks(ranks=ranks, nodes=count, rails=rails)
            for (ranks, rails), count in sorted(counted.items(), reverse=True)
        ),
    )


def _rails(island: Island, members: list[int]) -> tuple[int, ...]:
    """Ranks on each rail."""
    rails = Counter(rail_of_local(island, local) for local in members)
    return tuple(rails[rail] for rail in range(max(rails) + 1))


def transport_of(cluster: Cluster, shape: GroupShape) -> Transport:
    """Host-staged as soon as one link of the group is: a group uses one library."""
    staged = any(link.transport is Transport.HOST_STAGED for link in _links(cluster, shape))
    return Transport.HOST_STAGED if staged else Transport.DEVICE_DIRECT


def _links(cluster: Cluster, shape: GroupShape) -> list[Link]:
    islands = shape.islands
    found = []
    for each in islands:
        island = cluster.island(each.island)
        if each.most_ranks > 1:
            found.append(island.intra_node)
        if each.num_nodes > 1:
            found.append(island.inter_node)
    for index in range(1, len(islands)):
        found.append(cluster.link_between(islands[index - 1].island, islands[index].island))
    return found
