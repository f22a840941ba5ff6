"""Plans that tests share: several pipelines with unequal cuts, degrees and microbatch counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd

from hypothesis import strategies as st
from one_pipeline import StageChoice, build_plan

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.assemble import assemble_pipeline, assemble_plan
from hetplan.plans.chosen import Shape
from hetplan.plans.formats import reduction_precision
from hetplan.plans.pieces import expert_copies, own_depth, stage_copies
from hetplan.plans.plan import (
    LayerRange,
    Pipeline,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Schedule,
    Sharding,
    Stage,
    compress,
)

NO_RECOMPUTE = Recompute()

INSIDE = Link(
    bandwidth_bytes_per_second=1e11, latency_seconds=5e-6, transport=Transport.DEVICE_DIRECT
)
BETWEEN = Link(
    bandwidth_bytes_per_second=1e10, latency_seconds=1e-5, transport=Transport.DEVICE_DIRECT
)
FAR = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-3, transport=Transport.HOST_STAGED)


def small_model(layers: int = 8, *, experts: bool = False, tied: bool = False) -> ModelSpec:
    """8 heads of 8, hidden size 64, vocabulary 100; with `experts` 8 of them, 2 per token."""
    model = plain_model(
        name="small",
        architecture=Architecture.LLAMA,
        num_layers=layers,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=8,
        num_kv_heads=8,
        head_dim=8,
        vocab_size=100,
        max_sequence_length=32,
        tied_embeddings=tied,
    )
    if not experts:
        return model
    mlp = Experts(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=64)
    layer = replace(model.layer_runs[0].layer, mlp=mlp)
    return replace(model, layer_runs=(LayerRun(count=layers, layer=layer),))


def small_island(name: str, nodes: int, per_node: int, out: tuple[int, ...] = ()) -> Island:
    """Devices of 10 GB and 1 Tflop/s."""
    device = DeviceKind(
        kind=f"kind-{name}",
        vendor="v",
        peak_flops_per_second=(("float32", 1e12), ("bfloat16", 2e12)),
        memory_bytes=1e10,
        memory_bandwidth_bytes_per_second=1e11,
        provenance="datasheet",
        source="test",
    )
    return Island(
        name=name,
        region="r",
        device=device,
        nodes=nodes,
        devices_per_node=per_node,
        intra_node=INSIDE,
        inter_node=BETWEEN,
        memory_bytes=1e10,
        nodes_out=out,
    )


def small_cluster(*islands: Island) -> Cluster:
    """These islands, every two joined by a host-staged link."""
    return Cluster(
        name="c",
        islands=islands,
        links=tuple(
            IslandLink(between=(a.name, b.name), link=FAR)
            for i, a in enumerate(islands)
            for b in islands[i + 1 :]
        ),
    )


def small_job(batch: int, target: str = "any") -> Job:
    """Sequences of 32 tokens in bfloat16, with AdamW."""
    return Job(
        name="j",
        global_batch_size=batch,
        sequence_length=32,
        precision=Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target=target,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and its inputs."""

    plan: Plan
    model: ModelSpec
    cluster: Cluster
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One stage of a pipeline to build: its devices, layers and degrees."""

    devices: Sequence[int]
    chunks: tuple[LayerRange, ...]
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    microbatch_size: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = NO_RECOMPUTE

    def stage(self, depth: int) -> Stage:
        """The stage with this warm-up depth."""
        return Stage(
            chunks=self.chunks,
            replicas=(
                Replica(
                    devices=compress(self.devices),
                    tp=self.tp,
                    cp=self.cp,
                    ep=self.ep,
                    etp=self.etp,
                    microbatch_size=self.microbatch_size,
                    sequence_parallel=self.sequence_parallel,
                ),
            ),
            recompute=self.recompute,
            warmup_depth=depth,
        )


def pipeline_of(
    cluster: Cluster,
    job: Job,
    wants: Sequence[Want],
    num_microbatches: int,
    schedule: Schedule | None = None,
    depths: Sequence[int] | None = None,
) -> Pipeline:
    """A pipeline of these stages, with the schedule's own warm-up depths unless told otherwise."""
    order = schedule or Schedule(name="1f1b")
    own = [
        own_depth(order.name, s, len(wants), num_microbatches, order.virtual_stages)
        for s in range(len(wants))
    ]
    return assemble_pipeline(
        cluster,
        job,
        [want.stage(depth) for want, depth in zip(wants, depths or own, strict=True)],
        num_microbatches=num_microbatches,
        schedule=order,
    )


def two_pipelines(*, experts: bool = False, tied: bool = False) -> Case:
    """A fast pipeline of 3 stages with 4 microbatches, a slow one of 2 with 2, cut differently.

    Islands: fast (3 nodes of 4), slow (2 nodes of 4). 8 transformer layers, 10 in the row.
    """
    model = small_model(experts=experts, tied=tied)
    cluster = small_cluster(small_island("fast", 3, 4), small_island("slow", 2, 4))
    job = small_job(4 * 4 + 2 * 2)
    etp = {"etp": 2} if experts else {}
    fast = [
        Want(devices=range(4 * s, 4 * s + 4), chunks=(cut,), tp=2, microbatch_size=2, **etp)
        for s, cut in enumerate(_cuts((0, 4, 7, 10)))
    ]
    slow = [
        Want(devices=range(12, 16), chunks=(LayerRange(start=0, stop=5),), tp=2, **etp),
        Want(devices=range(16, 20), chunks=(LayerRange(start=5, stop=10),), tp=2, **etp),
    ]
    pipelines = [pipeline_of(cluster, job, fast, 4), pipeline_of(cluster, job, slow, 2)]
    return Case(
        plan=assemble_plan(model, cluster, job, pipelines), model=model, cluster=cluster, job=job
    )


def plain_case(target: str = "any", *, experts: bool = False, tp: int = 2) -> Case:
    """Two stages of dp 2, 8 layers, on island a (3 nodes of 4)."""
    model = small_model(experts=experts)
    cluster = small_cluster(small_island("a", 3, 4, out=(2,)), small_island("b", 1, 4))
    job = small_job(8, target)
    plan = build_plan(
        model if not experts or target != "native" else small_model(),
        cluster,
        job,
        [StageChoice(island="a", transformer_layers=4)] * 2,
        Shape(tp=tp, dp=4 // tp, microbatch_size=1),
    )
    return Case(plan=plan, model=model, cluster=cluster, job=job)


def _cuts(bounds: Sequence[int]) -> list[LayerRange]:
    return [LayerRange(start=start, stop=stop) for start, stop in pairwise(bounds)]


@st.composite
def legal_cases(draw: st.DrawFn, *, most_pipelines: int = 3) -> Case:
    """Random legal plans of target `any`: every schedule, unequal degrees, cuts and pipelines."""
    experts, tied = draw(st.booleans()), draw(st.booleans())
    count = draw(st.integers(1, most_pipelines))
    shapes = [(draw(st.integers(1, 3)), draw(_schedules())) for _ in range(count)]
    layers = max(stages * order.virtual_stages for stages, order in shapes)
    layers += draw(st.integers(0, 4))
    model = small_model(layers, experts=experts, tied=tied)
    wants: list[list[Want]] = []
    islands: list[Island] = []
    samples = []
    next_device = 0
    for p, (stages, order) in enumerate(shapes):
        samples.append(draw(st.sampled_from([1, 2, 4])))
        chunks = draw(_chunks(layers, stages, order.virtual_stages))
        row = []
        for s in range(stages):
            size, want = draw(_stage(chunks[s], samples[p], experts))
            per_node = 4 if size <= 4 else 8
            nodes = -(-size // per_node) + draw(st.integers(0, 1))
            islands.append(small_island(f"i{p}{s}", nodes, per_node))
            row.append(replace(want, devices=range(next_device, next_device + size)))
            next_device += nodes * per_node
        wants.append(row)
    cluster = small_cluster(*islands)
    microbatches = [draw(st.integers(1, 6)) for _ in shapes]
    job = small_job(sum(a * b for a, b in zip(samples, microbatches, strict=True)))
    pipelines = [
        pipeline_of(cluster, job, row, m, order, draw(_depths(order, len(row))))
        for row, m, (_, order) in zip(wants, microbatches, shapes, strict=True)
    ]
    sharding, shards = draw(_sharding([s for p in pipelines for s in p.stages], experts))
    plan = assemble_plan(model, cluster, job, pipelines, sharding=sharding, optimizer_shards=shards)
    return Case(plan=plan, model=model, cluster=cluster, job=job)


@st.composite
def _schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"]))
    virtual = draw(st.integers(1, 3)) if name == "interleaved-1f1b" else 1
    return Schedule(name=name, virtual_stages=virtual)


@st.composite
def _depths(draw: st.DrawFn, order: Schedule, stages: int) -> list[int] | None:
    if order.name != "1f1b" or draw(st.booleans()):
        return None
    return sorted((draw(st.integers(1, 6)) for _ in range(stages)), reverse=True)


@st.composite
def _chunks(
    draw: st.DrawFn, layers: int, stages: int, virtual: int
) -> list[tuple[LayerRange, ...]]:
    parts = [1] * (stages * virtual)
    for _ in range(layers - len(parts)):
        parts[draw(st.integers(0, len(parts) - 1))] += 1
    parts[0] += 1
    parts[-1] += 1
    cuts = _cuts([0, *accumulate(parts)])
    return [tuple(cuts[c * stages + s] for c in range(virtual)) for s in range(stages)]


@st.composite
def _stage(
    draw: st.DrawFn, chunks: tuple[LayerRange, ...], samples: int, experts: bool
) -> tuple[int, Want]:
    tp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 1, 2]))
    dp = draw(st.sampled_from([each for each in (1, 2, 4) if samples % each == 0]))
    size = tp * cp * dp
    ep = etp = 1
    if experts:
        ep = draw(st.sampled_from([each for each in (1, 2, 4, 8) if size % each == 0]))
        etp = draw(st.sampled_from([each for each in (1, 2, 4) if size // ep % each == 0]))
    modules = [RecomputeModule.CORE_ATTENTION, RecomputeModule.MLP]
    recompute = draw(
        st.sampled_from(
            [
                Recompute(),
                Recompute(granularity=RecomputeGranularity.FULL),
                Recompute(granularity=RecomputeGranularity.FULL, layers=1),
                Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=tuple(modules)),
            ]
        )
    )
    want = Want(
        devices=(),
        chunks=chunks,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        microbatch_size=samples // dp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        recompute=recompute,
    )
    return size, want


@st.composite
def _sharding(draw: st.DrawFn, stages: list[Stage], experts: bool) -> tuple[Sharding, int]:
    common = gcd(*(stage_copies(stage) for stage in stages))
    possible = [
        shards
        for shards in range(2, common + 1)
        if common % shards == 0
        and not (
            experts and any(expert_copies(each) % (stage_copies(each) // shards) for each in stages)
        )
    ]
    shards = draw(st.sampled_from([1, *possible]))
    if shards == 1:
        return Sharding.NONE, 1
    level = [Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS]
    return draw(st.sampled_from(level)), shards


@st.composite
def summed_cases(draw: st.DrawFn, *, most_pipelines: int = 3) -> Case:
    """Cases with drawn formats of their sums: of each group its own, of sharded gradients one."""
    case = draw(legal_cases(most_pipelines=most_pipelines))
    plan = case.plan
    formats = st.sampled_from([each.value for each in Precision])
    one = draw(st.none() | formats)
    if one is None and plan.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS):
        return case
    groups = tuple(
        replace(group, precision=draw(formats) if one is None else one)
        for group in plan.reduction_groups
    )
    tied = None if plan.tied_embedding_precision is None else draw(formats)
    plan = replace(plan, reduction_groups=groups, tied_embedding_precision=tied)
    return replace(case, plan=plan)


def summed_as(plan: Plan, job: Job) -> Plan:
    """The plan with the formats of the job's trainer."""
    own = reduction_precision(job).value
    return replace(
        plan,
        reduction_groups=tuple(replace(each, precision=own) for each in plan.reduction_groups),
        tied_embedding_precision=None if plan.tied_embedding_precision is None else own,
    )
