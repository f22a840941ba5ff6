"""Which JSON file says a plan to Sailor (github.com/eth-easl/sailor)?

The form is that of its repository's sailor/Planner/simulations/validation: per stage the numbers of
its layers (0 is the embedding, the last one the head) and one entry per data-parallel replica,
`[[[GPU, devices per node, zone]], tp]`. One microbatch size and one dp for all stages; 1F1B,
float32, no recomputation (sailor/Planner/simulations/runtime_simulator.py). A plan that is more
than that is refused with every reason, never approximated.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job
from hetplan.plans.pieces import data_ranks, own_depth
from hetplan.plans.plan import (
    Pipeline,
    Plan,
    RecomputeGranularity,
    Replica,
    Sharding,
    Stage,
    expand,
)

NAMES = (
    ("nvidia-a100-40gb-sxm", "A100-40"),
    ("nvidia-a100-80gb-sxm", "A100-80"),
    ("nvidia-v100-16gb-sxm", "V100-16"),
    ("nvidia-gh200-96gb", "GH-96"),
    ("nvidia-rtx-2080-ti-11gb", "RTX-2080"),
    ("nvidia-rtx-3090-24gb", "RTX-3090"),
    ("nvidia-titan-rtx-24gb", "Titan-RTX"),
)
"""(kind of the catalogue, Sailor's name) of the GPUs that Sailor knows the memory of
(sailor/Planner/simulations/constants.py: GPU_MEMORY_GB)."""
_OF_KIND = dict(NAMES)


def sailor_text(plan: Plan, cluster: Cluster, job: Job) -> str:
    """The plan as Sailor's JSON; an InputError lists everything that Sailor cannot express."""
    faults = sailor_faults(plan, cluster, job)
    if faults:
        raise InputError(*faults)
    return json.dumps(_document(plan, cluster, job), indent=2) + "\n"


def sailor_faults(plan: Plan, cluster: Cluster, job: Job) -> tuple[Fault, ...]:
    """Everything in the plan that Sailor cannot express; empty: nothing."""
    found: list[Fault] = []
    if len(plan.pipelines) > 1:
        message = (
            f"{len(plan.pipelines)} pipelines; Sailor's plan is one pipeline: pin pipelines: 1"
        )
        found.append(Fault(field="pipelines", message=message))
    if plan.sharding is not Sharding.NONE:
        message = f"{plan.sharding.value}; Sailor knows none: pin sharded_optimizer: false"
        found.append(Fault(field="sharding", message=message))
    if plan.optimizer_offload:
        message = f"{plan.optimizer_offload:g}; Sailor keeps the optimizer on the device"
        found.append(Fault(field="optimizer_offload", message=message))
    if job.sequence_lengths:
        message = "sequences of several lengths; Sailor has one sequence length"
        found.append(Fault(field="inputs.job.sequence_lengths", message=message))
    for p, pipeline in enumerate(plan.pipelines):
        found += _pipeline_faults(f"pipelines[{p}]", pipeline, cluster)
    return tuple(found)


def _pipeline_faults(where: str, pipeline: Pipeline, cluster: Cluster) -> list[Fault]:
    found: list[Fault] = []
    schedule = pipeline.schedule
    if schedule.name != "1f1b":
        message = f"{schedule.name}; Sailor runs 1f1b only: pin virtual_stages: 1"
        found.append(Fault(field=f"{where}.schedule", message=message))
    copies = {data_ranks(stage) for stage in pipeline.stages}
    if len(copies) > 1:
        message = (
            f"stages have dp {_listed(copies)}; Sailor's simulator counts microbatches by the "
            "first stage's dp, so all stages must have it"
        )
        found.append(Fault(field=f"{where}.stages", message=message))
    sizes = {replica.microbatch_size for stage in pipeline.stages for replica in stage.replicas}
    if len(sizes) > 1:
        message = (
            f"microbatch sizes {_listed(sizes)}; Sailor has one for all stages: pin microbatch_size"
        )
        found.append(Fault(field=f"{where}.stages", message=message))
    for s, stage in enumerate(pipeline.stages):
        found += _stage_faults(f"{where}.stages[{s}]", stage, _own_depth(pipeline, s))
        for r, replica in enumerate(stage.replicas):
            found += _replica_faults(f"{where}.stages[{s}].replicas[{r}]", replica, cluster)
    return found


def _listed(numbers: set[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _stage_faults(where: str, stage: Stage, depth: int) -> list[Fault]:
    found: list[Fault] = []
    if stage.recompute.granularity is not RecomputeGranularity.NONE:
        message = f"{stage.recompute.granularity.value}; Sailor has none: pin recompute: false"
        found.append(Fault(field=f"{where}.recompute", message=message))
    if stage.warmup_depth != depth:
        message = f"{stage.warmup_depth}; Sailor's 1f1b keeps {depth} in flight: pin depth: 0"
        found.append(Fault(field=f"{where}.warmup_depth", message=message))
    return found


def _replica_faults(where: str, replica: Replica, cluster: Cluster) -> list[Fault]:
    found: list[Fault] = []
    for name, degree in (("cp", replica.cp), ("ep", replica.ep)):
        if degree > 1:
            message = f"{degree}; Sailor has no such parallelism: pin {name}: 1"
            found.append(Fault(field=f"{where}.{name}", message=message))
    if replica.sequence_parallel:
        message = "on; Sailor has none: pin sequence_parallel: false"
        found.append(Fault(field=f"{where}.sequence_parallel", message=message))
    devices = expand(replica.devices)
    kinds = {cluster.island_of_device(device).device.kind for device in devices}
    for kind in sorted(kinds - set(_OF_KIND)):
        message = f"device kind {kind}; Sailor knows {', '.join(_OF_KIND)}"
        found.append(Fault(field=f"{where}.devices", message=message))
    if replica.cp == 1 and any(
        len({_node(cluster, device) for device in devices[at : at + replica.tp]}) > 1
        for at in range(0, len(devices), replica.tp)
    ):
        message = (
            f"a tensor-parallel group of {replica.tp} lies on several nodes, for whose compute "
            "Sailor's simulator charges nothing: pin a smaller tp"
        )
        found.append(Fault(field=f"{where}.devices", message=message))
    return found


def _node(cluster: Cluster, device: int) -> tuple[str, int]:
    return cluster.island_of_device(device).name, cluster.node_of_device(device)


def _document(plan: Plan, cluster: Cluster, job: Job) -> dict[str, Any]:
    (pipeline,) = plan.pipelines
    used: Counter[str] = Counter()
    nodes = set()
    rows = []
    for stage in pipeline.stages:
        row: list[Any] = []
        for replica in stage.replicas:
            devices = expand(replica.devices)
            nodes |= {_node(cluster, device) for device in devices}
            for first in devices[:: replica.tp]:
                island = cluster.island_of_device(first)
                name = _OF_KIND[island.device.kind]
                used[name] += replica.tp
                row.append([[[name, island.devices_per_node, island.region]], replica.tp])
        rows.append(row)
    return {
        "zone": rows[0][0][0][0][2],
        "pipeline_list": [
            {
                "num_stages": len(pipeline.stages),
                "layers_per_stage": [
                    [layer for chunk in stage.chunks for layer in range(chunk.start, chunk.stop)]
                    for stage in pipeline.stages
                ],
                "tmp_per_stage": rows,
                "dp": [len(row) for row in rows],
            }
        ],
        "mbs": pipeline.stages[0].replicas[0].microbatch_size,
        "gbs": job.global_batch_size,
        "N": len(nodes),
        "used_gpus": dict(sorted(used.items())),
    }


def _own_depth(pipeline: Pipeline, stage: int) -> int:
    return own_depth("1f1b", stage, len(pipeline.stages), pipeline.num_microbatches)
