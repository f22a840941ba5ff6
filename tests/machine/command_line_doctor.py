"""Runs `hetplan doctor` as a user does."""

from __future__ import annotations

import os
import subprocess
import sys


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetplan", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        # Device kinds of whoever runs the tests are left out unless a test gives some.
        env=os.environ | {"XDG_CONFIG_HOME": "/nonexistent"} | environment,
    )
