"""Commands ended by SIGKILL, SIGTERM and SIGINT lose nothing, leave nothing, and can be gone on
with; `kill_matrix.py` says how it is seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kill_commands import COMMANDS
from kill_matrix import Command

MOMENTS = 50
QUICK = 6
"""Moments of a commit, of the commands that take no second."""


def ended(command: Command, moments: int) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("kill_matrix.py"))),
            *("--moments", str(moments), "--commands", command.name),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number in command.signals:
        (found,) = re.findall(rf"{command.name} +{number.name} +(\d+) +(\d+) +0", done.stdout)
        # The test would see nothing if no signal came in time.
        assert int(found[1]) > 0


@pytest.mark.slow
@pytest.mark.xdist_group("emulation")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.name)
def test_a_command_that_is_ended_leaves_and_loses_nothing(command: Command) -> None:
    ended(command, MOMENTS)


def test_rows_of_a_store_that_are_cut_off_early_lose_nothing() -> None:
    ended(next(each for each in COMMANDS if each.name == "store rows"), QUICK)
