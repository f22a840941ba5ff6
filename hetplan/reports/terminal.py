"""Text on stdout: sentences of 80 to 100 columns, tables as wide as the terminal.

Into a file or a pipe tables are as wide as they need.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table

# Wider than any table that is printed; tables are not stretched to it.
_WIDTH_WITHOUT_TERMINAL = 1000


_NARROW, _WIDE = 80, 100
"""Columns that are read in comfort."""


def _on_terminal() -> bool:
    """Python has no stdout where the caller closed it."""
    return sys.stdout is not None and sys.stdout.isatty()


def text_width() -> int:
    """Columns for sentences: those of the terminal, at most 100; 80 into a file or a pipe."""
    if not _on_terminal():
        return _NARROW
    return min(shutil.get_terminal_size().columns, _WIDE)


def folded(lines: Iterable[str], width: int) -> Iterator[str]:
    """Long lines folded between words, what follows the first part two columns to the right."""
    for line in lines:
        yield from textwrap.wrap(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def print_table(table: Table) -> None:
    """The table on stdout; into a file or a pipe its rows stay whole."""
    width = None if _on_terminal() else _WIDTH_WITHOUT_TERMINAL
    Console(width=width, highlight=False).print(table)


def small_table(columns: str) -> Table:
    """An empty table without lines, as `new_table` reads its columns; for `print_small`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in columns.split("|"):
        right = name.strip().startswith(">")
        table.add_column(
            name.strip().removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    return table


def print_small(table: Table) -> None:
    """The table on stdout, folded to the columns of sentences."""
    for line in table_lines(table, text_width()):
        print(line, flush=True)


def table_lines(table: Table, width: int) -> Iterator[str]:
    """The table as text of at most `width` columns."""
    text = io.StringIO()
    plain = Console(file=text, width=width, highlight=False, color_system=None, force_jupyter=False)
    plain.print(table)
    yield from (line.rstrip() for line in text.getvalue().splitlines())


def new_table(columns: str, *, title: str = "") -> Table:
    """An empty table of these columns, as in `"rank | >seconds"`; > puts a column to the right.

    With a title, cells are folded where the terminal is narrow; without, lines stay whole.
    """
    table = Table(title=title, title_justify="left") if title else Table(box=box.SIMPLE)
    for name in columns.split("|"):
        right = name.strip().startswith(">")
        table.add_column(
            name.strip().removeprefix(">"),
            justify="right" if right else "left",
            overflow="fold" if title else "ellipsis",
            no_wrap=not title,
        )
    return table
