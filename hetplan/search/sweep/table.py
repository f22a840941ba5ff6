"""The table of a sweep: one CSV row per question, written as soon as its plan is there.

A row is one write of one whole line, so that a table that was cut short by a kill ends in at most
one torn line, which is dropped when the sweep goes on. Rows of questions that are done are kept.
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from hetplan.errors import Fault, InputError
from hetplan.files.writing import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one question; empty text where there is no such figure."""

    key: str
    model: str
    cluster: str
    job: str
    target: str
    global_batch_size: int
    sequence_length: int
    links: str
    nodes: str
    status: str
    """`optimal`, `limit` (with a plan, or without one in time), `open` (a wider gap than asked
    for, at the search's own end), `infeasible`, or `error`: the question contradicts itself."""
    step_seconds: str = ""
    tokens_per_second: str = ""
    gap: str = ""
    lower_bound_seconds: str = ""
    devices_in_use: str = ""
    layout: str = ""
    """Degrees in short."""
    reason: str = ""
    """Why there is no plan."""

    @property
    def words(self) -> str:
        """For a line of progress."""
        found = f"{float(self.step_seconds):.4g} s" if self.step_seconds else self.status
        batch = f"batch {self.global_batch_size}" if self.global_batch_size else ""
        length = f"{self.sequence_length} tokens" if self.sequence_length else ""
        asked = (
            self.model, self.cluster, self.job, self.target, batch, length, self.links, self.nodes,
        )  # fmt: skip
        return f"{', '.join(each for each in asked if each)}: {found}"


COLUMNS = tuple(each.name for each in fields(Row))


class Table:
    """The open table; rows of earlier runs stay."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        self.done: frozenset[str] = frozenset()
        if fresh or not path.exists():
            write_atomically(path, _line(COLUMNS))
        else:
            self.done = self._mend()
        self._file = path.open("a", encoding="utf-8", newline="")

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Write the row, whole, to the disk."""
        self._file.write(_line([str(getattr(row, name)) for name in COLUMNS]))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _mend(self) -> frozenset[str]:
        """Keys of whole rows; a torn last line is cut off."""
        text = self._path.read_bytes().decode("utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        try:
            rows = list(csv.reader(io.StringIO(whole)))
        except csv.Error:
            rows = []
        if not text or (not whole and _line(COLUMNS).startswith(text)):
            # A kill before the first line was whole.
            write_atomically(self._path, _line(COLUMNS))
            return frozenset()
        if not rows or tuple(rows[0]) != COLUMNS:
            raise InputError(
                Fault(
                    file=str(self._path),
                    line=1,
                    message="is no table of a sweep of this version of hetplan; nothing was "
                    "changed: name another file with --out",
                )
            )
        good = [row for row in rows[1:] if len(row) == len(COLUMNS)]
        if whole != text or len(good) < len(rows) - 1:
            write_atomically(self._path, _line(COLUMNS) + "".join(map(_line, good)))
        return frozenset(row[0] for row in good)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([" ".join(cell.split()) for cell in cells])
    return buffer.getvalue()
