"""Devices for stages (`positions`), and from placed stages to a plan (`assemble_plan`).

Placement: a stage has tp * cp * dp devices, which divide the devices of a node or are whole nodes.
It lies inside one node or fills whole ones, so that every tensor-parallel group lies in a node.
Where a search may use parts of nodes (`Island.node_parts`), equal parts of all count as nodes too.
Positions count the devices of usable nodes in order. Stages are placed in the order in which they
are given, each at the next multiple of its own size; where that leaves too little room, the largest
first, and then with no gaps. Sizes of which each divides the next larger one fill every node so.

Assembly adds what follows from the stages: boundaries, reduction groups (one for each run of layers
that the same stages hold, a second one where experts are dealt out differently from the other
weights), the devices that share a tied matrix, the padded vocabulary and the unused devices.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from hetplan.cluster.spec import Cluster, Island
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.formats import reduction_precision
from hetplan.plans.pieces import Holders, Places, device_array, holders, stage_array
from hetplan.plans.plan import (
    Boundary,
    DeviceRange,
    OverlapSettings,
    Pipeline,
    Plan,
    ReductionGroup,
    Schedule,
    Sharding,
    Stage,
    compress,
)
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target


def stages_with_room(island: Island, tp: int, size: int) -> int:
    """How many stages of `size` devices fit on the island; 0 if tp or size do not suit it."""
    per_node, filled = island.devices_per_node, island.filled_node
    if per_node % tp:
        return 0
    if size % filled == 0 and filled % tp == 0:
        return dict(island.part_counts).get(filled, 0) // (size // filled)
    if per_node % size and filled % size:
        return 0
    return sum(part // size * nodes for part, nodes in island.part_counts)


def positions(
    sizes: Sequence[int], per_node: int, nodes: int, parts: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Where each of these stages begins among the usable devices; None where they have no room.

    Every size must divide `per_node` or be a multiple of it, but where nodes have `parts`: these
    have room for stages of any size, and those of `per_node` for a part of a larger one.
    """
    in_order = list(range(len(sizes)))
    largest_first = sorted(in_order, key=lambda at: -sizes[at])
    if parts:
        return _first_fit(sizes, largest_first, per_node, parts)
    return (
        _next_fit(sizes, in_order, per_node, nodes)
        or _next_fit(sizes, largest_first, per_node, nodes)
        or _first_fit(sizes, largest_first, per_node, (per_node,) * nodes)
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
    sizes: Sequence[int], order: Sequence[int], per_node: int, parts: Sequence[int]
) -> tuple[int, ...] | None:
    """Largest first, each into the first node that has room; whole nodes stand before them."""
    found = [0] * len(sizes)
    starts = [*accumulate(parts, initial=0)]
    taken: list[int] = []
    for at in order:
        size, node = sizes[at], len(taken)
        if size >= per_node:
            wanted = [per_node] * (size // per_node)
            if [*parts[node : node + len(wanted)]] != wanted:
                return None
            found[at] = starts[node]
            taken += wanted
            continue
        node = next((k for k, used in enumerate(taken) if used + size <= parts[k]), node)
        if node == len(taken):
            if node == len(parts) or size > parts[node]:
                return None
            taken.append(0)
        found[at] = starts[node] + taken[node]
        taken[node] += size
    return tuple(found)


def device_ranges(
    cluster: Cluster, island: Island, position: int, size: int
) -> tuple[DeviceRange, ...]:
    """Device numbers of `size` usable devices of the island from this position on."""
    first = cluster.first_device(island.name)
    if not (island.nodes_out or island.node_parts):
        return (DeviceRange(start=first + position, count=size),)
    starts = island.part_starts
    from_node, to_node = bisect_right(starts, position) - 1, bisect_left(starts, position + size)
    devices = [
        first + node * island.devices_per_node + local
        for node, part in zip(
            island.usable_nodes[from_node:to_node],
            island.usable_parts[from_node:to_node],
            strict=True,
        )
        for local in range(part)
    ]
    skipped = position - starts[from_node]
    return compress(devices[skipped : skipped + size])


def assemble_pipeline(
    cluster: Cluster,
    job: Job,
    stages: Sequence[Stage],
    *,
    num_microbatches: int,
    schedule: Schedule,
) -> Pipeline:
    """These stages with the boundaries between them, in the job's number format."""
    places = Places(cluster=cluster)
    return Pipeline(
        stages=tuple(stages),
        boundaries=tuple(
            Boundary(
                index=index,
                transport=places.group_transport(
                    device_array([*left.devices, *right.devices])
                ).value,
                precision=job.precision.value,
            )
            for index, (left, right) in enumerate(pairwise(stages))
        ),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )


def assemble_plan(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    pipelines: Sequence[Pipeline],
    *,
    sharding: Sharding = Sharding.NONE,
    optimizer_shards: int = 1,
    optimizer_offload: float = 0.0,
    overlap: OverlapSettings | None = None,
) -> Plan:
    """The plan of these pipelines, of which every one must hold every layer once.

    Whether it is legal is another question: `hetplan.plans.check`.
    """
    tps = [r.tp for each in pipelines for stage in each.stages for r in stage.replicas]
    tied = _tied(model, pipelines)
    summed = reduction_precision(job)
    return Plan(
        pipelines=tuple(pipelines),
        reduction_groups=reduction_groups(model, cluster, pipelines, summed),
        precision=job.precision.value,
        optimizer=job.optimizer.value,
        optimizer_shards=optimizer_shards,
        padded_vocab_size=target(job.target).padded_vocab_size(model.vocab_size, math.lcm(*tps)),
        tied_embedding_devices=tied,
        tied_embedding_precision=summed.value if tied else None,
        target=job.target,
        unused_devices=_unused(cluster, pipelines),
        sharding=sharding,
        optimizer_offload=optimizer_offload,
        overlap=OverlapSettings() if overlap is None else overlap,
    )


def reduction_groups(
    model: ModelSpec, cluster: Cluster, pipelines: Sequence[Pipeline], summed: Precision
) -> tuple[ReductionGroup, ...]:
    """Who reduces what, in the format `summed`; empty where every weight has one copy."""
    places = Places(cluster=cluster)
    found = []
    for piece in holders([each.stages for each in pipelines], len(model.layers)):
        if piece.copies > 1:
            found.append(_group(places, piece, summed, expert=False))
        experts = experts_of(model, piece.layers.start, piece.layers.stop)
        if experts and piece.experts_apart and piece.expert_copies > 1:
            found.append(_group(places, piece, summed, expert=True))
    return tuple(found)


def _group(places: Places, piece: Holders, summed: Precision, *, expert: bool) -> ReductionGroup:
    members = tuple(part for stage in piece.stages for part in stage.devices)
    return ReductionGroup(
        layers=piece.layers,
        members=members,
        degree=piece.expert_copies if expert else piece.copies,
        transport=places.group_transport(device_array(members)).value,
        precision=summed.value,
        expert=expert,
    )


def _tied(model: ModelSpec, pipelines: Sequence[Pipeline]) -> tuple[DeviceRange, ...]:
    if not model.tied_embeddings or all(len(each.ends) == 1 for each in pipelines):
        return ()
    return tuple(
        part for each in pipelines for stage in dict.fromkeys(each.ends) for part in stage.devices
    )


def _unused(cluster: Cluster, pipelines: Sequence[Pipeline]) -> tuple[DeviceRange, ...]:
    used = np.zeros(cluster.num_devices, dtype=np.bool_)
    for each in pipelines:
        for stage in each.stages:
            used[stage_array(stage)] = True
    return compress(np.flatnonzero(~used).tolist())
