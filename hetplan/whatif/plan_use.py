"""Which devices, nodes and islands of a cluster does a plan use?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.plans.plan import Plan, expand


def islands_in_use(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Names of the islands that the plan uses, in its order."""
    firsts = (replica.devices[0].start for replica in plan.replicas)
    return tuple(dict.fromkeys(cluster.island_of_device(first).name for first in firsts))


def used_devices(plan: Plan, cluster: Cluster) -> Iterator[tuple[Island, npt.NDArray[np.bool_]]]:
    """Every island with [nodes, devices of a node]: whether the plan uses the device."""
    used = np.zeros(cluster.num_devices, dtype=np.bool_)
    for replica in plan.replicas:
        used[list(expand(replica.devices))] = True
    for island in cluster.islands:
        first = cluster.first_device(island.name)
        mine = used[first : first + island.num_devices]
        yield island, mine.reshape(island.nodes, island.devices_per_node)
