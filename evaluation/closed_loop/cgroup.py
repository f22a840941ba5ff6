"""A control group that gives the loop's processes the cores' time, and how busy the machine was.

The group has the largest share there is. Where it cannot be made the loop runs
with the usual share, and its report says so. A process outside of the group removes it when the
one that made it ends, however that is.

Run as a program (`python -m evaluation.closed_loop.cgroup FOLDER`) it is that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import hetplan

_STEAL = 7
"""Column of /proc/stat after the name: time that other virtual machines had (proc(5))."""
_COLUMNS = 8
"""What of the cores' time is counted once; guests' time stands in `user` too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMark:
    """Counters at one moment, in the kernel's ticks."""

    all_ticks: int
    stolen_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Between two moments."""

    load_average: float
    """Of the last minute, at the second moment."""
    steal: float
    """Part of the cores' time."""


def load_now() -> LoadMark:
    """The counters now; zeros where there are none."""
    try:
        columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return LoadMark(all_ticks=0, stolen_ticks=0)
    numbers = [int(column) for column in columns[:_COLUMNS]]
    return LoadMark(all_ticks=sum(numbers), stolen_ticks=numbers[_STEAL])


def load_between(before: LoadMark, after: LoadMark) -> Load:
    """What the counters say of the time between."""
    ticks = after.all_ticks - before.all_ticks
    stolen = after.stolen_ticks - before.stolen_ticks
    return Load(load_average=os.getloadavg()[0], steal=stolen / ticks if ticks > 0 else 0.0)


SHARES, USUAL_SHARES = 262144, 1024
"""cpu.shares of version 1: the kernel's largest, and its default."""
WEIGHT = 10000
"""cpu.weight of version 2: the kernel's largest; 100 is its default."""
PREFIX = "hetplan-closed-loop-"
_REMOVE_SECONDS = 60.0


@contextmanager
def weighted() -> Iterator[str]:
    """Give this process, and all that it starts inside the block, weight; what became of it.

    Empty: it has the weight. Otherwise why not.
    """
    made = _make_group()
    if isinstance(made, str):
        yield made
        return
    root = made.parent
    read_end, write_end = os.pipe()
    try:
        guard = subprocess.Popen(
            (sys.executable, "-m", "evaluation.closed_loop.cgroup", str(made)),
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(hetplan.__file__).parent.parent)},
        )
    except BaseException:
        made.rmdir()
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    before = _own_group(root)
    why_not = ""
    try:
        try:
            (made / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            # In a container the kernel may let groups be made, but not be joined.
            why_not = f"{made} cannot be joined: {error.strerror or error}"
        yield why_not
    finally:
        with suppress(OSError):
            (before / "cgroup.procs").write_text(str(os.getpid()))
        os.close(write_end)
        guard.wait()


def _make_group() -> Path | str:
    """A new group with weight, or why there is none."""
    one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (one / "cpu.shares").exists():
        root, name, value = one, "cpu.shares", SHARES
    elif (two / "cgroup.subtree_control").exists():
        if "cpu" not in (two / "cgroup.subtree_control").read_text().split():
            return "the machine's control groups do not divide the cores' time"
        root, name, value = two, "cpu.weight", WEIGHT
    else:
        return "this machine has no control groups"
    made = root / f"{PREFIX}{os.getpid()}"
    try:
        made.mkdir()
        (made / name).write_text(str(value))
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        return f"{made} cannot be made: {error.strerror or error}"
    return made


def _own_group(root: Path) -> Path:
    """The group of this process in the hierarchy of `root`."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (not controllers and root.name == "cgroup"):
            found = root / path.lstrip("/")
            return found if found.is_dir() else root
    return root


def groups_left() -> tuple[str, ...]:
    """Groups of this kind that there are now."""
    roots = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
    return tuple(str(path) for root in roots for path in root.glob(f"{PREFIX}*"))


def main(folder: str) -> None:
    """Wait until whoever holds the other end of stdin ends, then remove the group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 16):
        pass
    limit = time.monotonic() + _REMOVE_SECONDS
    while time.monotonic() < limit:
        # A group with processes cannot be removed; those of the loop are ending.
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    main(sys.argv[1])
