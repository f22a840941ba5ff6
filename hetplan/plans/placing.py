"""Which devices of an island does each stage on it get?

Sizes are tp * cp * dp devices. A size divides the devices of a node, or is whole nodes; a stage
then lies inside one node or fills whole ones, so that every tensor-parallel group lies in a node.
Positions count the devices of usable nodes in order. Stages are placed in the order in which they
are given, each at the next multiple of its own size; where that leaves too little room, the largest
first, and then with no gaps. Sizes of which each divides the next larger one fill every node so.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.cluster.spec import Cluster, Island
from hetplan.plans.plan import DeviceRange, compress


def stages_with_room(island: Island, tp: int, size: int) -> int:
    """How many stages of `size` devices fit on the island; 0 if tp or size do not suit it."""
    per_node = island.devices_per_node
    if per_node % tp or (per_node % size and size % per_node):
        return 0
    nodes = island.num_usable_devices // per_node
    return nodes * (per_node // size) if size <= per_node else nodes // (size // per_node)


def positions(sizes: Sequence[int], per_node: int, nodes: int) -> tuple[int, ...] | None:
    """Where each of these stages begins among the usable devices; None where they have no room.

    Every size must divide `per_node` or be a multiple of it.
    """
    in_order = list(range(len(sizes)))
    largest_first = sorted(in_order, key=lambda at: -sizes[at])
    return (
        _next_fit(sizes, in_order, per_node, nodes)
        or _next_fit(sizes, largest_first, per_node, nodes)
        or _first_fit(sizes, largest_first, per_node, nodes)
    )


def _next_fit(
    sizes: Sequence[int], order: Sequence[int], per_node: int, nodes: int
) -> tuple[int, ...] | None:
    found = [0] * len(sizes)
    free = 0
    for at in order:
        # Multiples of a size that divides a node never cross from one node to the next.
        step = min(sizes[at], per_node)
        found[at] = -(-free // step) * step
        free = found[at] + sizes[at]
    return tuple(found) if free <= nodes * per_node else None


def _first_fit(
    sizes: Sequence[int], order: Sequence[int], per_node: int, nodes: int
) -> tuple[int, ...] | None:
    """Largest first, each into the first node that has room; whole nodes stand before them."""
    found = [0] * len(sizes)
    taken: list[int] = []
    for at in order:
        size = sizes[at]
        if size >= per_node:
            found[at] = len(taken) * per_node
            taken += [per_node] * (size // per_node)
            continue
        node = next((k for k, used in enumerate(taken) if used + size <= per_node), len(taken))
        if node == len(taken):
            taken.append(0)
        found[at] = node * per_node + taken[node]
        taken[node] += size
    return tuple(found) if len(taken) <= nodes else None


def device_ranges(
    cluster: Cluster, island: Island, position: int, size: int
) -> tuple[DeviceRange, ...]:
    """Device numbers of `size` usable devices of the island from this position on."""
    first = cluster.first_device(island.name)
    if not island.nodes_out:
        return (DeviceRange(start=first + position, count=size),)
    per_node = island.devices_per_node
    from_node, to_node = position // per_node, -(-(position + size) // per_node)
    devices = [
        first + node * per_node + local
        for node in island.usable_nodes[from_node:to_node]
        for local in range(per_node)
    ]
    skipped = position - from_node * per_node
    return compress(devices[skipped : skipped + size])
