"""What is emitted reads back as the plan it was made from, for every trainer that has a reader."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from trainer_plans import (
    JOB,
    MODEL,
    cluster,
    flagscale,
    island,
    made,
    megatron,
    one_pipeline,
    outermost_results,
    random_results,
    ranks_of,
    stage,
    torchtitan,
)

from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Experts, LatentAttention
from hetplan.model.numerics import Activation, Router, ScoreFunction
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer, trainer_named
from hetplan.trainers.launch_plan import PlannedLaunch, launch_plan
from hetplan.trainers.launch_values import LaunchHost
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import read_launch

PLAIN = EmissionOptions()


@dataclass(frozen=True)
class Emitted:
    """What a trainer is told: its arguments or its YAML, and the hosts in rank order."""

    path: Path
    hosts: tuple[LaunchHost, ...]


def emitted(folder: Path, result: SearchResult, trainer: Trainer) -> Emitted | None:
    """The trainer's own files of a plan that it can be told, without hetplan's scripts."""
    sheet = ranks_of(result, trainer)
    if trainer.faults(result, sheet, PLAIN):
        return None
    launch = trainer.launch(result, sheet, PLAIN)
    folder.mkdir()
    for each in launch.files:
        (folder / each.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / each.path).write_text(each.text)
    arguments = folder / "arguments.txt"
    arguments.write_text("".join(shlex.join(words) + "\n" for words in launch.arguments))
    hosts = tuple(
        LaunchHost(
            name=agent.host.name,
            devices=len(agent.local_devices),
            local_devices=agent.local_devices,
        )
        for agent in sheet.agents
    )
    experiment = folder / "flagscale.yaml"
    return Emitted(path=experiment if experiment.exists() else arguments, hosts=hosts)


def normal(plan: Plan) -> Plan:
    """Without what the trainers cannot be told, or is told by nothing.

    Whether gradients are reduced beside compute where no gradient is reduced: flags are left out.
    """
    if plan.reduction_groups:
        return plan
    return replace(plan, overlap=replace(plan.overlap, reduction=False))


def read(launch: Emitted, trainer: str, result: SearchResult) -> PlannedLaunch:
    text = read_launch(launch.path, trainer, (), launch.hosts)
    return launch_plan(text, result.inputs.model, result.inputs.cluster, target=result.plan.target)


def check(folder: Emitted, reader: str, result: SearchResult) -> PlannedLaunch:
    """The folder reads back as the plan, without remarks about it, for a job like the plan's."""
    found = read(folder, reader, result)
    assert normal(found.plan) == normal(result.plan)
    job = result.inputs.job
    for name in ("global_batch_size", "sequence_length", "precision", "optimizer", "target"):
        assert getattr(found.job, name) == getattr(job, name)
    return found


def trained(model: ModelSpec) -> ModelSpec:
    """A model as Megatron-LM trains it: what it leaves open is the trainer's own, on both sides.

    --max-position-embeddings is at least the run's sequence length, whatever the model's longest.
    Defaults: megatron/training/arguments.py, MLATransformerConfig, transformer/mlp.py.
    """
    layer = model.layer_runs[0].layer
    latent = isinstance(layer.attention, LatentAttention)
    rotary = isinstance(layer.attention, LatentAttention) or layer.attention.rotary
    scaling = model.rotary_scaling if rotary else None
    if scaling is not None and latent:
        own = {"original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
        own |= {"mscale": 1.0, "mscale_all_dim": 0.0}
        missing = {name: value for name, value in own.items() if getattr(scaling, name) is None}
        scaling = replace(scaling, **missing)  # type: ignore[arg-type]
    return replace(
        model,
        max_sequence_length=1,
        norm_epsilon=model.norm_epsilon or 1e-5,
        activation=_activation(model),
        rotary_base=(model.rotary_base or 10000.0) if rotary else None,
        rotary_fraction=(model.rotary_fraction or 1.0) if rotary else None,
        rotary_scaling=scaling,
        router=_router(model),
    )


def _activation(model: ModelSpec) -> Activation:
    mlp = model.layer_runs[0].layer.mlp
    if mlp.gated:
        return Activation.SILU
    exact = model.activation is Activation.GELU or not mlp.bias
    return Activation.GELU if exact else Activation.GELU_TANH


def _router(model: ModelSpec) -> Router | None:
    experts = [run.layer.mlp for run in model.layer_runs if isinstance(run.layer.mlp, Experts)]
    if not experts:
        return None
    said = model.router or Router()
    sigmoid = said.score_function is ScoreFunction.SIGMOID
    normalized = said.normalized
    if normalized is None or sigmoid:
        normalized = sigmoid or experts[0].experts_per_token > 1
    grouped = said.num_groups is not None and said.num_groups != said.groups_per_token
    return Router(
        score_function=ScoreFunction.SIGMOID if sigmoid else ScoreFunction.SOFTMAX,
        normalized=normalized,
        scaling_factor=said.scaling_factor or 1.0,
        num_groups=said.num_groups if grouped else None,
        groups_per_token=said.groups_per_token if grouped else None,
        correction_bias=bool(said.correction_bias),
        loss_coefficient=said.loss_coefficient or 0.0,
        loss_per_sequence=bool(said.loss_per_sequence),
    )


CASES = (
    ("megatron", "megatron", megatron),
    ("flagscale", "flagscale", flagscale),
    ("torchtitan", "torchtitan", torchtitan),
    ("mindspeed", "megatron", None),
)
"""Trainer, whose reader reads its arguments, and how plans are drawn; None: `outermost_results`."""


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "reader", "draw"), CASES)
def test_folders_read_back(
    tmp_path: Path,
    name: str,
    reader: str,
    draw: Callable[[Random], SearchResult | None] | None,
    count: int,
) -> None:
    results = outermost_results() if draw is None else random_results(draw, 29, count)
    done = []
    for at, result in enumerate(results):
        folder = emitted(tmp_path / str(at), result, trainer_named(name))
        done.append(folder is not None)
        if folder is None:
            continue
        found = check(folder, reader, result)
        if name == "megatron" and draw is not None:
            # The trainer's own choices, and the model, come back as they were priced.
            # What runs beside compute was drawn for the plan; a read job has it as an option.
            own, overlap = trainer_settings(result.inputs.job), normal(result.plan).overlap
            assert trainer_settings(found.job) == replace(
                own,
                overlap_grad_reduce=overlap.reduction,
                overlap_param_gather=overlap.gathering,
                tp_comm_overlap=overlap.tensor_parallel,
            )
            model = launch_model(found.facts.text, result.inputs.model.name)
            assert trained(model) == trained(result.inputs.model)
    assert sum(done) >= 0.8 * len(done)


@pytest.mark.parametrize(
    ("name", "flag", "chunks"),
    [
        ("zb-h1", "InterleavedZeroBubble", 1),
        ("zb-h1", "InterleavedZeroBubble", 2),
        ("zbv", "ZBVZeroBubble", 2),
        ("dualpipev", "DualPipeV", 2),
    ],
)
def test_zero_bubble_schedules_of_torchtitan(
    tmp_path: Path, name: str, flag: str, chunks: int
) -> None:
    shape = {"tp": 2, "dp": 2, "microbatch_size": 1, "sequence_parallel": True}
    layers = [(4, 3), (2, 3)] if chunks == 2 else [(7,), (5,)]
    layers = [(4, 1), (2, 5)] if name == "zbv" else layers
    rows = (stage(where, *each, **shape) for where, each in zip("ab", layers, strict=True))
    chosen = one_pipeline(*rows, microbatches=32, schedule=name)
    job = replace(JOB, target="torchtitan")
    result = made(cluster(island("a"), island("b")), chosen, MODEL, job)
    launch = emitted(tmp_path / "run", result, trainer_named("torchtitan"))
    assert launch is not None
    words = shlex.split(launch.path.read_text())
    assert words[words.index("--parallelism.pipeline_parallel_schedule") + 1] == flag
    at = words.index("--parallelism.module_fqns_per_model_part") + 1
    counts = [part.count("layers.") for part in words[at : at + 2 * chunks]]
    # Torch gives stage s of a V the parts s and 2 P - 1 - s, of a loop s and P + s.
    last = {"zb-h1": [3, 3], "zbv": [5, 1], "dualpipev": [3, 3]}[name]
    assert counts == ([4, 2, *last] if chunks == 2 else [7, 5])
    check(launch, "torchtitan", result)
