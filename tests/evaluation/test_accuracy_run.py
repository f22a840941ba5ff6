"""`evaluation accuracy`: tables, JSON, folders that have little, and nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_tables import (
    COLLECTIVE_HEADER,
    collective_row,
    write_profile,
    write_runs,
    write_table,
)
from typer.testing import CliRunner, Result

from evaluation.__main__ import app
from evaluation.accuracy import run as accuracy_module
from evaluation.accuracy.calibration import predict_rows, run_intervals
from evaluation.accuracy.left_out import OCTAVES, left_out, other_folder, read_unit
from evaluation.accuracy.rows import read_runs
from evaluation.accuracy.run import accuracy
from hetplan.predict.fit import FittedPredictor, fit_populations, with_shipped

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
LAYOUTS = tuple(
    {"tp": str(tp), "pp": str(pp), "dp": str(16 // tp // pp), "micro_batch": str(size)}
    for tp in (1, 2, 4)
    for pp in (1, 2)
    for size in (1, 2)
)


def measured(folder: Path, factor: float = 1.1) -> Path:
    """Runs that took `factor` times what the default predictor says, in several cells."""
    rows = read_runs(write_runs(folder, *LAYOUTS))[0]
    done, _ = predict_rows(rows, (), with_shipped(FittedPredictor.datasheet_only()))
    times = [f"{run.estimate.step_seconds * factor:.6f}" for run in done]
    assert len(times) == len(LAYOUTS)
    return write_runs(
        folder,
        *(row | {"step_time_s": time} for row, time in zip(LAYOUTS, times, strict=True)),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return measured(tmp_path / "data")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["accuracy", *arguments])


# ---- the command


def test_tables_and_json_say_the_same(folder: Path) -> None:
    result = run("--fit", str(folder), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "hetplan.bench/2"
    (data_set,) = found["data_sets"]
    assert data_set["data_set"] == "made-up"
    assert data_set["mape"] == pytest.approx(1 - 1 / 1.1, rel=1e-4)
    assert data_set["bias"] == pytest.approx(1 / 1.1 - 1, rel=1e-4)
    assert data_set["spearman"] == pytest.approx(1.0)
    assert len(found["rows"]) == len(LAYOUTS)
    text = run("--fit", str(folder)).stdout
    assert "9.09%" in text
    assert "-9.09%" in text


def test_folders_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for option in ("--fit", "--judge", "--reference"):
        result = run(option, str(tmp_path / "nowhere"))
        assert result.exit_code == 2
        assert "is no folder" in result.stderr


def test_a_judge_of_nonsense_is_listed_and_ends_well(folder: Path, tmp_path: Path) -> None:
    judge = write_runs(
        tmp_path / "judge",
        {"heads": ""},
        {"dtype": "FP4"},
        {"step_time_s": "nan"},
        {"gpu": "XPU-9"},
        {"layers": "99999999999"},
        {"gpus": "16", "global_batch": "999999999999"},
        {"tp": "3"},
        name="other.csv",
    )
    (judge / "runs/empty.csv").write_text("")
    (judge / "unit").mkdir()
    (judge / "unit/collectives.csv").write_text("a,b\n1,2\n")
    result = run("--fit", str(folder), "--judge", str(judge))
    assert result.exit_code == 0, result.output
    assert "does not say heads" in result.stderr
    assert "no rates" in result.stderr
    assert "XPU-9" in result.stderr
    assert "wrong cell: other.csv:4: step_time_s" in result.stderr
    assert "the header is of no table" in result.stderr
    rows = json.loads(run("--fit", str(folder), "--judge", str(judge), "--json").stdout)["skipped"]
    assert sum(len(each["places"]) for each in rows) == 7


# ---- what is judged by what


def test_nothing_of_a_judge_changes_its_predictions(folder: Path, tmp_path: Path) -> None:
    slow = measured(tmp_path / "slow", factor=2.0)
    one, two = (accuracy(folder, judge).document() for judge in (folder, slow))
    for before, after in zip(one["rows"], two["rows"], strict=True):
        assert before["predicted_seconds"] == after["predicted_seconds"]
    # Widths come from the fitted folder's runs, which are 10 % off; these are twice as long.
    assert two["data_sets"][0]["inside"] == 0
    assert one["data_sets"][0]["inside"] >= len(LAYOUTS) - 1  # equal but for rounding


def test_no_run_is_in_what_its_interval_stands_on(folder: Path) -> None:
    rows = read_runs(folder)[0]
    done, _ = predict_rows(rows, (), with_shipped(FittedPredictor.datasheet_only()))
    before = run_intervals(done, done)
    # One cell's measurements become absurd: its own intervals must not notice.
    cell = {row.place for row in rows if (row.tp, row.pp) == (2, 1)}
    changed = [
        replace(run, row=replace(run.row, step_seconds=500.0)) if run.row.place in cell else run
        for run in done
    ]
    after = run_intervals(changed, changed)
    for run, one, two in zip(done, before, after, strict=True):
        if run.row.place in cell:
            assert one == two
    assert any("measured runs" in one.stands_on for one in before)


# ---- unit data


def profiles(folder: Path) -> Path:
    times = {
        (size, 1): (1e-4 * size, 1e-3 * size + 2e-4, 2e-3 * size + 1e-4) for size in (1, 2, 4, 8)
    }
    for gpu in ("A100-40", "V100-16"):
        write_profile(folder, "OPT-350", gpu, times)
    return folder


def test_devices_are_left_out_whole(tmp_path: Path) -> None:
    populations = read_unit(profiles(tmp_path)).populations
    whole = fit_populations(populations)
    found = left_out(populations, whole).errors()
    devices = set(found[found["left_out"] == "the device"]["device"])
    assert devices == {"nvidia-a100-40gb-sxm", "nvidia-v100-16gb-sxm"}
    # Both have the same times here, and very different figures: without its own samples a device
    # is predicted from the other, and wrongly.
    own = other_folder(populations, whole).errors()
    assert own[own["what"] == "transformer layers"]["mape"].max() < 0.05
    assert found[found["what"] == "transformer layers"]["mape"].min() > 0.2


def test_messages_and_ranks_are_left_out(tmp_path: Path) -> None:
    rows = [
        collective_row(
            "vTrain trace", "all_reduce", ranks, 2**size, 20 + 2**size / 1e5 * (ranks - 1) / ranks,
            "", gpu="A100",
        )
        for ranks in (2, 4, 8)
        for size in range(20, 28)
    ]  # fmt: skip
    write_table(tmp_path, "collectives.csv", COLLECTIVE_HEADER, *rows)
    populations = read_unit(tmp_path).populations
    found = left_out(populations, fit_populations(populations)).errors().set_index("left_out")
    assert found["rows"].to_dict() == {OCTAVES: 24, "each of 2, 4, 8 ranks": 24}
    # A line in between is a line: only the ends, which are beyond what is left, can be off.
    assert found["median"][OCTAVES] < 0.01


# ---- the published data, where they are


@pytest.mark.slow
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="published measurements are not here")
def test_every_published_row_is_predicted_or_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = accuracy(REFERENCE, REFERENCE).document()
    rows = read_runs(REFERENCE)[0]
    places = [row["place"] for row in bench["rows"]]
    places += [place for group in bench["skipped"] for place in group["places"]]
    assert sorted(places) == sorted(row.place for row in rows)
    assert sum(bool(row["suspect"]) for row in bench["rows"]) == 17
    mape = {each["data_set"]: each["mape"] for each in bench["data_sets"]}
    # Peers' figures, far above what hetplan has: a slip in a reading of rows shows here.
    assert mape["vtrain-multi"] < 0.1473
    opt = [
        abs(row["error"])
        for row in bench["rows"]
        if row["data_set"] == "sailor-clariden" and "gpt_neo" not in row["place"]
    ]
    assert sum(opt) / len(opt) < 0.089
    assert mape["simumax-b200-v1.2"] < 0.0586
    assert mape["megatron-sc21-table1, derived"] < 0.103
    # B200's peak memory without any fit.
    memory = {each["data_set"]: each["memory_mape"] for each in bench["data_sets"]}
    assert memory["simumax-b200-v1.2"] < 0.0045
    assert memory["simumax-b200-v1.2, experts"] < 0.01
    monkeypatch.setattr(accuracy_module, "left_out", lambda *_: pytest.fail("fitted on the judge"))
    other = accuracy(REFERENCE, tmp_path).document()
    assert "rows" not in other
    assert any("no row of runs" in each for each in other["missing"])
