"""How is a row of stages (`evaluation.search.rows`) a plan of hetplan?

The row's rooms are described as one island per tp, with nodes of tp devices: groups of tp devices,
powers of two that divide a node's devices, always have room in whole nodes, however many replicas a
stage takes. The job's batch is what the row's microbatches hold: the case's, rounded up to whole
microbatches of every replica. The target is `any`: native alone runs stages of several kinds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from evaluation.search.case_inputs import case_inputs, room_island, rooms_cluster
from evaluation.search.cases import Case, SailorRoom
from evaluation.search.rows import Row
from evaluation.search.sailor_cost import SailorReplicas
from evaluation.search.sailor_files import SailorFiles
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import Schedule
from hetplan.search.result import Inputs


def row_inputs(case: Case, files: SailorFiles, row: Row) -> Inputs:
    """Model, cluster and job of which the row is a plan."""
    replicas: Counter[tuple[SailorRoom, int]] = Counter()
    rooms = {(room.gpu, room.zone): room for room in case.rooms}
    for stage in row.plan.stages:
        for each in stage:
            replicas[rooms[each.gpu, each.zone], each.tp] += each.count
    islands = [
        (room, replace(
            room_island(case, room, files), name=_name(room.gpu, room.zone, tp),
            nodes=number, devices_per_node=tp,
        ))
        for (room, tp), number in sorted(
            replicas.items(), key=lambda each: (case.rooms.index(each[0][0]), each[0][1])
        )
    ]  # fmt: skip
    inputs = case_inputs(case, files)
    batch = row.num_microbatches * row.plan.microbatch_size * row.plan.dp(0)
    return replace(
        inputs,
        cluster=rooms_cluster(case.name, islands, files),
        job=replace(inputs.job, global_batch_size=batch, target="any"),
    )


def row_chosen(row: Row) -> ChosenPlan:
    """The row on the islands of `row_inputs`."""
    plan = row.plan
    last = len(plan.stages) - 1
    stages = tuple(
        ChosenStage(
            parts=_parts(replicas, plan.microbatch_size),
            layers=(layers - (s == 0) - (s == last),),
            warmup_depth=min(len(plan.stages) - s, row.num_microbatches),
        )
        for s, (layers, replicas) in enumerate(zip(plan.layers, plan.stages, strict=True))
    )
    pipeline = ChosenPipeline(
        stages=stages,
        num_microbatches=row.num_microbatches,
        schedule=Schedule(name="1f1b"),
    )
    return ChosenPlan(pipelines=(pipeline,))


def _parts(replicas: tuple[SailorReplicas, ...], microbatch_size: int) -> tuple[Part, ...]:
    return tuple(
        Part(
            island=_name(each.gpu, each.zone, each.tp),
            shape=Shape(tp=each.tp, dp=each.count, microbatch_size=microbatch_size),
        )
        for each in replicas
    )


def _name(gpu: str, zone: str, tp: int) -> str:
    return f"{gpu}-{zone}-tp{tp}"
