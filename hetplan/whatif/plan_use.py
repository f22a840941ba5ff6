"""What a plan uses of a cluster, and what it has where a job could have a pin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from hetplan.cluster.spec import Cluster, Island
from hetplan.job.spec import Job
from hetplan.plans.chosen import Shape
from hetplan.plans.pieces import data_ranks, stage_array
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding


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


def keeps_pins(plan: Plan, cluster: Cluster, job: Job) -> bool:
    """Whether a plan for this cluster has what the job pins; False too where it cannot be told."""
    pin, has = job.pin, pinned_values(plan)
    ends = [(place, end) for place, end in ((pin.embedding_on, 0), (pin.head_on, -1)) if place]
    shapes = {Shape.of(replica) for replica in plan.replicas}
    return (
        all(
            text == str(getattr(pin, name)).lower()
            for name, text in has.items()
            if getattr(pin, name) is not None
        )
        and all(
            place in (island.name, island.device.kind)
            for place, end in ends
            for pipeline in plan.pipelines
            for replica in pipeline.stages[end].replicas
            for island in [cluster.island_of_device(replica.devices[0].start)]
        )
        and all(
            pin.sequence_parallel in (None, shape.sequence_parallel)
            for shape in shapes
            if shape.tp > 1
        )
        and not (pin.same_degrees and len(shapes) > 1)
        and (pin.depth is None or (pin.depth == 0 and not plan.overlap.send))
    )


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
        "schedule": (pipeline.schedule.name for pipeline in pipelines),
        "recompute": (
            stage.recompute.granularity is not RecomputeGranularity.NONE for stage in stages
        ),
        "sharded_optimizer": (plan.sharding is not Sharding.NONE,),
        "recompute_modules": (stage.recompute.words for stage in stages),
        "sharding": (plan.sharding.value,),
        "optimizer_offload": (f"{plan.optimizer_offload:g}",),
    }
    return {name: different(each) for name, each in values.items()}


def different(values: Iterable[object]) -> str:
    """The different values in the order in which they come, as in `4/8` or `true/false`."""
    words = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return "/".join(dict.fromkeys(words))
