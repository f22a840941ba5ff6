"""Local steps trained on emulated hosts: what is left when the evaluation is ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.local_steps import NAME
from hetplan.emulation import state
from hetplan.emulation.tools import missing
from hetplan.emulation.values import key_of


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.xdist_group("emulation")
@pytest.mark.skipif(bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}")
def test_it_says_how_far_it_is_and_leaves_no_emulation_at_sigterm() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "evaluation", "local-steps"],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with program:
        assert program.stderr is not None
        while not (line := program.stderr.readline()).startswith("training together: "):
            assert line, program.wait()
        assert state.is_up(NAME)
        program.send_signal(signal.SIGTERM)
        assert program.stderr.read().endswith("interrupted\n")
    assert program.returncode == 130
    assert key_of(NAME) not in state.written_keys()
