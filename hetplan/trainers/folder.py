"""An emitted folder: what its check.py looks for, and how it is written so that nothing is lost.

A new folder appears whole, in one rename. A folder that exists is only written to with `force`.
Then files of the earlier emission are removed before the first new one is written, so that old and
new files are never mixed. check.py, which lists the emitted files with their sha256, comes last. A
file that a person made or changed is kept under its name with a `~`.

check.py is the program `check_program.py` with one more line, a comment of JSON: what it looks for
on every host, and the other files of the folder. It needs nothing but Python.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetplan.cost.traffic import checkpoint_bytes_per_parameter
from hetplan.errors import Fault, HetplanError, InputError
from hetplan.files.locks import Lock
from hetplan.files.writing import temporary_beside, write_atomically
from hetplan.plans.pieces import Places, stage_array
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import Host, RankLayout, used_devices
from hetplan.search.result import SearchResult
from hetplan.version import __version__

CHECK_FILE = "check.py"
_TAKEN = "is there already, and a file that was changed by hand would be kept under it: move it"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What writing a folder did, by names of files in it."""

    files: tuple[str, ...]
    edited: tuple[str, ...] = ()
    """In the way of new files and somebody's own, or changed by somebody: kept as NAME~."""
    removed: tuple[str, ...] = ()
    """Of an earlier emission, no longer needed."""


def check_place(folder: Path, *, force: bool) -> None:
    """An InputError where the folder cannot be written; called before any work is done."""
    if any(ord(each) < 32 or ord(each) == 127 for each in str(folder.absolute())):
        raise _fault(
            folder, "has a control character in its path, which scripts refuse; choose another name"
        )
    try:
        _check_free(folder, force=force)
    except OSError as error:  # a name that is too long, a parent that cannot be entered
        raise _write_error(folder, error) from error


def _check_free(folder: Path, *, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise _fault(folder, "is a file; give the name of a new folder")
    if not folder.exists():
        parent = folder.absolute().parent
        if folder.is_symlink() or not parent.is_dir():
            raise _fault(folder, f"{parent} is no folder; create it first")
        return
    if any(folder.iterdir()) and not force:
        raise _fault(
            folder,
            "exists and is not empty; give the name of a new folder, or --force to replace what "
            "hetplan emit wrote there",
        )


def write_folder(folder: Path, files: Sequence[EmittedFile], *, force: bool = False) -> Written:
    """Write the files, of which check.py lists the others; an InputError as of `check_place`."""
    for each in files:
        if not _NAME.fullmatch(each.path):
            raise InputError(f"{each.path[:80]!a} cannot be a file in an emitted folder")
    if len({each.path for each in files}) < len(files):
        raise HetplanError("two emitted files have one name")
    check_place(folder, force=force)
    try:
        if not folder.exists():
            _create(folder, files)
            return Written(files=tuple(each.path for each in files))
        with Lock(folder).take():
            return _replace(folder, files)
    except OSError as error:
        raise _write_error(folder, error) from error


def emitted_files(folder: Path) -> Mapping[str, str]:
    """sha256 of every file that hetplan wrote here, by its name; empty: check.py names none."""
    try:
        text = (folder / CHECK_FILE).read_text(encoding="utf-8")
        program, _, emitted = text.rpartition("\n# ")
        listed = dict(json.loads(emitted)["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    if _sha256(f"{program}\n".encode()) == listed.get(CHECK_FILE):
        # check.py lists its program; the list itself is not in that sum.
        listed[CHECK_FILE] = _sha256(text.encode())
    return listed


def _create(folder: Path, files: Sequence[EmittedFile]) -> None:
    """A new folder, filled elsewhere and put in its place by one rename."""
    place = folder.absolute()
    try:
        with temporary_beside(place, folder=True) as (temporary, _):
            for each in files:
                _write(temporary, each)
            temporary.rename(place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _fault(folder, "was made by somebody else meanwhile: try again") from None
        raise


def _replace(folder: Path, files: Sequence[EmittedFile]) -> Written:
    """The files in place of those of an earlier emission."""
    before, new = emitted_files(folder), {each.path: each for each in files}
    there = [name for name in {**before, **new} if os.path.lexists(folder / name)]
    texts = {name: _sha256(each.text.encode()) for name, each in new.items()}
    edited = tuple(
        name
        for name in there
        if _sha256_at(folder / name) not in (before.get(name), texts.get(name))
    )
    kept = [(folder / name, folder / f"{name}~") for name in edited]
    taken = [Fault(file=str(new), message=_TAKEN) for _, new in kept if os.path.lexists(new)]
    if taken:
        raise InputError(*taken)
    for old, aside in kept:
        old.rename(aside)
    for name in there:
        if name not in edited and name != CHECK_FILE:
            (folder / name).unlink()
    for each in sorted(files, key=lambda each: each.path == CHECK_FILE):
        _write(folder, each)
    removed = tuple(name for name in there if name not in new and name not in edited)
    return Written(files=tuple(new), edited=edited, removed=removed)


def _write(folder: Path, each: EmittedFile) -> None:
    path = folder / each.path
    write_atomically(path, each.text)
    mode = path.stat().st_mode & 0o7777
    # Whoever may read a script may run it.
    readers = (mode & 0o444) >> 2
    os.chmod(path, mode | readers if each.executable else mode & ~0o111)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_at(path: Path) -> str:
    """Of a file; a link or a folder is nobody's but the person's who made it."""
    return _sha256(path.read_bytes()) if path.is_file() and not path.is_symlink() else ""


def _fault(folder: Path, message: str) -> InputError:
    return InputError(Fault(file=str(folder), message=message))


def _write_error(folder: Path, error: OSError) -> HetplanError:
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENAMETOOLONG):
        return InputError(f"cannot write {folder}: {reason}; choose another place")
    return HetplanError(f"cannot write {folder}: {reason}")


# ---- check.py

SCHEMA = "hetplan.emitted/3"
# Trainers in which every rank reads its own samples (torchtitan: components/dataloader.py); in
# Megatron-LM and what is made of it first and last stage do (pretrain_gpt.py, get_batch).
_ALL_READ = ("torchtitan",)


Checks = dict[str, Any]
"""What check.py knows of a plan, as JSON has it (`host_checks` names the keys)."""


def check_text(checks: Checks, files: Iterable[EmittedFile]) -> str:
    """The program with what it looks for; `files` are the other files of the folder."""
    program = Path(__file__).with_name("check_program.py").read_text(encoding="utf-8")
    texts = {CHECK_FILE: program, **{each.path: each.text for each in files}}
    emitted = {
        "schema": SCHEMA,
        "hetplan_version": __version__,
        "files": {name: _sha256(text.encode()) for name, text in texts.items()},
        "checks": checks,
    }
    return f"{program}# {json.dumps(emitted, sort_keys=True)}\n"


def host_checks(
    result: SearchResult, ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> Checks:
    """What the plan needs of its hosts.

    Hosts are in the order of their agents, rank 0 on the first one. An empty trainer_folder is that
    of the variable TRAINER_FOLDER; an empty program is none in that folder.
    """
    program = launch.program[0]
    parameters = result.inputs.model.parameter_count
    return {
        "port": ranks.port,
        "hosts": _checked_hosts(result, ranks, all_read=launch.target in _ALL_READ),
        "python": options.python,
        "trainer_folder": options.trainer_folder,
        "program": "" if program.startswith(("-", "/", "{")) else program,
        "data": options.data,
        "save": options.save,
        "load": options.load,
        # Weights and optimizer state of the whole model.
        "checkpoint_bytes": float(parameters * checkpoint_bytes_per_parameter(result.inputs.job)),
    }


def _checked_hosts(result: SearchResult, ranks: RankLayout, *, all_read: bool) -> list[Checks]:
    """`all_read`: all ranks read data, otherwise those of the first and last stages."""
    places = Places(cluster=result.inputs.cluster)
    used = used_devices(ranks)
    memory: dict[int, float] = {}
    readers: set[int] = set()
    costs = iter(result.estimate.stages)
    for pipeline in result.plan.pipelines:
        for stage in pipeline.stages:
            nodes = np.unique(places.nodes(stage_array(stage))).tolist()
            cost = next(costs, None)
            needed = cost.memory.total_bytes if cost else 0.0
            for node in nodes:
                memory[node] = max(memory.get(node, 0.0), needed)
            if all_read or stage in pipeline.ends:
                readers.update(nodes)
    return [
        {
            "name": host.name,
            "address": host.address,
            "vendor": host.vendor,
            "device_kind": host.device_kind,
            "devices": used[host.name],
            # On the fullest device.
            "memory_bytes": memory[_node_number(places, host)],
            "interface": host.domain.interface,
            "fabric_devices": host.domain.fabric_devices,
            "reads_data": _node_number(places, host) in readers,
            # In an image, what is installed beside it does not matter.
            "container": bool(host.domain.image_of(host.device_kind)),
        }
        for host in ranks.hosts
    ]


def _node_number(places: Places, host: Host) -> int:
    """The host's node, counted through the whole cluster as `Places.nodes` does."""
    before = 0
    for island in places.cluster.islands:
        if island.name == host.island:
            break
        before += island.nodes
    return before + host.node
