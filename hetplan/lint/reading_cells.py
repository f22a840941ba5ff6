"""What stands in a cell or a JSON value: a number, a count, a word, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.errors import Fault

MAX_FAULTS = 20
"""Faults of one file that are reported; a file with more is of another kind, or broken."""
MAX_NUMBER = 1e30
"""A cell above it is no measurement: bytes, seconds and rates all stay far below."""


@dataclass(slots=True)
class Cells:
    """One row of a table, read by column name; wrong cells are collected, not raised."""

    file: str
    line: int
    values: Mapping[str, str]
    faults: list[Fault] = field(default_factory=list)

    def text(self, column: str) -> str:
        """The cell; empty where the column is missing."""
        return (self.values.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A finite number; None where the cell is empty (or wrong, which is noted)."""
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
        return value

    def count(self, column: str) -> int | None:
        """A whole number of at least 1; None where the cell is empty (or wrong)."""
        value = self.number(column)
        if value is None:
            return None
        if value < 1 or value != int(value):
            self._wrong(column, f"found {value:g}; write a whole number of at least 1")
            return None
        return int(value)

    def _wrong(self, column: str, message: str) -> None:
        self.faults.append(Fault(file=self.file, line=self.line, field=column, message=message))
