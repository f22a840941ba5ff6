"""Samples of layers to laws: known devices recovered, columns dropped, intervals honest."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from predict_samples import (
    DEVICE,
    HIDDEN,
    fitted,
    gpt,
    layer_grid,
    layer_sample,
    query,
    truth,
)

from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.law_parts import OWN_ROWS, WIDENING_PER_DOUBLING
from hetplan.predict.layer.laws import UNVALIDATED_LOG_HALFWIDTH, fit_layer_laws
from hetplan.predict.layer.values import LayerLaw, layer_columns
from hetplan.predict.predictor import Prediction


def coefficients(law: LayerLaw) -> dict[str, float]:
    return {term.column: term.coefficient for term in law.terms}


def forward(
    predictor: FittedPredictor,
    *,
    hidden: int = 2048,
    microbatch: int = 2,
    sequence: int = 2048,
    tp: int = 1,
) -> Prediction:
    return predictor.layer(DEVICE, query(hidden, microbatch=microbatch, sequence=sequence, tp=tp))


def test_a_known_device_is_recovered() -> None:
    (law,) = fit_layer_laws(layer_grid())
    found = coefficients(law)
    assert found["constant"] == pytest.approx(50e-6, rel=1e-3)
    assert found["matrix_flops"] == pytest.approx(1 / 200e12, rel=1e-3)
    assert found["attention_flops"] == pytest.approx(1 / 100e12, rel=1e-3)
    assert found["elementwise_bytes"] == pytest.approx(1 / 1e12, rel=1e-3)
    assert found["weight_bytes"] == pytest.approx(0.0, abs=1e-16)
    assert law.rows == law.points == 48
    assert law.validation.left_out == "hidden"
    assert law.validation.folds == len(HIDDEN)
    assert law.validation.worst < 1e-6
    assert law.calibration == OWN_ROWS


def test_predicts_four_times_the_measured_hidden_size() -> None:
    """The case hetplan exists for; a device's truth holds beyond what was measured."""
    samples = layer_grid(hidden=(512, 1024, 2048), noise=0.02, seed=4)
    predictor = fitted(samples)
    columns = layer_columns(query(8192, sequence=4096))
    prediction = forward(predictor, hidden=8192, sequence=4096)
    assert abs(math.log(truth(columns) / prediction.seconds)) < prediction.log_halfwidth
    assert prediction.seconds == pytest.approx(truth(columns), rel=0.1)


def test_intervals_cover_nine_of_ten_unseen_rows() -> None:
    held = tried = 0
    source = random.Random(6)
    for seed in range(20):
        predictor = fitted(layer_grid(noise=0.05, seed=seed))
        for _ in range(20):
            hidden = source.choice((1536, 3072, 6144))
            microbatch = source.choice((1, 2, 3, 4))
            columns = layer_columns(query(hidden, microbatch=microbatch))
            measured = truth(columns) * math.exp(source.gauss(0, 0.05))
            prediction = forward(predictor, hidden=hidden, microbatch=microbatch)
            assert not prediction.extrapolating
            held += abs(math.log(measured / prediction.seconds)) <= prediction.log_halfwidth
            tried += 1
    assert 0.86 <= held / tried <= 0.97


def test_columns_are_dropped_where_samples_cannot_tell_them_apart() -> None:
    samples = layer_grid(hidden=(2048,), sequences=(2048,), tps=(1,), microbatches=(1, 2, 3, 4))
    (law,) = fit_layer_laws(samples)
    assert list(coefficients(law)) == ["constant", "flops"]
    assert law.validation.left_out == "microbatch"
    assert "one hidden size only: the errors leave out whole microbatch sizes" in " ".join(
        law.notes
    )
    assert "cannot tell 5 columns apart" in " ".join(law.notes)
    (law,) = fit_layer_laws(samples[:1])
    assert list(coefficients(law)) == ["flops"]
    assert law.log_halfwidth >= UNVALIDATED_LOG_HALFWIDTH
    assert law.validation.left_out == ""
    assert "untested" in " ".join(law.notes)


def test_extrapolation_is_said_and_widens_the_interval() -> None:
    predictor = fitted(layer_grid(noise=0.05, seed=10))
    inside = forward(predictor, hidden=4096)
    assert inside.extrapolating == ()
    assert inside.source == "measured"
    assert inside.log_halfwidth == predictor.laws.layers[0].log_halfwidth
    outside = forward(predictor, hidden=16384)
    assert outside.extrapolating == ("hidden 16384 > 8192 measured",)
    widened = inside.log_halfwidth * (1 + WIDENING_PER_DOUBLING)
    assert outside.log_halfwidth == pytest.approx(widened)
    both = forward(predictor, hidden=512, tp=4)
    assert both.extrapolating == ("hidden 512 < 1024 measured", "tp 4 > 2 measured")
    assert both.log_halfwidth == pytest.approx(
        inside.log_halfwidth * (1 + 2 * WIDENING_PER_DOUBLING)
    )


def test_an_optimizer_is_fitted_by_parameters() -> None:
    samples = []
    for hidden in HIDDEN:
        for layer in (LayerKind.TRANSFORMER, LayerKind.HEAD):
            for tp in (1, 2):
                seconds = 20e-6 + 30e-12 * gpt(hidden).parameters(layer, tp)
                samples.append(
                    layer_sample(gpt(hidden), seconds, layer=layer, tp=tp, phase="optimizer:adamw")
                )
    predictor = fitted(samples)
    (law,) = predictor.laws.layers
    assert (law.layer, law.phase) == ("all", "optimizer:adamw")
    update = predictor.optimizer_update(DEVICE, Optimizer.ADAMW, 1e8, Precision.BFLOAT16)
    assert update.seconds == pytest.approx(20e-6 + 30e-12 * 1e8, rel=1e-4)
    assert update.source == "measured"
    sgd = predictor.optimizer_update(DEVICE, Optimizer.SGD, 1e8, Precision.BFLOAT16)
    assert sgd.source == "datasheet"
    assert "optimizer:sgd not measured" in sgd.extrapolating[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"median_seconds": math.inf}, "median_seconds is inf"),
        ({"layer": "decoder"}, "layer is 'decoder'"),
        ({"phase": "optimizer"}, "phase is 'optimizer'"),
    ],
)
def test_every_unusable_sample_is_named(change: dict[str, object], words: str) -> None:
    samples = layer_grid()
    samples[1] = replace(samples[1], **change)  # type: ignore[arg-type]
    samples[7] = replace(samples[7], **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="layer sample 2 of testium-1") as caught:
        fit_layer_laws(samples)
    assert len(caught.value.faults) == 2
    assert words in str(caught.value)
