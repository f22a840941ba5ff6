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
from flagscale_plans import A100, MI300, any_estimate

from hetplan.cluster.spec import Cluster
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.torchtitan.trainer import TRAINER
from hetplan.emitters.trainer_launch import EmitOptions, TrainerLaunch
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
from hetplan.search.result import Inputs, SearchResult

JOB = Job(
    name="test",
    global_batch_size=64,
    sequence_length=2048,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="torchtitan",
)
PLAIN = EmitOptions()
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
) -> tuple[SearchResult, LaunchSheet]:
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
    return result, sheet_of(plan, found)


def random_case(seed: int) -> tuple[SearchResult, LaunchSheet]:
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


def launched(case: tuple[SearchResult, LaunchSheet], options: EmitOptions = PLAIN) -> TrainerLaunch:
    assert TRAINER.faults(*case, options) == ()
    return TRAINER.launch(*case, options)


def faults(case: tuple[SearchResult, LaunchSheet], options: EmitOptions = PLAIN) -> list[str]:
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


@pytest.mark.parametrize("seed", range(120))
def test_every_rank_holds_its_layers(seed: int) -> None:
    result, sheet = random_case(seed)
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


def test_a_name_cannot_leave_its_text() -> None:
    name = 'x", model=__import__("os").system("reboot"), y="'
    model = replace(MODEL, name=name)
    launch = launched(made(MACHINES, two_stages(model=model), model))
    tree = ast.parse(launch.files[0].text)
    assert name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize(
    ("product", "converter"),
    [
        (ProductFormat.FLOAT8, "Float8LinearConverter"),
        (ProductFormat.MXFP8, "MXFP8LinearConverter"),
        (ProductFormat.NVFP4, "NVFP4LinearConverter"),
    ],
)
def test_product_formats_are_converters(product: ProductFormat, converter: str) -> None:
    job = replace(JOB, trainer=TrainerOptions(product_format=product))
    case = made(MACHINES, two_stages(), job=job, legal=False)
    launch = launched(case)
    calls = [
        node.value.id
        for node in ast.walk(ast.parse(launch.files[0].text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    assert converter in calls


def test_options_of_the_user() -> None:
    options = EmitOptions(
        data=("/texts",), tokenizer="/t", learning_rate=3e-4, save="/s", load="/l", steps=7
    )
    found = values(launched(made(MACHINES, two_stages()), options))
    assert found["--dataloader.dataset_path"] == ("/texts",)
    assert found["--hf_assets_path"] == ("/t",)
    assert found["--optimizer.param_groups.0.optimizer_kwargs.lr"] == ("0.0003",)
    assert found["--checkpoint.folder"] == ("/s",)
    assert found["--checkpoint.initial_load_path"] == ("/l",)
    assert found["--training.steps"] == ("7",)


def test_long_steps_have_longer_timeouts() -> None:
    result, sheet = made(MACHINES, two_stages())
    for seconds, expected in ((0.1, None), (20.0, ("161",))):
        estimate = replace(result.estimate, step_seconds=seconds, p95_seconds=seconds)
        found = values(launched((replace(result, estimate=estimate), sheet)))
        assert found.get("--comm.train_timeout_seconds") == expected
    assert found["--comm.init_timeout_seconds"] == ("361",)


# ---- what is refused


LLAMA3 = RotaryScaling(
    kind=RotaryScalingKind.LLAMA3,
    factor=32.0,
    original_length=8192,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
)


def test_what_the_model_computes_with_its_weights() -> None:
    model = replace(
        MODEL,
        norm_epsilon=1e-6,
        activation=Activation.SILU,
        rotary_base=250000.0,
        rotary_scaling=LLAMA3,
    )
    launch = launched(made(MACHINES, two_stages(model=model), model))
    tree = ast.parse(launch.files[0].text)
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert (constants["NORM_EPSILON"], constants["ROTARY_BASE"]) == (1e-6, 250000)
    assert constants["ROTARY_SCALING"] == {
        "scaling": "llama",
        "scaling_factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("does not say" in remark for remark in launch.remarks)
    plain = launched(made(MACHINES, two_stages(model=MODEL), MODEL))
    assert sum("does not say" in remark for remark in plain.remarks) == 2


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TIED, "no rotary positions"),
        (TIED, "learned positions"),
        (replace(MODEL, activation=Activation.GELU_TANH), "a gate with gelu_tanh"),
        (replace(MODEL, rotary_fraction=0.5), "0.5 of each head rotated"),
        (
            replace(MODEL, rotary_scaling=replace(LLAMA3, kind=RotaryScalingKind.YARN)),
            "yarn stretching",
        ),
        (replace(MODEL, head_bias=True), "bias in the head"),
        (replace(MODEL, final_norm=Norm.LAYER_NORM), "without RMSNorm"),
        (replace(MODEL, embedding_size=512), "projection beside"),
        (
            replace(
                MODEL,
                layer_runs=(
                    LayerRun(
                        count=12,
                        layer=replace(
                            _LAYER,
                            mlp=Experts(
                                num_experts=4, experts_per_token=2, expert_ffn_hidden_size=64
                            ),
                        ),
                    ),
                ),
            ),
            "experts",
        ),
        (
            replace(
                MODEL,
                layer_runs=(
                    LayerRun(
                        count=12,
                        layer=replace(_LAYER, attention=replace(_ATTENTION, qk_norm=True)),
                    ),
                ),
            ),
            "query and key norms",
        ),
    ],
)
def test_models_that_it_has_not_are_refused(model: ModelSpec, message: str) -> None:
    case = made(MACHINES, two_stages(), model, legal=False)
    assert any(message in each for each in faults(case))


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (replace(JOB, precision=Precision.FLOAT16), "inputs.job.precision"),
        (replace(JOB, optimizer=Optimizer.SGD), "inputs.job.optimizer"),
        (
            replace(JOB, sequence_lengths=(LengthShare(length=128, share=1.0),)),
            "inputs.job.packing",
        ),
    ],
)
def test_jobs_that_it_cannot_run_are_refused(job: Job, field: str) -> None:
    case = made(MACHINES, two_stages(), job=job, legal=False)
    assert any(each.startswith(field) for each in faults(case))


def test_vendors_and_machines_that_it_cannot_use_are_refused() -> None:
    both = cluster(island("a", kind=A100), island("b", kind=MI300))
    assert any("nccl, rccl" in each for each in faults(made(both, two_stages())))
    slow = cluster(island("a", kind="cpu"), island("b", kind="cpu"))
    assert any("no accelerator" in each for each in faults(made(slow, two_stages(), legal=False)))


def test_shards_that_cross_copies_are_refused() -> None:
    plan = planned(
        MACHINES,
        ("a", (12,)),
        shape=Shape(tp=1, dp=4, cp=2, microbatch_size=1),
        sharding=Sharding.OPTIMIZER,
    )
    assert faults(made(MACHINES, plan)) == []
    odd = replace(plan, optimizer_shards=1)
    assert any("optimizer_shards" in each for each in faults(made(MACHINES, odd, legal=False)))


def test_short_pieces_of_a_sequence_are_refused() -> None:
    job = replace(JOB, sequence_length=384)
    plan = planned(
        MACHINES,
        ("a", (12,)),
        shape=Shape(tp=1, dp=2, cp=2, microbatch_size=1),
        sharding=Sharding.OPTIMIZER,
        job=job,
    )
    assert any("256" in each for each in faults(made(MACHINES, plan, job=job)))


def test_options_that_it_cannot_use_are_refused() -> None:
    case = made(MACHINES, two_stages())
    found = faults(case, EmitOptions(data=("/a", "/b")))
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
