"""How the processes of a run are started, watched and ended: all of them, whatever happens.

Every process leads a session of its own, so that a Ctrl-C at the terminal reaches the launcher
alone, which then ends the processes and everything that they may have started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.launchers.hosts import Hosts

# How often exits and progress are looked for; rare enough to cost a busy core nothing.
POLL_SECONDS = 0.1
# A worker holds nothing that must be saved: time for the system to end it, no more.
GRACE_SECONDS = 3.0
LOG_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process of a run."""

    rank: int
    arguments: tuple[str, ...]
    log: Path
    """Gets its stdout and stderr."""


Judge = Callable[[Sequence[int | None]], None]
"""Gets the exit codes so far, None of processes that run. Raises once the run has failed: sooner or
later where a code is not 0."""


def run_all(
    commands: Sequence[Command],
    *,
    environment: Mapping[str, str],
    watch: Callable[[], None],
    hosts: Hosts,
    judge: Judge,
) -> None:
    """Run all processes to their end, on their hosts.

    `watch` is called while they run and may raise; `judge` raises what a run fails with. Nothing is
    left running, also after an exception.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with command.log.open("wb") as log:
                started.append(
                    hosts.start(command.rank, command.arguments, environment=environment, log=log)
                )
        while True:
            codes = [process.poll() for process in started]
            judge(codes)
            if all(code == 0 for code in codes):
                break
            watch()
            time.sleep(POLL_SECONDS)
        watch()
    finally:
        _end(started)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every process group, unless all ended well: asked first, then forced."""
    if all(process.poll() == 0 for process in processes):
        return
    _signal(processes, signal.SIGTERM)
    limit = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < limit and any([each.poll() is None for each in processes]):
        time.sleep(POLL_SECONDS / 10)
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.poll()
        # Its own children may outlive it: the group is there until the last of them is gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def last_lines(log: Path, count: int = LOG_LINES) -> list[str]:
    """The last lines of a log that are not blank."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()][-count:]
