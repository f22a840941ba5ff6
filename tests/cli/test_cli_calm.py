"""Restraint: a line of progress now and then, answers of at most ten lines of 80 columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from test_launchers_run_log import RANK, RUN

from hetplan.reports import terminal
from hetplan.reports.comparison import loop_lines
from hetplan.reports.launch import show_run
from hetplan.reports.terminal import ProgressLine, shown_on
from hetplan.search.solver import Progress


def is_calm(text: str) -> bool:
    lines = text.splitlines()
    return len(lines) <= 10 and all(len(line) <= 80 for line in lines)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until the test moves it."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_progress_in_a_log_begins_after_two_seconds_and_is_a_line_every_five(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressLine("measuring") as line:
        for at in range(1, 13):
            clock[0] = at - 0.5
            line.show(at, 12, 12.0 - at, "a layer")
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 3 of 12, 9 s left, a layer",
        "measuring: 8 of 12, 4 s left, a layer",
    ]
    with ProgressLine("measuring") as line:
        line.show(3, 3, None, "all")
    with ProgressLine("a demo", shown=None) as line:
        clock[0] += 100.0
        line.show(1, 3, None, "one")
    assert capsys.readouterr().err == ""


def test_progress_says_nothing_of_counts_and_bounds_that_are_not_there(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = Progress(
        best_seconds=float("inf"),
        lower_bound_seconds=0.0,
        candidates_done=0,
        candidates=0,
        elapsed_seconds=3.0,
    )
    with ProgressLine("searching") as line:
        for seconds, stands in (
            (3.0, nothing),
            (9.0, replace(nothing, best_seconds=44.04, candidates=2000, candidates_done=1200)),
            (15.0, replace(nothing, best_seconds=44.04, lower_bound_seconds=43.6)),
        ):
            clock[0] = seconds
            shown_on(line)(stands)
    assert capsys.readouterr().err.splitlines() == [
        "searching: no plan yet",
        "searching: 1,200 of 2,000, best 44.0 s, no bound yet",
        "searching: best 44.0 s, gap 1.0%",
    ]


def test_a_fit_is_a_line_for_each_kind_and_link_and_every_law_with_verbose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    done = run("fit")
    assert done.exit_code == 0, done.stderr
    assert is_calm(done.stdout)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["cpu", "loopback"]
    every = run("fit", "--verbose").stdout
    assert "transformer forward, " in every
    assert "mean, median and worst: errors on sizes left out of the fit" in every
    assert len(every.splitlines()) > 30


def test_a_run_is_measured_beside_predicted_in_a_few_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_run(RUN, verbose=False)
    said = capsys.readouterr().out
    assert is_calm(said)
    assert "measured 1.00 s a step, median of 1 step\n" in said
    assert "predicted 1.10 s a step (80 %: 0.900 to 1.30 s): 10.0% more than measured" in said
    show_run(RUN, verbose=True)
    assert RANK.device_kind in capsys.readouterr().out


def test_two_runs_of_the_loop_are_a_table_and_a_curve() -> None:
    lines = [*loop_lines((("hetplan's plan", RUN), ("even split", RUN)))]
    assert is_calm("\n".join(lines))
    assert lines[1].split()[-6:] == ["s", "+10.0%", "0.900", "to", "1.30", "s"]


def test_the_doctor_names_devices_and_what_can_be_measured() -> None:
    done = run("doctor", "--kinds")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "float4" in run("doctor", "--kinds", "--verbose").stdout
