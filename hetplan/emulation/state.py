"""What is written about the emulations of this machine?

Each has a folder in /run (memory, gone after a restart of the machine, as the namespaces are):

    emulation.json   everything that may be made of it, written before anything is
    hosts            names and addresses, as in /etc/hosts
    places.json      namespace and environment variables of every place a command can run
    relay.json, relay.counters, relay.log
    sys              an empty folder, to mount at
    up               an empty file, written when all is made
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hetplan.emulation.locks import FOLDER, check_up, folder_of, no_such
from hetplan.emulation.values import SCHEMA, Emulation
from hetplan.errors import HetplanError, InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document


def write(emulation: Emulation) -> None:
    """Write down what is going to be made. The lock is held."""
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
        raise InputError(no_such(name))
    return _read(path)


def read_up(name: str) -> Emulation:
    """As `read`; an InputError too where it was left half made."""
    emulation = read(name)
    check_up(name)
    return emulation


def _read(path: Path) -> Emulation:
    return decode(read_document(path), Emulation, schema=SCHEMA)


def all_written() -> tuple[Emulation, ...]:
    """Every emulation of this machine, up or half made, by name."""
    found = []
    for path in sorted(FOLDER.glob("*/emulation.json")):
        # Removed meanwhile, or written by another version: `down --all` removes it without.
        with suppress(InputError, HetplanError):
            found.append(_read(path))
    return tuple(sorted(found, key=lambda emulation: emulation.name))


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
