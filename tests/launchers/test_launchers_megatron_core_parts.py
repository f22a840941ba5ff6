"""What the megatron-core launcher refuses, how it lays out weights and stands in for a device."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from core_cases import core_result
from launch_results import result_of
from runtime_cases import CPUS, GPT, LLAMA, TIED_LLAMA, cluster, gpt, island, job, llama, plan_of

from hetplan.cli.launch import launch
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision, TrainerOptions
from hetplan.launchers import machine, megatron_core, megatron_core_shim
from hetplan.launchers.megatron_core import launch_with_core
from hetplan.launchers.megatron_core_plan import core_faults, core_places
from hetplan.launchers.megatron_core_weights import layer_values, stage_values
from hetplan.model.layers import LayerRun
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Sharding,
)
from hetplan.plans.ranks import rank_rows
from hetplan.profiling.layers import build_layer
from hetplan.search.files import save_result

MIXED = cluster(island("a", "fast", 2), island("b", "slow", 2))


def test_every_rank_stands_where_the_plan_lists_it() -> None:
    result = core_result(GPT, ((3,), (1,)), tp=2, microbatch_size=2)
    places = core_places(result.plan)
    rows = tuple(rank_rows(result.plan, CPUS))
    assert [(p.rank, p.device, p.stage, p.dp_index, p.tp_index) for p in places] == [
        (r.rank, r.device, r.stage, r.dp, r.tp) for r in rows
    ]


# ---- refusals


def refusals(result) -> str:
    return "\n".join(str(fault) for fault in core_faults(result))


def with_job(result, **changes):
    task = replace(result.inputs.job, **changes)
    return replace(result, inputs=replace(result.inputs, job=task))


def test_a_plan_of_target_native_runs_too() -> None:
    task = job()
    plan = plan_of(GPT, task, (3, 1), tp=2, microbatch_size=2)
    assert plan.padded_vocab_size == 64  # target megatron pads to 256
    assert refusals(result_of(GPT, CPUS, task, plan)) == ""


def test_what_megatron_cannot_express_is_refused() -> None:
    task = job()
    plan = plan_of(GPT, task, (3, 1), microbatch_size=2)
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, warmup_depth=2) for stage in pipeline.stages)
    deep = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    text = refusals(result_of(GPT, CPUS, task, deep))
    assert "target megatron always has [2, 1]" in text
    assert "plan again with --target megatron" in text


def test_an_illegal_plan_is_refused_once() -> None:
    result = core_result(GPT, ((3,), (1,)))
    (pipeline,) = result.plan.pipelines
    plan = replace(result.plan, pipelines=(replace(pipeline, num_microbatches=3),))
    assert refusals(replace(result, plan=plan)).count("global_batch_size is 8") == 1


def test_what_needs_other_libraries_is_refused() -> None:
    plain = core_result(GPT, ((3,), (1,)))
    norms = Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.NORMS,))
    assert "layernorm; hetplan launch has core_attn and mlp" in refusals(
        core_result(GPT, ((3,), (1,)), recompute=norms)
    )
    assert "tensor_parallel: megatron-core has it with Transformer" in refusals(
        core_result(
            GPT,
            ((4,),),
            tp=2,
            sequence_parallel=True,
            overlap=OverlapSettings(tensor_parallel=True),
        )
    )
    assert "replicas[0].cp: 2; megatron-core has it with" in refusals(
        core_result(GPT, ((4,),), cp=2, microbatch_size=2)
    )
    assert "optimizer_offload: 0.5" in refusals(
        replace(plain, plan=replace(plain.plan, optimizer_offload=0.5))
    )
    assert refusals(plain) == ""


def test_what_would_change_the_losses_is_refused() -> None:
    plain = core_result(GPT, ((3,), (1,)))
    assert "gradient_clipping: true" in refusals(with_job(plain, gradient_clipping=True))
    dropout = TrainerOptions(hidden_dropout=True)
    assert "hidden_dropout: on" in refusals(with_job(plain, trainer=dropout))
    other = replace(LLAMA.layer_runs[0].layer, parallel_residual=True)
    unlike = replace(LLAMA, layer_runs=(LayerRun(count=4, layer=other),))
    changed = replace(plain, inputs=replace(plain.inputs, model=unlike))
    assert "emit the plan for Megatron-LM" in refusals(changed)


def test_a_sharded_sgd_is_refused() -> None:
    result = core_result(GPT, ((4,),), dp=2, sharding=Sharding.OPTIMIZER)
    plan = replace(result.plan, optimizer="sgd")
    changed = with_job(replace(result, plan=plan), optimizer=Optimizer.SGD)
    assert "shards Adam's state only" in refusals(changed)


def test_all_reasons_of_this_machine_are_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_core, "_installed_version", lambda: "1")
    result = core_result(GPT, ((3,), (1,)), task=job(precision=Precision.BFLOAT16))
    with pytest.raises(InputError) as caught:
        launch_with_core(result, max_ranks=1)
    text = str(caught.value)
    assert "the plan has 2 ranks, one process each; the limit is 1" in text
    assert "bfloat16; the trainer has float32 on a cpu device" in text


def test_shards_inside_dp_need_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_core, "_installed_version", lambda: "1")
    result = core_result(GPT, ((4,),), dp=4, sharding=Sharding.OPTIMIZER)
    plan = replace(result.plan, optimizer_shards=2)
    with pytest.raises(InputError, match="on CPU cores megatron-core shards over all of dp"):
        launch_with_core(replace(result, plan=plan))


def test_accelerators_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_core, "_installed_version", lambda: "1")
    monkeypatch.setattr(machine, "_accelerators", list)
    task = job()
    plan = plan_of(GPT, task, (3, 1), MIXED, "ab", microbatch_size=2)
    with pytest.raises(InputError, match="this machine has no accelerator") as caught:
        launch_with_core(result_of(GPT, MIXED, task, plan))
    assert "--pace" not in str(caught.value)
    assert "cluster of kind cpu" in str(caught.value)


@pytest.mark.parametrize("missing", ["megatron", "megatron.core"])
def test_a_missing_megatron_core_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        megatron_core, "find_spec", lambda name: None if name == missing else found("json")
    )
    with pytest.raises(InputError, match="pip install megatron-core"):
        launch_with_core(core_result(GPT, ((3,), (1,))))


def with_model(result, **changes):
    model = replace(result.inputs.model, **changes)
    return replace(result, inputs=replace(result.inputs, model=model))


def test_rotary_positions_that_megatron_core_has_fixed_are_refused() -> None:
    plain = core_result(LLAMA, ((3,), (1,)))
    kinds = RotaryScalingKind
    good = RotaryScaling(kind=kinds.LLAMA3, factor=8.0, original_length=8192)
    for scaling in (good, RotaryScaling(kind=kinds.LINEAR, factor=2.0)):
        assert refusals(with_model(plain, rotary_scaling=scaling)) == ""
    for scaling in (
        RotaryScaling(kind=kinds.YARN, factor=4.0),
        replace(good, original_length=4096),
        replace(good, factor=None),
    ):
        assert "megatron-core's GPT has linear" in refusals(
            with_model(plain, rotary_scaling=scaling)
        )
    assert "hetplan launch has silu" in refusals(with_model(plain, activation=Activation.OTHER))


def test_losses_of_other_numerics_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_core, "_installed_version", lambda: "1")
    result = with_model(core_result(LLAMA, ((3,), (1,))), norm_epsilon=1e-6)
    with pytest.raises(InputError, match=r"the reference has norm_epsilon 1e-05 instead of 1e-06"):
        launch_with_core(result, check_loss=True)


# ---- the command


def test_the_command_starts_the_asked_trainer(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_result(core_result(GPT, ((3,), (1,))), path)
    asked = []

    def give(result, **settings):
        asked.append(settings)
        raise InputError("started")

    monkeypatch.setattr(megatron_core, "launch_with_core", give)
    with pytest.raises(InputError, match="started"):
        launch(path, target="megatron-core", steps=7)
    assert (asked[0]["steps"], asked[0]["warmup_steps"]) == (7, 1)
    with pytest.raises(InputError, match="--pace plays device kinds"):
        launch(path, target="megatron-core", pace=path)
    with pytest.raises(InputError, match="launches native and megatron-core"):
        launch(path, target="megatron")


# ---- weights


@pytest.mark.parametrize("model", [GPT, LLAMA, llama(num_kv_heads=1)], ids=["gpt", "gqa", "mqa"])
def test_the_ranks_slices_make_up_the_layer(model) -> None:
    whole = layer_values(model, 2, tp=1, tp_rank=0, seed=3)
    parts = [layer_values(model, 2, tp=2, tp_rank=rank, seed=3) for rank in range(2)]
    for name, value in whole.items():
        if name == "mlp.linear_fc1.weight" and model is not GPT:
            # Gate and up are cut on their own.
            gate_and_up = [part[name].chunk(2) for part in parts]
            joined = torch.cat([torch.cat(halves) for halves in zip(*gate_and_up, strict=True)])
        elif parts[0][name].shape == value.shape:
            joined = parts[1][name]
        else:
            dim = 0 if parts[0][name].shape[0] < value.shape[0] else 1
            joined = torch.cat([part[name] for part in parts], dim)
        assert torch.equal(joined, value), name


def test_queries_keys_and_values_stand_by_key_value_head() -> None:
    layer = build_layer(
        LLAMA, 1, tp=1, tp_rank=0, group=None, seed=3, dtype=torch.float32, device="cpu"
    )
    query, key, value = layer.qkv_weight.split([32, 16, 16])
    fused = layer_values(LLAMA, 1, tp=1, tp_rank=0, seed=3)["self_attention.linear_qkv.weight"]
    # Four query heads of 8 on two key-value heads.
    expected = [query[:16], key[:8], value[:8], query[16:], key[8:], value[8:]]
    assert torch.equal(fused, torch.cat(expected))


def test_the_padding_of_the_vocabulary_is_zero() -> None:
    model = gpt(vocab_size=61)
    sizes = {"padded_vocab_size": 128, "tp": 2, "tp_rank": 0, "seed": 3}
    first = dict(stage_values(model, range(6), **sizes))
    last = dict(stage_values(model, range(6), **{**sizes, "tp_rank": 1}))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert first[name].shape == last[name].shape == (64, 32)
        assert not first[name][61:].any()
        assert first[name][:61].all(dim=1).any()
        assert not last[name].any()


def test_a_tied_head_starts_as_the_embedding() -> None:
    sizes = {"padded_vocab_size": 128, "tp": 1, "tp_rank": 0, "seed": 3}
    values = dict(stage_values(TIED_LLAMA, range(6), **sizes))
    assert torch.equal(values["output_layer.weight"], values["embedding.word_embeddings.weight"])
    values = dict(stage_values(LLAMA, range(6), **sizes))
    assert not torch.equal(
        values["output_layer.weight"], values["embedding.word_embeddings.weight"]
    )


# ---- standing in for an accelerator


def test_factories_make_cpu_tensors_where_an_accelerator_is_asked_for() -> None:
    zeros = megatron_core_shim._on_cpu(torch.zeros)
    assert zeros([2], device="cuda").device.type == "cpu"
    assert zeros([2], device=torch.device("cuda", 1)).device.type == "cpu"
    assert zeros([2], device="meta").device.type == "meta"
    assert zeros(2, 3).shape == (2, 3)


def test_types_are_named_as_an_accelerators() -> None:
    named = megatron_core_shim._accelerator_names(torch.Tensor.type)
    assert named(torch.zeros(1)) == "torch.cuda.FloatTensor"
    assert named(torch.zeros(1, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"
    assert named(torch.zeros(1), torch.float64).dtype == torch.float64
