"""What is emitted reads back as the plan it was made from, for every trainer that has a reader."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from flagscale_plans import random_result as random_flagscale
from megatron_plans import outermost_results, random_results
from test_trainers_torchtitan import random_case as random_torchtitan

from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Experts, LatentAttention
from hetplan.model.numerics import Activation, Router, ScoreFunction
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import RankLayout, rank_layout
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer, trainer_named
from hetplan.trainers.launch_plan import PlannedLaunch, launch_plan
from hetplan.trainers.launch_values import LaunchHost, LaunchText
from hetplan.trainers.megatron.read_model import launch_model
from hetplan.trainers.read import read_launch

PLAIN = EmissionOptions()
FAST, SLOW = 20, 200


@dataclass(frozen=True)
class Emitted:
    """What a trainer is told: its arguments or its YAML, and the hosts in rank order."""

    path: Path
    hosts: tuple[LaunchHost, ...]


def emitted(folder: Path, result: SearchResult, trainer: Trainer) -> Emitted | None:
    """The trainer's own files of a plan that it can be told, without hetplan's scripts."""
    plan, where = result.plan, result.inputs.cluster
    sheet = rank_layout(plan, where, data_outermost=trainer.data_outermost)
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


def check(folder: Emitted, reader: str, result: SearchResult) -> LaunchText:
    """The folder reads back as the plan, without remarks about it, for a job like the plan's."""
    found = read(folder, reader, result)
    assert normal(found.plan) == normal(result.plan)
    job = result.inputs.job
    for name in ("global_batch_size", "sequence_length", "precision", "optimizer", "target"):
        assert getattr(found.job, name) == getattr(job, name)
    return found.facts.text


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


def megatron_results(count: int) -> Iterator[SearchResult]:
    yield from random_results(29, count)
    yield from outermost_results()


def first_of(
    draw: Callable[[int], tuple[SearchResult, RankLayout]], count: int
) -> Iterator[SearchResult]:
    for seed in range(1000, 1000 + count):
        yield draw(seed)[0]


def check_megatron(tmp_path: Path, count: int, target: str = "megatron") -> int:
    trainer, done = trainer_named(target), 0
    for at, result in enumerate(megatron_results(count)):
        folder = emitted(tmp_path / str(at), result, trainer)
        if folder is None:
            continue
        text = check(folder, "megatron", result)
        # The trainer's own choices come back as they were priced.
        found = read(folder, "megatron", result).job
        assert trainer_settings(found) == trainer_settings(result.inputs.job)
        found_model = launch_model(text, result.inputs.model.name)
        assert trained(found_model) == trained(result.inputs.model)
        done += 1
    return done


def test_megatron_folders_read_back(tmp_path: Path) -> None:
    assert check_megatron(tmp_path, FAST) >= FAST * 0.8


@pytest.mark.slow
def test_many_megatron_folders_read_back(tmp_path: Path) -> None:
    assert check_megatron(tmp_path, SLOW) >= SLOW * 0.8


def check_flagscale(tmp_path: Path, count: int) -> int:
    trainer, done = trainer_named("flagscale"), 0
    for at, result in enumerate(first_of(random_flagscale, count)):
        folder = emitted(tmp_path / str(at), result, trainer)
        if folder is None:
            continue
        check(folder, "flagscale", result)
        done += 1
    return done


def test_flagscale_folders_read_back(tmp_path: Path) -> None:
    assert check_flagscale(tmp_path, FAST) >= FAST * 0.8


@pytest.mark.slow
def test_many_flagscale_folders_read_back(tmp_path: Path) -> None:
    assert check_flagscale(tmp_path, SLOW) >= SLOW * 0.8


def check_torchtitan(tmp_path: Path, count: int) -> int:
    trainer, done = trainer_named("torchtitan"), 0
    for at, result in enumerate(first_of(random_torchtitan, count)):
        folder = emitted(tmp_path / str(at), result, trainer)
        if folder is None:
            continue
        check(folder, "torchtitan", result)
        done += 1
    return done


def test_torchtitan_folders_read_back(tmp_path: Path) -> None:
    assert check_torchtitan(tmp_path, FAST) >= FAST * 0.8


@pytest.mark.slow
def test_many_torchtitan_folders_read_back(tmp_path: Path) -> None:
    assert check_torchtitan(tmp_path, SLOW) >= SLOW * 0.8


def test_mindspeed_folders_read_back_as_megatrons(tmp_path: Path) -> None:
    """Its arguments are Megatron-LM's and its devices Ascend."""
    for at, result in enumerate(outermost_results()):
        folder = emitted(tmp_path / str(at), result, trainer_named("mindspeed"))
        assert folder is not None
        check(folder, "megatron", result)
