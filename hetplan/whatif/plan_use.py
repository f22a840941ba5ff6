"""What a plan uses of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.spec import Cluster, Island
from hetplan.plans.pieces import used_devices
from hetplan.plans.plan import Plan


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
