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

from hetplan.errors import LaunchError
from hetplan.launchers.hosts import Hosts, this_machine_hosts

# How often exits and progress are looked for; rare enough to cost a busy core nothing.
POLL_SECONDS = 0.1
# A worker holds nothing that must be saved: time for the system to end it, no more.
GRACE_SECONDS = 3.0
# When one rank dies the others fail too, as their connections break: time for all to say so.
SETTLE_SECONDS = 0.5
LOG_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process of a run."""

    rank: int
    arguments: tuple[str, ...]
    log: Path
    """Gets its stdout and stderr."""
    failure: Path
    """Where it writes the monotonic time and the reason if it fails by itself."""


Judge = Callable[[Sequence[int | None]], None]
"""Gets the exit codes so far, None of processes that run. Raises once the run has failed: sooner or
later where a code is not 0."""


def run_all(
    commands: Sequence[Command],
    *,
    environment: Mapping[str, str],
    watch: Callable[[], None],
    hosts: Hosts | None = None,
    judge: Judge | None = None,
) -> None:
    """Run all processes to their end, on their hosts, or on this machine.

    `watch` is called while they run and may raise. `judge` raises what a run fails with; without
    one a LaunchError names the rank that failed first and shows the end of its log. Nothing is left
    running, also after an exception.
    """
    decide = judge or _FirstFailure(commands).judge
    started: list[subprocess.Popen[bytes]] = []
    where = hosts or this_machine_hosts(len(commands))
    try:
        for command in commands:
            with command.log.open("wb") as log:
                started.append(
                    where.start(command.rank, command.arguments, environment=environment, log=log)
                )
        while True:
            codes = [process.poll() for process in started]
            decide(codes)
            if all(code == 0 for code in codes):
                break
            watch()
            time.sleep(POLL_SECONDS)
        watch()
    finally:
        _end(started)


class _FirstFailure:
    """Judges by exits alone."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._commands = commands
        self._since: float | None = None

    def judge(self, codes: Sequence[int | None]) -> None:
        """As `Judge` says; others get a moment to fail too, so that the first can be told."""
        if not any(codes):
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if None not in codes or now - self._since >= SETTLE_SECONDS:
            raise LaunchError(_failure_text(self._commands, codes))


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


def _failure_text(commands: Sequence[Command], codes: Sequence[int | None]) -> str:
    """Which rank failed first, how, and the last lines that it wrote.

    A rank that a signal ended could not say when; it is the cause where there is one, because the
    launcher has not sent any signal yet.
    """
    failed = [(command, code) for command, code in zip(commands, codes, strict=True) if code]
    command, code = min(failed, key=lambda pair: (pair[1] > 0, _failed_at(pair[0])))
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    reason = _reason(command)
    lines = last_lines(command.log)
    return "\n".join(
        [
            f"rank {command.rank} {how}" + (f": {reason}" if reason else ""),
            *(f"  rank {command.rank} | {line}" for line in lines),
        ]
    )


def _failed_at(command: Command) -> float:
    words = command.failure.read_text().split(maxsplit=1) if command.failure.exists() else []
    return float(words[0]) if words else float("inf")


def _reason(command: Command) -> str:
    words = command.failure.read_text().split(maxsplit=1) if command.failure.exists() else []
    return words[1].splitlines()[0] if len(words) > 1 else ""


def last_lines(log: Path, count: int = LOG_LINES) -> list[str]:
    """The last lines of a log that are not blank."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()][-count:]
