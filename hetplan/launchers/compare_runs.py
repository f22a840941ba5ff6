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
from os.path import realpath
from pathlib import Path

from hetplan.errors import Fault, InputError
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
    faults: list[Fault] = []
    found: dict[tuple[str, ...], int] = {}
    runs: list[RunFiles] = []
    for number, entry in enumerate(listed.runs):
        logs = (entry.log,) if isinstance(entry.log, str) else entry.log
        for name, values in (("log", logs), ("plan", (entry.plan,))):
            if not values or not all(each.strip() for each in values):
                faults.append(document.fault(("runs", number, name), "empty; name a file"))
        run = RunFiles(logs=tuple(path.parent / e for e in logs), plan=path.parent / entry.plan)
        # One log may hold several runs of hetplan, each with a plan of its own.
        first = found.setdefault(_real_files(run), number)
        if first != number:
            message = (
                f"the same log and plan as runs[{first}]: a run counts once; take this entry out"
            )
            faults.append(document.fault(("runs", number), message))
        runs.append(run)
    if faults:
        raise InputError(*faults)
    return tuple(runs)


def _real_files(run: RunFiles) -> tuple[str, ...]:
    """The files whatever they are called; logs in any order."""
    return (realpath(run.plan), *sorted(realpath(each) for each in run.logs))
