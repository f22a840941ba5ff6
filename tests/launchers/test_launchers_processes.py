"""Ending processes ends their children too, whether they listen or not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hetplan.emulation.running import end
from hetplan.launchers.hosts import this_machine_hosts

# A process that starts another one, writes both pids and then does what the test says.
FAMILY = """
import os, signal, subprocess, sys, time
{deaf}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({path!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
{then}
"""


def gone(pid: int) -> bool:
    """Soon at least: a signal is on its way for a moment."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(7)"])
@pytest.mark.parametrize("deaf", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_a_process_and_its_children_are_ended(then: str, deaf: str, tmp_path: Path) -> None:
    path, log = tmp_path / "pids", tmp_path / "log"
    code = FAMILY.format(path=str(path), then=then, deaf=deaf)
    with log.open("wb") as stream:
        hosts = this_machine_hosts(1)
        command = (sys.executable, "-c", code)
        process = hosts.start(0, command, environment=os.environ, log=stream)
    try:
        limit = time.monotonic() + 20
        while not path.exists() or not path.read_text().endswith("\n"):
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.02)
        if "exit" in then:
            assert process.wait(10) == 7
    finally:
        end([process], grace_seconds=0.3)
    assert all(gone(int(pid)) for pid in path.read_text().split())
