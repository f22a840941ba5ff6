"""`evaluation cost`: own timings, and memory, collectives and long links that others measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from evaluation.cost.long_links import PAIRS_FILE, city_pairs, left_out_errors, predict
from evaluation.cost.memory import SIMUMAX_FILE, memory_errors, memory_rows
from typer.testing import CliRunner, Result

from evaluation.__main__ import app
from evaluation.cost import run as cost
from evaluation.cost.collectives import collective_errors
from evaluation.output import plain
from hetplan.errors import InputError

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not there")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = cost.estimate_timings(known=2, timed=2, repeats=1)
    monkeypatch.setattr(cost, "estimate_timings", lambda: timings)
    monkeypatch.setattr(cost, "replay_timings", lambda: pandas.DataFrame())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cost", *arguments])


def test_plans_of_the_benchmark_are_all_different() -> None:
    _, plans = cost.random_plans(6)
    assert len(set(plans)) == 6
    for plan in plans:
        (pipeline,) = plan.pipelines
        assert (len(pipeline.stages), pipeline.num_microbatches) == (16, 64)


@pytest.mark.usefixtures("quick")
def test_tables_without_reference_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no ../shared/reference from here
    result = run()
    assert result.exit_code == 0, result.output
    assert "step with memory, other cuts" in result.stdout
    assert "Memory against" not in result.stdout
    assert "left out: memory, collectives and long links" in result.stderr


@pytest.mark.usefixtures("quick")
def test_json_holds_fractions_and_seconds(tmp_path: Path) -> None:
    result = run("--json", "--reference", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "hetplan.bench/2"
    assert [row["stages"] for row in found["estimates"]] == [16, 16, 16]
    # An empty folder: every table of it is named as missing.
    assert [line.split()[0].rpartition("/")[2] for line in found["missing"]] == [
        "simumax_b200.csv", "collectives.csv", "collectives.csv", "wan_city_pairs.csv",
    ]  # fmt: skip


MAX_COUNT = {
    # (rows, most that the mean of the absolute errors may be). Sailor's own model has 6 to 7 % on
    # GH200 and 88 % on the mixed cards.
    "B200, dense": (16, 0.0045),
    "B200, experts": (6, 0.01),
    "GH200": (15, 0.04),
    "RTX": (2, 0.10),
}


@needs_reference
def test_memory_of_measured_runs() -> None:
    rows = memory_rows(REFERENCE)
    assert len(rows) == 22 + 18
    assert rows["suspect"].sum() == 1
    groups = memory_errors(rows).set_index("group")
    assert list(groups.index) == list(MAX_COUNT)
    for name, (count, most) in MAX_COUNT.items():
        assert groups["rows"][name] == count
        assert groups["mean_error"][name] <= most
        # Nothing is fitted to the B200 runs.
        assert (groups["constant_bytes"][name] == 0) == name.startswith("B200")


def test_wrong_reference_data_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"simumax_b200\.csv is not there"):
        memory_rows(tmp_path)
    path = tmp_path / SIMUMAX_FILE
    path.parent.mkdir()
    path.write_text("model,step_time_s,peak_mem_gib\nx,1,much\n")
    with pytest.raises(InputError, match=r"simumax_b200\.csv, line 2: peak_mem_gib is 'much'"):
        memory_rows(tmp_path)


@needs_reference
def test_published_collectives() -> None:
    keys = ["source", "group", "algorithm"]
    rows = {tuple(row[key] for key in keys): row for row in plain(collective_errors(REFERENCE))}
    # Two nodes of 8, whose times the laws have not seen: one, two, four and all devices of a node.
    # Measured: 4.6, 4.9, 11.8 and 2.1 %.
    for ranks, most in ((1, 0.06), (2, 0.06), (4, 0.13), (8, 0.04)):
        for form in ("ring", "library"):
            row = rows["Galvatron, 2x8", f"{ranks} in each of two nodes", form]
            assert row["rows"] == 1
            assert row["mean_error"] < most
    for ranks in range(2, 9):
        key = "vTrain, A100", f"{ranks} in one node"
        before, ring, library = (rows[*key, form] for form in ("figures", "ring", "library"))
        assert ring["rows"] == 11
        # Inside a node a device-direct library lays rings, which is what was measured.
        assert ring["mean_error"] == library["mean_error"] < 0.13
        assert ring["mean_error"] < before["mean_error"] / 2
        assert 0.95 < ring["median_ratio"] < 1.05
    for nodes in (2, 4, 8, 16, 32, 64, 128):
        key = "SimAI, rings only", f"{nodes} nodes of 8"
        before, ring, library = (
            rows[*key, form] for form in ("figures", "ring", "library, trees too")
        )
        assert ring["rows"] == 11
        assert ring["mean_error"] < 0.14
        assert ring["mean_error"] < before["mean_error"] / 5
        # The rows are of rings; with many nodes a library takes trees for short messages.
        assert library["median_ratio"] <= ring["median_ratio"]
    for source, group, form in rows:
        more = ", trees too" if source.startswith("SimAI") else ""
        forms = ("ring", f"library{more}")
        chosen = [rows[source, group, each]["median_ratio"] for each in forms]
        assert chosen == sorted(chosen, reverse=True), (source, group, form)


@needs_reference
def test_city_pairs_are_predicted_from_the_others() -> None:
    pairs = city_pairs(REFERENCE)
    constant, window = (left_out_errors(pairs, window=each) for each in (False, True))
    assert constant["pairs"] == 45
    assert float(constant["mean"]) > 0.4
    assert float(window["mean"]) < 0.1374  # one window for all, as fitted elsewhere: 13.7 %
    assert 0.85 <= float(window["covered"]) <= 1.0


def test_a_world_that_follows_the_law_is_found() -> None:
    rng = np.random.default_rng(1)
    trips = rng.uniform(0.01, 0.3, 40)
    goodput = np.minimum(1.25e8, 1e7 / trips)
    for trip in (0.02, 0.15, 3.0):
        found, _ = predict(np.log(trips), np.log(goodput), np.log(trip), window=True)
        assert np.exp(found) == pytest.approx(min(1.25e8, 1e7 / trip), rel=1e-9)


@pytest.mark.parametrize(
    ("cells", "word"),
    [("from,to\na,b", "rtt_or_delay"), ("rtt_or_delay_ms_as_published\n0", "bandwidth")],
)
def test_wrong_samples_are_refused(tmp_path: Path, cells: str, word: str) -> None:
    with pytest.raises(InputError, match="wan_city_pairs"):
        city_pairs(tmp_path)
    path = tmp_path / PAIRS_FILE
    path.parent.mkdir()
    path.write_text(f"{cells}\n")
    with pytest.raises(InputError, match=word):
        city_pairs(tmp_path)
