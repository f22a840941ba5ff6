"""Tables on stdout: as wide as the terminal, or as wide as they need into a file or a pipe."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

# Wider than any table that is printed; tables are not stretched to it.
_WIDTH_WITHOUT_TERMINAL = 1000


def print_table(table: Table) -> None:
    """The table on stdout; into a file or a pipe its rows stay whole."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    Console(width=width, highlight=False).print(table)
