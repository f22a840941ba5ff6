"""The file that a campaign script writes: one JSON object per line, each with its own checksum.

    run      a start of the script: campaign, device kind, provenance
    begin    a unit is begun; without a sample, a failure or a stop after it the process died in it
    layer    one layer sample        link     one link sample
    failure  a unit that cannot be measured, and why (out of memory is a reason, never a number)
    stop     the user stopped it     end      the script came to its end

Every line but `run` names its run. Both ends use this module: the script that writes (it carries
this file) and the merge that reads. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

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
    with open(path, "rb") as file:
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
    """Adds records to a file; each is on disk before the next is made."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    # The half line of a killed run spoils itself only.
                    file.write(b"\n")

    def add(self, record: dict[str, Any]) -> None:
        """Write one record and wait until it is on disk."""
        with open(self._path, "ab") as file:
            file.write(record_line(record).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
