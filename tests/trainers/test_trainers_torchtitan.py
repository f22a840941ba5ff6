"""What is emitted for torchtitan cuts the model as planned; its own code reads it where it is."""

from __future__ import annotations

import ast
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_models import MODEL, TIED
from trainer_plans import (
    JOB,
    NO_OPTIONS,
    NONE,
    cluster,
    island,
    made,
    one_pipeline,
    random_results,
    ranks_of,
    stage,
    torchtitan,
)

from hetplan.job.spec import Job, LengthShare, Optimizer, Precision, TrainerOptions
from hetplan.model.layers import Attention, Experts, LayerRun, Norm
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Sharding
from hetplan.plans.ranks import rank_rows
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.trainers.torchtitan.write import TRAINER

TITAN_JOB = replace(JOB, target="torchtitan")
MACHINES = cluster(island("a"), island("b"))
Case = tuple[SearchResult, RankLayout]


def case_of(
    model: ModelSpec = MODEL,
    job: Job = TITAN_JOB,
    *,
    layers: tuple[int, ...] = (7, 5),
    **more: bool,
) -> Case:
    """A stage on each island, tp 2 and dp 2."""
    shape = {"tp": 2, "dp": 2, "microbatch_size": 1, "sequence_parallel": True}
    stages = (stage(name, count, **shape) for name, count in zip("ab", layers, strict=False))
    result = made(MACHINES, one_pipeline(*stages, microbatches=32), model, job, **more)
    return result, ranks_of(result)


def launched(case: Case, options: EmissionOptions = NO_OPTIONS) -> TrainerLaunch:
    assert TRAINER.faults(*case, options) == ()
    return TRAINER.launch(*case, options)


def faults(case: Case, options: EmissionOptions = NO_OPTIONS) -> list[str]:
    return [f"{each.field}: {each.message}" for each in TRAINER.faults(*case, options)]


def values(launch: TrainerLaunch) -> dict[str, tuple[str, ...]]:
    return {name: tuple(rest) for name, *rest in launch.arguments}


def number(launch: TrainerLaunch, name: str) -> int:
    return int(values(launch)[f"--{name}"][0])


def coordinates(launch: TrainerLaunch) -> list[tuple[int, int, int, int]]:
    """(pp, dp, cp, tp) of every rank: torchtitan's mesh, row by row (parallel_dims.py)."""
    sizes = [
        number(launch, f"parallelism.{name}_degree")
        for name in (
            *("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard"),
            *("context_parallel", "tensor_parallel"),
        )
    ]
    rows = itertools.product(*(range(size) for size in sizes))
    return [(pp, copy * sizes[2] + shard, cp, tp) for pp, copy, shard, cp, tp in rows]


def test_every_rank_holds_its_layers() -> None:
    for result in random_results(torchtitan, seed=1, count=30):
        check_layers(result, ranks_of(result))


def check_layers(result: SearchResult, sheet: RankLayout) -> None:
    launch = launched((result, sheet))
    plan = result.plan
    stages = plan.pipelines[0].stages
    rows = [*rank_rows(plan, result.inputs.cluster)]
    assert [(row.stage, row.dp, row.cp, row.tp) for row in rows] == coordinates(launch)
    if len(stages) > 1:
        lists = [
            part.split(",") for part in values(launch)["--parallelism.module_fqns_per_model_part"]
        ]
        everything = ["tok_embeddings", *(f"layers.{n}" for n in range(12)), "norm", "lm_head"]
        assert [name for part in lists for name in part] == everything
        for s, stage in enumerate(stages):
            # Looped schedules give rank s the lists s, s + P, ...
            held = [name for part in lists[s :: len(stages)] for name in part]
            expected = [
                name
                for chunk in stage.chunks
                for position in range(chunk.start, chunk.stop)
                for name in (
                    ["tok_embeddings"]
                    if position == 0
                    else [f"layers.{position - 1}"]
                    if position < 13
                    else ["norm", "lm_head"]
                )
            ]
            assert held == expected
    check_batch(result, launch)


def check_batch(result: SearchResult, launch: TrainerLaunch) -> None:
    plan = result.plan
    local, total = (
        number(launch, "training.local_batch_size"),
        number(launch, "training.global_batch_size"),
    )
    copies = number(launch, "parallelism.data_parallel_replicate_degree") * number(
        launch, "parallelism.data_parallel_shard_degree"
    )
    accumulated, rest = divmod(total, local * copies)
    assert rest == 0
    pipeline = plan.pipelines[0]
    if len(pipeline.stages) > 1:
        size = number(launch, "parallelism.pipeline_parallel_microbatch_size")
        assert (accumulated, local // size) == (1, pipeline.num_microbatches)
    else:
        assert accumulated == pipeline.num_microbatches
    shards = number(launch, "parallelism.data_parallel_shard_degree") * number(
        launch, "parallelism.context_parallel_degree"
    )
    assert shards == (plan.optimizer_shards if plan.sharding is not Sharding.NONE else 1)


def test_the_model_stands_in_a_module() -> None:
    launch = launched(case_of())
    (file,) = launch.files
    assert file.path == "hetplan_torchtitan.py"
    tree = ast.parse(file.text)
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert constants == {
        "LAYERS": 12,
        "HIDDEN": 1024,
        "FFN_HIDDEN": 2816,
        "HEADS": 16,
        "KEY_VALUE_HEADS": 16,
        "HEAD_DIM": 64,
        "VOCABULARY": 32000,
        "MAX_SEQUENCE_LENGTH": 2048,
        "TIED": False,
        "NORM_EPSILON": 1e-05,
        "ROTARY_BASE": 500000,
        "ROTARY_SCALING": {"scaling": "none"},
    }
    assert values(launch)["--module"] == ("hetplan_torchtitan",)
    assert launch.arguments[-1] == ("activation_checkpoint:none",)
    assert dict(launch.environment)["PYTHONPATH"] == "{folder}"


def test_a_name_cannot_leave_its_text() -> None:
    name = 'x", model=__import__("os").system("reboot"), y="'
    model = replace(MODEL, name=name)
    launch = launched(case_of(model))
    tree = ast.parse(launch.files[0].text)
    assert name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


# ---- what is refused


def test_tied_embeddings_with_stages_are_refused() -> None:
    model = replace(MODEL, tied_embeddings=True)
    assert any("pin pp: 1" in each for each in faults(case_of(model, legal=False)))
    launch = launched(case_of(model, layers=(12,)))
    assert "TIED = True" in launch.files[0].text


_LAYER = MODEL.layer_runs[0].layer
_ATTENTION = _LAYER.attention
assert isinstance(_ATTENTION, Attention)


def with_layer(**changes: object) -> ModelSpec:
    layer = replace(_LAYER, **changes)  # type: ignore[arg-type]
    return replace(MODEL, layer_runs=(LayerRun(count=12, layer=layer),))


def test_what_it_has_not_is_refused() -> None:
    experts = Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=64)
    yarn = RotaryScaling(kind=RotaryScalingKind.YARN, factor=4.0)
    for model, message in (
        (TIED, "no rotary positions"),
        (replace(MODEL, activation=Activation.GELU_TANH), "a gate with gelu_tanh"),
        (replace(MODEL, rotary_scaling=yarn), "yarn stretching"),
        (replace(MODEL, final_norm=Norm.LAYER_NORM), "without RMSNorm"),
        (with_layer(mlp=experts), "experts"),
        (with_layer(attention=replace(_ATTENTION, qk_norm=True)), "query and key norms"),
    ):
        found = faults(case_of(model, legal=False))
        assert any(message in each for each in found), message
    lengths = (LengthShare(length=128, share=1.0),)
    for job, field in (
        (replace(TITAN_JOB, precision=Precision.FLOAT16), "inputs.job.precision"),
        (replace(TITAN_JOB, optimizer=Optimizer.SGD), "inputs.job.optimizer"),
        (replace(TITAN_JOB, sequence_lengths=lengths), "inputs.job.packing"),
    ):
        found = faults(case_of(job=job, legal=False))
        assert any(each.startswith(field) for each in found), field


# ---- torchtitan's own code, where it is installed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore")
def test_its_own_code_reads_the_configuration(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ConfigManager, the model's checks of degrees and the whole model on the meta device."""
    pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed")
    (result,) = random_results(torchtitan, seed=seed, count=1)
    launch = launched((result, ranks_of(result)))
    (tmp_path / launch.files[0].path).write_text(launch.files[0].text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hetplan_torchtitan", raising=False)
    import torch
    from torchtitan.config import ConfigManager

    words = [word for argument in launch.arguments for word in argument]
    config = ConfigManager().parse_args(words)
    assert config.training.seq_len == JOB.sequence_length
    degrees = config.parallelism
    assert degrees.pipeline_parallel_degree == len(result.plan.pipelines[0].stages)
    recompute = result.plan.pipelines[0].stages[0].recompute.granularity
    assert (config.activation_checkpoint is None) == (recompute is NONE)
    model = config.model_spec.model
    model.update_from_config(config=config)
    with torch.device("meta"):
        built = model.build()
    assert sum(weight.numel() for weight in built.parameters()) == MODEL.parameter_count
    names = {name for name, _ in built.named_children()} | {
        f"layers.{n}" for n, _ in built.layers.named_children()
    }
    for part in degrees.module_fqns_per_model_part or []:
        assert names.issuperset(part)


@pytest.mark.parametrize("fused", [None, False, True])
def test_layers_are_compiled_where_their_kernels_are_priced_as_fused(fused: bool | None) -> None:
    job = replace(TITAN_JOB, trainer=TrainerOptions(fused_elementwise=fused))
    case = case_of(job=job)
    assert ("--compile.enable" in values(launched(case))) == bool(fused)
