"""The predictor as a value: its file, its fallbacks, its populations, its speed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from counted_steps import steps_of
from predict_samples import DEVICE, LINK, layer_grid, link_sample, provenance, query

from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.predict.fit import (
    FittedPredictor,
    fit,
    fit_populations,
    fit_stores,
    load_predictor,
    predictor_text,
    save_predictor,
)
from hetplan.predict.predictor import Prediction, Predictor
from hetplan.profiling.samples import ProfileSet
from hetplan.profiling.store import LayerWriter, LinkWriter


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
        ('"quantity": "hidden"', '"quantity": "width"', "has ranges of width"),
        ('"message_bytes": [\n', '"message_bytes": [\n 1e12,', "7 sizes and 6 times"),
        ("hetplan.predictor/2", "hetplan.plan/1", "a hetplan.predictor file is expected"),
        ("hetplan.predictor/2", "hetplan.predictor/9", "hetplan.predictor/9"),
        ('"rows": ', '"rows": "many", "x": ', "rows"),
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


def test_a_predictor_without_any_sample_answers_everything() -> None:
    predictor = fit(ProfileSet(layers=(), links=(), provenance=()))
    assert predictor == FittedPredictor.datasheet_only()
    bare = replace(LINK, samples=None)
    for layer in TRAINED_KINDS:
        assert forward(predictor, layer=layer, tp=8).seconds > 0
    assert predictor.send(bare, 1e6).seconds_per_byte > 0
    assert predictor.collective(bare, "broadcast", 8, 1e6).seconds > 0


def test_the_newest_population_is_fitted_and_the_report_says_so() -> None:
    slow = [replace(s, median_seconds=2 * s.median_seconds) for s in layer_grid()]
    old = ProfileSet(layers=tuple(slow), links=(), provenance=(provenance("2025-12-31"),))
    new = ProfileSet(
        layers=tuple(layer_grid()), links=(), provenance=(provenance("2026-02-01", threads=2),)
    )
    for order in ((old, new), (new, old)):
        predictor = fit_populations(order)
        alone = fit_populations((new,))
        assert predictor.laws.layers == alone.laws.layers
        (used,) = predictor.laws.populations
        assert "2026-02-01" in used
        assert "2 threads" in used
        (note,) = predictor.laws.notes
        assert note.startswith("testium-1 bfloat16 layers: not used: 48 rows: testium-1")
        assert "2025-12-31" in note


def test_each_operation_of_a_link_comes_from_the_newest_population_that_has_it() -> None:
    reduce_, gather = link_sample(2.0, 1000), link_sample(3.0, 1000)
    gather = replace(gather, operation="all_gather")
    old = ProfileSet(
        layers=(), links=(reduce_, gather), provenance=(provenance("2025-12-31", threads=2),)
    )
    new = ProfileSet(layers=(), links=(link_sample(1.0, 1000),), provenance=(provenance(),))
    predictor = fit_populations((old, new))
    assert predictor.collective(LINK, "all_reduce", 2, 1000).seconds == 1.0
    assert predictor.collective(LINK, "all_gather", 2, 1000).seconds == 3.0
    (note,) = predictor.laws.notes
    assert note.startswith("link rail all_reduce: not used")
    # A row that was measured later makes the old population the newer one.
    late = replace(old, links=(replace(reduce_, measured_on="2027-01-01"), gather))
    assert fit_populations((late, new)).collective(LINK, "all_reduce", 2, 1000).seconds == 2.0


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


def test_stores_are_read_and_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    import hashlib

    samples = everything()
    layers = LayerWriter(tmp_path / "store", provenance())
    for layer in samples.layers:
        layers.append(layer)
    links = LinkWriter(tmp_path / "store", "rail", provenance())
    for link in samples.links:
        links.append(link)
    predictor, digest = fit_stores(tmp_path / "store")
    assert predictor.laws.layers == fit(samples).laws.layers
    assert predictor.laws.links == fit(samples).laws.links
    save_predictor(predictor, tmp_path / "predictor.json")
    written = (tmp_path / "predictor.json").read_bytes()
    assert digest == hashlib.sha256(written).hexdigest()
    assert fit_stores()[0] == FittedPredictor.datasheet_only()


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


def test_importing_and_predicting_needs_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "import hetplan.predict.fit as f\n"
        "f.FittedPredictor.datasheet_only()\n"
        "heavy = ('scipy', 'numpy', 'pandas', 'torch')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
