"""Commands that are ended at counted moments: what is left, what is lost, who goes on running?

As a program: `python tests/kills/kill_matrix.py --moments 50`; it prints a table of commands and
signals, and what was found. A moment is the n-th change of the disk or start of a process (an audit
event), or the n-th call of a Python function: the same in every run, whatever the machine does.

Every run is a fork of a process that has run the command once, so that it begins without imports.
That process is the subreaper of all others: whoever outlives a run becomes its child.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path += [str(each) for each in Path(__file__).parents[1].iterdir() if each.is_dir()]
    sys.path.insert(0, str(Path(__file__).parents[2]))
    # Before anything is imported that has threads of its own, which no fork has.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CHANGES = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "subprocess.Popen", "os.posix_spawn", "os.fork"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
GONE_SECONDS = 30.0
"""Until workers have seen that the one who started them is gone."""
FEW_REAL = 25
"""One in so many runs starts its ranks as programs, which import torch: 4 CPU s each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command on files of its own."""

    name: str
    prepare: Callable[[Path], None]
    words: tuple[str, ...] = ()
    work: Callable[[], int] | None = None
    """What is done instead of the command of these words; its exit code."""
    signals: tuple[signal.Signals, ...] = SIGNALS
    again: Callable[[Path], tuple[str, ...]] | None = None
    """What goes on after the command was ended; None: the same words."""
    valid: Callable[[Path], object] = lambda folder: None
    """Reads whatever there is under final names; raises where something is half written."""
    same: bool = True
    """Whether a run that was ended and gone on with leaves the bytes of one that was not."""
    warm: Callable[[], object] | None = None
    """Done once, before the forks; None: the command itself."""
    forked_ranks: bool = False
    """Whether it starts ranks, which are forks too but in one run of FEW_REAL."""
    left: Callable[[], object] = lambda: None
    """What there is on the machine beside files and processes; equal before and after."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The n-th event of a kind (`change` or `call`)."""

    kind: str
    number: int


@dataclass(slots=True)
class Cell:
    """One command under one signal."""

    command: str
    signal: str
    runs: int = 0
    ended: int = 0
    """Of them those that the signal ended; in the others it came too late or was caught."""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """CPU seconds."""


def counted(moment: Moment | None, number: int, told: int) -> None:
    """Send this process the signal at the moment; None: tell at exit how many events there were."""
    seen, process = {"change": 0, "call": 0}, os.getpid()

    def event(kind: str) -> None:
        if os.getpid() != process:
            return
        seen[kind] += 1
        if moment is not None and moment.kind == kind and seen[kind] == moment.number:
            signal.raise_signal(number)

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name in CHANGES or (name == "open" and (arguments[2] or 0) & WRITING):
            event("change")

    def call(frame: FrameType, what: str, _: object) -> None:
        if what == "call":
            event("call")

    fsync = os.fsync

    def synced(handle: int) -> None:
        event("change")
        fsync(handle)

    os.fsync = synced
    sys.addaudithook(audit)
    if moment is None:
        atexit.register(lambda: os.write(told, f"{seen['change']} {seen['call']}".encode()))
    if moment is None or moment.kind == "call":
        sys.setprofile(call)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    code: int
    said: str
    told: str


@contextlib.contextmanager
def at_home(folder: Path, words: Sequence[str]) -> Iterator[None]:
    """The process is one that was started in the folder with these words."""
    before, kept = os.getcwd(), [os.dup(1), os.dup(2)]
    log = os.open(folder.with_name("output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for number in (1, 2):
            os.dup2(log, number)
        os.chdir(folder)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = ["hetplan", *words]
        yield
    finally:
        sys.stdout.flush()
        for number, handle in enumerate(kept, 1):
            os.dup2(handle, number)
        os.chdir(before)
        tempfile.tempdir = None
        del os.environ["TMPDIR"]


def run(
    folder: Path,
    command: Command,
    words: Sequence[str],
    moment: Moment | None = None,
    number: int = 0,
    *,
    forked_ranks: bool = True,
) -> Ended:
    """The command in a fork of this process, in a session of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            atexit._clear()
            if command.forked_ranks and forked_ranks:
                subprocess.Popen = ForkedRank  # type: ignore[misc]
            with at_home(folder, words):
                counted(moment, number, writing)
                code = done(command)
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
        except KeyboardInterrupt:  # before the command had begun
            code = 130
        except Exception:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        told = stream.read()
    said = folder.with_name("output").read_text()
    return Ended(os.waitstatus_to_exitcode(status), said, told)


def done(command: Command) -> int:
    """Do what the command does; its exit code."""
    from hetplan.cli.main import main

    try:
        if command.work is not None:
            return command.work()
        main()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.setprofile(None)


class ForkedRank(subprocess.Popen):  # type: ignore[type-arg]
    """A rank that is a fork of its launcher, which has imported torch, and nothing else unlike
    `python -m hetplan.launchers.worker`.
    """

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        sys.audit("subprocess.Popen", args[0], args, None, None)
        self._child_created, self.pid = True, os.fork()
        if self.pid:
            return
        try:
            from hetplan.launchers import worker

            sys.setprofile(None)
            os.setsid()
            for handle, number in zip((given[9], given[12], given[14]), range(3), strict=True):
                os.dup2(handle, number)
            os.environ |= given[5]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = worker.main(list(args[3:]), worker._train)
            os._exit(code)
        finally:
            os._exit(1)


def spread(most: int, count: int) -> list[int]:
    """At most `count` numbers from 1 to `most`, evenly."""
    if most <= count:
        return list(range(1, most + 1))
    return sorted({1 + at * (most - 1) // (count - 1) for at in range(count)})


def moments_of(changes: int, calls: int, count: int) -> list[Moment]:
    """Half of them changes of the disk or as many as there are, the others calls."""
    first = [Moment("change", number) for number in spread(changes, max(count // 2, 2))]
    return first + [Moment("call", number) for number in spread(calls, max(count - len(first), 2))]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file that a person sees, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def temporaries(folder: Path) -> list[str]:
    """Files and folders that nobody named: beside the others, and of the machine's own folder."""
    hidden = ("**/.*.tmp", "**/.lock", "**/.*.lock", "**/.*.held*")
    found = [path for each in hidden for path in folder.glob(each)]
    # torch keeps what it compiles in a folder of its user, for its next process.
    found += [
        path for path in (folder / "temporary").iterdir() if "torchinductor_" not in path.name
    ]
    return sorted(str(path.relative_to(folder)) for path in found)


def running() -> list[str]:
    """Processes that were left and run still, after they had time to end."""
    limit = time.monotonic() + GONE_SECONDS
    while (found := _children()) and time.monotonic() < limit:
        time.sleep(0.05)
    return found


def unlike(command: Command, machine: object) -> str:
    """What is on the machine that was not, or the other way round, after it had time to go."""
    limit = time.monotonic() + GONE_SECONDS
    while (now := command.left()) != machine and time.monotonic() < limit:
        time.sleep(0.2)
    changed = set(str(now).split("(")) ^ set(str(machine).split("("))
    return "" if now == machine else " ".join(sorted(changed))[:400]


def _children() -> list[str]:
    found = []
    for number in Path("/proc/thread-self/children").read_text().split():
        with contextlib.suppress(OSError):
            if os.waitpid(int(number), os.WNOHANG) == (0, 0):
                found.append(Path("/proc", number, "cmdline").read_text().replace("\0", " ")[:100])
    return found


def prepared(command: Command, place: Path) -> Path:
    """The command's folder as it was."""
    folder = place / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    if not (place / "pristine").exists():
        (place / "pristine" / "temporary").mkdir(parents=True)
        command.prepare(place / "pristine")
    shutil.copytree(place / "pristine", folder)
    return folder


def matrix(command: Command, count: int, place: Path, signals: Sequence[str]) -> Iterator[Cell]:
    """The command ended by each of the signals at that many moments."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
    folder = prepared(command, place)
    before, machine = files_of(folder), command.left()
    with at_home(folder, command.words):
        command.warm() if command.warm else done(command)
    folder = prepared(command, place)
    whole = run(folder, command, command.words)
    assert whole.code == 0, whole.said
    if command.again is not None and not command.same:
        run(folder, command, command.again(folder))
    after = files_of(folder)
    changes, calls = map(int, whole.told.split())
    for number in (each for each in command.signals if each.name in signals):
        began, cell = _cpu_seconds(), Cell(command.name, number.name)
        for at, moment in enumerate(moments_of(changes, calls, count)):
            folder = prepared(command, place)
            forked = at % FEW_REAL != FEW_REAL // 2
            ended = run(folder, command, command.words, moment, number, forked_ranks=forked)
            cell.runs += 1
            cell.ended += ended.code != 0
            for fault in _faults(command, folder, ended, number, before, after, machine):
                cell.faults.append(
                    f"{command.name}, {number.name} at {moment.kind} {moment.number}: {fault}"
                )
        cell.seconds = _cpu_seconds() - began
        yield cell


def _cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    return sum(os.times()[:4])


def _faults(
    command: Command,
    folder: Path,
    ended: Ended,
    number: int,
    before: dict[str, bytes],
    after: dict[str, bytes],
    machine: object,
) -> Iterator[str]:
    if ended.code not in (0, 130, -number):  # -number: before the command had begun
        yield f"exit code {ended.code}: {ended.said[-300:]!r}"
    if "Traceback" in ended.said or "internal fault" in ended.said:
        yield f"said {ended.said[-600:]!r}"
    if found := running():
        yield f"still running: {found}"
    now = files_of(folder)
    for name in before:
        if name not in now or (now[name] not in (before[name], after.get(name))):
            yield f"{name} was there and is lost or changed"
    for name in now.keys() - before.keys() if command.same else ():
        # Lines are added to a table one by one.
        part = name.endswith(".csv") and after[name].startswith(now[name])
        if now[name] != after[name] and not part:
            yield f"{name} is half written"
    try:
        command.valid(folder)
    except Exception as error:
        yield f"half written: {type(error).__name__}: {error}"
    if number != signal.SIGKILL:
        if left := temporaries(folder):
            yield f"left {left}"
        if other := unlike(command, machine):
            yield f"left on the machine: {other}"
    again = run(folder, command, command.again(folder) if command.again else command.words)
    if again.code != 0:
        yield f"cannot be gone on with: {again.said[-300:]!r}"
    if left := temporaries(folder):
        yield f"not cleared up by the next run: {left}"
    if other := unlike(command, machine):
        yield f"not cleared up on the machine: {other}"
    if command.same and (
        odd := {n for n, data in files_of(folder).items() if data != after.get(n)}
    ):
        yield f"other bytes than of a run that nobody ended: {sorted(odd)}"


def main() -> int:
    """Print the table."""
    from kill_commands import COMMANDS

    names = ",".join(each.name for each in COMMANDS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--commands", default=names)
    parser.add_argument("--signals", default=",".join(each.name for each in SIGNALS))
    parser.add_argument("--log", type=Path, help="Append each row as a line of JSON.")
    asked = parser.parse_args()
    print(
        f"{'command':13}{'signal':>9}{'runs':>6}{'ended by it':>13}{'faults':>8}{'CPU s':>8}",
        flush=True,
    )
    bad = 0
    for command in (each for each in COMMANDS if each.name in asked.commands.split(",")):
        with tempfile.TemporaryDirectory(prefix="hetplan-kills-") as place:
            for cell in matrix(command, asked.moments, Path(place), asked.signals.split(",")):
                bad += len(cell.faults)
                print(
                    f"{cell.command:13}{cell.signal:>9}{cell.runs:>6}{cell.ended:>13}"
                    f"{len(cell.faults):>8}{cell.seconds:>8.1f}",
                    *(f"\n  {fault}" for fault in cell.faults),
                    flush=True,
                )
                if asked.log:
                    with asked.log.open("a") as log:
                        log.write(json.dumps(asdict(cell)) + "\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
