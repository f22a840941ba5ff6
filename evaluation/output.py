"""What a command of the evaluation answers: tables of numbers and lines of words.

Errors are fractions and times seconds in the numbers; forms say how a table shows them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import pandas
from rich.markup import escape
from rich.table import Table

from hetplan.cli.options import emit, say
from hetplan.reports.terminal import print_table

SCHEMA = "hetplan.bench/2"
Form = str | Callable[[Any], str]
"""How a value is shown: a format such as `{:.1%}`, or a function."""
WORDS = "{}"
"""The form of a column of words, which is aligned to the left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of an answer; in JSON a list of objects, one per row."""

    frame: pandas.DataFrame
    name: str = ""
    """Key in the JSON; empty: the table is not in the JSON, whose other sections have its rows."""
    title: str = ""
    """Empty: the section is in the JSON alone."""
    columns: Mapping[str, tuple[str, Form]] = field(default_factory=dict)
    """Heading: (column of the frame, form). Other columns of the frame are in the JSON alone."""

    def table(self) -> Table:
        """The shown columns, numbers to the right; what a row does not have is `-`."""
        table = Table(title=self.title, title_justify="left")
        for heading, (_, form) in self.columns.items():
            table.add_column(heading, justify="left" if form == WORDS else "right", overflow="fold")
        cells = [
            [_shown(value, form) for value in self.frame[name]]
            for name, form in self.columns.values()
        ]
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        return table


def _shown(value: Any, form: Form) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return escape(form.format(value) if isinstance(form, str) else form(value))


def frame_of(rows: Iterable[Any]) -> pandas.DataFrame:
    """Dataclasses of one kind, or mappings, as rows."""
    return pandas.DataFrame([row if isinstance(row, Mapping) else asdict(row) for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that a command found."""

    sections: tuple[Section, ...] = ()
    lines: tuple[str, ...] = ()
    """Words below the tables."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the JSON has beside the sections."""

    def document(self) -> dict[str, Any]:
        """All numbers, as the JSON has them."""
        found = {name: plain(value) for name, value in self.values.items()}
        found |= {each.name: plain(each.frame) for each in self.sections if each.name}
        return {"schema": SCHEMA, **found}

    def show(self, *, as_json: bool) -> None:
        """Tables on stdout and lines on stderr, or all numbers as JSON on stdout."""
        if as_json:
            emit(json.dumps(self.document(), indent=2, ensure_ascii=False))
            return
        for section in self.sections:
            if section.title and len(section.frame):
                print_table(section.table())
        for line in self.lines:
            say(line)


def plain(value: Any) -> Any:
    """The same in the types that JSON has; None for what is not a number."""
    if isinstance(value, pandas.DataFrame):
        return [plain(row) for row in value.to_dict("records")]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
