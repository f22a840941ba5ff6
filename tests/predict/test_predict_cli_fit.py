"""`hetplan fit` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from predict_samples import layer_grid, link_sample, provenance
from typer.testing import CliRunner

from hetplan.cli.fit import fit as command
from hetplan.errors import InputError
from hetplan.predict.fit import fit_stores, load_predictor, predictor_text
from hetplan.profiling.store import LayerWriter, LinkWriter

app = typer.Typer()
app.command()(command)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    layers = LayerWriter(folder, provenance())
    for phase in ("forward", "backward"):
        for sample in layer_grid(noise=0.03, seed=1, phase=phase, tps=(1,)):
            layers.append(sample)
    links = LinkWriter(folder, "rail", provenance())
    for k in range(4):
        links.append(link_sample(1e-4 * (k + 1), 1024 << k))
    return folder


def test_a_table_per_law_and_a_file(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictor.json"
    done = CliRunner().invoke(
        app, ["--store", str(store), "--out", str(out), "--verbose"], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    for words in (
        "testium-1",
        "transformer backward, ",
        "all_reduce among 2",
        "left out of the fit",
    ):
        assert words in said
    assert "2026-01-01, torch 2.13.0, 1.0, 1 thread" in said
    # Four sizes leave too few out for an interval of their own.
    assert "rail all_reduce of 2: interval from 2 left-out sizes are too few" in said
    assert f"wrote {out}" in done.stderr
    assert "wrote" not in done.stdout
    assert load_predictor(out) == fit_stores(store)[0]


def test_json_is_the_file(store: Path) -> None:
    done = CliRunner().invoke(app, ["--store", str(store), "--json"])
    assert done.exit_code == 0
    assert done.stdout == predictor_text(fit_stores(store)[0])
    assert json.loads(done.stdout)["schema"] == "hetplan.predictor/2"


def test_a_store_without_samples_is_bad_input(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--store", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "there are no samples" in str(done.exception)
    assert "hetplan profile" in str(done.exception)
