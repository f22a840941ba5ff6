"""A list of runs to compare or to calibrate with: a YAML file of logs and plans.

    runs:
      - log: a100-64/train.log
        plan: plans/a100-64.json
      - log: [rank0.log, rank7.log]
        plan: plans/b.json

Paths are relative to the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import InputError
from hetplan.files.reading import Document, decode, read_document

SCHEMA = "hetplan.runs/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run."""

    logs: tuple[Path, ...]
    plan: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    log: str | tuple[str, ...]
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    runs: tuple[_Entry, ...]
    schema: str = SCHEMA


def load_runs(path: Path) -> tuple[RunFiles, ...]:
    """The runs of the list; an InputError with what is wrong in it."""
    document: Document = read_document(path)
    listed = decode(document, _Runs, schema=SCHEMA)
    if not listed.runs:
        raise InputError(document.fault(("runs",), "the list is empty; name at least one run"))
    folder = path.parent
    return tuple(
        RunFiles(
            logs=tuple(
                folder / each
                for each in ((entry.log,) if isinstance(entry.log, str) else entry.log)
            ),
            plan=folder / entry.plan,
        )
        for entry in listed.runs
    )
