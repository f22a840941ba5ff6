"""Small models, clusters and plans that the tests of runtime and launchers train."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.build import Degrees, StageChoice, build_plan
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan

SHAPE: dict[str, object] = {
    "name": "tiny-gpt",
    "architecture": Architecture.GPT,
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "max_sequence_length": 16,
}


def gpt(**changes: object) -> ModelSpec:
    return plain_model(**(SHAPE | changes))  # type: ignore[arg-type]


def llama(**changes: object) -> ModelSpec:
    shape = {"name": "tiny-llama", "architecture": Architecture.LLAMA, "num_kv_heads": 2}
    return gpt(**(shape | {"ffn_hidden_size": 48} | changes))


GPT = gpt()
LLAMA = llama()
LINK = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5, transport=Transport.HOST_STAGED)


def island(name: str, kind: str, devices: int) -> Island:
    device = DeviceKind(
        kind=kind,
        vendor="test",
        peak_flops_per_second=(("float32", 1e10),),
        memory_bytes=1e9,
        memory_bandwidth_bytes_per_second=1e10,
        provenance="datasheet",
        source="test",
    )
    return Island(
        name=name,
        region="here",
        device=device,
        nodes=1,
        devices_per_node=devices,
        intra_node=LINK,
        inter_node=LINK,
        memory_bytes=1e9,
    )


def cluster(*islands: Island) -> Cluster:
    return Cluster(
        name="test",
        islands=islands,
        links=tuple(
            IslandLink(between=(one.name, two.name), link=LINK)
            for index, one in enumerate(islands)
            for two in islands[index + 1 :]
        ),
    )


CPUS = cluster(island("a", "cpu", 4))


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
        Degrees(**{"tp": 1, "dp": 1, "microbatch_size": 1, **degrees}),
    )
    assert check_plan(plan, model, machines, task) == ()
    return plan


@dataclass(frozen=True)
class Case:
    name: str
    model: ModelSpec
    job: Job
    plan: Plan
    steps: int = 4


def _case(name: str, model: ModelSpec, layers: tuple[int, ...], **degrees: object) -> Case:
    steps = degrees.pop("steps", 4)
    task = degrees.pop("job", job())
    return Case(name, model, task, plan_of(model, task, layers, **degrees), steps)


ODD_GPT = replace(GPT, vocab_size=61)
TIED_GPT = replace(GPT, tied_embeddings=True)
TIED_LLAMA = replace(LLAMA, tied_embeddings=True)
CASES = (
    _case("one rank", GPT, (4,), microbatch_size=2),
    _case("pp2 uneven", GPT, (3, 1), microbatch_size=2, steps=20),
    _case("pp3 uneven, llama, recompute", LLAMA, (2, 1, 1), full_recompute=True, steps=3),
    _case("pp4, m = pp", LLAMA, (1, 1, 1, 1), microbatch_size=2),
    _case("dp2", LLAMA, (4,), dp=2, microbatch_size=2),
    _case("dp4, sgd", GPT, (4,), dp=4, job=job(optimizer=Optimizer.SGD)),
    _case("tp2, odd vocabulary", ODD_GPT, (4,), tp=2, microbatch_size=4, steps=3),
    _case("tp4, fewer kv heads", LLAMA, (4,), tp=4, microbatch_size=8, steps=3),
    _case("pp2 x tp2, tied", TIED_GPT, (1, 3), tp=2, microbatch_size=4, steps=3),
    _case("pp2 x dp2, tied, recompute", TIED_LLAMA, (3, 1), dp=2, full_recompute=True),
    _case("dp2 x tp2, tied", TIED_LLAMA, (4,), dp=2, tp=2, microbatch_size=4, steps=3),
)
