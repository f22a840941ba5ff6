"""One small value of every kind that is written to disk, written out by hand."""

from hetplan.cluster.spec import Cluster, DeviceKind, Island, IslandLink, Link, Transport
from hetplan.cost.estimate_values import Estimate, Interval, MemoryUse, StageEstimate
from hetplan.job.spec import Forbids, Job, Optimizer, Pins, Precision
from hetplan.model.spec import Architecture, ModelSpec
from hetplan.plans.plan import (
    Boundary,
    DeviceRange,
    LayerRange,
    Pipeline,
    Plan,
    Recompute,
    RecomputeGranularity,
    ReductionGroup,
    Replica,
    Schedule,
    Stage,
)
from hetplan.search.result import Certificate, Inputs, SearchResult

MODEL = ModelSpec(
    name="llama-2-70b",
    architecture=Architecture.LLAMA,
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_sequence_length=4096,
)

FAST = Link(
    bandwidth_bytes_per_second=300e9, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
SLOW = Link(
    bandwidth_bytes_per_second=12.5e9,
    latency_seconds=0.015,
    transport=Transport.HOST_STAGED,
    samples="long-link",
)


def _island(name: str, region: str, vendor: str, memory_bytes: float) -> Island:
    device = DeviceKind(
        kind=f"{vendor}-kind",
        vendor=vendor,
        peak_flops_per_second=(("bfloat16", 312e12), ("float32", 19.5e12)),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_second=2.039e12,
        provenance="datasheet",
        source="a datasheet",
    )
    return Island(
        name=name,
        region=region,
        device=device,
        nodes=2,
        devices_per_node=8,
        intra_node=FAST,
        inter_node=SLOW,
        memory_bytes=memory_bytes,
        nodes_out=(1,) if name == "slow" else (),
    )


CLUSTER = Cluster(
    name="two",
    islands=(
        _island("fast", "north", "nvidia", 80.0 * 2**30),
        _island("slow", "south", "amd", 64e9),
    ),
    links=(IslandLink(between=("fast", "slow"), link=SLOW),),
)

JOB = Job(
    name="job",
    global_batch_size=64,
    sequence_length=4096,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="megatron",
    gap=0.005,
    time_limit_seconds=60.0,
    total_tokens=2 * 10**12,
    seed=7,
    pin=Pins(tp=8, recompute=False, embedding_on="slow"),
    forbid=Forbids(nodes=("fast/1",)),
)


def _stage(start: int, stop: int, first_device: int, depth: int) -> Stage:
    return Stage(
        chunks=(LayerRange(start=start, stop=stop),),
        replicas=(
            Replica(devices=(DeviceRange(start=first_device, count=8),), tp=4, microbatch_size=2),
        ),
        recompute=Recompute(granularity=RecomputeGranularity.FULL),
        warmup_depth=depth,
    )


PLAN = Plan(
    pipelines=(
        Pipeline(
            stages=(_stage(0, 21, 16, 2), _stage(21, 82, 0, 1)),
            boundaries=(Boundary(index=0, transport="host-staged", precision="bfloat16"),),
            num_microbatches=16,
            schedule=Schedule(name="1f1b"),
        ),
    ),
    reduction_groups=(
        ReductionGroup(
            layers=LayerRange(start=0, stop=21),
            members=(DeviceRange(start=16, count=8),),
            degree=2,
            transport="device-direct",
        ),
    ),
    precision="bfloat16",
    optimizer="adamw",
    optimizer_shards=2,
    padded_vocab_size=32256,
    tied_embedding_devices=(),
    target="megatron",
    unused_devices=(DeviceRange(start=8, count=8), DeviceRange(start=24, count=4, stride=2)),
)

MEMORY = MemoryUse(
    parameter_bytes=1.0e10,
    gradient_bytes=2.0e10,
    optimizer_bytes=3.0e10,
    activation_bytes=1e9 / 3,
    temporary_bytes=0.0,
    available_bytes=7.2e10,
)

ESTIMATE = Estimate(
    step_seconds=12.3456789012345,
    interval=Interval(p10_seconds=11.5, mean_seconds=12.4, p90_seconds=13.7),
    pipeline_seconds=12.0,
    num_microbatches=16,
    tokens_per_second=21233.6,
    stages=(
        StageEstimate(
            island="slow",
            device="amd-kind",
            transformer_layers=20,
            forward_seconds=0.1,
            backward_seconds=0.3,
            tensor_parallel_seconds=0.01,
            busy_seconds=6.4,
            wait_seconds=5.6,
            reduction_seconds=0.2,
            optimizer_seconds=0.05,
            memory=MEMORY,
        ),
    ),
    peak_memory_bytes=6.03e10,
    sources=("measured", "datasheet"),
    warnings=("hidden 8192 > 5120 measured",),
)

RESULT = SearchResult(
    schema="hetplan.plan/1",
    hetplan_version="0.1.0",
    seed=7,
    inputs=Inputs(model=MODEL, cluster=CLUSTER, job=JOB, sha256=(("model", "00ff"),)),
    plan=PLAN,
    estimate=ESTIMATE,
    certificate=Certificate(
        lower_bound_seconds=12.3,
        gap=0.0037,
        status="optimal",
        space="one pipeline",
        candidates=10,
        pruned_by_bound=7,
        searched=3,
        replays=123,
        integer_model_bound_seconds=41.25,
    ),
)

GOLDEN: tuple[tuple[str, object], ...] = (
    ("hetplan.model-value/1", MODEL),
    ("hetplan.cluster-value/1", CLUSTER),
    ("hetplan.job-value/1", JOB),
    ("hetplan.plan-value/1", PLAN),
    ("hetplan.estimate/1", ESTIMATE),
    ("hetplan.plan/1", RESULT),
)
"""(current schema, value) of every kind of value that is written to disk."""
