"""CSV tables of collectives by size, recognised by their header, to rows.

Other columns are ignored. A cell that must be a number and is not is a fault with its line.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hetplan.errors import Fault, InputError
from hetplan.lint.rows import CollectiveRow, Place

MAX_FAULTS = 20
"""Faults of one file that are reported; a file with more is of another kind, or broken."""
MAX_NUMBER = 1e30
"""A cell above it is no measurement: bytes, seconds and rates all stay far below."""
MICROSECOND = 1e-6
MAX_CELL = 1 << 20  # csv's own limit is 128 KiB; notes are long, a megabyte is a wrong file
COLUMNS = frozenset({"gpu", "op", "ranks", "size_bytes", "time_us", "busbw_GBps"})
"""Columns of a table of collectives: `time_us` microseconds, `busbw_GBps` 1e9 bytes per second."""

Row = TypeVar("Row")


@dataclass(slots=True)
class Cells:
    """One row of a table, read by column name; wrong cells are collected, not raised."""

    file: str
    line: int
    values: Mapping[str, str]
    faults: list[Fault] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """File and line of the row."""
        return Place(file=self.file, line=self.line)

    def text(self, column: str) -> str:
        """The cell; empty where the column is missing."""
        return (self.values.get(column) or "").strip()

    def number(self, column: str, unit: float = 1.0) -> float | None:
        """A finite number times its unit; None where the cell is empty, or wrong (a fault)."""
        text = self.text(column)
        if not text or text.lower() in ("nan", "none"):
            return None
        try:
            value = float(text)
        except ValueError:
            self._wrong(column, f"found {text[:60]!a}; write a number")
            return None
        if not math.isfinite(value) or abs(value) > MAX_NUMBER:
            self._wrong(column, f"found {text[:60]!a}; write a finite number")
            return None
        return value * unit

    def count(self, column: str) -> int | None:
        """A whole number of at least 1; None where the cell is empty, or wrong (a fault)."""
        value = self.number(column)
        if value is None:
            return None
        if value < 1 or value != int(value):
            self._wrong(column, f"found {value:g}; write a whole number of at least 1")
            return None
        return int(value)

    def _wrong(self, column: str, message: str) -> None:
        self.faults.append(Fault(file=self.file, line=self.line, field=column, message=message))


def columns_of(header: str) -> frozenset[str]:
    """The column names in the first line of a CSV file."""
    try:
        return frozenset(next(csv.reader([header]), []))
    except csv.Error:
        return frozenset()


def read_collectives(file: str, text: str) -> tuple[CollectiveRow, ...]:
    """The rows of a table with `COLUMNS`."""
    return read_table(file, text, _collective)


def _collective(cells: Cells) -> CollectiveRow:
    return CollectiveRow(
        place=cells.place,
        source=cells.text("source"),
        device=cells.text("gpu"),
        operation=cells.text("op"),
        ranks=cells.text("ranks"),
        scope=cells.text("scope"),
        size_bytes=cells.number("size_bytes"),
        seconds=cells.number("time_us", MICROSECOND),
        bus_bytes_per_second=cells.number("busbw_GBps", 1e9),
    )


def read_table(file: str, text: str, read: Callable[[Cells], Row | None]) -> tuple[Row, ...]:
    """The rows that `read` makes of the lines; an InputError lists the cells that are wrong."""
    faults: list[Fault] = []
    rows = [read(cells) for cells in _lines(file, text, faults)]
    if faults:
        raise InputError(*faults[:MAX_FAULTS])
    return tuple(row for row in rows if row is not None)


def _lines(file: str, text: str, faults: list[Fault]) -> Iterator[Cells]:
    lines = csv.reader(io.StringIO(text, newline=""))
    previous = csv.field_size_limit(MAX_CELL)
    try:
        names = next(lines, [])
        for values in lines:
            if not values:
                continue
            if len(values) != len(names):
                message = f"found {len(values)} columns where the header has {len(names)}"
                faults.append(Fault(file=file, line=lines.line_num, message=message))
                continue
            cells = dict(zip(names, values, strict=True))
            yield Cells(file=file, line=lines.line_num, values=cells, faults=faults)
    except csv.Error as error:
        faults.append(Fault(file=file, line=lines.line_num, message=f"not CSV: {error}"))
    finally:
        csv.field_size_limit(previous)
