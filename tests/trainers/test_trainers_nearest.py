"""The nearest plan is one that the trainer can run, found by search under named pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from trainer_models import MODEL
from trainer_plans import PLAIN, cluster, island

from hetplan.cluster.spec import Cluster, Site
from hetplan.errors import Fault, InfeasibleError
from hetplan.job.spec import Job, Optimizer, Pins, Precision
from hetplan.plans.plan import RecomputeGranularity
from hetplan.predict.fit import FittedPredictor
from hetplan.schedulers.launch import EmissionOptions
from hetplan.schedulers.rank_layout import RankLayout
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.trainers import Trainer
from hetplan.trainers.emission import refusals
from hetplan.trainers.nearest import nearest_plan, plan_differences
from hetplan.whatif.within_limits import keeps_limits

PREDICTOR = FittedPredictor.datasheet_only()
TWO = cluster(island("a", nodes=1, devices_per_node=4), island("b", nodes=1, devices_per_node=4))
MIXED = cluster(
    island("a", nodes=1, devices_per_node=4),
    island("m", nodes=1, devices_per_node=4, kind="amd-mi300x"),
)
JOB = Job(
    name="test",
    global_batch_size=16,
    sequence_length=1024,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="any",
    gap=0.2,
    pin=Pins(cp=1, pipelines=1, depth=0),
)


@cache
def planned(machines: Cluster = TWO, job: Job = JOB) -> SearchResult:
    return search(MODEL, machines, job, PREDICTOR)


def refusing(
    faults: Callable[[SearchResult, RankLayout], list[Fault]], plan_target: str = "megatron"
) -> Trainer:
    def found(
        result: SearchResult, sheet: RankLayout, options: EmissionOptions
    ) -> tuple[Fault, ...]:
        return tuple(faults(result, sheet))

    return replace(PLAIN, plan_target=plan_target, faults=found)


def test_pins_that_faults_name_are_pinned_until_none_is_left() -> None:
    def faults(result: SearchResult, sheet: RankLayout) -> list[Fault]:
        plan = result.plan
        if any(replica.tp != 2 for replica in plan.replicas):
            return [Fault(field="plan.pipelines", message="tp; pin tp: 2, or pin dp: 3")]
        if plan.pipelines[0].stages[0].recompute.granularity is RecomputeGranularity.NONE:
            return [Fault(field="plan.pipelines", message="none; pin recompute: true")]
        return []

    trainer = refusing(faults)
    found = nearest_plan(planned(), trainer, EmissionOptions(), PREDICTOR)
    assert found.changes == ("pinned tp: 2", "pinned recompute: true")
    assert {replica.tp for replica in found.result.plan.replicas} == {2}
    assert refusals(found.result, trainer, EmissionOptions()) == ()


@pytest.mark.parametrize("limits", [{"power_limit_watts": 2100.0}, {"max_nodes": 1}])
def test_the_nearest_plan_keeps_the_limits(limits: dict[str, float]) -> None:
    sites = (Site(name="A", regions=TWO.regions, **limits),)  # type: ignore[arg-type]
    islands = tuple(replace(each, power_watts=500.0) for each in TWO.islands)
    refused = planned()
    limited = replace(TWO, sites=sites, islands=islands)
    asked = replace(refused, inputs=replace(refused.inputs, cluster=limited))
    assert not keeps_limits(refused.plan, refused.estimate, asked.inputs)
    trainer = refusing(lambda result, sheet: [])
    found = nearest_plan(asked, trainer, EmissionOptions(), PREDICTOR).result
    assert keeps_limits(found.plan, found.estimate, found.inputs)


@pytest.mark.slow
def test_devices_of_one_library_where_the_target_has_one() -> None:
    trainer = refusing(lambda result, sheet: [])
    refused = planned(MIXED)
    assert "2 libraries" in str(refusals(refused, trainer, EmissionOptions()))
    used = {stage.island for stage in refused.estimate.stages}
    assert used == {"a", "m"}
    found = nearest_plan(refused, trainer, EmissionOptions(), PREDICTOR)
    # Peak rates: the MI300X is the faster one.
    assert {stage.island for stage in found.result.estimate.stages} == {"m"}
    assert found.changes == ()
    lines = plan_differences(refused.plan, found.result.plan, MIXED)
    assert any(line.startswith("islands: ") and line.endswith("-> m") for line in lines)
    assert "target: any -> megatron" in lines


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("there is no way", "cannot be: .*there is no way"),
        ("pin tp: 3", "tp is 3|does not divide|3 "),
        ("pin nothing: 3", "cannot be: .*pin nothing: 3"),
    ],
)
def test_where_there_is_none_the_reason_is_said(message: str, word: str) -> None:
    def faults(result: SearchResult, sheet: RankLayout) -> list[Fault]:
        return [Fault(field="plan.pipelines", message=message)]

    with pytest.raises(InfeasibleError, match=rf"no plan was found(?s:.)*({word})"):
        nearest_plan(planned(), refusing(faults), EmissionOptions(), PREDICTOR)
