"""Plans with named hosts, priced from datasheets, for what emits them."""

from __future__ import annotations

from dataclasses import replace

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.estimate import estimate
from hetplan.errors import Fault
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, Schedule, Sharding
from hetplan.predict.fit import FittedPredictor
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import Inputs, SearchResult
from hetplan.trainers import Trainer

MODEL = plain_model(
    name="twelve layers",
    architecture=Architecture.LLAMA,
    num_layers=12,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=32000,
    max_sequence_length=2048,
)
TIED = plain_model(
    name="twelve tied layers",
    architecture=Architecture.GPT,
    num_layers=12,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=50257,
    max_sequence_length=2048,
    tied_embeddings=True,
)
JOB = Job(
    name="test",
    global_batch_size=64,
    sequence_length=2048,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="megatron",
)
INTRA = Link(
    bandwidth_bytes_per_second=300e9, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
INTER = replace(INTRA, bandwidth_bytes_per_second=25e9, latency_seconds=5e-6)
FAR = replace(INTRA, bandwidth_bytes_per_second=1e9, latency_seconds=20e-3)


def island(
    name: str,
    region: str = "here",
    *,
    nodes: int = 2,
    devices_per_node: int = 8,
    kind: str = "nvidia-a100-80gb-sxm",
) -> Island:
    device = next(each for each in load_catalogue() if each.kind == kind)
    return Island(
        name=name,
        region=region,
        device=device,
        nodes=nodes,
        devices_per_node=devices_per_node,
        intra_node=INTRA,
        inter_node=INTER,
        memory_bytes=80e9,
        node_names=(f"{name}[0000-{nodes - 1:04d}]",),
    )


def cluster(*islands: Island) -> Cluster:
    return Cluster(name="test", islands=islands, within_region=INTER, across_regions=FAR)


def chosen(
    *stages: tuple[str, int],
    tp: int = 1,
    dp: int = 1,
    microbatches: int | None = None,
    sharding: Sharding = Sharding.NONE,
    batch: int = JOB.global_batch_size,
) -> ChosenPlan:
    """One 1F1B pipeline of (island, transformer layers) stages with the same degrees."""
    count = microbatches or batch // dp
    return ChosenPlan(
        pipelines=(
            ChosenPipeline(
                stages=tuple(
                    ChosenStage(
                        parts=(
                            Part(
                                island=name,
                                shape=Shape(tp=tp, dp=dp, microbatch_size=batch // dp // count),
                            ),
                        ),
                        layers=(layers,),
                        warmup_depth=own_depth("1f1b", at, len(stages), count),
                    )
                    for at, (name, layers) in enumerate(stages)
                ),
                num_microbatches=count,
                schedule=Schedule(name="1f1b"),
            ),
        ),
        sharding=sharding,
    )


def result_of(machines: Cluster, plan: Plan, model: ModelSpec = MODEL) -> SearchResult:
    """The plan with its datasheet estimate, as `hetplan estimate` writes it."""
    return SearchResult(
        schema="hetplan.plan/5",
        hetplan_version="test",
        seed=0,
        inputs=Inputs(model=model, cluster=machines, job=JOB, sha256=()),
        plan=plan,
        estimate=estimate(plan, model, machines, JOB, FittedPredictor.datasheet_only()),
        certificate=None,
    )


def two_regions(model: ModelSpec = MODEL) -> SearchResult:
    """Four stages of tp 8, dp 1: two in the north, two in the south."""
    machines = cluster(island("north", "n"), island("south", "s"))
    plan = plan_of(
        model,
        machines,
        JOB,
        chosen(("north", 4), ("north", 3), ("south", 3), ("south", 2), tp=8),
    )
    return result_of(machines, plan, model)


def no_faults(
    result: SearchResult, sheet: RankLayout, options: EmissionOptions
) -> tuple[Fault, ...]:
    return ()


def plain_launch(
    result: SearchResult, sheet: RankLayout, options: EmissionOptions
) -> TrainerLaunch:
    return TrainerLaunch(
        target="plain",
        title="a plain trainer",
        program=("train.py",),
        arguments=(("--stages", str(len(result.plan.pipelines[0].stages))),),
        environment=(("A", "{folder}/a b"),),
        agent_environment=((),) * len(sheet.agents),
        remarks=("it is plain",),
    )


PLAIN = Trainer(name="plain", plan_target="megatron", faults=no_faults, launch=plain_launch)
