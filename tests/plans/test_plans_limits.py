"""Numbers far beyond any cluster are refused by the rule that they break, and at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans_mutations import with_pipeline, with_stage
from plans_of_many import Case, plain_case
from rule_names import rule_of

from hetplan.cost.traffic import ledger
from hetplan.errors import InputError
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.plans.rules import Rule


def only_rule(case: Case, plan: Plan) -> Rule:
    """The one rule that the plan breaks."""
    (found,) = {rule_of(fault) for fault in check_plan(plan, case.model, case.cluster, case.job)}
    return found


@pytest.mark.parametrize("count", [4_000_000, 5 * 10**8])
def test_more_passes_than_a_step_can_have(count: int) -> None:
    case = plain_case()
    pipeline = case.plan.pipelines[0]
    per_step = count * 2  # dp 2, one sequence each
    long = replace(case, job=replace(case.job, global_batch_size=per_step))
    plan = with_pipeline(case.plan, 0, replace(pipeline, num_microbatches=count))
    assert only_rule(long, plan) is Rule.BATCH


@pytest.mark.parametrize("depth", [10**9 + 1, 2**63, 10**30])
def test_a_warmup_that_no_number_of_a_kernel_holds(depth: int) -> None:
    case = plain_case()
    plan = with_stage(
        case.plan, 0, 0, replace(case.plan.pipelines[0].stages[0], warmup_depth=depth)
    )
    assert only_rule(case, plan) is Rule.WARMUP


def test_a_vocabulary_beyond_any_model() -> None:
    case = plain_case()
    plan = replace(case.plan, padded_vocab_size=8 * 10**9)
    assert only_rule(case, plan) is Rule.VOCABULARY


def test_a_run_of_more_tokens_than_can_be_counted() -> None:
    case = plain_case()
    with pytest.raises(InputError, match="at most 1,000,000,000,000,000,000"):
        ledger(case.plan, case.model, case.cluster, case.job, total_tokens=10**400)
