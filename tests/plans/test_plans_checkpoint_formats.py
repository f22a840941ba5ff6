"""Which checkpoints can be loaded under another plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans_mutations import with_stage
from plans_of_many import plain_case

from hetplan.plans.formats import (
    MEGATRON_DIST,
    reshardable,
)
from hetplan.plans.plan import Recompute, RecomputeGranularity, Sharding

PLAN = replace(plain_case("megatron").plan, sharding=Sharding.NONE, optimizer_shards=1)
FULL = Recompute(granularity=RecomputeGranularity.FULL)
UNLIKE = with_stage(PLAN, 0, 1, replace(PLAN.pipelines[0].stages[1], recompute=FULL))
"""The last stage recomputes, which FlagScale wants meshes for."""


@pytest.mark.parametrize("target", ["megatron", "mindspeed", "torchtitan", "flagscale"])
def test_what_can_be_continued_under_another_plan(target: str) -> None:
    assert reshardable(target, PLAN).possible
    answer = reshardable(target, UNLIKE)
    assert answer.possible is (target != "flagscale")
    assert answer.format.name in answer.reason


def test_a_sharded_optimizer_needs_a_setting() -> None:
    sharded = replace(PLAN, sharding=Sharding.OPTIMIZER, optimizer_shards=2)
    flag = "add --dist-ckpt-optim-fully-reshardable"
    for target in ("megatron", "flagscale"):
        assert flag in reshardable(target, sharded).reason
        assert flag not in reshardable(target, PLAN).reason
    assert reshardable("megatron", sharded).format is MEGATRON_DIST
