"""A step of millions of passes: commands answer in little memory, and say what they leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetplan.cost.replay import programs
from tests.cli.command_line import run

_QUESTION = ("--nodes", "1x8 h100", "--model", "llama-3-8b", "--batch", "400000", "--seq", "4096")
_RUN = ("--set", "total_tokens=150T", "--set", "checkpoint_interval_steps=90000")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,200,000 forward passes, and a run that never ends: its checkpoints are decades apart."""
    path = tmp_path_factory.mktemp("long") / "plan.json"
    done = run("estimate", *_QUESTION, *_RUN, "--tp", "1", "--pp", "8", "--out", str(path))
    assert path.exists(), done.stderr
    assert "never ends" in done.stdout
    assert "a checkpoint every 90,000 steps (best: 3)" in " ".join(done.stdout.split())
    return path


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes all passes of the step down, each of which takes a kB."""
    whole = programs.programs_of

    def written(times, rendezvous):  # type: ignore[no-untyped-def]
        assert times.num_microbatches * times.forward.size <= 100_000
        return whole(times, rendezvous)

    for name in ("hetplan.cost.energy.clocks", "hetplan.cost.replay.step"):
        monkeypatch.setattr(f"{name}.programs_of", written)


def test_the_report_does_not_draw_it(plan: Path, tmp_path: Path) -> None:
    done = run("report", str(plan), "--out", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "The step has 3,200,000 forward passes: too many to draw." in page


def test_no_trace_of_it_is_written(plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = run("estimate", str(plan), "--trace", str(trace))
    assert "3,200,000 forward passes" in done.stderr
    assert "a step" in done.stdout
    assert not trace.exists()


def test_what_never_ends_is_null_in_json(plan: Path) -> None:
    found = json.loads(run("estimate", str(plan), "--json").stdout)
    assert found["run"]["goodput"]["seconds"] is None
    assert found["run"]["goodput"]["interval_steps"] == 90000
    assert run("estimate", str(plan), "-v").exit_code in (0, 3)
