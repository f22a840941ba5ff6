"""Small models, clusters and plans that the tests of runtime and launchers train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import profiling_models
import search_jobs
from one_pipeline import StageChoice, build_plan
from search_jobs import cluster

from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import Experts, LatentAttention, LayerRun
from hetplan.model.spec import ModelSpec
from hetplan.plans import build
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Plan,
    Schedule,
    Sharding,
)
from hetplan.runtime.training import CheckpointRequest, Training

gpt = partial(profiling_models.gpt, num_layers=4)
llama = partial(profiling_models.llama, num_layers=4)
GPT = gpt()
LLAMA = llama()


def island(name: str, kind: str, devices: int, region: str = "here") -> Island:
    return replace(search_jobs.island(name, kind=kind, nodes=1, per_node=devices), region=region)


CPUS = cluster(island("a", "cpu", 4))
FOURS = cluster(island("a", "cpu", 4), island("b", "slow", 4))
LONG = Link(bandwidth_bytes_per_second=1e7, latency_seconds=5e-3, transport=Transport.HOST_STAGED)
REGIONS = replace(
    cluster(island("a", "cpu", 4, "north"), island("b", "slow", 4, "south")),
    links=(IslandLink(between=("a", "b"), link=LONG),),
)


def job(batch: int = 8, **changes: object) -> Job:
    start = Job(
        name="test",
        global_batch_size=batch,
        sequence_length=16,
        precision=Precision.FLOAT32,
        optimizer=Optimizer.ADAMW,
        target="native",
        seed=3,
    )
    return replace(start, **changes)


def plan_of(
    model: ModelSpec,
    task: Job,
    layers: tuple[int, ...],
    machines: Cluster = CPUS,
    islands: str = "",
    *,
    full_recompute: bool = False,
    **degrees: object,
) -> Plan:
    """A plan with these transformer layers per stage, on island `a` unless told otherwise."""
    names = islands or "a" * len(layers)
    plan = build_plan(
        model,
        machines,
        task,
        [
            StageChoice(island=name, transformer_layers=count)
            for name, count in zip(names, layers, strict=True)
        ],
        Shape(**{"tp": 1, "dp": 1, "microbatch_size": 1, **degrees}),
        full_recompute=full_recompute,
    )
    assert check_plan(plan, model, machines, task) == ()
    return plan


def parts(text: str) -> tuple[Part, ...]:
    """Parts of a stage, `ISLAND tp dp microbatch_size [ep]` each, as in "a 2 1 1 + b 1 1 2"; with
    ep of models with experts.
    """
    found = []
    for each in text.split("+"):
        name, tp, dp, size, *ep = each.split()
        shape = Shape(tp=int(tp), dp=int(dp), microbatch_size=int(size))
        if ep:
            shape = replace(shape, ep=int(ep[0]), etp=int(tp))
        found.append(Part(island=name, shape=shape))
    return tuple(found)


def pipeline_of(
    count: int,
    *stages: tuple[str, int | tuple[int, ...]],
    recompute: str = "",
    deeper: tuple[int, ...] = (),
) -> ChosenPipeline:
    """`count` microbatches through stages of (parts, transformer layers of each chunk).

    recompute: one letter per stage, `f` for full; deeper: microbatches in flight beyond the
    schedule's own, per stage.
    """
    chunks = [(layers,) if isinstance(layers, int) else layers for _, layers in stages]
    virtual = len(chunks[0])
    name = "1f1b" if virtual == 1 else "interleaved-1f1b"
    return ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=parts(text),
                layers=layers,
                recompute=FULL_RECOMPUTE if recompute[at : at + 1] == "f" else NO_RECOMPUTE,
                warmup_depth=own_depth(name, at, len(stages), count, virtual)
                + (deeper[at] if deeper else 0),
            )
            for at, ((text, _), layers) in enumerate(zip(stages, chunks, strict=True))
        ),
        num_microbatches=count,
        schedule=Schedule(name=name, virtual_stages=virtual),
    )


def unlike_plan(
    model: ModelSpec,
    task: Job,
    *pipelines: ChosenPipeline,
    machines: Cluster | None = None,
    early_sends: bool = False,
    sharded: bool = False,
    shards: int | None = None,
) -> Plan:
    """A legal plan of these pipelines on islands `a` and `b` of four devices each."""
    here = machines or FOURS
    chosen = ChosenPlan(
        pipelines=pipelines,
        early_sends=early_sends,
        sharding=Sharding.OPTIMIZER if sharded or shards else Sharding.NONE,
    )
    plan = build.plan_of(model, here, task, chosen)
    if shards is not None:
        plan = replace(plan, optimizer_shards=shards)
    assert check_plan(plan, model, here, task) == ()
    return plan


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelSpec
    job: Job
    plan: Plan
    steps: int = 4
    staged: bool = False
    """Through host buffers, as with accelerators whose memory the network does not reach."""
    machines: Cluster = FOURS


def _case(name: str, model: ModelSpec, layers: tuple[int, ...], **degrees: object) -> Case:
    steps = degrees.pop("steps", 4)
    task = degrees.pop("job", job())
    return Case(name, model, task, plan_of(model, task, layers, **degrees), steps)


ODD_GPT = replace(GPT, vocab_size=61)
ODD_LLAMA = replace(LLAMA, vocab_size=61)
_ROUTED = Experts(
    num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24, shared_ffn_hidden_size=16
)


def _with_experts(model: ModelSpec) -> ModelSpec:
    """One dense layer, then layers with experts; norms of heads in all."""
    plain = model.layer_runs[0].layer
    plain = replace(plain, attention=replace(plain.attention, qk_norm=True))
    routed = replace(plain, mlp=_ROUTED)
    runs = (LayerRun(count=1, layer=plain), LayerRun(count=3, layer=routed))
    return replace(model, layer_runs=runs)


MOE = _with_experts(LLAMA)
_LATENT = LatentAttention(
    num_heads=4, query_rank=12, kv_rank=8, nope_head_dim=6, rope_head_dim=4, value_head_dim=10
)


def _with_latents(model: ModelSpec, query_rank: int | None) -> ModelSpec:
    attention = replace(_LATENT, query_rank=query_rank)
    runs = (replace(run, layer=replace(run.layer, attention=attention)) for run in model.layer_runs)
    return replace(model, layer_runs=tuple(runs))


LATENT, LATENT_KEYS = _with_latents(MOE, 12), _with_latents(LLAMA, None)
TIED_GPT = replace(GPT, tied_embeddings=True)
TIED_LLAMA = replace(LLAMA, tied_embeddings=True)
PLAIN = (
    _case("pp2 uneven", GPT, (3, 1), microbatch_size=2, steps=20),
    _case("tp2, odd vocabulary", ODD_GPT, (4,), tp=2, microbatch_size=4, steps=3),
    _case("pp2 x dp2, tied, recompute", TIED_LLAMA, (3, 1), dp=2, full_recompute=True),
)


def _unlike(name: str, model: ModelSpec, *pipelines: ChosenPipeline, **settings: object) -> Case:
    steps, task = settings.pop("steps", 5), settings.pop("job", job())
    staged = settings.pop("staged", False)
    plan = unlike_plan(model, task, *pipelines, **settings)
    machines = settings.get("machines", FOURS)
    return Case(name, model, task, plan, steps, staged, machines)


# Plain SGD: AdamW's steps hardly depend on the size of the gradients.
CLIPPED = job(gradient_clipping=True, optimizer=Optimizer.SGD)
CASES_NORM = 0.2
"""Norm that gradients are clipped to in these cases; at 1 the models' own are hardly clipped."""
UNLIKE = (
    _unlike(
        "unlike degrees, a split",
        GPT,
        pipeline_of(4, ("a 1 2 1", 3), ("b 2 1 2", 1), recompute="nf"),
    ),
    _unlike(
        "unlike degrees, a join, tied, clipped",
        TIED_GPT,
        pipeline_of(4, ("a 2 1 2", 1), ("b 1 2 1", 3)),
        job=CLIPPED,
    ),
    _unlike(
        "one stage on two islands, unlike microbatches",
        LLAMA,
        pipeline_of(2, ("a 1 1 3 + b 1 1 1", 2), ("b 1 2 2", 2)),
    ),
    _unlike(
        "one stage on two islands, unlike tp, copied kv heads",
        replace(llama(num_kv_heads=1), tied_embeddings=True),
        pipeline_of(4, ("a 2 1 1 + b 1 1 1", 2), ("b 1 1 2", 2)),
    ),
    _unlike(
        "two pipelines, unlike cuts and shares",
        TIED_LLAMA,
        pipeline_of(5, ("a 1 1 1", 3), ("b 1 1 1", 1)),
        pipeline_of(3, ("a 1 1 1", 1), ("b 1 1 1", 3)),
        job=CLIPPED,
    ),
    _unlike(
        "early sends, deeper",
        GPT,
        pipeline_of(8, ("a 1 1 1", 1), ("b 1 1 1", 1), ("b 1 1 1", 2), deeper=(3, 1, 0)),
        early_sends=True,
    ),
    _unlike(
        "interleaved, unlike degrees, tied, clipped",
        TIED_GPT,
        pipeline_of(4, ("a 1 2 1", (1, 1)), ("b 2 1 2", (1, 1))),
        job=CLIPPED,
    ),
    _case(
        "tp4, fewer kv heads, clipped", LLAMA, (4,), tp=4, microbatch_size=8, job=CLIPPED, steps=5
    ),
    _unlike(
        "sharded over 2, tied, clipped",
        TIED_LLAMA,
        pipeline_of(4, ("a 1 2 1", 2), ("b 1 2 1", 2)),
        sharded=True,
        job=CLIPPED,
    ),
    _unlike(
        "sharded over 3",
        ODD_GPT,
        pipeline_of(3, ("a 1 2 1 + b 1 1 1", 4)),
        sharded=True,
        job=job(9),
    ),
    _unlike(
        "host-staged interleaved, tied",
        TIED_GPT,
        pipeline_of(4, ("a 1 2 1", (1, 1)), ("b 1 2 1", (1, 1))),
        staged=True,
    ),
    _unlike(
        "3 + 1 copies in two regions, clipped",
        TIED_GPT,
        pipeline_of(2, ("a 1 2 1 + a 1 1 1 + b 1 1 1", 4)),
        job=CLIPPED,
        machines=REGIONS,
    ),
    _unlike(
        "sharded in regions, summed over them",
        LLAMA,
        pipeline_of(2, ("a 1 2 1 + b 1 2 1", 4)),
        shards=2,
        machines=REGIONS,
    ),
)
MIXED = _unlike(
    "ep2 and tp2 in one stage, tied, clipped",
    replace(MOE, tied_embeddings=True),
    pipeline_of(3, ("a 1 2 1 2 + b 2 1 1 1", 4)),
    job=replace(CLIPPED, global_batch_size=9),
)
EXPERTS = (
    _unlike("ep2 of 4 copies, clipped", MOE, pipeline_of(2, ("a 1 4 1 2", 4)), job=CLIPPED),
    _unlike(
        "ep2 of 4 copies, sharded, clipped",
        MOE,
        pipeline_of(2, ("a 1 4 1 2", 4)),
        sharded=True,
        job=CLIPPED,
    ),
    _unlike("ep4, sharded", MOE, pipeline_of(2, ("a 1 4 1 4", 4)), sharded=True, job=CLIPPED),
    _unlike("ep2, shards of 2", MOE, pipeline_of(2, ("a 1 4 1 2", 4)), shards=2),
    _unlike(
        "ep2, then ep1, recompute",
        MOE,
        pipeline_of(4, ("a 1 2 1 2", 2), ("b 1 2 1 1", 2), recompute="fn"),
    ),
    _unlike("ep2 x tp2", MOE, pipeline_of(4, ("a 2 2 1 2", 4)), job=CLIPPED),
    _unlike(
        "ep2 and ep1 of two pipelines",
        MOE,
        pipeline_of(2, ("a 1 2 1 2", 4)),
        pipeline_of(4, ("b 1 1 1 1", 2), ("b 1 1 1 1", 2)),
    ),
    MIXED,
    _unlike("latent attention, ep2 x tp2", LATENT, pipeline_of(4, ("a 2 2 1 2", 4)), job=CLIPPED),
)
LATENTS = (
    _unlike(
        "latent keys, tp2 to tp1",
        LATENT_KEYS,
        pipeline_of(4, ("a 2 1 2", 2), ("b 1 2 1", 2)),
        job=CLIPPED,
    ),
)
CASES = PLAIN + UNLIKE + EXPERTS + LATENTS
SMOKE = CASES[::3]
"""Trained at once; the others are slow."""


# ---- one process that saves

SAVED_MODEL, SAVED_JOB = gpt(num_layers=1), job(2)


def saving(request: CheckpointRequest, steps: int) -> Training:
    """That model trained by one process."""
    return Training(
        model=SAVED_MODEL,
        job=SAVED_JOB,
        plan=plan_of(SAVED_MODEL, SAVED_JOB, (1,)),
        device_kinds=("cpu",),
        backend="cpu",
        pace=None,
        steps=steps,
        warmup_steps=0,
        timeout_seconds=60.0,
        checkpoints=request,
    )
