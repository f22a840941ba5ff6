"""From choices to a plan (`plan_of`) and back (`chosen_of`).

The stages on an island take its usable devices in order, pipeline by pipeline
(`hetplan.plans.assemble`): `tp * cp * dp` each, tensor-parallel ranks next to each other, then
context-parallel ones. `tp` divides the devices of a node; the product divides them or is a multiple
of them, so that no tensor-parallel group leaves its node. A stage on several islands has one
replica entry per island.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.layer_units import own_layer_fault, planning_faults
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import (
    assemble_pipeline,
    assemble_plan,
    device_ranges,
    positions,
    stages_with_room,
)
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import stage_copies
from hetplan.plans.plan import (
    DeviceRange,
    LayerRange,
    OverlapSettings,
    Pipeline,
    Plan,
    Replica,
    Schedule,
    Sharding,
    Stage,
)
from hetplan.plans.targets import target
from hetplan.plans.v_schedules import places


def chosen_of(plan: Plan, cluster: Cluster, job: Job, model: ModelSpec | None = None) -> ChosenPlan:
    """The choices that make this plan, but for the numbers of its devices.

    Without a model the only layer behind the transformer layers is the head. An InputError names
    what no choices can say: recomputation of some layers of a stage, another overlap than that of
    the job's trainer.
    """
    faults = tuple(_beyond_choices(plan, job))
    if faults:
        raise InputError(*faults)
    total = max(chunk.stop for stage in plan.stages for chunk in stage.chunks)
    end = total - 1 if model is None else 1 + model.num_layers
    every = plan.optimizer_shards in (1, _all_shards(plan.pipelines))
    return ChosenPlan(
        pipelines=tuple(
            ChosenPipeline(
                stages=tuple(_chosen_stage(cluster, stage, end) for stage in pipeline.stages),
                num_microbatches=pipeline.num_microbatches,
                schedule=pipeline.schedule,
            )
            for pipeline in plan.pipelines
        ),
        sharding=plan.sharding,
        early_sends=plan.overlap.send,
        optimizer_offload=plan.optimizer_offload,
        sharing_ranks=0 if every else plan.optimizer_shards,
    )


def _chosen_stage(cluster: Cluster, stage: Stage, end: int) -> ChosenStage:
    return ChosenStage(
        parts=tuple(
            Part(
                island=cluster.island_of_device(replica.devices[0].start).name,
                shape=Shape.of(replica),
            )
            for replica in stage.replicas
        ),
        # Position 0 is the embedding; what stands behind the transformer layers is not counted.
        layers=tuple(min(chunk.stop, end) - max(chunk.start, 1) for chunk in stage.chunks),
        recompute=stage.recompute,
        warmup_depth=stage.warmup_depth,
    )


def _beyond_choices(plan: Plan, job: Job) -> Iterator[Fault]:
    for field, _, stage in plan.named_stages():
        asks = stage.recompute
        if asks.layers is not None:
            message = f"{asks.layers}; searched plans recompute all layers of a stage or none"
            yield Fault(field=f"{field}.recompute.layers", message=message)
    shapes = [Shape.of(each) for stage in plan.stages for each in stage.replicas]
    if replace(plan.overlap, send=False) != overlap_of(job, shapes, plan.sharding):
        message = (
            "searched plans overlap sends, and what the job says (trainer.overlap_grad_reduce, "
            "overlap_param_gather, tp_comm_overlap); let the job say the same"
        )
        yield Fault(field="overlap", message=message)


def overlap_of(job: Job, shapes: Iterable[Shape], sharding: Sharding) -> OverlapSettings:
    """What the trainer of the job runs beside compute in a plan of stages of these shapes."""
    settings = trainer_settings(job)
    return OverlapSettings(
        reduction=settings.overlap_grad_reduce,
        gathering=settings.overlap_param_gather and sharding is not Sharding.NONE,
        tensor_parallel=settings.tp_comm_overlap and all(each.sequence_parallel for each in shapes),
    )


def plan_of(model: ModelSpec, cluster: Cluster, job: Job, chosen: ChosenPlan) -> Plan:
    """The plan of these choices; an InputError where it cannot be placed.

    Whether it is legal, and its target can express it, is another question:
    `hetplan.plans.check`.
    """
    for p, pipeline in enumerate(chosen.pipelines):
        _check_pipeline(model, f"pipelines[{p}]", pipeline)
    if not chosen.pipelines:
        raise InputError("a plan needs at least one pipeline")
    places = iter(_places(cluster, chosen))
    pipelines = []
    for pipeline in chosen.pipelines:
        chunks = chunks_of(model, pipeline.schedule, [stage.layers for stage in pipeline.stages])
        stages = [
            Stage(
                chunks=chunks[s],
                replicas=tuple(replica_of(part.shape, next(places)) for part in stage.parts),
                recompute=stage.recompute,
                warmup_depth=stage.warmup_depth,
            )
            for s, stage in enumerate(pipeline.stages)
        ]
        pipelines.append(
            assemble_pipeline(
                cluster,
                job,
                stages,
                num_microbatches=pipeline.num_microbatches,
                schedule=pipeline.schedule,
            )
        )
    every = _all_shards(pipelines) if chosen.sharding is not Sharding.NONE else 1
    shards = min(chosen.sharing_ranks or every, every)
    sharding = chosen.sharding if shards > 1 else Sharding.NONE
    shapes = (part.shape for each in chosen.pipelines for s in each.stages for part in s.parts)
    return assemble_plan(
        model,
        cluster,
        job,
        pipelines,
        sharding=sharding,
        optimizer_shards=shards,
        optimizer_offload=chosen.optimizer_offload,
        overlap=replace(overlap_of(job, shapes, sharding), send=chosen.early_sends),
    )


def _check_pipeline(model: ModelSpec, field: str, pipeline: ChosenPipeline) -> None:
    virtual = pipeline.schedule.virtual_stages
    if not pipeline.stages:
        raise InputError(Fault(field=field, message="a plan needs at least one stage"))
    if pipeline.num_microbatches < 1:
        message = f"{pipeline.num_microbatches}; at least 1"
        raise InputError(Fault(field=f"{field}.num_microbatches", message=message))
    for s, stage in enumerate(pipeline.stages):
        where = f"{field}.stages[{s}]"
        if len(stage.layers) != virtual:
            message = f"{len(stage.layers)} numbers of layers for {virtual} virtual stages"
            raise InputError(Fault(field=f"{where}.layers", message=message))
        if min(stage.layers) < 1:
            message = f"stage {s} has no transformer layer; give it one"
            raise InputError(Fault(field=f"{where}.layers", message=message))
        if not stage.parts:
            raise InputError(Fault(field=f"{where}.parts", message="needs at least one part"))
    held = sum(sum(stage.layers) for stage in pipeline.stages)
    if held != model.num_layers:
        message = (
            f"the stages hold {held} transformer layers, {model.name} has {model.num_layers}; the "
            "numbers must add up to that"
        )
        raise InputError(Fault(field=field, message=message))


def chunks_of(
    model: ModelSpec, schedule: Schedule, layers: Sequence[Sequence[int]]
) -> list[tuple[LayerRange, ...]]:
    """Layer ranges of every stage with so many transformer layers in its chunks.

    The embedding comes first; multi-token prediction and the head follow the last layer.
    """
    found: list[list[LayerRange]] = [[] for _ in layers]
    order = places(schedule.name, len(layers), schedule.virtual_stages)
    at = 0
    for s, chunk in order:
        stop = at + layers[s][chunk] + (at == 0)
        if (s, chunk) == order[-1]:
            stop = len(model.layers)
        found[s].append(LayerRange(start=at, stop=stop))
        at = stop
    return [tuple(ranges) for ranges in found]


def replica_of(shape: Shape, devices: tuple[DeviceRange, ...]) -> Replica:
    """A part of a stage on these devices; field by field, as a search places many plans."""
    return Replica(
        devices=devices,
        tp=shape.tp,
        cp=shape.cp,
        ep=shape.ep,
        etp=shape.etp,
        microbatch_size=shape.microbatch_size,
        sequence_parallel=shape.sequence_parallel,
    )


def _all_shards(pipelines: Sequence[Pipeline]) -> int:
    """So that every stage shards over all of its ranks (`Plan.optimizer_shards`)."""
    return math.lcm(*(stage_copies(stage) for each in pipelines for stage in each.stages))


def _places(cluster: Cluster, chosen: ChosenPlan) -> list[tuple[DeviceRange, ...]]:
    """Devices of every part of every stage, in their order."""
    parts = [part for each in chosen.pipelines for stage in each.stages for part in stage.parts]
    by_island: dict[str, list[int]] = {}
    for at, part in enumerate(parts):
        by_island.setdefault(part.island, []).append(at)
    found: list[tuple[DeviceRange, ...]] = [()] * len(parts)
    for name, mine in by_island.items():
        island = cluster.island(name)
        for k, at in enumerate(mine):
            _check_shape(island, parts[at].shape, k)
        sizes = [parts[at].shape.num_devices for at in mine]
        nodes = len(island.usable_nodes)
        filled = island.filled_node
        alike = len(island.part_counts) == 1 and all(
            filled % size == 0 or size % filled == 0 for size in sizes
        )
        unlike = () if alike else island.usable_parts
        starts = positions(sizes, filled, nodes, unlike)
        if starts is None:
            fits = next(
                k
                for k in range(len(mine))
                if positions(sizes[: k + 1], filled, nodes, unlike) is None
            )
            raise InputError(_no_room(island, parts[mine[fits]].shape, fits + 1))
        for at, start, size in zip(mine, starts, sizes, strict=True):
            found[at] = device_ranges(cluster, island, start, size)
    return found


def _check_shape(island: Island, shape: Shape, before: int) -> None:
    """A stage of this shape suits the island's nodes, with `before` others there."""
    if min(shape.tp, shape.cp, shape.dp, shape.microbatch_size, shape.ep, shape.etp) < 1:
        raise InputError(f"{shape}: every degree must be at least 1")
    if stages_with_room(island, shape.tp, shape.num_devices) == 0:
        raise InputError(_no_room(island, shape, before + 1))


def _no_room(island: Island, shape: Shape, stage: int) -> str:
    cp = f" x cp {shape.cp}" if shape.cp > 1 else ""
    counts = [f"{nodes} usable nodes of {part} devices" for part, nodes in island.part_counts]
    return (
        f"island {island.name} ({' and '.join(counts) or 'no usable nodes'}) has no room for stage "
        f"{stage} of tp {shape.tp}{cp} x dp {shape.dp} devices; tp must divide a node, and "
        f"tp{cp} x dp a node or be whole nodes"
    )


def check_model(model: ModelSpec, job: Job) -> None:
    """Raise an InputError where no plan of this model can be priced, or the target lacks it."""
    faults = planning_faults(model, job.sequence_length)
    trainer = target(job.target)
    if trainer.own_layers_only and not faults:
        own = own_layer_fault(model, trained=True)
        faults = (f"target {trainer.name} cannot train it: {own}",) if own else ()
    if faults:
        raise InputError(*(Fault(field="model", message=fault) for fault in faults))


def neighbour_link(
    cluster: Cluster, left: Sequence[int], right: Sequence[int]
) -> tuple[Link, bool]:
    """The link that carries activations between two stages, and whether it stays in one node.

    Each device sends to the device of the same position; where any pair lies in two nodes the
    slower link, the one between nodes, counts.
    """
    one, two = cluster.island_of_device(left[0]), cluster.island_of_device(right[0])
    if one.name != two.name:
        return cluster.link_between(one.name, two.name), False
    first = cluster.first_device(one.name)
    nodes = {(device - first) // one.devices_per_node for device in (*left, *right)}
    return (one.intra_node, True) if len(nodes) == 1 else (one.inter_node, False)
