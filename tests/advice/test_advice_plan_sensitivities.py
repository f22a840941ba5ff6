"""Which predictions plans stand on."""

from __future__ import annotations

import math

import pytest
from search_jobs import job, mixed, model

from hetplan.advice.plan_sensitivities import UPDATE, plan_sensitivities
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedPredictor
from hetplan.search.search import search

PREDICTOR = FittedPredictor.datasheet_only()


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
