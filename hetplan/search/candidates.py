"""Which degrees can be tried at all: everything that divides, before any time is known.

A candidate is one (tp, dp, microbatch size, recompute) for all stages of one pipeline. tp divides
the attention heads, the MLP and the key-value heads (or is a multiple of those); tp * dp divides
the devices of a node or is whole nodes; dp * microbatch size divides the global batch. Whether the
layers fit in memory is decided later, with the costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster, Island
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees, stages_that_fit
from hetplan.plans.targets import target


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Degrees that divide, and the islands that have room for at least one such stage."""

    degrees: Degrees
    num_microbatches: int
    islands: tuple[Island, ...]
    max_stages: tuple[int, ...]
    """How many stages each of `islands` has room for, at most one per transformer layer."""


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def tensor_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Tensor-parallel degrees that the model's shape and at least one island's nodes allow."""
    nodes = {d for island in cluster.islands for d in divisors(island.devices_per_node)}
    return tuple(tp for tp in sorted(nodes) if not model.slicing_faults(tp))


def enumerate_candidates(model: ModelSpec, cluster: Cluster, job: Job) -> tuple[Candidate, ...]:
    """Every candidate that divides and has room, in increasing order of its degrees.

    `cluster` is what `allowed_cluster` left of the user's cluster.
    """
    return tuple(sorted(_candidates(model, cluster, job), key=lambda found: found.degrees))


def _candidates(model: ModelSpec, cluster: Cluster, job: Job) -> Iterator[Candidate]:
    pin = job.pin
    recompute_choices = [False, True] if target(job.target).full_recompute else [False]
    for tp in tensor_degrees(model, cluster):
        if pin.tp not in (None, tp):
            continue
        for dp in divisors(job.global_batch_size):
            if pin.dp not in (None, dp) or tp * dp > cluster.num_devices:
                continue
            room = [(i, stages_that_fit(i, _bare(tp, dp))) for i in cluster.islands]
            islands = tuple(island for island, stages in room if stages)
            most = tuple(min(stages, model.num_layers) for _, stages in room if stages)
            if not islands or (pin.pp is not None and pin.pp > sum(most)):
                continue
            for size in divisors(job.global_batch_size // dp):
                microbatches = job.global_batch_size // (dp * size)
                if pin.microbatch_size not in (None, size) or (
                    pin.pp is not None and pin.pp > stage_limit(job, model, microbatches)
                ):
                    continue
                for recompute in recompute_choices:
                    if pin.recompute in (None, recompute):
                        yield Candidate(
                            degrees=Degrees(
                                tp=tp, dp=dp, microbatch_size=size, full_recompute=recompute
                            ),
                            num_microbatches=microbatches,
                            islands=islands,
                            max_stages=most,
                        )


def stage_limit(job: Job, model: ModelSpec, num_microbatches: int) -> int:
    """Most stages that the job's target can run with this many microbatches."""
    if target(job.target).fewer_microbatches_than_stages:
        return model.num_layers
    return min(model.num_layers, num_microbatches)


def _bare(tp: int, dp: int) -> Degrees:
    return Degrees(tp=tp, dp=dp, microbatch_size=1)


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
