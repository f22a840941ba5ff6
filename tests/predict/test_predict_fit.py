"""The predictor as a value: its file, its fallbacks, its populations, its speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from counted_steps import steps_of
from predict_samples import DEVICE, LINK, layer_grid, link_sample, provenance, query

from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import (
    FittedPredictor,
    fit,
    load_predictor,
    predictor_text,
    save_predictor,
)
from hetplan.predict.predictor import Prediction, Predictor
from hetplan.profiling.samples import ProfileSet


def everything(noise: float = 0.03) -> ProfileSet:
    return ProfileSet(
        layers=(
            *layer_grid(noise=noise, seed=1),
            *layer_grid(noise=noise, seed=2, phase="backward"),
        ),
        links=tuple(
            link_sample(1e-4 + (1024 << k) / 1e9, 1024 << k, operation=operation, ranks=ranks)
            for operation in ("all_reduce", "send_recv", "send_recv_late")
            for ranks in (2, 4)
            for k in range(0, 16, 3)
        ),
        provenance=(provenance(),),
    )


def forward(
    predictor: Predictor,
    *,
    device: str = DEVICE.kind,
    layer: LayerKind = LayerKind.TRANSFORMER,
    precision: Precision = Precision.BFLOAT16,
    tp: int = 1,
) -> Prediction:
    asked = query(2048, layer, tp=tp, precision=precision)
    return predictor.layer(replace(DEVICE, kind=device), asked)


def test_a_saved_predictor_is_read_back_equal_to_the_last_bit(tmp_path: Path) -> None:
    predictor = fit(everything())
    path = tmp_path / "predictor.json"
    save_predictor(predictor, path)
    again = load_predictor(path)
    assert again == predictor
    assert predictor_text(again) == path.read_text()
    assert json.loads(path.read_text())["schema"] == "hetplan.predictor/2"
    assert forward(again) == forward(predictor)
    assert again.send(LINK, 1e6) == predictor.send(LINK, 1e6)
    for ranks in (2, 4, 8):
        one, two = (p.collective(LINK, "all_reduce", ranks, 1e6) for p in (again, predictor))
        assert one == two


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"coefficient": ', '"coefficient": -', "time cannot fall with more work"),
        ('"column": "matrix_flops"', '"column": "flips"', "column is 'flips'"),
        ('"message_bytes": [\n', '"message_bytes": [\n 1e12,', "7 sizes and 6 times"),
        ("hetplan.predictor/2", "hetplan.plan/1", "a hetplan.predictor file is expected"),
    ],
)
def test_a_spoiled_predictor_file_is_refused(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    text = predictor_text(fit(everything()))
    assert old in text
    path = tmp_path / "predictor.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_predictor(path)
    assert words in str(caught.value)
    assert "predictor.json" in str(caught.value)


def test_what_was_not_measured_is_the_datasheets_and_says_so() -> None:
    predictor = fit(everything())
    paper = FittedPredictor.datasheet_only()
    assert forward(predictor).source == "measured"
    stranger = forward(predictor, device="testium-9")
    assert stranger == forward(paper, device="testium-9")
    assert stranger.source == "datasheet"
    other = forward(predictor, precision=Precision.FLOAT32)
    assert other.source == "datasheet"
    head = forward(predictor, layer=LayerKind.HEAD)
    assert head.source == "datasheet"
    assert head.extrapolating == ("testium-1 bfloat16 head forward not measured: datasheet",)
    assert head.seconds == forward(paper, layer=LayerKind.HEAD).seconds
    update = predictor.optimizer_update(DEVICE, Optimizer.ADAMW, 1e8, Precision.BFLOAT16)
    assert update.source == "datasheet"


def test_samples_that_can_no_longer_be_told_apart_are_refused() -> None:
    mixed = ProfileSet(
        layers=(*layer_grid(), *layer_grid()),
        links=(),
        provenance=(provenance(), provenance(threads=2)),
    )
    with pytest.raises(InputError, match="testium-1 come from several populations"):
        fit(mixed)
    links = (link_sample(1.0, 1000), link_sample(2.0, 1000))
    with pytest.raises(InputError, match="rail come from several populations"):
        fit(replace(mixed, layers=(), links=links))
    # The same circumstances on two days are one population.
    same = replace(mixed, provenance=(provenance(), provenance("2026-03-01")))
    assert fit(same).laws.layers[0].rows == 96


def test_a_prediction_takes_few_steps_however_much_was_measured() -> None:
    """A search asks for thousands; a fit or a walk over samples would be far more steps."""
    samples = everything()
    some = replace(samples, layers=samples.layers[::2])
    paper = FittedPredictor.datasheet_only()
    whole, half = fit(samples), fit(some)
    steps = steps_of(lambda: forward(whole))
    assert steps < 1000
    assert steps_of(lambda: forward(half)) <= 1.1 * steps
    assert steps_of(lambda: forward(paper)) < 1000
    assert steps_of(lambda: whole.send(LINK, 3e6)) < 500
    assert steps_of(lambda: whole.collective(LINK, "all_reduce", 8, 3e6)) < 500
