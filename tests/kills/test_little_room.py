"""Commands with little room: a full disk, little address space, few files, no home, one core."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kill_commands import COMMANDS
from kill_matrix import Command

_NAMES = ("profile", "import", "fit", "plan", "sweep", "emit")
_WRITING = tuple(each for each in COMMANDS if each.name in _NAMES)
_REPORT = replace(
    next(each for each in COMMANDS if each.name == "emit"),
    name="report",
    words=("report", "plan.json", "--out", "page.html"),
    valid=lambda _: None,
)
_TABLE = pytest.mark.parametrize("command", [*_WRITING, _REPORT], ids=lambda each: each.name)
_FILLER = "filler"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB, which root alone may make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(mounted, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk could be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _files(folder: Path) -> dict[str, bytes]:
    every = (each for each in folder.rglob("*") if each.is_file() and each.name != _FILLER)
    return {str(each.relative_to(folder)): each.read_bytes() for each in every}


def _hetplan(folder: Path, command: Command, shell: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", f'{shell} "$@"', "bash", sys.executable, "-m", "hetplan", *command.words]
    path = str(Path(__file__).parents[2])
    return subprocess.run(
        ["env", f"PYTHONPATH={path}", *words],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )


def _is_one_line(done: subprocess.CompletedProcess[str]) -> bool:
    last = done.stderr.splitlines()[-1]
    return last.startswith("hetplan: ") and "internal fault" not in last


@pytest.mark.slow
@_TABLE
def test_a_full_disk_is_one_line_and_loses_nothing(command: Command, small_disk: Path) -> None:
    command.prepare(small_disk)
    before = _files(small_disk)
    _fill(small_disk / _FILLER)
    done = _hetplan(small_disk, command, "exec")
    assert done.returncode == 1, done.stderr
    assert _is_one_line(done), done.stderr
    assert "No space left" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    (small_disk / _FILLER).unlink()
    after = _files(small_disk)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if name.endswith(".tmp")]
    command.valid(small_disk)


@pytest.mark.slow
@_TABLE
def test_little_address_space_loses_nothing(command: Command, tmp_path: Path) -> None:
    command.prepare(tmp_path)
    before = _files(tmp_path)
    done = _hetplan(tmp_path, command, "ulimit -v 300000; exec")
    assert done.returncode == 0 or _is_one_line(done), done.stderr
    assert "Traceback" not in done.stderr
    command.valid(tmp_path)
    if done.returncode:
        after = _files(tmp_path)
        assert {name: after.get(name) for name in before} == before


@pytest.mark.slow
@_TABLE
def test_few_files_no_home_and_one_core_are_enough(command: Command, tmp_path: Path) -> None:
    command.prepare(tmp_path)
    core = '$(taskset -cp $$ | sed "s/.*: //; s/[-,].*//")'
    little = f"ulimit -n 64; export HOME=/proc/nowhere XDG_CACHE_HOME=; exec taskset -c {core}"
    done = _hetplan(tmp_path, command, little)
    assert done.returncode == 0, done.stderr
    command.valid(tmp_path)
