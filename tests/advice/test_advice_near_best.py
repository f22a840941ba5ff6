"""Rivals of the best plan, and which predictions plans stand on."""

from __future__ import annotations

import math

import pytest
from search_jobs import job, mixed, model

from hetplan.advice.near_best import rivals
from hetplan.advice.plan_sensitivities import UPDATE, plan_sensitivities
from hetplan.cost.estimate import estimate
from hetplan.model.spec import LayerKind
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.search import search
from hetplan.search.space.forwarding_predictor import (
    ShiftedPredictor,
)

PREDICTOR = FittedPredictor.datasheet_only()


def test_rivals_are_legal_other_plans_and_one_wins_when_a_kind_is_slow() -> None:
    given, on, asked = model(6), mixed(), job(8)
    best = search(given, on, asked, PREDICTOR)
    found = rivals(best.plan, best.inputs, PREDICTOR, seconds=20.0)
    assert len(found) == len(set(found)) >= 3
    assert best.plan not in found
    assert all(not check_plan(each, given, on, asked) for each in found)
    # In the world where the quick kind is slow the best of them beats the best plan of today's.
    world = ShiftedPredictor(PREDICTOR, "new", 1.0)
    there = [estimate(each, given, on, asked, world).step_seconds for each in found]
    assert min(there) < 0.98 * estimate(best.plan, given, on, asked, world).step_seconds
    assert rivals(best.plan, best.inputs, PREDICTOR, seconds=0.0) == ()


def test_parts_are_the_whole_step_by_what_can_be_measured() -> None:
    given, on, asked = model(6), mixed(), job(8)
    best = search(given, on, asked, PREDICTOR)
    found = plan_sensitivities("best", best.plan, best.inputs, PREDICTOR)
    parts = found.parts
    assert math.fsum(part.seconds for part in parts) == pytest.approx(found.estimate.step_seconds)
    assert found.estimate.step_seconds == best.estimate.step_seconds
    layers = {each.layer for each in found.asked if each.cause == "new"}
    assert {LayerKind.TRANSFORMER.value, UPDATE} <= layers
    degrees = {each.tp for each in found.asked if each.layer}
    assert degrees == {best.plan.pipelines[0].stages[0].replicas[0].tp}
    # Datasheet figures of one kind err together, whichever layer they are of.
    sources = {
        part.source for each, part in zip(found.asked, parts, strict=True) if each.cause == "new"
    }
    assert len(sources) == 1
