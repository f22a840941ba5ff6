"""What a job's pins and forbids leave of its cluster, and how long a pipeline may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetplan.cluster.spec import Cluster, Island
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_target import ends_agree
from hetplan.plans.targets import Target, target
from hetplan.search.families.family import Mesh


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def kept(pin: int | None, choices: Sequence[int]) -> tuple[int, ...]:
    """The choices that a pin leaves."""
    return tuple(choice for choice in choices if pin in (None, choice))


def tensor_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Tensor-parallel degrees that the model's shape and at least one island's nodes allow."""
    sizes = {island.devices_per_node for island in cluster.islands if island.num_usable_devices}
    nodes = {d for size in sizes for d in divisors(size)}
    return tuple(tp for tp in sorted(nodes) if not model.slicing_faults(tp))


def is_one_stage(job: Job, model: ModelSpec) -> bool:
    """Whether the job's target trains the model in one stage only: its ends share a matrix."""
    return model.tied_embeddings and not target(job.target).tied_stages


def stage_limit(job: Job, model: ModelSpec, num_microbatches: int) -> int:
    """Most stages of the model that the job's target can run with this many microbatches."""
    if is_one_stage(job, model):
        return 1
    if target(job.target).fewer_microbatches_than_stages:
        return model.num_layers
    return min(model.num_layers, num_microbatches)


def allowed_cluster(cluster: Cluster, job: Job) -> Cluster:
    """The cluster with every node out that the job forbids; device numbers stay."""
    return replace(
        cluster,
        islands=tuple(
            replace(island, nodes_out=_nodes_out(island, job)) for island in cluster.islands
        ),
    )


def _nodes_out(island: Island, job: Job) -> tuple[int, ...]:
    if island.name in job.forbid.islands:
        return tuple(range(island.nodes))
    forbidden = {
        int(node.rpartition("/")[2])
        for node in job.forbid.nodes
        if node.rpartition("/")[0] == island.name
    }
    return tuple(sorted({*island.nodes_out, *forbidden}))


def matches(island: Island, place: str | None) -> bool:
    """Whether `place`, an island's name, a device kind or None for anywhere, means this island."""
    return place is None or place in (island.name, island.device.kind)


def mesh_matches(mesh: Mesh, cluster: Cluster, place: str | None) -> bool:
    """The same of every island of a mesh."""
    return all(matches(cluster.islands[island], place) for island in mesh.islands)


def ends_allowed(trainer: Target, model: ModelSpec, first: Mesh, last: Mesh) -> bool:
    """Whether the target runs pipelines that begin on one of these meshes and end on the other."""
    if not trainer.equal_ends or not (model.tied_embeddings or model.num_mtp_layers):
        return True
    return ends_agree(
        (first.shapes[0].tp, last.shapes[0].tp),
        (sum(each.dp for each in first.shapes), sum(each.dp for each in last.shapes)),
    )
