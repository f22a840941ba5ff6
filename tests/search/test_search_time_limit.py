"""A time limit is the whole search's: time for the last price is kept back."""

from __future__ import annotations

import math

import pytest
from search_jobs import cluster, island, job, model

from hetplan import kernels
from hetplan.deadline import LATE_SECONDS, ends_by
from hetplan.errors import OutOfTimeError
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import Schedule
from hetplan.predict.fit import FittedPredictor
from hetplan.search import search as driver
from hetplan.search.final_pricing import least_pricing_seconds, pricing_seconds
from hetplan.search.multi_pipeline.stage_options import OptionsMaker
from hetplan.search.result import Question
from hetplan.search.solver import Best
from hetplan.search.table_maker import TableMaker

NOW = 100.0
ASKED = Question(model=model(), cluster=cluster(island("a")), job=job(2))


def plan(stages: int = 1, nodes: int = 1, microbatches: int = 1) -> ChosenPlan:
    shape = Shape(tp=1, dp=nodes, microbatch_size=1)
    stage = ChosenStage(parts=(Part(island="a", shape=shape),), layers=(1,), warmup_depth=1)
    return ChosenPlan(
        pipelines=(
            ChosenPipeline(
                stages=(stage,) * stages,
                num_microbatches=microbatches,
                schedule=Schedule(name="1f1b"),
            ),
        )
    )


def begun(limit: float | None, pricing: float, monkeypatch: pytest.MonkeyPatch) -> Best:
    monkeypatch.setattr(kernels.loading, "now", lambda: NOW + kernels.loading.seconds)
    monkeypatch.setattr(driver, "pricing_seconds", lambda _: pricing)
    monkeypatch.setattr(driver, "least_pricing_seconds", lambda _: pricing)
    best = driver._nothing_yet(ASKED.with_job(time_limit_seconds=limit), None)
    best.bounds = [0.0]
    return best


@pytest.mark.parametrize("limit", [0.0, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("pricing", [0.01, 0.3, 0.7, 3.0])
def test_the_price_of_the_plan_is_kept_back(
    limit: float, pricing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = begun(limit, pricing, monkeypatch)
    kept = min(pricing, limit / 2)
    # A first plan has its price by the limit and what it may be overrun by.
    assert NOW + limit <= best.first_plan_by
    assert best.first_plan_by + min(kept, 1.0) <= NOW + limit + 2 * LATE_SECONDS + 1e-9
    assert best.deadline == NOW + limit
    best.offer(0, plan(), 1.0)
    assert best.deadline == pytest.approx(NOW + limit - kept)


def test_without_a_limit_nothing_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    best = begun(None, 3.0, monkeypatch)
    assert best.deadline == best.first_plan_by == math.inf


def test_a_search_within_another_ones_time_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.loading, "now", lambda: NOW + kernels.loading.seconds)
    with ends_by(NOW + 5.0):
        best = begun(10.0, 0.3, monkeypatch)
    assert best.first_plan_by == best.deadline == NOW + 5.0


def test_a_plan_ends_the_time_for_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    best = begun(1.0, 0.3, monkeypatch)
    monkeypatch.setattr(kernels.loading, "now", lambda: NOW + 1.1 + kernels.loading.seconds)
    assert best.late
    best.check_time()
    best.offer(0, plan(), 1.0)
    with pytest.raises(OutOfTimeError):
        best.check_time()


def test_pricing_takes_longer_with_devices_stages_and_passes() -> None:
    least = pricing_seconds(plan())
    assert least < pricing_seconds(plan(stages=10)) < pricing_seconds(plan(10, microbatches=100))
    assert least < pricing_seconds(plan(nodes=1000))
    assert pricing_seconds(plan(microbatches=10**6)) == pricing_seconds(plan(microbatches=10**7))
    wide = cluster(island("a", nodes=10_000))
    assert least_pricing_seconds(ASKED.cluster) < least_pricing_seconds(wide)


def test_options_of_several_pipelines_look_at_the_clock() -> None:
    looked = []
    maker = TableMaker.of(
        ASKED.with_job(target="native"), FittedPredictor.datasheet_only(), lambda: looked.append(1)
    )
    OptionsMaker(pricer=maker.stage_pricer, check=maker.check).stages()
    assert len(looked) > 1
