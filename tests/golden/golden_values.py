"""One small value of every kind that is written to disk, written out by hand."""

from dataclasses import replace

from golden_calibration import CALIBRATION
from golden_compare import COMPARISON
from golden_machine import DEVICE_KINDS, MACHINE_REPORT
from golden_numerics import NUMERICS
from golden_weights import checkpoint_manifest

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.launch_domains import KindLaunch, LaunchDomain, Scheduler
from hetplan.cluster.links import LossRecovery
from hetplan.cluster.node import Nics
from hetplan.cluster.spec import (
    Cluster,
    Island,
    IslandLink,
    Link,
    RegionLink,
    Site,
    Transport,
)
from hetplan.cost.estimate_values import (
    CauseSeconds,
    Component,
    ComponentSeconds,
    Estimate,
    Interval,
    MemoryUse,
    StageEstimate,
)
from hetplan.importers.records import (
    Host,
    Imported,
    NodeTopology,
    PathFigures,
    TopologyDevice,
    TopologyNic,
    TopologyPath,
)
from hetplan.job.spec import (
    Forbids,
    Job,
    LengthShare,
    Optimizer,
    Pins,
    Precision,
    ProductFormat,
    TrainerOptions,
)
from hetplan.launchers.elastic import Ended, Phase
from hetplan.launchers.run_log import LossCheck, Machine, RunLog
from hetplan.lint.findings import Finding, Findings, Severity
from hetplan.model.numerics import (
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)
from hetplan.model.spec import Architecture, plain_model
from hetplan.plans.plan import (
    Boundary,
    DeviceRange,
    LayerRange,
    OverlapSettings,
    Pipeline,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    ReductionGroup,
    Replica,
    Schedule,
    Sharding,
    Stage,
)
from hetplan.predict.laws import (
    FittedLaws,
    LayerLaw,
    LinkLaw,
    MeasuredRange,
    SizeTable,
    Term,
    Validation,
)
from hetplan.predict.layer.tables import LayerTable, MeasuredLayer, MeasuredUpdate
from hetplan.predict.operator.values import (
    LearnedResidual,
    MeasuredShape,
    OperatorLaw,
    OperatorTerm,
)
from hetplan.profiling.pacing import Pace, PacedKind, PaceEntry
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance
from hetplan.runtime.measured import RankMeasure, StepRecord
from hetplan.search.result import Alternative, Certificate, Inputs, Restriction, SearchResult

MODEL = replace(
    plain_model(
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
    ),
    norm_epsilon=1e-5,
    activation=Activation.SILU,
    rotary_base=500000.0,
    rotary_scaling=RotaryScaling(
        kind=RotaryScalingKind.LLAMA3,
        factor=8.0,
        original_length=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    ),
    router=Router(
        score_function=ScoreFunction.SIGMOID,
        normalized=True,
        scaling_factor=2.5,
        num_groups=8,
        groups_per_token=4,
        group_experts=2,
        correction_bias=True,
        loss_coefficient=0.0001,
        loss_per_sequence=True,
    ),
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

LEASED = Link(
    bandwidth_bytes_per_second=12.5e9,
    latency_seconds=0.015,
    transport=Transport.HOST_STAGED,
    shared_bandwidth_bytes_per_second=50e9,
    oversubscription=2.0,
    streams=16,
    window_bytes=16.0 * 2**20,
    loss=1e-6,
    segment_bytes=8960.0,
    loss_recovery=LossRecovery.GO_BACK_N,
    price_usd_per_byte=2e-11,
    compute_share=0.125,
    equal_cost_paths=4,
    measured=True,
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
        max_power_watts=700.0,
        overlap_compute_slowdown=1.125,
        overlap_communication_slowdown=1.25,
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
        nics=Nics(per_node=4, bandwidth_bytes_per_second=25e9, rails=2),
        switch_of_device=(0, 0, 0, 0, 1, 1, 1, 1),
        numa_node_of_device=(0, 0, 0, 0, 1, 1, 1, 1),
        node_names=("node[1-2]",),
        price_usd_per_device_hour=2.5,
        power_watts=700.0,
        power_cap_watts=600.0,
        clock_ratio=0.875,
        speed_spread=0.03125,
    )


CLUSTER = Cluster(
    name="two",
    islands=(
        _island("fast", "north", "nvidia", 80.0 * 2**30),
        _island("slow", "south", "amd", 64e9),
    ),
    links=(IslandLink(between=("fast", "slow"), link=SLOW),),
    region_links=(RegionLink(between=("north", "south"), link=LEASED),),
    within_region=FAST,
    across_regions=SLOW,
    sites=(Site(name="campus", regions=("north",), power_limit_watts=1e5),),
    launch_domains=(
        LaunchDomain(
            name="north-slurm",
            islands=("fast",),
            scheduler=Scheduler.SLURM,
            interface="eth0",
            fabric_devices=("mlx5_0", "mlx5_1:1"),
            first_port=30000,
            last_port=30100,
            addresses=(("node[1-2]", "10.0.1.[1-2]"),),
            image="registry.example.org/train:1.2",
            kinds=(KindLaunch(device="nvidia-kind", resource="a100", image="train/cuda:1"),),
            partition="gpu",
            account="team",
            time_limit_seconds=86400.0,
        ),
    ),
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
    sequence_lengths=(LengthShare(length=4096, share=0.25), LengthShare(length=512, share=0.75)),
    packing=True,
    expert_load_factor=1.25,
    gradient_clipping=True,
    data_loading_seconds=0.0625,
    checkpoint_interval_steps=500,
    trainer=TrainerOptions(
        fused_attention=False,
        attention_dropout=True,
        scattered_sends=True,
        gradient_precision=Precision.BFLOAT16,
        product_format=ProductFormat.MXFP8,
    ),
    pin=Pins(tp=8, recompute=False, embedding_on="slow"),
    forbid=Forbids(nodes=("fast/1",)),
)


def _stage(start: int, stop: int, first_device: int, depth: int) -> Stage:
    return Stage(
        chunks=(LayerRange(start=start, stop=stop),),
        replicas=(
            Replica(devices=(DeviceRange(start=first_device, count=8),), tp=4, microbatch_size=2),
        ),
        recompute=Recompute(granularity=RecomputeGranularity.FULL, layers=7)
        if start
        else Recompute(
            granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
        ),
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
            precision="bfloat16",
        ),
        ReductionGroup(
            layers=LayerRange(start=21, stop=82),
            members=(DeviceRange(start=0, count=8),),
            degree=2,
            transport="device-direct",
            precision="float32",
            expert=True,
        ),
    ),
    precision="bfloat16",
    optimizer="adamw",
    optimizer_shards=2,
    padded_vocab_size=32256,
    tied_embedding_devices=(),
    tied_embedding_precision=None,
    target="megatron",
    unused_devices=(DeviceRange(start=8, count=8), DeviceRange(start=24, count=4, stride=2)),
    sharding=Sharding.OPTIMIZER,
    optimizer_offload=0.25,
    overlap=OverlapSettings(
        reduction=True,
        gathering=True,
        tensor_parallel=True,
        context_parallel=False,
        send=True,
    ),
)

MEMORY = MemoryUse(
    parameter_bytes=1.0e10,
    gradient_bytes=2.0e10,
    optimizer_bytes=3.0e10,
    activation_bytes=1e9 / 3,
    temporary_bytes=0.0,
    available_bytes=7.2e10,
    buffer_bytes=67108864.0,
    reserve_factor=1.040625,
    runtime_bytes=2.0e9,
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
            pipeline=1,
            components=(
                ComponentSeconds(component=Component.COMPUTE, seconds=6.25),
                ComponentSeconds(
                    component=Component.DATA_PARALLEL, seconds=0.125, hidden_seconds=0.5
                ),
            ),
            extrapolating=("forward", "backward"),
        ),
    ),
    peak_memory_bytes=6.03e10,
    sources=("measured", "datasheet"),
    warnings=("hidden 8192 > 5120 measured",),
    components=(
        ComponentSeconds(component=Component.STRAGGLERS, seconds=0.0, note="all devices are alike"),
        ComponentSeconds(component=Component.BUBBLE, seconds=2.75),
    ),
    p5_seconds=11.25,
    p95_seconds=14.0,
    own_log_halfwidth=0.125,
    interval_note="interval by 9 measured runs",
    causes=(
        CauseSeconds(cause="amd-kind", part="matrix_product", seconds=9.5, log_halfwidth=0.0625),
        CauseSeconds(cause="link rack", part="", seconds=2.8456789012345, log_halfwidth=0.25),
    ),
)

RESULT = SearchResult(
    schema="hetplan.plan/8",
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
        closed_by_program=2,
        closed_by_listing=1,
        left_open=0,
        explored=45,
    ),
    objective="step time that 9 of 10 steps stay below",
    alternatives=(
        Alternative(
            why="fewest devices",
            plan=PLAN,
            step_seconds=13.5,
            quantile_seconds=14.5,
            quantile=0.9,
            usd_per_step=0.75,
            devices=16,
        ),
    ),
    restriction=Restriction(target="native", step_seconds=12.0, lower_bound_seconds=11.5),
)

LAYER_SAMPLE = LayerSample(
    device="cpu",
    architecture="gpt",
    layer="transformer",
    phase="optimizer:adamw",
    precision="float32",
    hidden_size=128,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=512,
    sequence_length=128,
    microbatch_size=2,
    tp=1,
    copies=8,
    median_seconds=0.0014,
    p10_seconds=0.0013,
    p90_seconds=0.0021,
    repeats=27,
    outliers=1,
    steady=True,
    activation_bytes=0.0,
    peak_memory_bytes=1048576.0,
    clock_hertz=0.0,
    measured_on="2026-11-21",
)
LINK_SAMPLE = LinkSample(
    link="loopback",
    operation="all_reduce",
    backend="gloo",
    group_size=2,
    message_bytes=65536,
    median_seconds=0.00052,
    p10_seconds=0.00041,
    p90_seconds=0.0009,
    repeats=20,
    outliers=0,
    measured_on="2026-11-21",
    nodes=2,
    groups=4,
)
OPERATOR_SAMPLE = OperatorSample(
    device="nvidia-kind",
    operator="matrix_product",
    phase="weight_gradient",
    precision="bfloat16",
    output_precision="float32",
    batch=1,
    m=1536,
    n=5120,
    k=4096,
    median_seconds=0.00033,
    p10_seconds=0.00032,
    p90_seconds=0.00041,
    repeats=20,
    outliers=1,
    measured_on="2026-11-21",
)
PROVENANCE = Provenance(
    device="cpu",
    device_name="a processor, with a comma",
    backend="cpu",
    measured_on="2026-11-21",
    hetplan_version="0.1.0",
    torch_version="2.13.0+cpu",
    driver="Linux 6.1",
    threads=1,
    paced="",
    command="hetplan profile --store profiles",
    notes="",
)
PACE = Pace(
    kinds=(
        PacedKind(
            device="slow",
            slow_down=2.5,
            entries=(
                PaceEntry(
                    layer="transformer", phase="forward", microbatch_size=1, tp=1, seconds=0.004
                ),
            ),
        ),
    )
)
_VALIDATION = Validation(left_out="hidden", folds=3, mean=0.05, median=0.04, worst=0.11)
LAWS = FittedLaws(
    hetplan_version="0.1.0",
    layers=(
        LayerLaw(
            device="cpu",
            precision="float32",
            layer="transformer",
            phase="forward",
            terms=(
                Term(column="constant", coefficient=0.0004),
                Term(column="matrix_flops", coefficient=2.1e-11),
            ),
            ranges=(
                MeasuredRange(quantity="hidden", least=96.0, most=160.0),
                MeasuredRange(quantity="sequence", least=128.0, most=128.0),
                MeasuredRange(quantity="microbatch", least=1.0, most=8.0),
                MeasuredRange(quantity="tp", least=1.0, most=2.0),
            ),
            log_halfwidth=0.12,
            calibration="own left-out rows",
            rows=24,
            points=24,
            validation=_VALIDATION,
            notes=("1 of 24 rows did not reach a steady time",),
            tables=(
                LayerTable(
                    architecture="gpt",
                    hidden_size=96,
                    ffn_hidden_size=384,
                    num_attention_heads=4,
                    num_kv_heads=4,
                    head_dim=24,
                    vocab_size=0,
                    sequence_length=128,
                    tp=1,
                    microbatch_sizes=(1, 2, 8),
                    seconds=(0.001, 0.0018, 0.0071),
                ),
            ),
            table_log_halfwidth=0.05,
            measured=(
                MeasuredLayer(
                    architecture="gpt",
                    hidden_size=96,
                    ffn_hidden_size=384,
                    num_attention_heads=4,
                    num_kv_heads=4,
                    head_dim=24,
                    vocab_size=0,
                    sequence_length=128,
                    tp=2,
                    microbatch_sizes=(1, 2),
                    seconds=(0.0008, 0.0015),
                    log_halfwidths=(0.1, 0.11),
                ),
            ),
            measured_updates=(
                MeasuredUpdate(parameters=110976, seconds=0.0001, log_halfwidth=0.1),
            ),
        ),
    ),
    operators=(
        OperatorLaw(
            device="a-device",
            precision="bfloat16",
            operator="matrix_product",
            phase="forward",
            terms=(
                OperatorTerm(column="launches", coefficient=5.5e-06),
                OperatorTerm(column="flops", coefficient=9.1e-16),
            ),
            floor_seconds=2.5e-05,
            ranges=(
                MeasuredRange(quantity="matrix product width", least=1024.0, most=28672.0),
                MeasuredRange(quantity="matrix product flop", least=4e9, most=7e13),
            ),
            log_halfwidth=0.14,
            calibration="own left-out rows",
            rows=144,
            points=144,
            validation=_VALIDATION,
            sustained_flops_per_second=1.1e15,
            floor_rows=7,
            multiprocessors=148,
            shapes=(
                MeasuredShape(
                    batch=1, m=4096, n=8192, k=10240, output_precision="bfloat16", seconds=0.00065
                ),
            ),
            residual=LearnedResidual(doublings=0.5, error_before=0.12, error_after=0.1),
            notes=("never faster than the largest products keep up, 1100 TFLOP/s",),
            large_seconds=0.0004,
            large_log_halfwidth=0.04,
        ),
    ),
    links=(
        LinkLaw(
            link="loopback",
            tables=(
                SizeTable(
                    operation="all_reduce",
                    backend="gloo",
                    group_size=2,
                    message_bytes=(4096.0, 65536.0),
                    seconds=(0.0003, 0.0005),
                    log_halfwidth=0.43,
                    calibration="own left-out rows",
                    rows=2,
                    validation=_VALIDATION,
                ),
            ),
        ),
    ),
    populations=("24 rows: cpu",),
    notes=(),
    calibration=CALIBRATION,
)
RUN = RunLog(
    schema="hetplan.run/3",
    hetplan_version="0.1.0",
    plan_sha256="00ff",
    started="2026-11-21T06:00:00+00:00",
    model="gpt-tiny",
    cluster="this-machine",
    job="gpt-tiny",
    target="native",
    backend="gloo",
    ranks=(
        RankMeasure(
            rank=0,
            device=0,
            device_kind="cpu",
            stage=0,
            dp_index=0,
            tp_index=0,
            step_seconds=0.41,
            busy_seconds=0.4,
            tensor_parallel_seconds=0.0,
            wait_seconds=0.0,
            reduction_seconds=0.001,
            optimizer_seconds=0.009,
            paced_passes=0,
            overruns=0,
            peak_memory_bytes=5e7,
        ),
    ),
    steps=(
        StepRecord(step=0, seconds=0.6, loss=6.25),
        StepRecord(step=1, seconds=0.41, loss=6.1),
    ),
    warmup_steps=1,
    median_step_seconds=0.41,
    predicted_step_seconds=0.4,
    predicted_interval=Interval(p10_seconds=0.35, mean_seconds=0.41, p90_seconds=0.47),
    paced=(),
    machine=Machine(
        cores=2,
        processor="a processor",
        system="Linux 6.1",
        python_version="3.11.7",
        torch_version="2.13.0+cpu",
        load_before=0.25,
    ),
    loss_check=LossCheck(
        reference_losses=(6.25, 6.1), largest_relative_difference=1e-07, tolerance=0.0001
    ),
    phase=Phase(
        hosts=("north1", "south1"),
        first_step=0,
        steps_done=2,
        checkpoint_step=2,
        ended=Ended.GREW,
        reason="south2 came back",
        predicted_step_seconds=0.4,
        median_step_seconds=0.41,
        start_seconds=5.5,
        seconds=9.25,
    ),
)

IMPORTED = Imported(
    kind="nccl-tests",
    tool_version="2.17.8, NCCL 2.28.5",
    device_name="a device",
    links=(LINK_SAMPLE,),
    paths=(
        PathFigures(
            measured="TCP bandwidth",
            message_bytes=131072,
            bandwidth_bytes_per_second=1.1e9,
            latency_seconds=0.015,
            round_trip_seconds=0.03,
            streams=4,
            window_bytes=4194304.0,
            loss_fraction=1e-05,
        ),
    ),
    topology=NodeTopology(
        vendor="nvidia",
        devices=(TopologyDevice(index=0, name="GPU0", numa_node=0),),
        nics=(TopologyNic(name="mlx5_0"),),
        paths=(TopologyPath(between=("GPU0", "mlx5_0"), path="PIX", hops=1, weight=15),),
    ),
    hosts=(Host(name="node1", slots=8, device="A100"),),
    notes=("seconds are means",),
    skipped=("line 30: 3 wrong elements",),
)

FINDINGS = Findings(
    findings=(
        Finding(
            rule="missing-size",
            severity=Severity.WARNING,
            file="collectives.csv",
            lines=(5, 9),
            count=2,
            message="rows without a size: a table",
        ),
    ),
    files=("collectives.csv",),
    skipped=("notes.md: is text or code, no measurements",),
)

GOLDEN: tuple[tuple[str, object], ...] = (
    ("hetplan.checkpoint/3", checkpoint_manifest(MODEL)),
    ("hetplan.comparison/1", COMPARISON),
    ("hetplan.model-value/3", MODEL),
    ("hetplan.cluster-value/5", CLUSTER),
    ("hetplan.job-value/4", JOB),
    ("hetplan.plan-value/3", PLAN),
    ("hetplan.estimate/3", ESTIMATE),
    ("hetplan.plan/8", RESULT),
    ("hetplan.provenance/2", PROVENANCE),
    ("hetplan.pace/2", PACE),
    ("hetplan.predictor/2", LAWS),
    ("hetplan.run/3", RUN),
    ("hetplan.import/4", IMPORTED),
    ("hetplan.doctor/1", MACHINE_REPORT),
    ("hetplan.device-kinds/2", DEVICE_KINDS),
    ("hetplan.findings/2", FINDINGS),
    ("hetplan.numerics/1", NUMERICS),
)
"""(current schema, value) of every kind of value that is written to disk."""

GOLDEN_ROWS: tuple[tuple[int, LayerSample | LinkSample | OperatorSample], ...] = (
    (2, LAYER_SAMPLE),
    (3, LINK_SAMPLE),
    (1, OPERATOR_SAMPLE),
)
"""One row of every kind of CSV file, and the number of its form."""
