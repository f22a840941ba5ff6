"""The host's waits in a pass that communicates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.layer_compute import without_waits
from hetplan.cost.terms import Part, Term, seconds_of_parts
from hetplan.predict.layer.composed import WAIT_PART
from hetplan.predict.predictor import Prediction, PredictionPart

TIMES = st.floats(0.0, 10.0)


def layer(device: float, wait: float) -> Prediction:
    parts = [PredictionPart(name="matrix_product", seconds=device, log_halfwidth=0.1)]
    if wait:
        parts.append(PredictionPart(name=WAIT_PART, seconds=wait, log_halfwidth=0.4))
    spread = math.hypot(0.1 * device, 0.4 * wait)
    whole = device + wait
    return Prediction(
        seconds=whole,
        log_halfwidth=spread / whole if whole else 0.0,
        source="measured",
        parts=tuple(parts),
    )


def part(component: Component, prediction: Prediction, count: float = 1.0) -> Part:
    term = Term(what="any", cause="any", count=count, prediction=prediction)
    return Part(component=component, term=term, computes=component is Component.COMPUTE)


def plain(seconds: float) -> Prediction:
    return Prediction(seconds=seconds, log_halfwidth=0.2, source="measured")


@given(device=TIMES, wait=TIMES, communication=TIMES)
@settings(max_examples=100, deadline=None)
def test_a_pass_is_as_long_as_the_longer_of_host_and_device(
    device: float, wait: float, communication: float
) -> None:
    beside = (part(Component.TENSOR_PARALLEL, plain(communication)),)
    found = without_waits((part(Component.COMPUTE, layer(device, wait)),), beside)
    whole = seconds_of_parts((*found, *beside))
    assert whole == pytest.approx(max(device + communication, device + wait))
