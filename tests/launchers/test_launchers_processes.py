"""Processes are ended whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetplan.errors import LaunchError
from hetplan.launchers import ranks
from hetplan.launchers.hosts import this_machine_hosts
from hetplan.launchers.ranks import Command, run_all


def command(folder: Path, rank: int, code: str) -> Command:
    return Command(
        rank=rank,
        arguments=(sys.executable, "-c", code),
        log=folder / f"{rank}.log",
    )


def judge(codes: Sequence[int | None]) -> None:
    for rank, code in enumerate(codes):
        if code:
            raise LaunchError(f"rank {rank} ended with code {code}")


def run(folder: Path, *codes: str, watch=lambda: None) -> None:
    commands = [command(folder, rank, code) for rank, code in enumerate(codes)]
    run_all(
        commands,
        environment=os.environ,
        watch=watch,
        hosts=this_machine_hosts(len(commands)),
        judge=judge,
    )


def gone(pid: int) -> bool:
    """Soon at least: a signal is on its way for a moment."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        if _gone_now(pid):
            return True
        time.sleep(0.02)
    return False


def _gone_now(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_for(path: Path) -> str:
    limit = time.monotonic() + 20
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < limit, f"{path} was not written"
        time.sleep(0.02)
    return path.read_text()


# A process that starts another one, says both pids and waits for ever.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({path!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(600)
"""


def test_all_succeed(tmp_path: Path) -> None:
    run(tmp_path, "print('hello')", "import time; time.sleep(0.2)")
    assert (tmp_path / "0.log").read_text() == "hello\n"


def test_a_failure_ends_the_others_and_their_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fails = f"""
import os, sys, time
while not os.path.exists({str(pids)!r}) or not open({str(pids)!r}).read().endswith("\\n"):
    time.sleep(0.02)
sys.exit(7)
"""
    with pytest.raises(LaunchError, match="rank 1 ended with code 7"):
        run(tmp_path, FAMILY.format(path=str(pids)), fails)
    for pid in map(int, pids.read_text().split()):
        assert gone(pid)


def test_an_interrupt_ends_them_all(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        wait_for(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FAMILY.format(path=str(pids)), watch=interrupt)
    for pid in map(int, pids.read_text().split()):
        assert gone(pid)


def test_a_deaf_child_of_a_process_that_ended_is_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.3)
    pids = tmp_path / "pids"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    family = FAMILY.replace("import time;", f"{deaf}print(flush=True);").replace(
        '600)"])', '600)"], stdout=subprocess.PIPE)\nchild.stdout.readline()'
    )

    def interrupt() -> None:
        wait_for(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, family.format(path=str(pids)), watch=interrupt)
    for pid in map(int, pids.read_text().split()):
        assert gone(pid)


def test_a_process_that_does_not_listen_is_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.3)
    pid = tmp_path / "pid"
    deaf = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(pid)!r}, "w").write(f"{{os.getpid()}}\\n")
time.sleep(600)
"""

    def stop() -> None:
        wait_for(pid)
        raise LaunchError("enough")

    with pytest.raises(LaunchError, match="enough"):
        run(tmp_path, deaf, watch=stop)
    assert gone(int(pid.read_text()))
