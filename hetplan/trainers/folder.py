"""How an emitted folder is written: nothing of a person's is lost and no half folder is started.

A new folder appears whole, in one rename. A folder that exists is only written to with `force`.
Then files of the earlier emission are removed before the first new one is written, so that old and
new files are never mixed. check.py, which lists the emitted files with their sha256, comes last. A
file that a person made or changed is kept under its name with a `~`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import Fault, HetplanError, InputError
from hetplan.files.writing import write_atomically
from hetplan.schedulers.launch import EmittedFile
from hetplan.trainers.host_check import CHECK_FILE

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
    """An InputError where no folder can be written; asked before work is put into it."""
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
        return _replace(folder, files)
    except OSError as error:
        raise _write_error(folder, error) from error


def emitted_files(folder: Path) -> Mapping[str, str]:
    """sha256 of every file that hetplan wrote here, by its name; empty: check.py names none."""
    try:
        text = (folder / CHECK_FILE).read_text(encoding="utf-8")
        program, _, emitted = text.rpartition("\n# ")
        listed = dict(json.loads(emitted)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if _sha256(f"{program}\n".encode()) == listed.get(CHECK_FILE):
        # check.py lists its program; the list itself is not in that sum.
        listed[CHECK_FILE] = _sha256(text.encode())
    return listed


def _create(folder: Path, files: Sequence[EmittedFile]) -> None:
    """A new folder, filled elsewhere and put in its place by one rename."""
    place = folder.absolute()
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        for each in files:
            _write(temporary, each)
        temporary.rename(place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _fault(folder, "was made by somebody else meanwhile: try again") from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
