"""How files are written so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from hetplan.errors import Fault, HetplanError, InputError
from hetplan.files.locks import Lock, surely

# The file system refuses the place itself: a read-only mount, a name that is too long or odd.
_REFUSED_PLACES = (errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)
NEW_FILE_MODE = 0o664
"""Less the umask: whatever that is, only its owner and group may write to a new file."""
_KEPT_MODE = 0o775  # what a file that is replaced may hand on


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by this text in one step; the old content stays until the new is on disk.

    An InputError where the folder does not exist or must not be written to.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """The same for several files: none is replaced before all texts are on the disk."""
    # Two paths of one file are one: each file is locked once.
    targets = {os.path.realpath(path): (path, text) for path, text in texts.items()}
    path = Path()
    try:
        with contextlib.ExitStack() as stack:
            written = []
            for name, (path, text) in targets.items():
                temporary, handle = stack.enter_context(temporary_beside(Path(name)))
                written.append((path, temporary, Path(name)))
                with os.fdopen(handle, "wb", closefd=False) as stream:
                    stream.write(text.encode("utf-8"))
                os.fsync(handle)
                if os.path.exists(name):
                    os.chmod(temporary, os.stat(name).st_mode & _KEPT_MODE)
            for path, temporary, target in written:  # noqa: B007, the error names the path
                os.replace(temporary, target)
                sync_folder(target.parent)
    except OSError as error:
        raise _write_error(path, error) from error


def make_folder(folder: Path) -> None:
    """Make the folder and those above it where they are missing; an InputError where none can be
    made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be made: {reason}; choose another place"
        raise InputError(Fault(file=str(folder), message=message)) from error


def check_writable(path: Path) -> None:
    """Whether `write_atomically` or `append_line` can write there, before work is put into it.

    An InputError where the folder does not exist or must not be written to. Leaves no file.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            raise PermissionError(errno.EPERM, "not a regular file")
        with temporary_beside(target):
            pass
    except OSError as error:
        raise _write_error(path, error) from error


@contextlib.contextmanager
def temporary_beside(target: Path, *, folder: bool = False) -> Iterator[tuple[Path, int]]:
    """A new file, or folder, to be renamed to the target, and its handle; gone at the end if not.

    It has one name, and its writer a lock, which the kernel frees when the writer is killed: others
    wait for it, and the next one removes what a killed one left.
    """
    temporary = target.with_name(f".{target.name}.{os.getuid()}.tmp")
    handle = None
    try:
        while handle is None:
            handle = _made_alone(temporary, folder=folder)
        yield temporary, handle
    finally:
        if handle is not None:
            surely(partial(_drop, handle, temporary))
            os.close(handle)


def _made_alone(temporary: Path, *, folder: bool) -> int | None:
    """A handle of the new file or folder, locked; None: try again."""
    import fcntl

    access = (os.O_RDONLY if folder else os.O_RDWR) | os.O_NOFOLLOW
    is_new = True
    try:
        if folder:
            temporary.mkdir()
        else:
            handle = os.open(temporary, access | os.O_CREAT | os.O_EXCL, NEW_FILE_MODE)
    except FileExistsError:
        is_new = False
    if folder or not is_new:
        try:
            handle = os.open(temporary, access)
        except FileNotFoundError:
            return None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if _has_name(handle, temporary):
            if is_new:
                return handle
            _remove(temporary)
    except BaseException:
        if is_new:
            _drop(handle, temporary)
        os.close(handle)
        raise
    os.close(handle)
    return None


def _drop(handle: int, temporary: Path) -> None:
    with contextlib.suppress(OSError):
        if _has_name(handle, temporary):
            _remove(temporary)


def _has_name(handle: int, path: Path) -> bool:
    """Whether the path is this file still: it may be renamed, and another may have the name."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


class ScratchFolder:
    """A new folder among the machine's temporary ones, for this process, until `remove` or `keep`.

    It has a mark, and its process holds its lock: the next one that makes a folder of the same name
    removes those that killed ones left. What was kept has no mark, whoever locks it later.
    """

    def __init__(self, name: str) -> None:
        prefix = f"hetplan-{name}-"
        for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            status = os.lstat(old) if os.path.lexists(old) else None
            if status and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                _remove_scratch(old, Lock(old))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock, self._mark = Lock(self.path), self.path / _MARK
            try:
                self._mark.touch()
                self._lock.take(_SCRATCH_SECONDS)
                return
            except FileNotFoundError:
                continue  # as below, before the mark
            except InputError:
                if self.path.exists():
                    raise
                # Another process took it for what one that was killed before its lock had left.
            except KeyboardInterrupt:
                self.remove()
                raise

    def keep(self) -> None:
        """Leave it to the user."""
        self._mark.unlink(missing_ok=True)
        self._lock.release()

    def remove(self) -> None:
        """Remove it, the lock last: what is left when this process is killed here is not kept."""
        surely(self._remove)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            _empty(self.path)
            self._lock.release()
            self._mark.unlink(missing_ok=True)
            self.path.rmdir()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


_MARK = ".scratch"
_SCRATCH_SECONDS = 1.0
"""Longest wait for another process that looks whether the new folder was left."""


def _remove_scratch(folder: Path, lock: Lock) -> None:
    with contextlib.suppress(OSError):
        mark = folder / _MARK
        if mark.exists() and lock.take_over():
            _empty(folder)
            lock.release()
        # Of one that was killed before its lock, or while it was removed, nothing more is there.
        if {each.name for each in folder.iterdir()} <= {_MARK}:
            mark.unlink(missing_ok=True)
            folder.rmdir()


def _empty(folder: Path) -> None:
    """Remove all but the lock and the mark."""
    for each in folder.iterdir():
        if each.name not in (".lock", _MARK):
            shutil.rmtree(each) if each.is_dir() else each.unlink()


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
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, NEW_FILE_MODE)
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
