"""Locks: one holder, named to the others; those of dead processes are recognised."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.files.locks import Lock

HOLD = """
import os, sys, time
from pathlib import Path
from hetplan.files.locks import Lock
lock = Lock(Path(sys.argv[1])).take()
if len(sys.argv) > 2 and os.fork() == 0:
    os.setsid()
else:
    print("held", flush=True)
time.sleep(60)
"""
COUNT = """
import sys
from pathlib import Path
from hetplan.files.locks import Lock
place = Path(sys.argv[1])
for _ in range(50):
    with Lock(place).take(60.0):
        place.write_text(str(1 + int(place.read_text())))
"""


@contextmanager
def _holder(path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(path), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=[True, False], ids=["flock", "no flock"])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With flock, and on a file system that has none."""
    if not request.param:

        def refused(*_: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, "not supported")

        monkeypatch.setattr(fcntl, "flock", refused)
    return bool(request.param)


@pytest.mark.usefixtures("flock")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_has_it_and_is_named_to_others(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    with Lock(path).take():
        with pytest.raises(InputError, match=rf"it: process {os.getpid()} on .* since 20"):
            Lock(path).take(0.02)
        link = tmp_path / "link"
        link.symlink_to(path)
        with pytest.raises(InputError, match="wait for it"):
            Lock(link).take()
    with Lock(path).take():
        pass
    assert not [each for each in tmp_path.rglob("*lock*")]


def test_a_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    with _holder(path) as process:
        with pytest.raises(InputError, match=f"process {process.pid} on"):
            Lock(path).take()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / ".table.csv.lock").exists()
        with Lock(path).take():
            pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_started_is_told_from_it(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    with _holder(path, "fork") as process:
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        process.kill()
        process.wait()
        try:
            with pytest.raises(InputError, match="it is gone, and a program that it started"):
                Lock(path).take()
        finally:
            os.kill(child, signal.SIGKILL)


def _claim(folder: Path, **changes: Any) -> Path:
    """A claim as this process makes it on a file system without flock."""
    own = Lock(folder / "table.csv")
    own.take()
    claim = folder / ".table.csv.lock.held"
    holder = json.loads(claim.read_text())
    own.release()
    claim.write_text(json.dumps({**holder, **changes}))
    return claim


@pytest.mark.parametrize("flock", [False], indirect=True)
def test_without_flock_the_holder_decides(flock: bool, tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for gone in ({"pid": dead.pid}, {"started": "1"}):
        _claim(tmp_path, **gone)
        with Lock(tmp_path / "table.csv").take():
            pass
        assert list(tmp_path.iterdir()) == []
    for kept in ({}, {"host": "elsewhere", "pid": dead.pid}, {"host": "evil\x1b[2J"}):
        claim = _claim(tmp_path, **kept)
        with pytest.raises(InputError) as refused:
            Lock(tmp_path / "table.csv").take()
        assert "\x1b" not in str(refused.value)
        assert (f"remove {claim}" in str(refused.value)) == (kept != {})
        claim.unlink()


def test_two_never_count_at_once(tmp_path: Path) -> None:
    place = tmp_path / "count"
    place.write_text("0")
    jobs = [subprocess.Popen([sys.executable, "-c", COUNT, str(place)]) for _ in range(3)]
    assert [job.wait(120) for job in jobs] == [0, 0, 0]
    assert place.read_text() == "150"
    assert list(tmp_path.iterdir()) == [place]


def test_a_forgotten_lock_and_a_fork_let_nothing_go(tmp_path: Path) -> None:
    path = tmp_path / "it"
    lock = Lock(path).take()
    child = os.fork()
    if child == 0:
        del lock
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(InputError):
        Lock(path).take()
    del lock
    with Lock(path).take():
        pass
