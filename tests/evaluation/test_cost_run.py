"""`evaluation cost`: its own timings, its tables, and what it says without reference data."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner, Result

from evaluation.__main__ import app
from evaluation.cost import run as cost


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
