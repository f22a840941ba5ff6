"""Trainers are told to sum gradients in the format that the plan names, or the plan is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainer_models import MODEL
from trainer_plans import JOB, chosen, cluster, island, result_of

from hetplan.plans.build import plan_of
from hetplan.schedulers.launch import EmissionOptions
from hetplan.search.result import SearchResult
from hetplan.trainers import trainer_named
from hetplan.trainers.emission import refusals


def searched(target: str, *formats: str) -> SearchResult:
    """Two stages of tp 2, dp 4 in one island, whose groups have these formats in turn."""
    machines = cluster(island("north"))
    job = replace(JOB, target=target)
    plan = plan_of(MODEL, machines, job, chosen(("north", 6), ("north", 6), tp=2, dp=4))
    groups = tuple(
        replace(each, precision=formats[at % len(formats)] if formats else each.precision)
        for at, each in enumerate(plan.reduction_groups)
    )
    assert len(groups) == 2
    result = result_of(machines, replace(plan, reduction_groups=groups))
    return replace(result, inputs=replace(result.inputs, job=job))


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "flagscale"])
def test_two_formats_in_one_plan_are_refused_by_name(target: str) -> None:
    result = searched("any", "float32", "bfloat16")
    trainer = trainer_named(target)
    (fault,) = refusals(result, trainer, EmissionOptions())
    assert fault.field == "plan.reduction_groups[1].precision"
    assert fault.message.startswith(f"bfloat16; target {trainer.plan_target} ")
    assert "sums in float32" in fault.message
