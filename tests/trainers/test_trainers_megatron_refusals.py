"""What Megatron-LM cannot be told is refused, with what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainer_models import llama
from trainer_plans import (
    cluster,
    here,
    island,
    job_of,
    megatron,
    messages,
    outermost_results,
    random_results,
    stage_per_island,
    with_job,
    with_plan,
    with_stages,
)

from hetplan.job.spec import Optimizer, TrainerOptions
from hetplan.model.layers import LatentAttention, LayerRun, Norm, TransformerLayer
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Sharding,
)
from hetplan.schedulers.launch import EmissionOptions
from hetplan.trainers.emission import emission_for, refusals
from hetplan.trainers.megatron.mindspeed import TRAINER as MINDSPEED
from hetplan.trainers.megatron.model import model_faults
from hetplan.trainers.megatron.parallel import degrees_of
from hetplan.trainers.megatron.write import TRAINER as MEGATRON


def test_devices_of_two_libraries_are_refused_unless_the_trainer_is_patched() -> None:
    result = stage_per_island(cluster(island("a", "n"), island("b", "n", kind="amd-mi300x")), 3, 5)
    (fault,) = refusals(result, MEGATRON, EmissionOptions())
    assert "2 libraries of collectives (nccl on nvidia-a100-80gb-sxm; rccl on amd-mi300x)" in str(
        fault
    )
    assert "for flagscale or native" in fault.message
    assert "inputs.job.trainer.mixed_libraries" in fault.message  # what its reader can change
    job = replace(result.inputs.job, trainer=TrainerOptions(mixed_libraries=True))
    patched = replace(result, inputs=replace(result.inputs, job=job))
    emission = emission_for(patched, MEGATRON, EmissionOptions())
    assert any("nccl and rccl, which stock megatron" in each for each in emission.ranks.remarks)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("huawei-ascend-910b2-64gb", "mindspeed"),
    ],
)
def test_devices_that_are_not_cuda_are_refused(kind: str, instead: str) -> None:
    (message,) = messages(stage_per_island(cluster(island("a", "n", kind=kind)), 4))
    assert instead in message


def _layers(**changes: object) -> ModelSpec:
    model = llama(8)
    layer = replace(model.layer_runs[0].layer, **changes)  # type: ignore[arg-type]
    return replace(model, layer_runs=(LayerRun(count=8, layer=layer),))


def _attention(**changes: object) -> ModelSpec:
    attention = llama(1).layer_runs[0].layer.attention
    return _layers(attention=replace(attention, **changes))  # type: ignore[arg-type]


def _two_layers(**changes: object) -> ModelSpec:
    model = llama(8)
    layer = model.layer_runs[0].layer
    other = replace(layer, **changes)  # type: ignore[arg-type]
    runs = (LayerRun(count=4, layer=layer), LayerRun(count=4, layer=other))
    return replace(model, layer_runs=runs)


def _latent(bias: bool) -> TransformerLayer:
    latent = LatentAttention(
        num_heads=32, query_rank=None, kv_rank=64, nope_head_dim=16, rope_head_dim=8,
        value_head_dim=16, bias=bias,
    )  # fmt: skip
    return replace(llama(1).layer_runs[0].layer, attention=latent)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (_layers(parallel_residual=True), "parallel residual"),
        (_layers(num_norms=4), "4 norms"),
        (_layers(norm=Norm.UNSCALED), "norms without weights"),
        (llama(8, final_norm=None), "no final norm"),
        (llama(8, final_norm=Norm.LAYER_NORM), "final norm"),
        (llama(8, head_bias=True), "bias in its head"),
        (_attention(output_bias=True), "biases on attention output"),
        (
            replace(_layers(norm=Norm.LAYER_NORM), final_norm=Norm.LAYER_NORM),
            "",
        ),
        (_two_layers(norm=Norm.LAYER_NORM), "differ in more than"),
        (llama(8, layer_runs=(LayerRun(count=8, layer=_latent(False)),)), ""),
    ],
)
def test_models_without_flags_are_refused(model: ModelSpec, said: str) -> None:
    found = [fault.message for fault in model_faults(model, job_of(8))]
    assert any(said in each for each in found) if said else not found, found


def test_settings_that_megatron_refuses() -> None:
    sharded = stage_per_island(cluster(island("a", "n"), island("b", "n")), 3, 5, tp=4, dp=4)
    wrong = (
        (with_job(sharded, optimizer=Optimizer.SGD), "pin sharded_optimizer: false"),
        (
            with_plan(sharded, sharding=Sharding.NONE, optimizer_shards=1, optimizer_offload=0.5),
            "pin sharded_optimizer: true",
        ),
        (here(trainer=TrainerOptions(scattered_sends=True)), "leave it out"),
        (
            with_stages(
                here(),
                recompute=Recompute(
                    granularity=RecomputeGranularity.SELECTIVE,
                    modules=(RecomputeModule.ACTIVATION,),
                ),
            ),
            "not in dense MLPs",
        ),
    )
    for result, said in wrong:
        assert any(said in message for message in messages(result)), said


def test_mindspeed_refuses_what_its_code_does_not_show() -> None:
    nvidia = next(random_results(megatron, seed=31, count=1))
    assert any("Ascend alone" in message for message in messages(nvidia, trainer=MINDSPEED))
    result = next(outermost_results())
    assert messages(result) != []
    wrong = with_plan(result, overlap=OverlapSettings(tensor_parallel=True))
    (message,) = messages(wrong, trainer=MINDSPEED)
    assert "found in neither MindSpeed's code" in message


def test_context_parallel_faults() -> None:
    for result in random_results(megatron, seed=9, count=10_000):
        degrees = degrees_of(result.plan)
        if degrees.cp > 1 and degrees.tp == 8 and result.inputs.model.name == "llama":
            break
    assert messages(result) == []
    exchange = with_job(result, trainer=TrainerOptions(context_exchange=True))
    assert any("key-value heads for cp" in message for message in messages(exchange))
    off = with_plan(result, overlap=replace(result.plan.overlap, context_parallel=False))
    assert any("overlap.context_parallel" in message for message in messages(off))
