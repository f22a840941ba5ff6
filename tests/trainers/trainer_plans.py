"""Plans for every trainer on hosts with names: made by hand, and random legal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random

from one_pipeline import StageChoice, build_plan
from trainer_models import MODEL, TIED, device, llama, random_model

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Schedule,
    Sharding,
    compress,
)
from hetplan.predict.fit import FittedPredictor
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout, rank_layout
from hetplan.search.result import Inputs, SearchResult
from hetplan.trainers import Trainer
from hetplan.trainers.megatron.write import TRAINER as MEGATRON

A100, H100, MI300 = "nvidia-a100-80gb-sxm", "nvidia-h100-80gb-sxm", "amd-mi300x"
ASCEND = "huawei-ascend-910b2-64gb"
FULL, NONE = FULL_RECOMPUTE, NO_RECOMPUTE
CORE = Recompute(
    granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
)
NO_OPTIONS = EmissionOptions()
JOB = Job(
    name="test",
    global_batch_size=64,
    sequence_length=2048,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="megatron",
)
FAST = Link(
    bandwidth_bytes_per_second=300e9, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
NEAR = replace(FAST, bandwidth_bytes_per_second=25e9, latency_seconds=5e-6)
FAR = replace(FAST, bandwidth_bytes_per_second=1e9, latency_seconds=20e-3)
STAGED = replace(FAR, latency_seconds=0.05, transport=Transport.HOST_STAGED)


def island(
    name: str,
    region: str = "here",
    *,
    nodes: int = 2,
    devices_per_node: int = 8,
    kind: str = A100,
) -> Island:
    return Island(
        name=name,
        region=region,
        device=device(kind),
        nodes=nodes,
        devices_per_node=devices_per_node,
        intra_node=FAST,
        inter_node=NEAR,
        memory_bytes=80e9,
        node_names=(f"{name}[0000-{nodes - 1:04d}]",),
    )


def cluster(*islands: Island, across: Link = FAR, fabric: tuple[str, ...] = ()) -> Cluster:
    """`fabric`: RDMA devices of all hosts."""
    domain = LaunchDomain(
        name="d",
        islands=tuple(each.name for each in islands),
        interface="eth0",
        fabric_devices=fabric,
    )
    return Cluster(
        name="test",
        islands=islands,
        within_region=NEAR,
        across_regions=across,
        launch_domains=(domain,) if fabric else (),
    )


def job_of(batch: int) -> Job:
    """Sequences of 256."""
    return replace(JOB, global_batch_size=batch, sequence_length=256)


# ---- plans


def stage(where: str, *layers: int, recompute: Recompute = NONE, **shape: int | bool):
    """A stage on one island with so many layers in each virtual stage."""
    part = Part(island=where, shape=Shape(**shape))  # type: ignore[arg-type]
    return ChosenStage(parts=(part,), layers=layers, recompute=recompute, warmup_depth=0)


def one_pipeline(
    *stages: ChosenStage,
    microbatches: int,
    sharding: Sharding = Sharding.NONE,
    early_sends: bool = False,
    schedule: str | None = None,
) -> ChosenPlan:
    """These stages, under 1F1B unless said, interleaved where they have several virtual stages."""
    virtual = len(stages[0].layers)
    name = schedule or ("interleaved-1f1b" if virtual > 1 else "1f1b")
    pipeline = ChosenPipeline(
        stages=tuple(
            replace(each, warmup_depth=own_depth(name, at, len(stages), microbatches, virtual))
            for at, each in enumerate(stages)
        ),
        num_microbatches=microbatches,
        schedule=Schedule(name=name, virtual_stages=virtual),
    )
    return ChosenPlan(pipelines=(pipeline,), sharding=sharding, early_sends=early_sends)


def chosen(
    *stages: tuple[str, int],
    tp: int = 1,
    dp: int = 1,
    microbatches: int | None = None,
    sharding: Sharding = Sharding.NONE,
    batch: int = JOB.global_batch_size,
) -> ChosenPlan:
    """(island, transformer layers) stages with the same degrees."""
    count = microbatches or batch // dp
    size = batch // dp // count
    rows = (stage(name, layers, tp=tp, dp=dp, microbatch_size=size) for name, layers in stages)
    return one_pipeline(*rows, microbatches=count, sharding=sharding)


@cache
def any_estimate() -> Estimate:
    """What timeouts are made from; nothing else of an emission reads it."""
    return replace(two_regions().estimate, step_seconds=1.0, p5_seconds=None, p95_seconds=None)


def result_of(
    machines: Cluster,
    plan: Plan,
    model: ModelSpec = MODEL,
    job: Job = JOB,
    *,
    priced: Estimate | None = None,
) -> SearchResult:
    """The plan as a plan file holds it, priced from datasheets unless `priced` is given."""
    if priced is None:
        priced = estimate(plan, model, machines, job, FittedPredictor.datasheet_only())
    return SearchResult(
        schema="hetplan.plan/5",
        hetplan_version="test",
        seed=0,
        inputs=Inputs(model=model, cluster=machines, job=job, sha256=()),
        plan=plan,
        estimate=priced,
        certificate=None,
    )


def two_regions(model: ModelSpec = MODEL) -> SearchResult:
    """Four stages of tp 8, dp 1: two in the north, two in the south."""
    machines = cluster(island("north", "n"), island("south", "s"))
    stages = chosen(("north", 4), ("north", 3), ("south", 3), ("south", 2), tp=8)
    return result_of(machines, plan_of(model, machines, JOB, stages), model)


def made(
    machines: Cluster,
    stages: ChosenPlan,
    model: ModelSpec = MODEL,
    job: Job = JOB,
    *,
    legal: bool = True,
    **changes: object,
) -> SearchResult:
    """The plan of these stages, not priced; `changes` are made to the plan before it is checked."""
    plan = replace(plan_of(model, machines, job, stages), **changes)  # type: ignore[arg-type]
    faults = check_plan(plan, model, machines, job)
    assert not (legal and faults), faults
    return result_of(machines, plan, model, job, priced=any_estimate())


def stage_per_island(
    machines: Cluster,
    *layers: int,
    model: ModelSpec | None = None,
    job: Job | None = None,
    tp: int = 8,
    dp: int = 1,
) -> SearchResult:
    """With the sharding and overlap that plans have unless pinned."""
    model, job = model or llama(sum(layers)), job or job_of(8)
    choices = [
        StageChoice(island=each.name, transformer_layers=count)
        for each, count in zip(machines.islands, layers, strict=True)
    ]
    plan = build_plan(model, machines, job, choices, Shape(tp=tp, dp=dp, microbatch_size=1))
    return result_of(machines, plan, model, job, priced=any_estimate())


def here(**job: object) -> SearchResult:
    """Two stages on two islands of one region."""
    return with_job(stage_per_island(cluster(island("a"), island("b")), 3, 5), **job)


def with_job(result: SearchResult, **changes: object) -> SearchResult:
    job = replace(result.inputs.job, **changes)  # type: ignore[arg-type]
    return replace(result, inputs=replace(result.inputs, job=job))


def with_plan(result: SearchResult, **changes: object) -> SearchResult:
    return replace(result, plan=replace(result.plan, **changes))  # type: ignore[arg-type]


def with_stages(result: SearchResult, **changes: object) -> SearchResult:
    """The same changes to every stage."""
    (pipeline,) = result.plan.pipelines
    stages = tuple(replace(each, **changes) for each in pipeline.stages)  # type: ignore[arg-type]
    return with_plan(result, pipelines=(replace(pipeline, stages=stages),))


# ---- what is emitted of them


def ranks_of(result: SearchResult, trainer: Trainer = MEGATRON) -> RankLayout:
    machines = result.inputs.cluster
    return rank_layout(result.plan, machines, data_outermost=trainer.data_outermost)


def messages(
    result: SearchResult, options: EmissionOptions = NO_OPTIONS, trainer: Trainer = MEGATRON
) -> list[str]:
    """Why the trainer cannot be told the plan."""
    faults = trainer.faults(result, ranks_of(result, trainer), options)
    return [f"{fault.field}: {fault.message}" for fault in faults]


def launched(
    result: SearchResult, options: EmissionOptions = NO_OPTIONS, trainer: Trainer = MEGATRON
) -> TrainerLaunch:
    """The launch of a plan that the trainer can be told."""
    assert messages(result, options, trainer) == []
    return trainer.launch(result, ranks_of(result, trainer), options)


def flags(
    result: SearchResult, options: EmissionOptions = NO_OPTIONS
) -> dict[str, tuple[str, ...]]:
    """Values by flag of Megatron-LM; no flag is there twice."""
    launch = launched(result, options)
    names = [entry[0] for entry in launch.arguments]
    assert len(set(names)) == len(names)
    return {entry[0]: entry[1:] for entry in launch.arguments}


def no_faults(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[Fault, ...]:
    return ()


def plain_launch(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> TrainerLaunch:
    return TrainerLaunch(
        target="plain",
        title="a plain trainer",
        program=("train.py",),
        arguments=(("--stages", str(len(result.plan.pipelines[0].stages))),),
        environment=(("A", "{folder}/a b"),),
        agent_environment=((),) * len(ranks.agents),
        remarks=("it is plain",),
    )


PLAIN = Trainer(name="plain", plan_target="megatron", faults=no_faults, launch=plain_launch)


# ---- random plans


def random_results(
    draw: Callable[[Random], SearchResult | None], seed: int, count: int
) -> Iterator[SearchResult]:
    """This many legal plans; draws that are none are left out."""
    rng = Random(seed)
    while count:
        result = draw(rng)
        if result is not None:
            count -= 1
            yield result


def _drawn(
    machines: Cluster, stages: ChosenPlan, model: ModelSpec, job: Job
) -> SearchResult | None:
    """The plan where it is legal and has room."""
    try:
        plan = plan_of(model, machines, job, stages)
    except InputError:
        return None
    if check_plan(plan, model, machines, job):
        return None
    return result_of(machines, plan, model, job, priced=any_estimate())


def _cut(rng: Random, layers: int, chunks: int) -> list[int]:
    """Layers of the chunks, at least one each."""
    cuts = sorted(rng.sample(range(1, layers), chunks - 1))
    return [stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True)]


def flagscale(rng: Random) -> SearchResult | None:
    """One to four runs of alike stages, over kinds that may come again."""
    kinds = [rng.choice((A100, H100, MI300)) for _ in range(rng.randint(1, 4))]
    machines = cluster(*(island("abcd"[at], nodes=4, kind=kind) for at, kind in enumerate(kinds)))
    model = rng.choice((MODEL, MODEL, TIED))
    recomputes = rng.choice((False, False, True))
    rows: list[ChosenStage] = []
    for at in range(len(kinds)):
        # Sometimes an island holds two runs, which then may share a host.
        for _ in range(rng.choice((1, 1, 2))):
            tp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4))
            recompute = rng.choice((FULL, NONE)) if recomputes else NONE
            row = flagscale_stage("abcd"[at], 1, tp=tp, dp=dp, recompute=recompute)
            rows += [row] * rng.randint(1, 3)
    if len(rows) > model.num_layers:
        return None
    layers = _cut(rng, model.num_layers, len(rows))
    sharding = rng.choice((Sharding.NONE, Sharding.OPTIMIZER))
    stages = one_pipeline(
        *(replace(row, layers=(count,)) for row, count in zip(rows, layers, strict=True)),
        microbatches=16,
        sharding=sharding,
    )
    return _drawn(machines, stages, model, replace(JOB, target="flagscale"))


def flagscale_stage(
    where: str,
    layers: int,
    *,
    tp: int,
    dp: int,
    recompute: Recompute = NONE,
    sequence_parallel: bool | None = None,
) -> ChosenStage:
    """A microbatch has four samples over all data-parallel ranks."""
    parallel = tp > 1 if sequence_parallel is None else sequence_parallel
    shape = {"tp": tp, "dp": dp, "microbatch_size": 4 // dp, "sequence_parallel": parallel}
    return stage(where, layers, recompute=recompute, **shape)


def torchtitan(rng: Random) -> SearchResult | None:
    """One shape for all stages, some of several virtual stages."""
    stages = rng.choice((1, 2, 3, 4))
    virtual = rng.choice((1, 1, 2)) if stages > 1 else 1
    tp, dp, cp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
    size = rng.choice((1, 2))
    parallel = tp > 1 and rng.random() < 0.7
    counts = _cut(rng, 12, stages * virtual)
    recompute = rng.choice((FULL, NONE))
    rows = [
        stage(
            "ab"[s * 2 // stages],
            *counts[s::stages],
            recompute=recompute,
            tp=tp,
            dp=dp,
            cp=cp,
            microbatch_size=size,
            sequence_parallel=parallel,
        )
        for s in range(stages)
    ]
    machines = cluster(island("a", nodes=8), island("b", nodes=8))
    sharding = Sharding.OPTIMIZER if cp > 1 or rng.random() < 0.5 else Sharding.NONE
    if stages == 1 and dp * cp > 1 and rng.random() < 0.5:
        sharding = Sharding.PARAMETERS
    planned = one_pipeline(*rows, microbatches=64 // (dp * size), sharding=sharding)
    if sharding is Sharding.PARAMETERS and dp % 2 == 0 and rng.random() < 0.5:
        planned = replace(planned, sharing_ranks=cp * dp // 2)
    return _drawn(machines, planned, MODEL, replace(JOB, target="torchtitan"))


def megatron(rng: Random) -> SearchResult | None:
    """Any model, degrees, virtual stages, recomputation; stages over several islands."""
    machines = _random_cluster(rng)
    pp, virtual = rng.randint(1, 6), rng.choice((1, 1, 2, 3))
    if pp == 1:
        virtual = 1
    model = random_model(rng, rng.randint(pp * virtual, pp * virtual + 12))
    layer = model.layer_runs[-1].layer
    experts = isinstance(layer.mlp, Experts)
    tp, cp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3, 4, 8))
    ep, etp = (rng.choice((1, 2, 4)), rng.choice((1, tp))) if experts else (1, 1)
    shape = Shape(
        tp=tp,
        cp=1 if layer.window is not None else cp,
        dp=dp,
        microbatch_size=rng.choice((1, 1, 2)),
        ep=ep,
        etp=etp,
        sequence_parallel=tp > 1 and (experts or rng.random() < 0.6),
    )
    count = rng.choice((1, 2, 3, 4)) * (pp if virtual > 1 else rng.choice((1, pp)))
    cut = _cut(rng, model.num_layers, pp * virtual)
    # Stages of an island are next to each other.
    homes = sorted(rng.choices(range(len(machines.islands)), k=pp))
    order = rng.sample([each.name for each in machines.islands], len(machines.islands))
    recompute = rng.choice((NONE, CORE, FULL))
    stages = one_pipeline(
        *(
            ChosenStage(
                parts=_parts(rng, order[homes[s]], shape, machines),
                layers=tuple(cut[s::pp]),
                recompute=recompute,
                warmup_depth=0,
            )
            for s in range(pp)
        ),
        microbatches=count,
        sharding=rng.choice((Sharding.NONE, Sharding.OPTIMIZER)),
        early_sends=virtual > 1 and (pp == 2 or rng.random() < 0.5),
    )
    job = job_of(count * shape.samples)
    result = _drawn(machines, stages, model, job)
    if result is None:
        return None
    plan = _changed(rng, result.plan, model, machines, job)
    return None if check_plan(plan, model, machines, job) else replace(result, plan=plan)


def _random_cluster(rng: Random) -> Cluster:
    """One to three islands of 2 to 8 nodes, in one region or in several."""
    islands = []
    for at in range(rng.randint(1, 3)):
        made_island = island(
            f"i{at}",
            rng.choice(("north", "south")),
            nodes=rng.choice((2, 3, 4, 6, 8)),
            devices_per_node=rng.choice((2, 4, 8)),
            kind=rng.choice((H100, A100, "nvidia-b200-180gb-sxm")),
        )
        islands.append(replace(made_island, nodes_out=(0,) if rng.random() < 0.2 else ()))
    fabric = ("mlx5_0",) if rng.random() < 0.5 else ()
    return cluster(*islands, across=STAGED, fabric=fabric)


def _parts(rng: Random, home: str, shape: Shape, machines: Cluster) -> tuple[Part, ...]:
    """All ranks on one island, or some of them on another of the same kind."""
    others = [
        each.name
        for each in machines.islands
        if each.name != home and each.device == machines.island(home).device
    ]
    if shape.dp == 1 or shape.ep > 1 or not others or rng.random() < 0.5:
        return (Part(island=home, shape=shape),)
    here = rng.randint(1, shape.dp - 1)
    return (
        Part(island=home, shape=replace(shape, dp=here)),
        Part(island=rng.choice(others), shape=replace(shape, dp=shape.dp - here)),
    )


def _changed(rng: Random, plan: Plan, model: ModelSpec, machines: Cluster, job: Job) -> Plan:
    """Perhaps with what choices cannot say: other recomputation, overlap, smaller shards."""
    (pipeline,) = plan.pipelines
    recompute = rng.choice(
        (
            *(None,) * 4,
            Recompute(granularity=FULL, layers=1),
            Recompute(
                granularity=RecomputeGranularity.SELECTIVE,
                modules=(RecomputeModule.CORE_ATTENTION, RecomputeModule.NORMS),
            ),
        )
    )
    shards = plan.optimizer_shards
    if shards % 2 == 0 and rng.random() < 0.3:
        shards //= 2
    if recompute is None and shards == plan.optimizer_shards:
        return plan
    stages = pipeline.stages
    if recompute is not None:
        stages = tuple(replace(each, recompute=recompute) for each in stages)
    rebuilt = assemble_pipeline(
        machines,
        job,
        list(stages),
        num_microbatches=pipeline.num_microbatches,
        schedule=pipeline.schedule,
    )
    sharded = plan.sharding is Sharding.OPTIMIZER and shards > 1
    return assemble_plan(
        model,
        machines,
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
    machines = cluster(island("one", nodes=1, devices_per_node=16, kind=ASCEND))
    for tp, pp, dp in ((1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 4, 2), (4, 2, 2), (1, 4, 4), (1, 8, 2)):
        for layers in (2 * pp, 2 * pp + 3):
            model, job = llama(layers), job_of(2 * pp * dp)
            rows = (
                stage("one", count, tp=tp, dp=dp, microbatch_size=1)
                for count in _cut(Random(layers), layers, pp)
            )
            planned = plan_of(model, machines, job, one_pipeline(*rows, microbatches=2 * pp))
            (pipeline,) = planned.pipelines
            stages = []
            for s, each in enumerate(pipeline.stages):
                devices = [(d * pp + s) * tp + t for d in range(dp) for t in range(tp)]
                replica = replace(each.replicas[0], devices=compress(devices))
                stages.append(replace(each, replicas=(replica,)))
            rebuilt = assemble_pipeline(
                machines, job, stages, num_microbatches=2 * pp, schedule=pipeline.schedule
            )
            plan = assemble_plan(model, machines, job, [rebuilt])
            assert check_plan(plan, model, machines, job) == ()
            yield result_of(machines, plan, model, job, priced=any_estimate())
