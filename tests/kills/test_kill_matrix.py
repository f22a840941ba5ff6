"""Commands ended by SIGKILL, SIGTERM and SIGINT lose nothing, leave nothing, and can be gone on
with; `kill_matrix.py` says how it is seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kill_commands import COMMANDS
from kill_matrix import SIGNALS

MOMENTS = 50
QUICK = 6
"""Moments of a commit, of the commands that take no second."""


def row(command: str, number: str, moments: int) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("kill_matrix.py"))),
            *("--moments", str(moments), "--commands", command, "--signals", number),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(rf"{command} +{number} +(\d+) +(\d+) +0", done.stdout)
    # The test would see nothing if no signal came in time.
    assert int(found[1]) > 0


@pytest.mark.slow
@pytest.mark.xdist_group("emulation")
@pytest.mark.parametrize("number", [each.name for each in SIGNALS])
@pytest.mark.parametrize("command", [each.name for each in COMMANDS])
def test_a_command_that_is_ended_leaves_and_loses_nothing(command: str, number: str) -> None:
    row(command, number, MOMENTS)


def test_an_emission_that_is_killed_leaves_nothing() -> None:
    row("emit", "SIGKILL", QUICK)
