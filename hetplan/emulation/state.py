"""Files and locks of the emulations of this machine: who may change one or enter it.

Each emulation has a folder in /run (memory, gone after a restart of the machine, as the namespaces
are):

    emulation.json   everything that may be made of it, written before anything is
    hosts            names and addresses, as in /etc/hosts
    places.json      namespace and environment variables of every place a command can run
    relay.json, relay.counters, relay.log
    sys              an empty folder, to mount at
    up               an empty file, written when all is made

Whoever makes or removes an emulation holds an exclusive lock on its folder; the programs that it
starts hold it too, so that what a killed command has started is over before anything is removed.
Whoever enters a host holds a shared one until it is inside. A lock of `hetplan.files.locks` is one
process's own and never shared, so it cannot do either. Every command on a host goes through here,
so only the standard library is imported until a file is read.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetplan.emulation.values import SCHEMA, Emulation, check_name, key_of
from hetplan.errors import HetplanError, InputError

FOLDER = Path("/run/hetplan-emulate")
LOCK_SECONDS = 30.0
"""How long to wait for another command: making 64 hosts takes about five seconds."""
_POLL_SECONDS = 0.02


def folder_of(name: str) -> Path:
    """Where the emulation of this name is written."""
    return FOLDER / key_of(check_name(name))


@contextmanager
def locked(
    key: str,
    *,
    shared: bool = False,
    create: bool = False,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Hold the folder of the emulation with this key; its file descriptor, for programs that hold
    it too.

    FileNotFoundError where there is no such emulation, InputError where another command works on it
    for `LOCK_SECONDS`. `create`: make the folder where there is none. `while_waiting` may raise.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    handle = _lock(FOLDER / key, how, create, while_waiting)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(folder: Path, how: int, create: bool, while_waiting: Callable[[], None]) -> int:
    limit = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            if create:
                folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if create:
                continue  # another command removed the folder above, or this one, right now
            raise
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            # Removed by the one that had the lock before: it is another folder's now.
            if os.stat(folder).st_ino == os.fstat(handle).st_ino:
                return handle
        except BlockingIOError:
            if time.monotonic() > limit:
                os.close(handle)
                raise InputError(
                    f"another command has been working on this emulation ({folder}) for "
                    f"{LOCK_SECONDS:g} s; wait for it or end it"
                ) from None
            while_waiting()
            time.sleep(_POLL_SECONDS)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def is_up(name: str) -> bool:
    """Whether all of the emulation was made."""
    return (folder_of(name) / "up").exists()


def check_up(name: str) -> None:
    """An InputError where there is no such emulation, or it was left half made."""
    if not folder_of(name).exists():
        raise InputError(_no_such(name))
    if not is_up(name):
        raise InputError(
            f"emulation {name} is not up: it is being made, or that was interrupted "
            f"(`hetplan emulate down --name {name}` removes what is there)"
        )


def _no_such(name: str) -> str:
    have = ", ".join(emulation.name for emulation in all_written()) or "none"
    return f"there is no emulation {name} on this machine; there is: {have}"


def write(emulation: Emulation) -> None:
    """Write down what is going to be made. The lock is held."""
    from hetplan.files.encoding import encode

    folder = folder_of(emulation.name)
    _replace(folder / "emulation.json", encode(emulation, schema=SCHEMA))


def _replace(path: Path, text: str) -> None:
    # Nothing outlives a restart here: no need to wait for a disk.
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def mark_up(emulation: Emulation) -> None:
    """All is made. The lock is held."""
    (folder_of(emulation.name) / "up").touch()


def read(name: str) -> Emulation:
    """The emulation of this name; an InputError that lists the others where there is none."""
    path = folder_of(name) / "emulation.json"
    if not path.exists():
        raise InputError(_no_such(name))
    return _read(path)


def read_up(name: str) -> Emulation:
    """As `read`; an InputError too where it was left half made."""
    emulation = read(name)
    check_up(name)
    return emulation


def _read(path: Path) -> Emulation:
    from hetplan.files.reading import decode, read_document

    return decode(read_document(path), Emulation, schema=SCHEMA)


def all_written() -> tuple[Emulation, ...]:
    """Every emulation of this machine, up or half made, by name."""
    emulations = []
    for path in sorted(FOLDER.glob("*/emulation.json")):
        # Removed meanwhile, or written by another version: `down --all` removes it without.
        with suppress(InputError, HetplanError):
            emulations.append(_read(path))
    return tuple(sorted(emulations, key=lambda emulation: emulation.name))


def written_keys() -> tuple[str, ...]:
    """Names of the folders, also of those where nothing is written yet."""
    try:
        return tuple(sorted(entry.name for entry in FOLDER.iterdir() if entry.is_dir()))
    except FileNotFoundError:
        return ()


def remove_folder(folder: Path) -> None:
    """Remove what is written. The lock is held; it goes with the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others are there
        FOLDER.rmdir()
