"""Run logs: written, read back, read after a crash, and what `hetplan launch` makes of them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from launch_results import result_of
from runtime_cases import CPUS, GPT, job, plan_of
from typer.testing import CliRunner

from hetplan.cli.launch import run as launch
from hetplan.cli.main import app
from hetplan.cost.estimate_values import Interval
from hetplan.errors import InputError, LaunchError
from hetplan.launchers import local
from hetplan.launchers.local import largest_difference
from hetplan.launchers.run_log import LossCheck, Machine, RunLog, append_run, read_runs, run_line
from hetplan.runtime.measured import RankMeasure, StepRecord
from hetplan.search.files import save_result

RANK = RankMeasure(
    rank=0,
    device=4,
    device_kind="slow",
    stage=0,
    dp_index=0,
    tp_index=0,
    step_seconds=1.0,
    busy_seconds=0.7,
    tensor_parallel_seconds=0.0,
    wait_seconds=0.2,
    reduction_seconds=0.05,
    optimizer_seconds=0.05,
    paced_passes=100,
    overruns=20,
    peak_memory_bytes=1e6,
)
RUN = RunLog(
    schema="hetplan.run/3",
    hetplan_version="0.1.0",
    plan_sha256="ab",
    started="2026-01-02T03:04:05+00:00",
    model="m",
    cluster="c",
    job="j",
    target="native",
    backend="gloo",
    ranks=(RANK, replace(RANK, rank=1, overruns=50)),
    steps=(
        StepRecord(step=0, seconds=2.0, loss=4.0),
        StepRecord(step=1, seconds=1.0, loss=3.1),
    ),
    warmup_steps=1,
    median_step_seconds=1.0,
    predicted_step_seconds=1.1,
    predicted_interval=Interval(p10_seconds=0.9, mean_seconds=1.1, p90_seconds=1.3),
    paced=("slow",),
    machine=Machine(
        cores=2,
        processor="p",
        system="s",
        python_version="3.11",
        torch_version="2.13",
        load_before=0.5,
    ),
    loss_check=LossCheck(
        reference_losses=(4.0, 3.1), largest_relative_difference=1e-8, tolerance=1e-4
    ),
)


def test_runs_are_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    second = replace(RUN, loss_check=None, paced=())
    append_run(path, RUN)
    append_run(path, second)
    assert read_runs(path) == (RUN, second)


@pytest.mark.parametrize("cut", [1, 900])
def test_a_torn_line_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(run_line(RUN) + "\n" + run_line(RUN)[:cut])
    with caplog.at_level(logging.WARNING):
        assert read_runs(path) == (RUN,)
    assert "runs.jsonl:2: half a line" in caplog.text
    # The next run is not lost to the half line before it.
    append_run(path, RUN)
    assert read_runs(path) == (RUN, RUN)


def test_another_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(run_line(RUN) + '\n{"schema": "hetplan.plan/1"}\n')
    with pytest.raises(InputError, match=r"this is a hetplan\.plan file") as caught:
        read_runs(path)
    assert caught.value.faults[0].line == 2


def test_a_loss_that_is_no_number_differs() -> None:
    assert largest_difference([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    assert largest_difference([1.1, 1.0], [1.0, 1.0]) == pytest.approx(0.1)


# ---- the command

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
