"""What a plan uses of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.plans.pieces import stage_array
from hetplan.plans.plan import Plan


def used_devices(plan: Plan, cluster: Cluster) -> Iterator[tuple[Island, npt.NDArray[np.bool_]]]:
    """Every island with [nodes, devices of a node]: whether the plan uses the device."""
    used = np.zeros(cluster.num_devices, dtype=np.bool_)
    for stage in plan.stages:
        used[stage_array(stage)] = True
    for island in cluster.islands:
        first = cluster.first_device(island.name)
        mine = used[first : first + island.num_devices]
        yield island, mine.reshape(island.nodes, island.devices_per_node)


def idle_islands(plan: Plan, cluster: Cluster) -> Iterator[tuple[Island, int]]:
    """Islands of which usable devices are left over, and how many.

    cluster: as the job's forbids leave it (`hetplan.search.space.allowed`).
    """
    for island, mine in used_devices(plan, cluster):
        left = island.num_usable_devices - int(mine.sum())
        if left > 0:
            yield island, left


def work_share(plan: Plan, cluster: Cluster, name: str) -> float:
    """Part of all passes, of one layer and one sequence each, that an island computes."""
    mine = every = 0
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                sequences = replica.dp * replica.microbatch_size
                work = stage.num_layers * sequences * pipeline.num_microbatches
                every += work
                first = replica.devices[0].start
                mine += work * (cluster.island_of_device(first).name == name)
    return mine / every
