"""Which groups of a plan sum level by level, and how do their ranks lie?

Sums over several islands are made of the trainer's own messages where the cost model prices such:
`hetplan.cost.collectives.direct_levels` chooses, by the cluster's figures.
"""

from __future__ import annotations

from collections.abc import Callable

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import group_shape
from hetplan.cost.collectives.direct_levels import summed_by_messages
from hetplan.cost.collectives.layout import ISLAND, NODE
from hetplan.plans.plan import Plan
from hetplan.runtime.communicator.levels import GroupSum
from hetplan.runtime.exchanges import reduction_of
from hetplan.runtime.placement import place_ranks


def sums_of(plan: Plan, cluster: Cluster) -> tuple[GroupSum, ...]:
    """The groups of this plan that sum level by level: of gradients, of tied matrices, and all
    ranks (the norm).
    """
    places = place_ranks(plan)
    groups = [ranks for ranks, _ in reduction_of(plan, places).groups()]
    groups.append(tuple(place.rank for place in places))
    found = []
    for ranks in dict.fromkeys(groups):
        devices = [places[rank].device for rank in ranks]
        layout = summed_by_messages(cluster, group_shape(cluster, devices))
        if layout is not None:
            units = [_unit_of(cluster, low) for low, _ in layout.blocks[1:]]
            levels = tuple(_numbered([unit(device) for device in devices]) for unit in units)
            found.append(GroupSum(ranks=ranks, levels=levels))
    return tuple(found)


def _unit_of(cluster: Cluster, level: int) -> Callable[[int], tuple[str, int]]:
    """The unit of a level that a device lies in."""

    def unit(device: int) -> tuple[str, int]:
        island = cluster.island_of_device(device)
        if level == NODE:
            return island.name, cluster.node_of_device(device)
        return (island.name if level == ISLAND else island.region), 0

    return unit


def _numbered(units: list[tuple[str, int]]) -> tuple[int, ...]:
    numbers = {each: at for at, each in enumerate(dict.fromkeys(units))}
    return tuple(numbers[each] for each in units)
