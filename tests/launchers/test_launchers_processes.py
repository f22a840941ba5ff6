"""Ending processes ends their children too, whether they listen or not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hetplan.emulation.running import end
from hetplan.launchers.hosts import this_machine_hosts


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def within(seconds: float, what: object) -> bool:
    limit = time.monotonic() + seconds
    while not what() and time.monotonic() < limit:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(what())  # type: ignore[operator]


@pytest.mark.parametrize("then", ["wait", "exit 7"])
@pytest.mark.parametrize("deaf", ["", "trap '' TERM;"])
def test_a_process_and_its_children_are_ended(then: str, deaf: str, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    code = f"{deaf} sleep 600 & echo $$ $! > {path}.new; mv {path}.new {path}; {then}"
    with (tmp_path / "log").open("wb") as log:
        process = this_machine_hosts(1).start(
            0, ("sh", "-c", code), environment=os.environ, log=log
        )
    try:
        assert within(20, path.exists)
        assert then == "wait" or process.wait(10) == 7
    finally:
        end([process], grace_seconds=0.3)
    assert all(within(10, lambda pid=pid: gone(int(pid))) for pid in path.read_text().split())
