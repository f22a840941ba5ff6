"""A plan names the number format of every sum of gradients, and nothing sums in another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_of_many import Case, plain_case, summed_as, summed_cases, two_pipelines

from hetplan.files.reading import decode, read_document
from hetplan.job.spec import Precision, TrainerOptions
from hetplan.job.trainer import trainer_settings
from hetplan.plans.assemble import assemble_plan
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.plans.ranks import limits_of
from hetplan.search.files import SCHEMA
from hetplan.search.result import SearchResult

GOLDEN = Path(__file__).parents[1] / "golden"


def faults_of(case: Case, plan: Plan) -> list[tuple[str, str]]:
    found = check_plan(plan, case.model, case.cluster, case.job)
    return [(fault.field, fault.message) for fault in found]


def summed_in(plan: Plan, *formats: str) -> Plan:
    """The plan whose groups have these formats in turn."""
    groups = tuple(
        replace(each, precision=formats[at % len(formats)])
        for at, each in enumerate(plan.reduction_groups)
    )
    return replace(plan, reduction_groups=groups)


@pytest.mark.parametrize("asked", [None, Precision.BFLOAT16, Precision.FLOAT32])
def test_plans_that_are_made_name_what_the_jobs_trainer_sums_in(asked: Precision | None) -> None:
    case = two_pipelines(tied=True)
    job = replace(case.job, trainer=TrainerOptions(gradient_precision=asked))
    plan = summed_as(case.plan, job)
    own = trainer_settings(job).gradient_precision.value
    assert own == (asked or Precision.FLOAT32).value
    assert {group.precision for group in plan.reduction_groups} == {own}
    assert plan.tied_embedding_precision == own
    assert len(case.plan.reduction_groups) > 1
    # Made anew of the same pipelines it is the same plan.
    assert assemble_plan(case.model, case.cluster, job, case.plan.pipelines) == plan


@pytest.mark.parametrize("number", range(1, 8))
def test_older_plan_files_have_the_format_that_their_job_implied(number: int) -> None:
    """The golden job asks for gradients in bfloat16 where its form can say so (from form 4 of the
    job on), and for none before that: then it is Megatron-LM's own.
    """
    path = GOLDEN / f"SearchResult.v{number}.json"
    data = json.loads(path.read_text())
    assert all("precision" not in each for each in data["plan"]["reduction_groups"])
    said = data["inputs"]["job"].get("trainer", {}).get("gradient_precision")
    read = decode(read_document(path), SearchResult, schema=SCHEMA)
    plans = [read.plan, *(each.plan for each in read.alternatives)]
    assert {group.precision for plan in plans for group in plan.reduction_groups} == {
        said or "float32"
    }
    assert {plan.tied_embedding_precision for plan in plans} == {None}


@pytest.mark.parametrize("target", ["native", "megatron", "flagscale", "torchtitan"])
def test_a_format_that_the_trainer_lacks_is_refused_by_name(target: str) -> None:
    case = plain_case(target)
    own = trainer_settings(case.job).gradient_precision.value
    assert faults_of(case, case.plan) == []
    other = "float16" if own != "float16" else "float32"
    found = faults_of(case, summed_in(case.plan, own, other))
    ((field, message),) = found
    assert field == "reduction_groups[1].precision"
    assert message.startswith(f"{other}; target {target} ")
    assert f"sums in {own}" in message


@settings(derandomize=True, deadline=None, max_examples=60)
@given(case=summed_cases(most_pipelines=2), precision=st.sampled_from(Precision))
def test_the_reference_trainer_refuses_what_it_does_not_sum_in(
    case: Case, precision: Precision
) -> None:
    plan = replace(case.plan, precision=precision.value)
    named = [group.precision for group in plan.reduction_groups]
    wanted = [
        f"reduction_groups[{at}].precision"
        for at, found in enumerate(named)
        if found != precision.value
    ]
    if plan.tied_embedding_precision not in (None, precision.value):
        wanted.append("tied_embedding_precision")
    found = [each.field for each in limits_of(plan) if "sums gradients" in each.message]
    assert found == wanted
