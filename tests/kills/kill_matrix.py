"""Commands that are ended at counted moments: what is left, what is lost, who goes on running?

As a program: `python tests/kills/kill_matrix.py --moments 50`; it prints a table of commands and
signals, and what was found. A moment is the n-th change of the disk or start of a process (an audit
event), or the n-th call of a Python function: the same in every run, whatever the machine does.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path += [str(each) for each in Path(__file__).parents[1].iterdir() if each.is_dir()]
    sys.path.insert(0, str(Path(__file__).parents[2]))

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CHANGES = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "subprocess.Popen", "os.posix_spawn", "os.fork"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
GONE_SECONDS = 30.0
"""Until workers have seen that the one who started them is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command on files of its own."""

    name: str
    prepare: Callable[[Path], None]
    words: tuple[str, ...]
    again: Callable[[Path], tuple[str, ...]] | None = None
    """What goes on after the command was ended; None: the same words."""
    valid: Callable[[Path], object] = lambda folder: None
    """Reads whatever there is under final names; raises where something is half written."""
    same: bool = True
    """Whether a run that was ended and gone on with leaves the bytes of one that was not."""
    modules: tuple[str, ...] = ()
    """Imported once, before the forks."""
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


def counted(moment: Moment | None, number: int, told: int) -> None:
    """Send this process the signal at the moment; None: tell at exit how many events there were."""
    seen = {"change": 0, "call": 0}

    def event(kind: str) -> None:
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
    session: int


def run(folder: Path, words: Sequence[str], moment: Moment | None, number: int) -> Ended:
    """The command in a fork of this process, in a session of its own."""
    reading, writing = os.pipe()
    output = folder.with_name("output")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(folder)
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.argv = ["hetplan", *words]
            atexit._clear()
            code = _command(moment, number, writing)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        told = stream.read()
    return Ended(os.waitstatus_to_exitcode(status), output.read_text(), told, child)


def _command(moment: Moment | None, number: int, told: int) -> int:
    from hetplan.cli.main import main

    counted(moment, number, told)
    try:
        main()
        code = 0
    except KeyboardInterrupt:  # before the command had begun
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.setprofile(None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


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
    found = [*folder.rglob(".*.tmp"), *(folder / "temporary").iterdir()]
    # torch keeps what it compiles in a folder of its user, for its next process; launch keeps the
    # logs of a run that failed.
    kept = ("torchinductor_", "hetplan-run-")
    own = [path for path in found if not path.name.startswith(kept)]
    return sorted(str(path.relative_to(folder)) for path in own)


def running(session: int) -> list[str]:
    """Processes of a session that run still, after they had time to end."""
    limit = time.monotonic() + GONE_SECONDS
    while (found := _of_session(session)) and time.monotonic() < limit:
        time.sleep(0.05)
    return found


def unlike(command: Command, machine: object) -> str:
    """What is on the machine that was not, or the other way round, after it had time to go."""
    limit = time.monotonic() + GONE_SECONDS
    while (now := command.left()) != machine and time.monotonic() < limit:
        time.sleep(0.2)
    changed = set(str(now).split("(")) ^ set(str(machine).split("("))
    return "" if now == machine else " ".join(sorted(changed))[:400]


def _of_session(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state, _, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " ")[:100])
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


def matrix(command: Command, number: signal.Signals, count: int, place: Path) -> Cell:
    """The command ended by the signal at that many moments."""
    for module in command.modules:
        importlib.import_module(module)
    cell = Cell(command.name, number.name)
    folder = prepared(command, place)
    before, machine = files_of(folder), command.left()
    whole = run(folder, command.words, None, 0)
    assert whole.code == 0, whole.said
    if command.again is not None and not command.same:
        run(folder, command.again(folder), None, 0)
    after = files_of(folder)
    changes, calls = map(int, whole.told.split())
    for moment in moments_of(changes, calls, count):
        folder = prepared(command, place)
        ended = run(folder, command.words, moment, number)
        cell.runs += 1
        cell.ended += ended.code != 0
        for fault in _faults(command, folder, ended, number, before, after, machine):
            cell.faults.append(
                f"{command.name}, {number.name} at {moment.kind} {moment.number}: {fault}"
            )
    return cell


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
    if found := running(ended.session):
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
    again = run(folder, command.again(folder) if command.again else command.words, None, 0)
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

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--commands", default=",".join(each.name for each in COMMANDS))
    parser.add_argument("--signals", default=",".join(each.name for each in SIGNALS))
    asked = parser.parse_args()
    print(f"{'command':10}{'signal':>9}{'runs':>6}{'ended by it':>13}{'faults':>8}")
    bad = 0
    for command in COMMANDS:
        for number in SIGNALS:
            if command.name in asked.commands.split(",") and number.name in asked.signals.split(
                ","
            ):
                with tempfile.TemporaryDirectory(prefix="hetplan-kills-") as place:
                    cell = matrix(command, number, asked.moments, Path(place))
                bad += len(cell.faults)
                print(
                    f"{cell.command:10}{cell.signal:>9}{cell.runs:>6}{cell.ended:>13}"
                    f"{len(cell.faults):>8}",
                    *(f"\n  {fault}" for fault in cell.faults),
                    flush=True,
                )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
