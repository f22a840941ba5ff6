"""How an emitted folder is written: nothing of a person's is lost and no half folder is started.

A new folder appears whole, in one rename. A folder that exists is only written to with `force`, and
then only files that its manifest names are replaced or removed. The manifest is marked incomplete
first and complete last: what a kill leaves behind says so and can be emitted again. The manifest
also holds what check.py looks for on the hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.errors import Fault, HetplanError, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.schedulers.launch import EmittedFile
from hetplan.trainers.host_check import HostChecks
from hetplan.version import __version__

MANIFEST = "hetplan-emitted.json"
SCHEMA = "hetplan.emitted/2"
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One file of an emitted folder."""

    path: str
    """Relative to the folder."""
    sha256: str

    def __post_init__(self) -> None:
        _check_path(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Which files of a folder are hetplan's."""

    schema: str
    hetplan_version: str
    target: str
    """As in `hetplan emit --target`."""
    complete: bool
    """False while the folder is being written: not every file may be there."""
    files: tuple[ManifestEntry, ...]
    checks: HostChecks | None = None
    """What check.py looks for; None in folders of schema 1 and where nothing is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What writing a folder did, by paths in it."""

    files: tuple[str, ...]
    edited: tuple[str, ...] = ()
    """Replaced although somebody had changed them."""
    removed: tuple[str, ...] = ()
    """Of an earlier emission, no longer needed."""
    kept: tuple[str, ...] = ()
    """The same, but changed by somebody, and so left there."""


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
    if _holds_anything(folder) and not force:
        raise _fault(
            folder,
            "exists and is not empty; give the name of a new folder, or --force to replace what "
            "hetplan emit wrote there",
        )


def write_folder(
    folder: Path,
    files: Sequence[EmittedFile],
    target: str,
    *,
    force: bool = False,
    checks: HostChecks | None = None,
) -> Written:
    """Write the files and their manifest.

    An InputError where the place is taken (`check_place`), a file is not hetplan's to replace, or a
    symbolic link would lead out of the folder.
    """
    _check_paths(files)
    check_place(folder, force=force)
    manifest = Manifest(
        schema=SCHEMA,
        hetplan_version=__version__,
        target=target,
        complete=True,
        files=tuple(
            ManifestEntry(path=each.path, sha256=_sha256(each.text.encode())) for each in files
        ),
        checks=checks,
    )
    if not folder.exists():
        _create(folder, files, manifest)
        return Written(files=tuple(each.path for each in files))
    with _locked(folder):
        check_place(folder, force=force)
        _check_links(folder, (MANIFEST,))
        before = read_manifest(folder)
        older = tuple(entry.path for entry in before.files) if before else ()
        _check_links(folder, (*older, *(each.path for each in files)))
        _check_foreign(folder, files, before)
        written = _fill(folder, files, manifest, before)
        _remove_leftovers(folder, (MANIFEST, *older, *written.files))
    return written


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where it has none, an InputError where it is no manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    return decode(read_document(path), Manifest, schema=SCHEMA)


def changed_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Files of the manifest that are there and not as they were written."""
    return tuple(
        entry.path
        for entry in manifest.files
        if (digest := _sha256_at(folder / entry.path)) and digest != entry.sha256
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other emission writes the folder meanwhile: two would leave a mixture of both."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another hetplan emit writes there now: try again when it is done"
            raise _fault(folder, message) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _remove_leftovers(folder: Path, paths: Sequence[str]) -> None:
    """Remove what a kill left of files that were being written (`write_atomically`)."""
    for path in dict.fromkeys(paths):
        place = folder / path
        for left in place.parent.glob(f".{place.name}.*.tmp"):
            if left.name.removeprefix(f".{place.name}.").removesuffix(".tmp").isdigit():
                with contextlib.suppress(OSError):
                    left.unlink()


def _fault(folder: Path, message: str) -> InputError:
    return InputError(Fault(file=str(folder), message=message))


def _holds_anything(folder: Path) -> bool:
    return next(folder.iterdir(), None) is not None


def _check_path(path: str) -> None:
    if not _PATH.fullmatch(path):
        raise InputError(f"{path[:80]!a} cannot be the path of a file in an emitted folder")


def _check_paths(files: Sequence[EmittedFile]) -> None:
    seen: set[str] = set()
    for each in files:
        _check_path(each.path)
        if each.path in seen or each.path == MANIFEST:
            raise HetplanError(f"two emitted files are called {each.path}")
        seen.add(each.path)


def _create(folder: Path, files: Sequence[EmittedFile], manifest: Manifest) -> None:
    """A new folder, filled elsewhere and put in its place by one rename."""
    place = folder.absolute()
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        for each in files:
            _write(temporary, each)
        _save_manifest(temporary, manifest)
        temporary.rename(place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _fault(folder, "was made by somebody else meanwhile: try again") from None
        raise _write_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(
    folder: Path, files: Sequence[EmittedFile], manifest: Manifest, before: Manifest | None
) -> Written:
    """Write the files into a folder that is there, over those of an earlier emission."""
    new = {each.path for each in files}
    older = [entry for entry in before.files if entry.path not in new] if before else []
    edited = changed_files(folder, before) if before else ()
    there = [entry.path for entry in older if os.path.lexists(folder / entry.path)]
    removed = tuple(path for path in there if path not in edited)
    try:
        # Whoever finds the folder half written knows which files are hetplan's.
        _save_manifest(folder, replace(manifest, complete=False, files=(*manifest.files, *older)))
        for each in files:
            _write(folder, each)
        for path in removed:
            (folder / path).unlink()
        _remove_empty(folder, removed)
        _save_manifest(folder, manifest)
    except OSError as error:
        raise _write_error(folder, error) from error
    return Written(
        files=tuple(each.path for each in files),
        # Of an emission that was cut off, files may be as the manifest before had them.
        edited=tuple(path for path in edited if path in new and before and before.complete),
        removed=removed,
        kept=tuple(path for path in there if path in edited),
    )


def _check_foreign(folder: Path, files: Sequence[EmittedFile], before: Manifest | None) -> None:
    """No file of the new emission stands where somebody else's does."""
    known = {entry.path for entry in before.files} if before else set()
    foreign = [
        each.path
        for each in files
        if each.path not in known and os.path.lexists(folder / each.path)
    ]
    if foreign:
        raise InputError(
            *(
                Fault(
                    file=str(folder / path),
                    message="is not from hetplan emit (no manifest names it), so it is not "
                    "replaced: move it, or give another folder",
                )
                for path in foreign
            )
        )


def _check_links(folder: Path, paths: Sequence[str]) -> None:
    for path in dict.fromkeys(paths):
        place = folder
        for part in path.split("/"):
            place = place / part
            if place.is_symlink():
                raise InputError(
                    Fault(
                        file=str(place),
                        message="is a symbolic link; nothing is written through links inside of "
                        "an emitted folder: remove it",
                    )
                )


def _write(folder: Path, each: EmittedFile) -> None:
    path = folder / each.path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, each.text)
    mode = path.stat().st_mode & 0o7777
    # Whoever may read a script may run it.
    readers = (mode & 0o444) >> 2
    os.chmod(path, mode | readers if each.executable else mode & ~0o111)


def _save_manifest(folder: Path, manifest: Manifest) -> None:
    files = tuple(sorted(manifest.files, key=lambda entry: entry.path))
    text = encode(replace(manifest, files=files), schema=SCHEMA)
    write_atomically(folder / MANIFEST, text)


def _remove_empty(folder: Path, removed: Sequence[str]) -> None:
    """Folders inside that held nothing but removed files."""
    for parent in _parents(removed):
        with contextlib.suppress(OSError):
            (folder / parent).rmdir()


def _parents(paths: Sequence[str]) -> Iterator[str]:
    """Every folder above these paths, the deepest first."""
    found = {
        "/".join(parts[:depth])
        for parts in (path.split("/") for path in paths)
        for depth in range(1, len(parts))
    }
    yield from sorted(found, key=lambda path: -path.count("/"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_at(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return _sha256(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except IsADirectoryError:
        return "a folder"


def _write_error(folder: Path, error: OSError) -> HetplanError:
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENAMETOOLONG):
        return InputError(f"cannot write {folder}: {reason}; choose another place")
    return HetplanError(f"cannot write {folder}: {reason}")
