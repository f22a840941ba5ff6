"""What is emitted for torchtitan cuts the model as planned; its own code reads it where it is."""

from __future__ import annotations

import ast
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from emit_cases import MODEL, TIED, cluster, island
from flagscale_plans import any_estimate

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job, LengthShare, Optimizer, Precision, ProductFormat, TrainerOptions
from hetplan.model.layers import Attention, Experts, LayerRun, Norm
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, RecomputeGranularity, Schedule, Sharding
from hetplan.plans.ranks import rank_rows
from hetplan.schedulers.launch import EmissionOptions, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout, rank_layout
from hetplan.search.result import Inputs, SearchResult
from hetplan.trainers.torchtitan.write import TRAINER

JOB = Job(
    name="test",
    global_batch_size=64,
    sequence_length=2048,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="torchtitan",
)
PLAIN = EmissionOptions()
FULL, NONE = RecomputeGranularity.FULL, RecomputeGranularity.NONE


def planned(
    found: Cluster,
    *stages: tuple[str, tuple[int, ...]],
    shape: Shape,
    model: ModelSpec = MODEL,
    job: Job = JOB,
    sharding: Sharding = Sharding.NONE,
    recompute: RecomputeGranularity = NONE,
) -> Plan:
    count = job.global_batch_size // shape.samples
    virtual = len(stages[0][1])
    name = "interleaved-1f1b" if virtual > 1 else "1f1b"
    pipeline = ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=(Part(island=where, shape=shape),),
                layers=layers,
                recompute=recompute,
                warmup_depth=own_depth(name, at, len(stages), count, virtual),
            )
            for at, (where, layers) in enumerate(stages)
        ),
        num_microbatches=count,
        schedule=Schedule(name=name, virtual_stages=virtual),
    )
    return plan_of(model, found, job, ChosenPlan(pipelines=(pipeline,), sharding=sharding))


def made(
    found: Cluster, plan: Plan, model: ModelSpec = MODEL, job: Job = JOB, *, legal: bool = True
) -> tuple[SearchResult, RankLayout]:
    faults = check_plan(plan, model, found, job)
    assert not (legal and faults), faults
    result = SearchResult(
        schema="hetplan.plan/5",
        hetplan_version="test",
        seed=0,
        inputs=Inputs(model=model, cluster=found, job=job, sha256=()),
        plan=plan,
        estimate=any_estimate(),
        certificate=None,
    )
    return result, rank_layout(plan, found)


def random_case(seed: int) -> tuple[SearchResult, RankLayout]:
    """A legal plan with one shape for all stages, some of several virtual stages."""
    draw = Random(seed)
    while True:
        stages = draw.choice((1, 2, 3, 4))
        virtual = draw.choice((1, 1, 2)) if stages > 1 else 1
        tp, dp, cp = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((1, 1, 2))
        shape = Shape(
            tp=tp,
            dp=dp,
            cp=cp,
            microbatch_size=draw.choice((1, 2)),
            sequence_parallel=tp > 1 and draw.random() < 0.7,
        )
        cuts = sorted(draw.sample(range(1, 12), stages * virtual - 1))
        counts = [b - a for a, b in zip((0, *cuts), (*cuts, 12), strict=True)]
        rows = [
            ("ab"[s * 2 // stages], tuple(counts[s + v * stages] for v in range(virtual)))
            for s in range(stages)
        ]
        found = cluster(island("a", nodes=8), island("b", nodes=8))
        sharding = Sharding.OPTIMIZER if cp > 1 or draw.random() < 0.5 else Sharding.NONE
        recompute = draw.choice((FULL, NONE))
        try:
            plan = planned(found, *rows, shape=shape, sharding=sharding, recompute=recompute)
        except InputError:
            continue
        if not check_plan(plan, MODEL, found, JOB):
            return made(found, plan)


def launched(
    case: tuple[SearchResult, RankLayout], options: EmissionOptions = PLAIN
) -> TrainerLaunch:
    assert TRAINER.faults(*case, options) == ()
    return TRAINER.launch(*case, options)


def faults(case: tuple[SearchResult, RankLayout], options: EmissionOptions = PLAIN) -> list[str]:
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
    for seed in range(30):
        check_layers(*random_case(seed))


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


def two_stages(**changes: object) -> Plan:
    return planned(
        cluster(island("a"), island("b")),
        ("a", (7,)),
        ("b", (5,)),
        shape=Shape(tp=2, dp=2, microbatch_size=1, sequence_parallel=True),
        **changes,  # type: ignore[arg-type]
    )


MACHINES = cluster(island("a"), island("b"))


def test_the_model_stands_in_a_module() -> None:
    launch = launched(made(MACHINES, two_stages()))
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


def test_what_the_model_computes_with_its_weights_stands_there_too() -> None:
    scaling = RotaryScaling(kind=RotaryScalingKind.LLAMA3, factor=32.0, original_length=8192)
    model = replace(MODEL, norm_epsilon=1e-6, rotary_base=250000.0, rotary_scaling=scaling)
    launch = launched(made(MACHINES, two_stages(model=model), model))
    (text,) = [file.text for file in launch.files]
    for line in ("NORM_EPSILON = 1e-06", "ROTARY_BASE = 250000", '"scaling_factor": 32.0,'):
        assert line in text
    assert not any("does not say" in remark for remark in launch.remarks)


def test_a_name_cannot_leave_its_text() -> None:
    name = 'x", model=__import__("os").system("reboot"), y="'
    model = replace(MODEL, name=name)
    launch = launched(made(MACHINES, two_stages(model=model), model))
    tree = ast.parse(launch.files[0].text)
    assert name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_product_formats_are_converters() -> None:
    for product, converter in (
        (ProductFormat.FLOAT8, "Float8LinearConverter"),
        (ProductFormat.MXFP8, "MXFP8LinearConverter"),
        (ProductFormat.NVFP4, "NVFP4LinearConverter"),
    ):
        job = replace(JOB, trainer=TrainerOptions(product_format=product))
        (file,) = launched(made(MACHINES, two_stages(), job=job, legal=False)).files
        calls = [node.id for node in ast.walk(ast.parse(file.text)) if isinstance(node, ast.Name)]
        assert converter in calls


# ---- what is refused


LLAMA3 = RotaryScaling(
    kind=RotaryScalingKind.LLAMA3,
    factor=32.0,
    original_length=8192,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
)


def test_tied_embeddings_with_stages_are_refused() -> None:
    model = replace(MODEL, tied_embeddings=True)
    plan = two_stages(model=model)
    assert any("pin pp: 1" in each for each in faults(made(MACHINES, plan, model, legal=False)))
    one = planned(
        MACHINES,
        ("a", (12,)),
        shape=Shape(tp=2, dp=2, microbatch_size=1, sequence_parallel=True),
        model=model,
    )
    launch = launched(made(MACHINES, one, model))
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
        (TIED, "learned positions"),
        (replace(MODEL, activation=Activation.GELU_TANH), "a gate with gelu_tanh"),
        (replace(MODEL, rotary_fraction=0.5), "0.5 of each head rotated"),
        (replace(MODEL, rotary_scaling=yarn), "yarn stretching"),
        (replace(MODEL, head_bias=True), "bias in the head"),
        (replace(MODEL, final_norm=Norm.LAYER_NORM), "without RMSNorm"),
        (replace(MODEL, embedding_size=512), "projection beside"),
        (with_layer(mlp=experts), "experts"),
        (with_layer(attention=replace(_ATTENTION, qk_norm=True)), "query and key norms"),
    ):
        found = faults(made(MACHINES, two_stages(), model, legal=False))
        assert any(message in each for each in found), message
    lengths = (LengthShare(length=128, share=1.0),)
    for job, field in (
        (replace(JOB, precision=Precision.FLOAT16), "inputs.job.precision"),
        (replace(JOB, optimizer=Optimizer.SGD), "inputs.job.optimizer"),
        (replace(JOB, sequence_lengths=lengths), "inputs.job.packing"),
    ):
        found = faults(made(MACHINES, two_stages(), job=job, legal=False))
        assert any(each.startswith(field) for each in found), field


def test_options_that_it_cannot_use_are_refused() -> None:
    case = made(MACHINES, two_stages())
    found = faults(case, EmissionOptions(data=("/a", "/b")))
    assert {each.split(":")[0] for each in found} >= {"--data", "--tokenizer"}
    small = replace(MODEL, vocab_size=1000)
    case = made(MACHINES, two_stages(model=small), small)
    assert any("test texts" in each for each in faults(case))


# ---- torchtitan's own code, where it is installed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore")
def test_its_own_code_reads_the_configuration(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ConfigManager, the model's checks of degrees and the whole model on the meta device."""
    pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed")
    result, sheet = random_case(seed)
    launch = launched((result, sheet))
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
