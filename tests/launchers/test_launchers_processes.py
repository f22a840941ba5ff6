"""Ending processes ends their children too, whether they listen or not."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from hetplan.emulation.running import end
from hetplan.launchers.hosts import this_machine_hosts
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.worker import meet
from hetplan.runtime.activity import Activity


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


def test_ranks_meet_at_their_own_address_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store obeys whoever reaches it, and torch's own listens on all interfaces."""
    monkeypatch.delenv("HETPLAN_MEETING_ADDRESS", raising=False)
    folder = RunFolder(tmp_path)
    store = meet(folder, 0, 1, timedelta(seconds=20), Activity())
    store.set("key", "value")
    assert store.get("key") == b"value"
    port = f":{int(folder.port.read_text()):04X}"
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    lines = [line.split() for line in tables.splitlines()]
    listening = "0A"  # include/net/tcp_states.h
    found = [each[1] for each in lines if each[1].endswith(port) and each[3] == listening]
    assert found == [f"0100007F{port}"]
