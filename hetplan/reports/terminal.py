"""Tables on stdout: as wide as the terminal, or as wide as they need into a file or a pipe."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

# Wider than any table that is printed; tables are not stretched to it.
_WIDTH_WITHOUT_TERMINAL = 1000


def print_table(table: Table) -> None:
    """The table on stdout; into a file or a pipe its rows stay whole."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    Console(width=width, highlight=False).print(table)


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
