"""What is emitted for Megatron-DeepSpeed, and why most plans are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from emit_cases import JOB, MODEL, TIED, cluster, island
from flagscale_plans import A100, FULL, MI300, legal, planned, stage
from hypothesis import given
from hypothesis import strategies as st

from hetplan.emitters.deepspeed.partition import balanced_cuts, transformer_layers
from hetplan.emitters.deepspeed.trainer import TRAINER
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, TrainerLaunch
from hetplan.job.spec import Job, LengthShare, Precision, TrainerOptions
from hetplan.model.layers import Attention, Experts, LayerRun
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import OverlapSettings, Plan, Recompute, RecomputeGranularity, Sharding
from hetplan.search.result import SearchResult

MACHINES = cluster(island("a", nodes=4), island("b", nodes=4))
OPTIONS = EmitOptions(data=("/data/text",), tokenizer="/tokenizer", learning_rate=3e-4)
SMALL = 7


def listed_partition(weights: list[int], parts: int) -> list[int]:
    """DeepSpeed's recurrence, number by number: tables (entries, parts) of top, low and spread."""
    total = len(weights)
    if total <= parts:
        return [min(part, total) for part in range(parts + 1)]
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {}
    none = (float("inf"), float("inf"), float("inf"), 0)
    best[0, 0] = (0.0, float("inf"), 0.0, 0)
    for stop in range(1, total + 1):
        for count in range(1, min(stop, parts) + 1):
            found = none
            for start in range(stop):
                before = best.get((start, count - 1), none)
                own = float(sum(weights[start:stop]))
                top, low = max(before[0], own), min(before[1], own)
                if found[2] >= top - low:
                    found = (top, low, top - low, start)
            best[stop, count] = found
    cuts = [total]
    for count in range(parts, 0, -1):
        cuts.append(best[cuts[-1], count][3])
    return cuts[::-1]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, SMALL))
def test_cuts_follow_the_recurrence(weights: list[int], parts: int) -> None:
    assert [*balanced_cuts(weights, parts)] == listed_partition(weights, parts)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    # Printed by partition_balanced of DeepSpeed 0.19.6 for GPTModelPipe's entries in bfloat16.
    [
        (12, 4, (3, 3, 3, 3)),
        (30, 4, (8, 8, 7, 7)),
        (12, 5, (3, 3, 2, 2, 2)),
    ],
)
def test_known_cuts(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert transformer_layers(layers, stages, mixed=True) == expected


@given(st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_cuts_hold_every_layer(layers: int, stages: int, mixed: bool) -> None:
    held = transformer_layers(layers, stages, mixed=mixed)
    assert (len(held), sum(held)) == (stages, layers)
    if layers >= stages:
        assert max(held) - min(held) <= 1
    cuts = balanced_cuts([0, 0] + [1] * layers + [0] * (2 + mixed), stages)
    assert all(left <= right for left, right in pairwise(cuts))


# ---- launches


def plan_with(
    *layers: int, tp: int = 2, dp: int = 2, job: Job = JOB, model: ModelSpec = MODEL
) -> Plan:
    sharding = Sharding.OPTIMIZER if dp > 1 else Sharding.NONE
    stages = [
        stage("ab"[2 * at // len(layers)], count, tp=tp, dp=dp, sequence_parallel=False)
        for at, count in enumerate(layers)
    ]
    return planned(MACHINES, *stages, model=model, sharding=sharding, job=job)


def case(plan: Plan, model: ModelSpec = MODEL, job: Job = JOB) -> tuple[SearchResult, LaunchSheet]:
    return legal(MACHINES, plan, model, job)


def launched(
    made: tuple[SearchResult, LaunchSheet], options: EmitOptions = OPTIONS
) -> TrainerLaunch:
    assert TRAINER.faults(*made, options) == ()
    return TRAINER.launch(*made, options)


def faults(made: tuple[SearchResult, LaunchSheet], options: EmitOptions = OPTIONS) -> list[str]:
    return [f"{each.field}: {each.message}" for each in TRAINER.faults(*made, options)]


def test_an_even_plan_is_a_launch() -> None:
    plan = plan_with(3, 3, 3, 3)
    launch = launched(case(plan))
    (file,) = launch.files
    assert file.path == "ds_config.json"
    config = json.loads(file.text)
    count = plan.pipelines[0].num_microbatches
    assert config["train_batch_size"] == JOB.global_batch_size
    assert (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2 == 64
    )
    assert config["gradient_accumulation_steps"] == count
    assert config["zero_optimization"] == {"stage": 1}
    assert config["bf16"] == {"enabled": True}
    assert config["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    for argument in (
        ("--pipeline-model-parallel-size", "4"),
        ("--tensor-model-parallel-size", "2"),
        ("--num-key-value-heads", "16"),
        ("--normalization", "rmsnorm"),
        ("--swiglu",),
        ("--deepspeed_config", "{folder}/ds_config.json"),
        ("--zero-stage", "1"),
        ("--lr", "0.0003"),
    ):
        assert argument in launch.arguments
    assert any("cuts by itself" in remark for remark in launch.remarks)
    assert any("blocking_sends" in remark for remark in launch.remarks)


def test_one_stage_runs_without_the_pipeline() -> None:
    launch = launched(case(plan_with(12)))
    assert ("--no-pipeline-parallel",) in launch.arguments
    assert not any("cuts by itself" in remark for remark in launch.remarks)


def test_float32_needs_no_sharding() -> None:
    job = replace(JOB, precision=Precision.FLOAT32)
    plan = replace(plan_with(6, 6, dp=2, job=job), sharding=Sharding.NONE, optimizer_shards=1)
    config = json.loads(launched(case(plan, job=job)).files[0].text)
    assert config["zero_optimization"] == {"stage": 0}
    assert "bf16" not in config


def test_settings_of_its_pipeline_can_be_priced() -> None:
    job = replace(JOB, trainer=TrainerOptions(blocking_sends=True, scattered_sends=True))
    launch = launched(case(plan_with(6, 6, job=job), job=job))
    config = json.loads(launch.files[0].text)
    assert config["pipeline"]["pipe_partitioned"] is True
    assert not any("blocking_sends" in remark for remark in launch.remarks)


def test_learned_positions_and_tied_matrices_are_its_own() -> None:
    launch = launched(case(plan_with(6, 6, model=TIED), TIED))
    flags = {argument[0] for argument in launch.arguments}
    assert "--untie-embeddings-and-output-weights" not in flags
    assert "--use-rotary-position-embeddings" not in flags
    assert "--disable-bias-linear" not in flags
    assert ("--normalization", "layernorm") in launch.arguments


def test_what_the_model_computes_with_its_weights() -> None:
    model = replace(MODEL, norm_epsilon=1e-6, rotary_base=500000.0, activation=Activation.SILU)
    launch = launched(case(plan_with(6, 6, model=model), model))
    assert ("--layernorm-epsilon", "1e-06") in launch.arguments
    assert ("--rotary-position-embeddings-theta", "500000") in launch.arguments
    assert not any("does not say" in remark for remark in launch.remarks)
    plain = launched(case(plan_with(6, 6)))
    assert sum("does not say" in remark for remark in plain.remarks) == 1
    exact = replace(TIED, activation=Activation.GELU)
    gelu = launched(case(plan_with(6, 6, model=exact), exact))
    assert ("--no-bias-gelu-fusion",) in gelu.arguments


# ---- what is refused


def test_stretched_positions_are_refused() -> None:
    scaling = RotaryScaling(
        kind=RotaryScalingKind.LLAMA3,
        factor=8.0,
        original_length=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    )
    model = replace(MODEL, rotary_scaling=scaling)
    assert any("stretched" in each for each in faults(case(plan_with(6, 6, model=model), model)))


def test_an_uneven_plan_is_refused_with_the_cut_that_it_makes() -> None:
    (fault,) = faults(case(plan_with(7, 5)))
    assert fault.startswith("plan.pipelines[0].stages: hold 7, 5 transformer layers")
    assert "cuts 12 into 6, 6" in fault


def test_unsharded_bfloat16_is_refused() -> None:
    plan = replace(plan_with(6, 6), sharding=Sharding.NONE, optimizer_shards=1)
    assert any("sharded_optimizer: true" in each for each in faults(case(plan)))


def test_sequence_parallelism_and_overlap_are_refused() -> None:
    plan = planned(MACHINES, stage("a", 6, tp=2, dp=1), stage("b", 6, tp=2, dp=1), job=JOB)
    plan = replace(plan, overlap=OverlapSettings(reduction=True))
    found = faults(case(plan))
    assert any("pin sequence_parallel: false" in each for each in found)
    assert any(each.startswith("plan.overlap.reduction") for each in found)


def test_recomputing_parts_is_refused() -> None:
    full = planned(
        MACHINES,
        stage("a", 6, tp=2, dp=1, recompute=FULL, sequence_parallel=False),
        stage("b", 6, tp=2, dp=1, recompute=FULL, sequence_parallel=False),
        job=JOB,
    )
    assert ("--recompute-num-layers", "1") in launched(case(full)).arguments
    pipeline = full.pipelines[0]
    some = Recompute(granularity=RecomputeGranularity.FULL, layers=2)
    stages = tuple(replace(each, recompute=some) for each in pipeline.stages)
    plan = replace(full, pipelines=(replace(pipeline, stages=stages),))
    assert any("recomputes every layer" in each for each in faults(case(plan)))


def test_without_data_nothing_can_be_trained() -> None:
    found = faults(case(plan_with(6, 6)), EmitOptions())
    assert [each.split(":")[0] for each in found] == ["--data", "--tokenizer", "--learning-rate"]


_LAYER = MODEL.layer_runs[0].layer
_ATTENTION = _LAYER.attention
assert isinstance(_ATTENTION, Attention)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (replace(_LAYER, attention=replace(_ATTENTION, qk_norm=True)), "query and key norms"),
        (replace(_LAYER, attention=replace(_ATTENTION, head_dim=32)), "do not make up"),
        (replace(_LAYER, attention=replace(_ATTENTION, window=128)), "windows"),
        (replace(_LAYER, attention=replace(_ATTENTION, qkv_bias=True)), "some matrices alone"),
        (
            replace(
                _LAYER,
                mlp=Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=64),
            ),
            "experts",
        ),
    ],
)
def test_models_that_it_has_no_words_for_are_refused(layer: object, message: str) -> None:
    model = replace(MODEL, layer_runs=(LayerRun(count=12, layer=layer),))  # type: ignore[arg-type]
    result, sheet = case(plan_with(6, 6))
    other = replace(result, inputs=replace(result.inputs, model=model))
    assert any(message in each for each in faults((other, sheet)))


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, precision=Precision.FLOAT16),
        replace(JOB, trainer=TrainerOptions(fused_loss=True)),
        replace(JOB, trainer=TrainerOptions(gradient_precision=Precision.BFLOAT16)),
        replace(JOB, sequence_lengths=(LengthShare(length=128, share=1.0),)),
    ],
)
def test_jobs_that_it_cannot_run_are_refused(job: Job) -> None:
    result, sheet = case(plan_with(6, 6))
    other = replace(result, inputs=replace(result.inputs, job=job))
    assert any(each.startswith("inputs.job") for each in faults((other, sheet)))


def test_vendors_that_cannot_talk_are_refused() -> None:
    machines = cluster(island("a", kind=A100), island("b", kind=MI300))
    plan = planned(
        machines,
        stage("a", 6, tp=2, dp=1, sequence_parallel=False),
        stage("b", 6, tp=2, dp=1, sequence_parallel=False),
        job=JOB,
    )
    assert any("nccl, rccl" in each for each in faults(legal(machines, plan, MODEL, JOB)))
    slow = cluster(island("a", kind="cpu"))
    plan = planned(slow, stage("a", 12, tp=1, dp=1), job=replace(JOB, precision=Precision.FLOAT32))
    made = legal(slow, plan, MODEL, replace(JOB, precision=Precision.FLOAT32))
    assert any("torch calls cuda" in each for each in faults(made))


def test_its_own_cut_can_be_asked_for() -> None:
    result, _ = case(plan_with(7, 5))
    assert TRAINER.own_cut is not None
    assert TRAINER.own_cut(result) == (6, 6)
