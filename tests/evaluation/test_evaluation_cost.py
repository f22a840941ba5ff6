"""`evaluation cost`: own timings."""

from __future__ import annotations

import json

import pandas
import pytest
from typer.testing import CliRunner

from evaluation import cost
from evaluation.__main__ import app


def test_plans_of_the_benchmark_are_all_different() -> None:
    _, plans = cost.random_plans(6)
    assert len(set(plans)) == 6
    for plan in plans:
        (pipeline,) = plan.pipelines
        assert (len(pipeline.stages), pipeline.num_microbatches) == (16, 64)


def test_tables_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = cost.estimate_timings(known=2, timed=2, repeats=1)
    monkeypatch.setattr(cost, "estimate_timings", lambda: timings)
    monkeypatch.setattr(cost, "replay_timings", lambda: pandas.DataFrame())
    result = CliRunner().invoke(app, ["cost"])
    assert result.exit_code == 0, result.output
    assert "step with memory, other cuts" in result.stdout
    found = json.loads(CliRunner().invoke(app, ["cost", "--json"]).stdout)
    assert found["schema"] == "hetplan.bench/2"
    assert [row["stages"] for row in found["estimates"]] == [16, 16, 16]
