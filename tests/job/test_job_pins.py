"""Pins of every kind are read; what no plan can keep is named with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_document
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.job.spec import Job, Pins, RecomputeModule, Sharding
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.load import load_model
from hetplan.model.spec import ModelSpec
from hetplan.plans.check_job import check_job_against

CONFIGS = shipped_folder("configs")

TEXT = """schema: hetplan.job/7
name: small
global_batch_size: 96
sequence_length: 2048
precision: bfloat16
optimizer: adamw
target: megatron
objective: step_time
pin: {tp: 4}
"""


def load(tmp_path: Path, pin: str, *, target: str = "megatron", objective: str = "") -> Job:
    text = TEXT.replace("{tp: 4}", pin).replace("megatron", target)
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("step_time", objective or "step_time"))
    return load_job(path)


def cluster() -> Cluster:
    return load_cluster(CONFIGS / "clusters" / "two-regions.yaml")


def model(*, experts: bool = False) -> ModelSpec:
    plain = load_model(CONFIGS / "models" / "llama-2-7b.yaml")
    if not experts:
        return plain
    mlp = Experts(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=1024)
    run = plain.layer_runs[0]
    layer = replace(run.layer, mlp=mlp)
    return replace(plain, layer_runs=(LayerRun(count=run.count, layer=layer),))


def found(tmp_path: Path, job: Job, *, experts: bool = False) -> tuple[Fault, ...]:
    document = read_document(tmp_path / "job.yaml")
    return check_job_against(job, model(experts=experts), cluster(), document)


def test_every_pin_is_read(tmp_path: Path) -> None:
    pin = (
        "{tp: 4, cp: 2, ep: 1, dp: 3, pp: 8, microbatch_size: 2, virtual_stages: 2, "
        "recompute: false, sequence_parallel: true, sharded_optimizer: true, pipelines: 1, "
        "same_degrees: true, depth: 0, embedding_on: a100, head_on: mi250x, "
        "sharding: optimizer, optimizer_offload: 0.5, recompute_modules: [core_attn, mlp]}"
    )
    assert load(tmp_path, pin).pin == Pins(
        tp=4,
        cp=2,
        ep=1,
        dp=3,
        pp=8,
        microbatch_size=2,
        virtual_stages=2,
        recompute=False,
        sequence_parallel=True,
        sharded_optimizer=True,
        pipelines=1,
        same_degrees=True,
        depth=0,
        embedding_on="a100",
        head_on="mi250x",
        sharding=Sharding.OPTIMIZER,
        optimizer_offload=0.5,
        recompute_modules=(RecomputeModule.CORE_ATTENTION, RecomputeModule.MLP),
    )


@pytest.mark.parametrize(
    "quantile",
    [
        "0.991",
        ".nan",
    ],
)
def test_quantiles_outside_are_refused_with_their_line(tmp_path: Path, quantile: str) -> None:
    with pytest.raises(InputError) as raised:
        load(tmp_path, "{}", objective=f"step_time\nquantile: {quantile}")
    assert "job.yaml:9: quantile: " in str(raised.value)


@pytest.mark.parametrize(
    ("target", "pin", "experts", "field", "words"),
    [
        ("native", "{cp: 2}", False, "pin.cp", "native has no context parallelism"),
        ("flagscale", "{cp: 2}", False, "pin.cp", "or plan for megatron or torchtitan or any"),
        (
            "torchtitan",
            "{cp: 2, sharded_optimizer: false}",
            False,
            "pin.sharded_optimizer",
            "shards over context-parallel ranks",
        ),
        ("megatron", "{cp: 3}", False, "pin.cp", "not a multiple of 2 x cp 3"),
        ("megatron", "{ep: 3}", True, "pin.ep", "3 does not divide the 8 experts"),
        (
            "native",
            "{ep: 4, tp: 2, cp: 1, dp: 2}",
            True,
            "pin.ep",
            "4 does not divide cp 1 x dp 2 = 2 ranks",
        ),
        (
            "torchtitan",
            "{pp: 16, dp: 8, microbatch_size: 1}",
            False,
            "pin.pp",
            "16 stages, and the other pins leave 12 microbatches",
        ),
        (
            "megatron",
            "{pp: 16, virtual_stages: 3}",
            False,
            "pin.virtual_stages",
            "3 on 16 stages are 48 parts, llama-2-7b has 32 transformer layers",
        ),
        (
            "megatron",
            "{optimizer_offload: 1}",
            False,
            "pin.optimizer_offload",
            'add host_memory (of one node, as in "host_memory: 256 GiB"), or remove the pin',
        ),
        (
            "torchtitan",
            "{optimizer_offload: 0.5}",
            False,
            "pin.optimizer_offload",
            "plan for megatron or any",
        ),
        ("megatron", "{sharding: gradients}", False, "pin.sharding", "has none, optimizer: pin"),
        (
            "torchtitan",
            "{sharding: parameters, pp: 2}",
            False,
            "pin.sharding",
            "parameters with pp 2; it is searched in one stage",
        ),
        (
            "any",
            "{sharding: none, sharded_optimizer: true}",
            False,
            "pin.sharding",
            "none with sharded_optimizer true",
        ),
        (
            "native",
            "{recompute_modules: [mlp]}",
            False,
            "pin.recompute_modules",
            "can recompute none alone",
        ),
        (
            "megatron",
            "{recompute_modules: [moe]}",
            False,
            "pin.recompute_modules",
            "has no experts: leave moe out",
        ),
        ("native", "{virtual_stages: 2, depth: 1}", False, "pin.depth", "it goes with 1f1b"),
        ("megatron", "{schedule: zbv}", False, "pin.schedule", "or plan for torchtitan or any"),
        (
            "torchtitan",
            "{schedule: v-min}",
            False,
            "pin.schedule",
            "has 1f1b, interleaved-1f1b",
        ),
        ("torchtitan", "{schedule: zbv, virtual_stages: 3}", False, "pin.schedule", "remove one"),
        ("torchtitan", "{schedule: zb-h1, pp: 1}", False, "pin.schedule", "two stages or more"),
        ("torchtitan", "{schedule: zbv, pp: 20}", False, "pin.pp", "at most 16"),
        (
            "torchtitan",
            "{schedule: dualpipev, pp: 8, dp: 8, microbatch_size: 1}",
            False,
            "pin.pp",
            "leave 12 microbatches; it needs two per stage",
        ),
        ("native", "{pipelines: 96, tp: 8, pp: 2}", False, "pin", "at least 1536 devices"),
    ],
)
def test_contradictions_are_named_with_their_line(
    tmp_path: Path, target: str, pin: str, experts: bool, field: str, words: str
) -> None:
    faults = found(tmp_path, load(tmp_path, pin, target=target), experts=experts)
    named = [fault for fault in faults if fault.field == field]
    assert [fault.line for fault in named] == [9], faults
    assert words in named[0].message


def test_cost_per_token_needs_prices(tmp_path: Path) -> None:
    job = load(tmp_path, "{}", objective="cost_per_token")
    bare = tuple(replace(each, price_usd_per_device_hour=None) for each in cluster().islands)
    (fault,) = check_job_against(
        job, model(), replace(cluster(), islands=bare), read_document(tmp_path / "job.yaml")
    )
    assert (fault.line, fault.field) == (8, "objective")
    assert bare[0].name in fault.message
    priced = tuple(replace(each, price_usd_per_device_hour=2.0) for each in bare)
    assert check_job_against(job, model(), replace(cluster(), islands=priced)) == ()
    energetic = load(tmp_path, "{}", objective="energy")
    (fault,) = check_job_against(energetic, model(), replace(cluster(), islands=dark(0.0)))
    assert "no known power" in fault.message
    assert check_job_against(energetic, model(), replace(cluster(), islands=dark(700.0))) == ()


def dark(watts: float) -> tuple[Island, ...]:
    """The cluster's islands with such a limit of their boards."""
    return tuple(
        replace(each, power_watts=None, device=replace(each.device, max_power_watts=watts))
        for each in cluster().islands
    )
