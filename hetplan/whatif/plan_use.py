"""What a plan uses of a cluster, and what it has where a job could have a pin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.plans.pieces import data_ranks, stage_array
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding


def islands_in_use(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Names of the islands that the plan uses, in its order."""
    firsts = (replica.devices[0].start for replica in plan.replicas)
    return tuple(dict.fromkeys(cluster.island_of_device(first).name for first in firsts))


def used_devices(plan: Plan, cluster: Cluster) -> Iterator[tuple[Island, npt.NDArray[np.bool_]]]:
    """Every island with [nodes, devices of a node]: whether the plan uses the device."""
    used = np.zeros(cluster.num_devices, dtype=np.bool_)
    for stage in plan.stages:
        used[stage_array(stage)] = True
    for island in cluster.islands:
        first = cluster.first_device(island.name)
        mine = used[first : first + island.num_devices]
        yield island, mine.reshape(island.nodes, island.devices_per_node)


def pinned_values(plan: Plan) -> dict[str, str]:
    """What the plan has under the name of each pin; `4/8` where its parts differ."""
    pipelines, stages, replicas = plan.pipelines, plan.stages, plan.replicas
    values: dict[str, Iterable[object]] = {
        "tp": (replica.tp for replica in replicas),
        "cp": (replica.cp for replica in replicas),
        "ep": (replica.ep for replica in replicas),
        "dp": (data_ranks(stage) for stage in stages),
        "pp": (len(pipeline.stages) for pipeline in pipelines),
        "pipelines": (len(pipelines),),
        "microbatch_size": (replica.microbatch_size for replica in replicas),
        "virtual_stages": (pipeline.schedule.virtual_stages for pipeline in pipelines),
        "recompute": (
            stage.recompute.granularity is not RecomputeGranularity.NONE for stage in stages
        ),
        "sharded_optimizer": (plan.sharding is not Sharding.NONE,),
        "sharding": (plan.sharding.value,),
        "optimizer_offload": (f"{plan.optimizer_offload:g}",),
    }
    return {name: different(each) for name, each in values.items()}


def different(values: Iterable[object]) -> str:
    """The different values in the order in which they come, as in `4/8` or `true/false`."""
    words = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return "/".join(dict.fromkeys(words))
