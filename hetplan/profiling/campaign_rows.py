"""The file that a campaign script writes: one JSON object per line, each with its own checksum.

    run      a start of the script: campaign, device kind, provenance
    begin    a unit is begun; without a sample, a failure or a stop after it the process died in it
    layer    one layer sample        link     one link sample        operator  one operator sample
    failure  a unit that cannot be measured, and why (out of memory is a reason, never a number)
    stop     the user stopped it     end      the script came to its end

Every line but `run` names its run. Both ends use this module: the script that writes (it carries
this file) and the merge that reads. Standard library and `hetplan.errors` only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from typing import Any

from hetplan.errors import InputError

SCHEMA = "hetplan.campaign-results/1"
TOOL = "hetplan campaign"
_SUM = "sum"


def checksum(record: dict[str, Any]) -> str:
    """16 hex digits over everything in the record but its sum."""
    rest = {name: value for name, value in record.items() if name != _SUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def record_line(record: dict[str, Any]) -> str:
    """The record's line with its sum, without a line break."""
    return json.dumps({**record, _SUM: checksum(record)}, sort_keys=True, ensure_ascii=True)


def is_whole(record: dict[str, Any]) -> bool:
    """Whether the record says what was written."""
    try:
        return record.get(_SUM) == checksum(record)
    except (TypeError, ValueError, RecursionError):
        return False


def read_own_records(path: str) -> list[dict[str, Any]]:
    """Every whole record of a file that this script wrote before; none where there is no file."""
    if not os.path.exists(path):
        return []
    if not os.path.isfile(path):
        # A device such as /dev/full would be read for ever.
        raise InputError(f"{path}: is no plain file; name one with --out")
    with _named(path), open(path, "rb") as file:
        lines = file.read().split(b"\n")
    records = []
    for line in lines[:-1]:
        try:
            record = json.loads(line.decode("ascii"))
        except ValueError:
            continue
        if isinstance(record, dict) and is_whole(record):
            records.append(record)
    return records


class RecordFile:
    """Adds records to a file; each is on disk before the next is made.

    Held by one process at a time: two that measure on the same devices would slow each other down.
    An InputError where another holds it, or where it cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with _named(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._unlock = weakref.finalize(self, os.close, lock)
        _hold(path, lock)
        with _named(path), open(path, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    # The half line of a killed run spoils itself only.
                    file.write(b"\n")

    def add(self, record: dict[str, Any]) -> None:
        """Write one record and wait until it is on disk."""
        with _named(self._path), open(self._path, "ab") as file:
            file.write(record_line(record).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """What the system refuses, as an InputError that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror or error}); make room, or name a file "
            "that you may write with --out"
        ) from error


def _hold(path: str, lock: int) -> None:
    """Lock the file until this process ends, however it ends."""
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"{path}: another start of the script is measuring into it, and both would measure "
            "wrong times; wait for its end"
        ) from None
    except (ImportError, OSError):
        return  # a system or a folder without locks: the lines are whole all the same
