"""The one place that reads this machine: files under a root, programs, nothing else.

Tests give another root and another way to run programs. Nothing here raises for what a machine
can do wrong: what cannot be read is empty, and programs answer with a state.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

TOOL_SECONDS = 5.0  # a driver's tool that takes longer hangs on a broken device
TORCH_SECONDS = 60.0  # importing torch takes seconds from a cold disk, more on a network disk
_MAX_BYTES = 1 << 20  # of a file or an output; nothing that is read here is as large
_MAX_ENTRIES = 4096


class AnswerState(StrEnum):
    """How a program ended."""

    DONE = "done"
    MISSING = "missing"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a program answered."""

    state: AnswerState
    text: str = ""
    """Of stdout; stderr is dropped, because it may name files and machines."""
    reason: str = ""
    """Why it failed, in a few words."""


Run = Callable[[Sequence[str], float], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How a machine is looked at."""

    root: Path = Path("/")
    run: Run
    """Program with its arguments, and its time limit in seconds."""
    find: Callable[[str], bool]
    """Whether a program is there."""
    space: Callable[[Path], float]
    """Size in bytes of the file system at this path; 0 where it is not told."""

    def text(self, path: str) -> str:
        """The file's text; empty where it cannot be read."""
        # Some files of /sys refuse with EINVAL; a fake tree may hold anything, a pipe too.
        with contextlib.suppress(OSError, ValueError):
            file = self.root / path
            if file.is_file():
                with file.open("rb") as stream:
                    return stream.read(_MAX_BYTES).decode("utf-8", "replace")
        return ""

    def names(self, path: str) -> tuple[str, ...]:
        """Names of a folder's entries, sorted; none where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            entries = sorted(entry.name for entry in (self.root / path).iterdir())
            return tuple(entries[:_MAX_ENTRIES])
        return ()

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        with contextlib.suppress(OSError, ValueError):
            return (self.root / path).exists()
        return False

    def link_name(self, path: str) -> str:
        """Last part of what a symbolic link points to; empty where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return Path(os.readlink(self.root / path)).name
        return ""


def this_machine_probe() -> Probe:
    """The machine that this process runs on."""
    return Probe(run=run_program, find=lambda name: shutil.which(name) is not None, space=_space)


def run_program(arguments: Sequence[str], seconds: float) -> Answer:
    """Run a program to its end or to its time limit; it gets no input and no terminal."""
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError:
        return Answer(state=AnswerState.MISSING)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it cannot be started"
        return Answer(state=AnswerState.FAILED, reason=str(reason))
    try:
        output, ended = _read(process, time.monotonic() + seconds)
    finally:
        _end(process)
    text = output.decode("utf-8", "replace")
    if not ended:
        reason = f"no end within {seconds:g} s or {_MAX_BYTES >> 20} MiB of output"
        return Answer(state=AnswerState.TIMEOUT, reason=reason)
    if process.returncode != 0:
        reason = f"exit code {process.returncode}"
        return Answer(state=AnswerState.FAILED, text=text, reason=reason)
    return Answer(state=AnswerState.DONE, text=text)


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """(output, whether the program ended by itself); a program that floods is not read on."""
    stream = process.stdout
    output = b""
    while stream is not None and len(output) < _MAX_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return output, False
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            return output, process.poll() is not None
        output += piece
    return output, False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs of it; a program that a driver holds in the kernel is left."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        process.wait(timeout=1.0)
    if process.stdout is not None:
        process.stdout.close()


def _space(path: Path) -> float:
    with contextlib.suppress(OSError, AttributeError):
        state = os.statvfs(path)
        return float(state.f_blocks) * float(state.f_frsize)
    return 0.0
