"""What is priced and counted of a sum of gradients is its elements times the named format."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from test_cost_traffic import PRICED, SecondsAsBytes, agrees, in_one_node

sys.path.insert(0, str(Path(__file__).parents[1] / "plans"))

from plans_of_many import Case, summed_cases

from hetplan.cost.estimate import estimate
from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.traffic import ledger
from hetplan.plans.check import check_plan
from hetplan.plans.plan import OverlapSettings


def runs(case: Case) -> bool:
    """Whether its stages wait for each other without sends of their own."""
    depths = [[stage.warmup_depth for stage in each.stages] for each in case.plan.pipelines]
    return all(left - right <= 1 for row in depths for left, right in pairwise(row))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(summed_cases(most_pipelines=2))
def test_the_ledger_counts_every_group_in_its_own_format(case: Case) -> None:
    assert check_plan(case.plan, case.model, case.cluster, case.job) == ()
    agrees(case)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(summed_cases(most_pipelines=1).filter(lambda each: in_one_node(each) and runs(each)))
def test_the_estimate_prices_the_bytes_of_the_named_formats(case: Case) -> None:
    plan = replace(case.plan, overlap=OverlapSettings(context_parallel=False))
    found = ledger(plan, case.model, case.cluster, case.job)
    priced = estimate(plan, case.model, case.cluster, case.job, SecondsAsBytes())
    sent = sum(
        part.seconds * sum(replica.num_devices for replica in stage.replicas)
        for stage, cost in zip(plan.pipelines[0].stages, priced.stages, strict=True)
        for part in cost.components
        if part.component in PRICED[TrafficClass.DATA_PARALLEL]
    )
    assert found.of_class(TrafficClass.DATA_PARALLEL) == pytest.approx(sent, rel=1e-9)
