"""What every command shares: completion, default sub-commands, how faults are printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command_line import run

from hetplan.cli import options
from hetplan.errors import Fault, Severity


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hetplan pl", "plan"),
        ("hetplan plan --time", "--time-limit"),
        ("hetplan explain ra", "ranks"),
    ],
)
def test_shells_complete(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "from hetplan.cli.main import app; app(prog_name='hetplan')"],
        env=os.environ | words | {"_HETPLAN_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [offered], done.stderr


def test_help_lists_options_by_panel() -> None:
    shown = run("plan", "--help").stdout
    assert shown.index("--model") < shown.index("Over the job file:") < shown.index("--gap")


def test_typos_are_answered_with_the_nearest_name() -> None:
    done = run("plann")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'plan'" in done.stderr
    assert run("plan", "--modle", "x").exit_code == 2


def test_faults_are_printed_by_severity_and_the_rest_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = Fault(file="job.yaml", line=3, field="gap", message="too large")
    options.tell(wrong, Fault(severity=Severity.NOTE, message="worth knowing"))
    assert capsys.readouterr().err == "hetplan: job.yaml:3: gap: too large\nnote: worth knowing\n"
    options.tell(*[wrong] * (options.MAX_FAULTS + 2))
    assert capsys.readouterr().err.endswith("hetplan: and 2 more like these\n")
