"""One process at a time on a file or folder that several could write.

A lock is a file beside what it keeps (`.NAME.lock`; `.lock` in a folder) that says who holds it.
The kernel frees it when that process ends, however it does: flock(2). Where a file system has no
flock (Lustre, as it is often mounted), a second file is the lock, which one process alone can make;
that of a process which is gone from this host is taken over. Only the standard library is used:
measure.py carries this module (`hetplan.profiling.script`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetplan.errors import InputError

_POLL_SECONDS = 0.005
"""From one try to the next; a row of samples is on disk in about this time."""
_NO_FLOCK = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_MAX_HOLDER_BYTES = 1024


def surely(work: Callable[[], object]) -> None:
    """Do it, and once more where a Ctrl-C breaks it off."""
    try:
        work()
    except KeyboardInterrupt:
        work()
        raise


class Lock:
    """Keeps a file or folder for this process, from `take` until `release` or its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        real = Path(os.path.realpath(path))
        folder = real.is_dir()
        self._place = real / ".lock" if folder else real.with_name(f".{real.name}.lock")
        self._claim = self._place.with_name(f"{self._place.name}.held")
        self._handle = -1
        self._has_claim, self._pid = False, os.getpid()

    def take(self, wait_seconds: float = 0.0) -> Lock:
        """Have it, or an InputError that names who has had it for so long."""
        limit = time.monotonic() + wait_seconds
        try:
            while not self._try():
                if time.monotonic() >= limit:
                    raise InputError(f"{self._path}: {self._holder()}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self.release()
            raise
        return self

    def release(self) -> None:
        """Let others have it."""
        if self._handle >= 0 and self._pid == os.getpid():  # in a fork it is the parent's
            # While it is held, so that nobody can have locked the file that goes.
            surely(self._unlink)
            os.close(self._handle)
            self._handle, self._has_claim = -1, False

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            if self._holds():
                os.unlink(str(self._place))
        with contextlib.suppress(OSError):
            if self._has_claim:
                os.unlink(str(self._claim))

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.release()

    def take_over(self) -> bool:
        """Have it if a process that is gone left it; False: somebody has it, or nobody had."""
        with contextlib.suppress(InputError):
            return self._try(new=False)
        return False

    def _try(self, *, new: bool = True) -> bool:
        try:
            self._handle = os.open(str(self._place), os.O_RDWR | os.O_CREAT * new, 0o664)
        except OSError as error:
            message = f"cannot be written to ({error.strerror}); choose another place"
            raise InputError(f"{self._path}: {message}") from error
        if not self._holds():
            os.close(self._handle)
            self._handle = -1
            return False
        with contextlib.suppress(OSError):  # a full disk costs the name alone
            os.ftruncate(self._handle, 0)
            os.write(self._handle, _this_process())
        return True

    def _holds(self) -> bool:
        """Whether the open file is locked, and is the lock still."""
        try:
            # Whoever had it before has removed the file: another one counts now.
            file = os.fstat(self._handle).st_ino
            return self._flock() and file == os.stat(str(self._place)).st_ino
        except FileNotFoundError:
            return False

    def _flock(self) -> bool:
        try:
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FLOCK:
                raise
            return self._has_claim or self._claimed()
        return True

    def _claimed(self) -> bool:
        """Whether this process has made the file that only one can make."""
        for _ in range(2):
            try:
                handle = os.open(str(self._claim), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
            except FileExistsError:
                holder = _read_holder(self._claim)
                if holder is None or not _is_gone(holder):
                    return False
                self._remove_claim(holder)
            else:
                with os.fdopen(handle, "wb") as file:
                    file.write(_this_process())
                self._has_claim = True
                return True
        return False

    def _remove_claim(self, holder: dict[str, Any]) -> None:
        """Remove the claim of a process that is gone; others may be about to do the same."""
        aside = f"{self._claim}.{os.getpid()}"
        with contextlib.suppress(OSError):
            os.rename(str(self._claim), aside)
            if _read_holder(Path(aside)) != holder:
                os.link(aside, str(self._claim))  # another one was quicker: it is theirs
            os.unlink(aside)

    def _holder(self) -> str:
        """Who holds it, and what to do."""
        claimed = self._claim.exists()
        place = self._claim if claimed else self._place
        holder = _read_holder(place)
        if holder is None:
            words = "another process works on it; wait for it"
            return f"{words}, or remove {place} where none does" if claimed else words
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since_seconds"]))
        words = f"process {holder['pid']} on {holder['host']} has worked on it since {since}"
        if _is_gone(holder):
            return f"{words}; it is gone, and a program that it started still does: end that"
        away = claimed and holder["host"] != _host()
        remove = f" (where it is gone, remove {place})" if away else ""
        return f"{words}; wait for it, end it, or choose another place{remove}"


def _this_process() -> bytes:
    holder = {
        "pid": os.getpid(),
        "host": _host(),
        "started": _started(os.getpid()),
        "since_seconds": int(time.time()),
    }
    return (json.dumps(holder) + "\n").encode()


def _read_holder(place: Path) -> dict[str, Any] | None:
    """What a lock file says; None where it says nothing that could be true."""
    try:
        with open(str(place), "rb") as file:
            holder = json.loads(file.read(_MAX_HOLDER_BYTES))
        numbers = all(0 <= int(holder[name]) < 1 << 40 for name in ("pid", "since_seconds"))
        good = numbers and _HOST.fullmatch(holder["host"]) and "started" in holder
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return dict(holder) if good else None


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the process has ended; of other hosts nobody knows."""
    if holder["host"] != _host():
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    # Its number may be another process's by now.
    return bool(_started(int(holder["pid"])) != holder["started"])


def _started(pid: int) -> str:
    """When the process began, in clock ticks since the machine did; empty where unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _host() -> str:
    return "".join(re.findall(r"[A-Za-z0-9._-]", socket.gethostname()))[:255] or "this-host"
