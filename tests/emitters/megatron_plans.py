"""Random legal plans for target megatron, and ways to break them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from megatron_models import device, llama, random_model

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.estimate_values import Estimate, Interval
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import (
    Experts,
)
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Schedule,
    Sharding,
    compress,
)
from hetplan.search.result import Inputs, SearchResult

SEQUENCE = 256
_KINDS = ("nvidia-h100-80gb-sxm", "nvidia-a100-80gb-sxm", "nvidia-b200-180gb-sxm")
_FAST = Link(
    bandwidth_bytes_per_second=3e11, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
_NEAR = replace(_FAST, bandwidth_bytes_per_second=2.5e10, latency_seconds=6e-6)
_FAR = replace(
    _FAST,
    bandwidth_bytes_per_second=1e9,
    latency_seconds=1.5e-2,
    transport=Transport.HOST_STAGED,
)


def random_cluster(rng: random.Random) -> Cluster:
    """One to three islands of 2 to 8 nodes, in one region or in several."""
    islands = []
    for at in range(rng.randint(1, 3)):
        nodes = rng.choice((2, 3, 4, 6, 8))
        islands.append(
            Island(
                name=f"i{at}",
                region=rng.choice(("north", "south")),
                device=device(rng.choice(_KINDS)),
                nodes=nodes,
                devices_per_node=rng.choice((2, 4, 8)),
                intra_node=_FAST,
                inter_node=_NEAR,
                memory_bytes=8e10,
                nodes_out=(0,) if rng.random() < 0.2 else (),
                node_names=(f"host{at}-[00-{nodes - 1:02d}]",),
            )
        )
    domain = LaunchDomain(
        name="all",
        islands=tuple(island.name for island in islands),
        interface="eth0",
        fabric_devices=("mlx5_0",),
    )
    return Cluster(
        name="random",
        islands=tuple(islands),
        within_region=_NEAR,
        across_regions=_FAR,
        launch_domains=(domain,) if rng.random() < 0.5 else (),
    )


def result_for(plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> SearchResult:
    """The plan with an estimate of one second a step."""
    return SearchResult(
        schema="hetplan.plan/5",
        hetplan_version="test",
        seed=0,
        inputs=Inputs(model=model, cluster=cluster, job=job, sha256=()),
        plan=plan,
        estimate=Estimate(
            step_seconds=1.0,
            interval=Interval(p10_seconds=0.9, mean_seconds=1.0, p90_seconds=1.1),
            pipeline_seconds=0.9,
            num_microbatches=plan.pipelines[0].num_microbatches,
            tokens_per_second=1.0,
            stages=(),
            peak_memory_bytes=1.0,
            sources=("datasheet",),
            warnings=(),
        ),
        certificate=None,
    )


def job_of(batch: int) -> Job:
    """Adam in bfloat16 over sequences of 256."""
    return Job(
        name="test",
        global_batch_size=batch,
        sequence_length=SEQUENCE,
        precision=Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target="megatron",
    )


def random_results(seed: int, count: int) -> Iterator[SearchResult]:
    """This many legal plans; draws that are not legal are left out."""
    rng = random.Random(seed)
    found = 0
    while found < count:
        result = _drawn(rng)
        if result is not None:
            found += 1
            yield result


def _drawn(rng: random.Random) -> SearchResult | None:
    cluster = random_cluster(rng)
    pp, virtual = rng.randint(1, 6), rng.choice((1, 1, 2, 3))
    if pp == 1:
        virtual = 1
    model = random_model(rng, rng.randint(pp * virtual, pp * virtual + 12))
    layer = model.layer_runs[-1].layer
    experts = isinstance(layer.mlp, Experts)
    tp, cp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3, 4, 8))
    ep, etp = (rng.choice((1, 2, 4)), rng.choice((1, tp))) if experts else (1, 1)
    if layer.window is not None:
        cp = 1
    shape = Shape(
        tp=tp,
        cp=cp,
        dp=dp,
        microbatch_size=rng.choice((1, 1, 2)),
        ep=ep,
        etp=etp,
        sequence_parallel=tp > 1 and (experts or rng.random() < 0.6),
    )
    count = rng.choice((1, 2, 3, 4)) * (pp if virtual > 1 else rng.choice((1, pp)))
    job = job_of(count * shape.samples)
    schedule = Schedule(name="interleaved-1f1b" if virtual > 1 else "1f1b", virtual_stages=virtual)
    cut = _cut(rng, model.num_layers, pp * virtual)
    homes = _homes(rng, [island.name for island in cluster.islands], pp)
    recompute = rng.choice(tuple(RecomputeGranularity))
    chosen = ChosenPlan(
        pipelines=(
            ChosenPipeline(
                stages=tuple(
                    ChosenStage(
                        parts=_parts(rng, homes[s], shape, cluster),
                        layers=tuple(cut[v * pp + s] for v in range(virtual)),
                        recompute=recompute,
                        warmup_depth=own_depth(schedule.name, s, pp, count, virtual),
                    )
                    for s in range(pp)
                ),
                num_microbatches=count,
                schedule=schedule,
            ),
        ),
        sharding=rng.choice((Sharding.NONE, Sharding.OPTIMIZER)),
        early_sends=virtual > 1 and (pp == 2 or rng.random() < 0.5),
    )
    try:
        plan = _changed(rng, plan_of(model, cluster, job, chosen), model, cluster, job)
    except InputError:
        return None
    if check_plan(plan, model, cluster, job):
        return None
    return result_for(plan, model, cluster, job)


def _parts(rng: random.Random, home: str, shape: Shape, cluster: Cluster) -> tuple[Part, ...]:
    """All ranks on one island, or some of them on another of the same kind."""
    others = [
        island.name
        for island in cluster.islands
        if island.name != home and island.device == cluster.island(home).device
    ]
    if shape.dp == 1 or shape.ep > 1 or not others or rng.random() < 0.5:
        return (Part(island=home, shape=shape),)
    here = rng.randint(1, shape.dp - 1)
    return (
        Part(island=home, shape=replace(shape, dp=here)),
        Part(island=rng.choice(others), shape=replace(shape, dp=shape.dp - here)),
    )


def _cut(rng: random.Random, layers: int, chunks: int) -> list[int]:
    found = [1] * chunks
    for _ in range(layers - chunks):
        found[rng.randrange(chunks)] += 1
    return found


def _homes(rng: random.Random, names: list[str], stages: int) -> list[str]:
    """Island of every stage, those of an island next to each other."""
    order = rng.sample(names, len(names))
    bounds = sorted(rng.randint(0, stages) for _ in order[1:])
    found = []
    for name, start, stop in zip(order, [0, *bounds], [*bounds, stages], strict=True):
        found += [name] * (stop - start)
    return found


def _changed(rng: random.Random, plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> Plan:
    """Perhaps with what choices cannot say: other recomputation, overlap, smaller shards."""
    (pipeline,) = plan.pipelines
    stages = pipeline.stages
    draw = rng.random()
    if draw < 0.15:
        full = Recompute(granularity=RecomputeGranularity.FULL, layers=1)
        stages = tuple(replace(stage, recompute=full) for stage in stages)
    elif draw < 0.3:
        modules = (RecomputeModule.CORE_ATTENTION, RecomputeModule.NORMS)
        some = Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)
        stages = tuple(replace(stage, recompute=some) for stage in stages)
    shards = plan.optimizer_shards
    if shards % 2 == 0 and rng.random() < 0.3:
        shards //= 2
    sharded = plan.sharding is Sharding.OPTIMIZER and shards > 1
    if stages is pipeline.stages and shards == plan.optimizer_shards:
        return plan
    rebuilt = assemble_pipeline(
        cluster,
        job,
        list(stages),
        num_microbatches=pipeline.num_microbatches,
        schedule=pipeline.schedule,
    )
    return assemble_plan(
        model,
        cluster,
        job,
        [rebuilt],
        sharding=Sharding.OPTIMIZER if sharded else Sharding.NONE,
        optimizer_shards=shards if sharded else 1,
        overlap=OverlapSettings(
            reduction=rng.random() < 0.5 or plan.overlap.gathering, send=plan.overlap.send
        ),
    )


def outermost_results() -> Iterator[SearchResult]:
    """Plans on one node whose devices are dealt copy by copy: ranks count dp outside of pp."""
    island = Island(
        name="one",
        region="north",
        device=device("huawei-ascend-910b2-64gb"),
        nodes=1,
        devices_per_node=16,
        intra_node=_FAST,
        inter_node=_NEAR,
        memory_bytes=8e10,
        node_names=("one",),
    )
    cluster = Cluster(name="one", islands=(island,))
    for tp, pp, dp in ((1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 4, 2), (4, 2, 2), (1, 4, 4), (1, 8, 2)):
        for layers in (2 * pp, 2 * pp + 3):
            model, job = llama(layers), job_of(2 * pp * dp)
            cut = _cut(random.Random(layers), layers, pp)
            shape = Shape(tp=tp, dp=dp, microbatch_size=1)
            chosen = ChosenPlan(
                pipelines=(
                    ChosenPipeline(
                        stages=tuple(
                            ChosenStage(
                                parts=(Part(island="one", shape=shape),),
                                layers=(cut[s],),
                                warmup_depth=own_depth("1f1b", s, pp, 2 * pp),
                            )
                            for s in range(pp)
                        ),
                        num_microbatches=2 * pp,
                        schedule=Schedule(name="1f1b"),
                    ),
                )
            )
            (pipeline,) = plan_of(model, cluster, job, chosen).pipelines
            stages = [
                replace(
                    stage,
                    replicas=(
                        replace(
                            stage.replicas[0],
                            devices=compress(
                                [(d * pp + s) * tp + t for d in range(dp) for t in range(tp)]
                            ),
                        ),
                    ),
                )
                for s, stage in enumerate(pipeline.stages)
            ]
            rebuilt = assemble_pipeline(
                cluster, job, stages, num_microbatches=2 * pp, schedule=pipeline.schedule
            )
            plan = assemble_plan(model, cluster, job, [rebuilt])
            assert check_plan(plan, model, cluster, job) == ()
            yield result_for(plan, model, cluster, job)
