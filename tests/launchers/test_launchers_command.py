"""What `hetplan launch` prints, and when it fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from launch_results import result_of
from runtime_cases import CPUS, GPT, job, plan_of
from test_launchers_run_log import RANK, RUN
from typer.testing import CliRunner

from hetplan.cli.launch import run as launch
from hetplan.cli.main import app
from hetplan.errors import LaunchError
from hetplan.launchers import local
from hetplan.launchers.run_log import LossCheck, RunLog, read_runs
from hetplan.search.files import save_result

VALID = replace(RUN, ranks=(RANK,))
DIFFERENT = LossCheck(reference_losses=(4.0, 3.0), largest_relative_difference=0.03, tolerance=1e-4)


def test_run_may_be_left_out(tmp_path: Path) -> None:
    for words in ((), ("run",), ("--steps", "3"), ("run", "--steps", "3")):
        done = CliRunner().invoke(app, ("launch", *words, str(tmp_path / "plan.json")))
        assert (done.exit_code, done.stderr.count("there is no such file")) == (2, 1)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_result(result_of(GPT, CPUS, job(), plan_of(GPT, job(), (2, 2))), path)
    return path


def runs(run: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every launch give this run, step by step."""

    def give(result, settings, *, on_step, tell) -> RunLog:
        assert result.inputs.model == GPT
        for step in run.steps:
            on_step(step)
        return run

    monkeypatch.setattr(local, "launch", give)


def test_json_is_the_line_of_the_run_log(
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs(VALID, monkeypatch)
    log = tmp_path / "runs.jsonl"
    launch(plan_file, run_log=log, as_json=True)
    out = capsys.readouterr().out
    assert out == log.read_text()
    assert json.loads(out)["schema"] == "hetplan.run/3"
    assert read_runs(log) == (VALID,)


def test_different_losses_fail_after_the_run_is_kept(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(VALID, loss_check=DIFFERENT)
    runs(run, monkeypatch)
    with pytest.raises(LaunchError, match=r"DIFFER from .* 3.0e-02, allowed 1e-04"):
        launch(plan_file, run_log=tmp_path / "runs.jsonl")
    assert read_runs(tmp_path / "runs.jsonl") == (run,)
