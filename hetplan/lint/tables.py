"""CSV tables of collectives by size, recognised by their header, to rows.

Other columns are ignored. A cell that must be a number and is not is a fault with its line.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping

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


def columns_of(header: str) -> frozenset[str]:
    """The column names in the first line of a CSV file."""
    try:
        return frozenset(next(csv.reader([header]), []))
    except csv.Error:
        return frozenset()


def read_collectives(file: str, text: str) -> tuple[CollectiveRow, ...]:
    """The rows of a table with `COLUMNS`; an InputError lists the cells that are wrong."""
    faults: list[Fault] = []
    rows = [_collective(file, line, cells, faults) for line, cells in _lines(file, text, faults)]
    if faults:
        raise InputError(*faults[:MAX_FAULTS])
    return tuple(rows)


def _collective(
    file: str, line: int, cells: Mapping[str, str], faults: list[Fault]
) -> CollectiveRow:
    def number(column: str, unit: float) -> float | None:
        """A finite number times its unit; None where the cell is empty, or wrong (a fault)."""
        text = cells.get(column, "").strip()
        if not text or text.lower() in ("nan", "none"):
            return None
        try:
            value, wanted = float(text), "a finite number"
        except ValueError:
            value, wanted = math.nan, "a number"
        if math.isfinite(value) and abs(value) <= MAX_NUMBER:
            return value * unit
        message = f"found {text[:60]!a}; write {wanted}"
        faults.append(Fault(file=file, line=line, field=column, message=message))
        return None

    return CollectiveRow(
        place=Place(file=file, line=line),
        source=cells.get("source", "").strip(),
        device=cells.get("gpu", "").strip(),
        operation=cells.get("op", "").strip(),
        ranks=cells.get("ranks", "").strip(),
        scope=cells.get("scope", "").strip(),
        size_bytes=number("size_bytes", 1.0),
        seconds=number("time_us", MICROSECOND),
        bus_bytes_per_second=number("busbw_GBps", 1e9),
    )


def _lines(file: str, text: str, faults: list[Fault]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(line, cells by column) of every row as wide as the header; a fault for every other."""
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
            yield lines.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        faults.append(Fault(file=file, line=lines.line_num, message=f"not CSV: {error}"))
    finally:
        csv.field_size_limit(previous)
