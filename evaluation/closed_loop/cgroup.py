"""A control group that gives the loop's processes the largest share of the cores' time.

Where the group cannot be made the loop runs with the usual share, and its report says so. A shell
outside of the group removes it when the process that made it ends, however that is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARES = 262144
"""cpu.shares of version 1: the kernel's largest; 1024 is its default."""
WEIGHT = 10000
"""cpu.weight of version 2: the kernel's largest; 100 is its default."""
PREFIX = "hetplan-closed-loop-"
_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
# stdin ends with the process that made the group. A group with processes cannot be removed: those
# of the loop are ending.
_GUARD = (
    "trap '' INT TERM HUP; cat; n=0; "
    'while [ -d "$0" ] && ! rmdir "$0" 2>/dev/null && [ $n -lt 600 ]; '
    "do n=$((n + 1)); sleep 0.1; done"
)


@contextmanager
def weighted() -> Iterator[str]:
    """Give this process, and all that it starts in the block, weight; why not, empty if it has."""
    try:
        group = _make_group()
    except OSError as error:
        yield f"a control group cannot be made: {error.strerror or error}"
        return
    guard = subprocess.Popen(
        ("sh", "-c", _GUARD, str(group)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    before = _own_group(group.parent)
    why_not = ""
    try:
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            # In a container the kernel may let groups be made, but not be joined.
            why_not = f"{group} cannot be joined: {error.strerror or error}"
        yield why_not
    finally:
        with suppress(OSError):
            (before / "cgroup.procs").write_text(str(os.getpid()))
        guard.communicate()


def _make_group() -> Path:
    """A new group with weight; an OSError where there is none."""
    if (_VERSION_1 / "cpu.shares").exists():
        root, file, value = _VERSION_1, "cpu.shares", SHARES
    else:
        root, file, value = _VERSION_2, "cpu.weight", WEIGHT
        if "cpu" not in (root / "cgroup.subtree_control").read_text().split():
            raise OSError("the machine's control groups do not divide the cores' time")
    group = root / f"{PREFIX}{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(str(value))
    except OSError:
        group.rmdir()
        raise
    return group


def _own_group(root: Path) -> Path:
    """The group of this process in the hierarchy of `root`."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (not controllers and root == _VERSION_2):
            group = root / path.lstrip("/")
            return group if group.is_dir() else root
    return root
