"""Which checkpoints can be loaded under another plan."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from runtime_cases import LLAMA, job, plan_of

from hetplan.errors import InputError
from hetplan.plans.formats import (
    FLAGSCALE_DIST,
    FLAGSCALE_TORCH,
    FORMATS,
    MEGATRON_DIST,
    formats_of,
    needs_meshes,
    reshardable,
)
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding
from hetplan.plans.targets import TARGETS

PLAN = plan_of(LLAMA, job(), (2, 2), dp=2)


def unlike_stages() -> Plan:
    """The plan, its last stage with recomputation, which FlagScale wants meshes for."""
    (pipeline,) = PLAN.pipelines
    full = replace(pipeline.stages[-1].recompute, granularity=RecomputeGranularity.FULL, layers=1)
    stages = (*pipeline.stages[:-1], replace(pipeline.stages[-1], recompute=full))
    return replace(PLAN, pipelines=(replace(pipeline, stages=stages),))


def test_every_target_has_formats_with_reason_and_source() -> None:
    for name in (*TARGETS, "megatron-bridge", "mindspeed", "deepspeed"):
        assert formats_of(name)
    for each in FORMATS:
        assert each.reason
        assert each.source
        assert each.setting
    assert len({(each.trainer, each.name) for each in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(
    ("target", "possible"),
    [
        ("native", True),
        ("megatron", True),
        ("megatron-bridge", True),
        ("mindspeed", True),
        ("any", True),
        ("torchtitan", True),
        ("flagscale", False),
        ("deepspeed", False),
    ],
)
def test_what_can_be_continued_under_another_plan(target: str, possible: bool) -> None:
    plan = unlike_stages() if target == "flagscale" else PLAN
    answer = reshardable(target, plan)
    assert answer.possible is possible
    assert answer.format is formats_of(target)[0]
    assert answer.format.name in answer.reason


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
def test_flagscale_without_meshes_keeps_megatrons_format(sharding: Sharding) -> None:
    plan = replace(PLAN, sharding=sharding)
    assert not needs_meshes(plan)
    answer = reshardable("flagscale", plan)
    assert answer.possible
    assert answer.format is FLAGSCALE_DIST
    flag = "add --dist-ckpt-optim-fully-reshardable"
    assert (flag in answer.reason) is (sharding is Sharding.OPTIMIZER)
    assert not reshardable("flagscale", plan, several_libraries=True).possible


def test_a_refusal_says_what_to_do() -> None:
    refused = reshardable("flagscale", unlike_stages()).reason
    assert "plan for target megatron or native" in refused
    assert "torch_dist (" not in refused
    assert "ds_to_universal.py" in reshardable("deepspeed", PLAN).reason
    assert reshardable("flagscale", unlike_stages()).format is FLAGSCALE_TORCH


def test_a_sharded_optimizer_needs_a_setting() -> None:
    sharded = replace(PLAN, sharding=Sharding.OPTIMIZER, optimizer_shards=2)
    flag = "add --dist-ckpt-optim-fully-reshardable"
    assert flag in reshardable("megatron", sharded).reason
    assert flag not in reshardable("megatron", PLAN).reason
    assert reshardable("megatron", sharded).format is MEGATRON_DIST


def test_an_unknown_trainer_is_refused() -> None:
    with pytest.raises(InputError, match="unknown trainer 'colossal'; known: any, deepspeed"):
        formats_of("colossal")
