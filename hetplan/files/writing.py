"""How files are written so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hetplan.errors import Fault, HetplanError, InputError

# The file system refuses the place itself: a read-only mount, a name that is too long or odd.
_REFUSED_PLACES = (errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)
_NEW_FILE_MODE = 0o666  # less the umask, as any program's new file


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by this text in one step; the old content stays until the new is on disk.

    An InputError where the folder does not exist or must not be written to.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """The same for several files: none is replaced before all texts are on the disk."""
    written: list[tuple[Path, Path, Path]] = []
    try:
        for path, text in texts.items():
            target = Path(os.path.realpath(path))
            temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            written.append((path, temporary, target))
            _write_and_sync(temporary, text.encode("utf-8"))
            if target.exists():
                os.chmod(temporary, target.stat().st_mode & 0o7777)
        for path, temporary, target in written:  # noqa: B007, the error names the path
            os.replace(temporary, target)
            sync_folder(target.parent)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        for _, temporary, _ in written:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Whether `write_atomically` or `append_line` can write there, before work is put into it.

    An InputError where the folder does not exist or must not be written to. Leaves no file.
    """
    target = Path(os.path.realpath(path))
    probe = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            raise PermissionError(errno.EPERM, "not a regular file")
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, _NEW_FILE_MODE))
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def check_replaceable(path: Path, what: str, is_one: Callable[[bytes], bool]) -> str:
    """What to add to `wrote FILE`: that a `what` was there before.

    An InputError where the file cannot be written, or would replace something else: a person's
    notes, an input, a run log.
    """
    check_writable(path)
    held = path.read_bytes() if path.exists() else b""
    if held and not is_one(held):
        message = (
            f"exists and is no {what}; nothing was changed: give the name of a new file, or of a "
            f"{what} to replace"
        )
        raise InputError(Fault(file=str(path), message=message))
    return f", replacing the {what} that was there" if held else ""


def check_new(path: Path | None, *, force: bool) -> None:
    """An InputError where the file exists and must not be replaced, or cannot be written."""
    if path is None:
        return
    if path.exists() and not force:
        raise InputError(f"{path} is there already; give another name, or --force to replace it")
    check_writable(path)


def append_line(path: Path, line: str) -> None:
    """Add one line to the file, whole or not at all, and wait until it is on disk.

    A half line that an earlier crash left at the end is closed first: it spoils itself only.
    """
    if "\n" in line:
        raise ValueError("append_line takes one line, without a line break")
    data = line.encode("utf-8") + b"\n"
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, _NEW_FILE_MODE)
        try:
            end = os.lseek(handle, 0, os.SEEK_END)
            if end and os.pread(handle, 1, end - 1) != b"\n":
                data = b"\n" + data
            written = os.write(handle, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise _write_error(path, error) from error


def _write_and_sync(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _NEW_FILE_MODE)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a rename in the folder to the disk, where the file system can sync a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_error(path: Path, error: OSError) -> HetplanError:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return InputError(f"cannot write {path}: its folder does not exist; create it first")
    refused = PermissionError | IsADirectoryError | NotADirectoryError
    if isinstance(error, refused) or error.errno in _REFUSED_PLACES:
        return InputError(f"cannot write {path}: {reason}; choose another place")
    return HetplanError(f"cannot write {path}: {reason}")
