"""Plans of every form that an estimate prices, on the clusters of `cost_fakes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from cost_fakes import island, job, link, model

from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.job.spec import Job
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    LayerRange,
    OverlapSettings,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Schedule,
    Sharding,
    Stage,
    compress,
)


def wide_cluster(nodes: int = 8, **changes: object) -> Cluster:
    """Islands a and b of nodes of four devices."""
    one, two = island("a", nodes=nodes), island("b", "slow", nodes=nodes)
    return Cluster(
        name="wide",
        islands=tuple(replace(each, **changes) for each in (one, two)),  # type: ignore[arg-type]
        links=(IslandLink(between=("a", "b"), link=link(1e9, 5e-3, staged=True)),),
    )


def unlike_kinds(count: int = 8) -> Cluster:
    """Islands of two nodes, equally fast and each of a kind of its own, so that they err apart."""
    names = [f"i{at}" for at in range(count)]
    return Cluster(
        name="unlike",
        islands=tuple(island(name, f"kind-{name}", nodes=2) for name in names),
        links=tuple(IslandLink(between=pair, link=link(1e10)) for pair in combinations(names, 2)),
    )


def expert_model(num_experts: int = 8, **changes: object) -> ModelSpec:
    """Every layer has experts instead of its MLP."""
    shape = model(**changes)
    layer = replace(
        shape.layer_runs[0].layer,
        mlp=Experts(num_experts=num_experts, experts_per_token=2, expert_ffn_hidden_size=256),
    )
    return replace(shape, layer_runs=(LayerRun(count=shape.num_layers, layer=layer),))


def stages_of(
    cuts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    total: int,
    *,
    first_device: int = 0,
    num_microbatches: int,
    schedule: str = "1f1b",
    recompute: Recompute | None = None,
    warmup: Sequence[int] | None = None,
    **replica: object,
) -> list[Stage]:
    """Stages on neighbouring devices; `cuts[k]` are the starts of chunk k of every stage."""
    starts = [start for row in cuts for start in row] + [total]
    count, virtual = len(sizes), len(cuts)
    found = []
    at = first_device
    for s, size in enumerate(sizes):
        chunks = tuple(
            LayerRange(start=starts[s + k * count], stop=starts[s + k * count + 1])
            for k in range(virtual)
        )
        depth = own_depth(schedule, s, count, num_microbatches, virtual)
        found.append(
            Stage(
                chunks=chunks,
                replicas=(
                    Replica(
                        devices=compress(range(at, at + size)),
                        **({"tp": 1, "microbatch_size": 1} | replica),  # type: ignore[arg-type]
                    ),
                ),
                recompute=recompute or Recompute(),
                warmup_depth=depth if warmup is None else warmup[s],
            )
        )
        at += size
    return found


def plan_with(
    shape: ModelSpec,
    cluster: Cluster,
    job: Job,
    pipelines: Sequence[tuple[Sequence[Stage], int]],
    *,
    schedule: str = "1f1b",
    sharding: Sharding = Sharding.NONE,
    shards: int = 1,
    offload: float = 0.0,
    overlap: OverlapSettings | None = None,
) -> Plan:
    """The plan of these (stages, microbatches)."""
    built: list[Pipeline] = [
        assemble_pipeline(
            cluster,
            job,
            stages,
            num_microbatches=count,
            schedule=Schedule(name=schedule, virtual_stages=len(stages[0].chunks)),
        )
        for stages, count in pipelines
    ]
    return assemble_plan(
        shape,
        cluster,
        job,
        built,
        sharding=sharding,
        optimizer_shards=shards,
        optimizer_offload=offload,
        overlap=overlap,
    )


SHAPE, CLUSTER = model(), wide_cluster()
FREE = job(target="any", gradient_clipping=False)


def plan_of(
    sizes: Sequence[int] = (4, 4),
    cuts: Sequence[Sequence[int]] | None = None,
    *,
    microbatches: int = 4,
    shape: ModelSpec = SHAPE,
    cluster: Cluster = CLUSTER,
    asked: Job = FREE,
    pipelines: int = 1,
    schedule: str = "1f1b",
    sharding: Sharding = Sharding.NONE,
    shards: int = 1,
    offload: float = 0.0,
    overlap: OverlapSettings | None = None,
    **stages: object,
) -> Plan:
    """Equal pipelines side by side, cut evenly unless `cuts` says where (`stages_of`)."""
    total = len(shape.layers)
    even = [[total * s // len(sizes) for s in range(len(sizes))]]
    built = [
        stages_of(
            cuts or even, sizes, total, first_device=p * sum(sizes),
            num_microbatches=microbatches, schedule=schedule, **stages,  # type: ignore[arg-type]
        )
        for p in range(pipelines)
    ]  # fmt: skip
    return plan_with(
        shape, cluster, asked, [(each, microbatches) for each in built], schedule=schedule,
        sharding=sharding, shards=shards, offload=offload, overlap=overlap,
    )  # fmt: skip


def seconds_of(found: Estimate, component: Component) -> float:
    """A component on the critical path."""
    return sum(each.seconds for each in found.components if each.component is component)


def hidden_of(found: Estimate, component: Component) -> float:
    """What of it runs beside other components."""
    return sum(each.hidden_seconds for each in found.components if each.component is component)


def total_of(found: Estimate) -> float:
    """All components of the critical path."""
    return sum(each.seconds for each in found.components)
