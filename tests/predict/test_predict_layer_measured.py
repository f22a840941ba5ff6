"""A shape that was measured is answered by its measurement; errors on left-out sizes are not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_samples import DEVICE, fitted, gpt, layer_grid, layer_sample, query

from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.layer.laws import fit_layer_laws
from hetplan.predict.layer.tables import (
    ACCELERATOR_REPEAT_LOG_HALFWIDTH,
    scatter_log_halfwidth,
)
from hetplan.predict.predictor import Prediction
from hetplan.profiling.samples import LayerSample

# A law that no sum of columns meets: the measured medians are off it by up to a fifth.
NOISE = 0.1


def spread(sample: LayerSample, ratio: float) -> LayerSample:
    """With its 10 % and 90 % points this far apart."""
    return replace(
        sample,
        p10_seconds=sample.median_seconds / math.sqrt(ratio),
        p90_seconds=sample.median_seconds * math.sqrt(ratio),
    )


def ask(
    predictor: FittedPredictor, sample: LayerSample, microbatch: int | None = None
) -> Prediction:
    asked = query(
        sample.hidden_size,
        LayerKind(sample.layer),
        microbatch=microbatch or sample.microbatch_size,
        sequence=sample.sequence_length,
        tp=sample.tp,
        precision=Precision(sample.precision),
    )
    return predictor.layer(replace(DEVICE, kind=sample.device), asked)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(1.0, 3.0))
def test_a_measured_shape_has_its_median_unless_a_checked_law_is_surer(
    seed: int, ratio: float
) -> None:
    samples = [
        spread(each, ratio)
        for each in layer_grid(noise=NOISE, seed=seed, sequences=(1024,), microbatches=(1, 4))
    ]
    (law,) = fit_layer_laws(samples)
    predictor = fitted(samples)
    for sample in samples:
        found = ask(predictor, sample)
        assert found.source == "measured"
        assert not found.extrapolating
        # What the row says of itself, not what the law is off by on sizes that it has not seen.
        own = max(scatter_log_halfwidth(sample), ACCELERATOR_REPEAT_LOG_HALFWIDTH)
        assert found.log_halfwidth == pytest.approx(min(own, law.log_halfwidth))
        if own < law.log_halfwidth:
            assert found.seconds == sample.median_seconds


def test_what_was_not_measured_is_the_sum_of_columns_as_before() -> None:
    samples = layer_grid(noise=NOISE, seed=3)
    (law,) = fit_layer_laws(samples)
    bare = FittedPredictor(replace(fitted(samples).laws, layers=(replace(law, measured=()),)))
    predictor = fitted(samples)
    for microbatch in (3, 6, 64):
        assert ask(predictor, samples[0], microbatch) == ask(bare, samples[0], microbatch)
    assert ask(predictor, samples[0]) != ask(bare, samples[0])
    # Another sequence length, tp, model or precision is not the same shape.
    other = layer_sample(gpt(3072), 1.0, microbatch=1, sequence=1024)
    assert ask(predictor, other) == ask(bare, other)
