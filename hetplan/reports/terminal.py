"""The terminal: sentences of 80 to 100 columns, tables as wide as it is, one line of progress.

Into a file or a pipe tables are as wide as they need. Progress is a bar on a terminal, a line that
is replaced in a notebook, and where nobody watches a line on stderr every few seconds.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from textwrap import shorten
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from hetplan.units import format_about, format_brief

if TYPE_CHECKING:
    from hetplan.search.solver import Progress as SearchProgress


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


# ---- progress


_QUIET_SECONDS = 2.0
"""Work that ends sooner leaves nothing in a log."""
_COLUMNS = 80
"""Of a line in a log."""
_LOG_INTERVAL_SECONDS = 5.0
"""Often enough to see that it lives, seldom enough for a log."""
_NOTEBOOK_INTERVAL_SECONDS = 0.2


class ProgressLine:
    """Shows how far long work is and how long it will still take."""

    def __init__(self, verb: str, shown: bool | None = True) -> None:
        """`shown`: None: on a terminal and in a notebook only, as a library has it."""
        self._verb = verb
        self._next_at = time.monotonic() + _QUIET_SECONDS
        self._bar: Progress | None = None
        self._display = None if shown is False else _notebook_display()
        if self._display is not None:
            self._next_at = 0.0
        self._cell: Any = None
        self._silent = shown is False
        if self._silent:
            return
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
        else:
            self._silent = shown is None and self._display is None

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._verb, total=None, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            self._cell.update({"text/plain": ""}, raw=True)

    def begin(self, verb: str) -> None:
        """Other work of the same command."""
        self._verb = verb
        if self._bar is not None:
            self._bar.update(self._task, description=verb)

    def show(self, finished: int, total: int, left_seconds: float | None, what: str) -> None:
        """`finished` of `total` are done; `what` was the last of them, or how things stand."""
        if self._silent:
            return
        count = f"{finished:,} of {total:,}" if total else ""
        left = f"{format_about(left_seconds)} left" if left_seconds else ""
        note = ", ".join(part for part in (count, left, what) if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, total=total or None, note=note)
            return
        now = time.monotonic()
        if note and now >= self._next_at:
            interval = _NOTEBOOK_INTERVAL_SECONDS if self._display else _LOG_INTERVAL_SECONDS
            self._next_at = now + interval
            self._say(shorten(f"{self._verb}: {note}", _COLUMNS, placeholder=" ..."))

    def _say(self, text: str) -> None:
        if self._display is None:
            print(text, file=sys.stderr, flush=True)
        elif self._cell is None:
            # An output of the running cell whose text can be replaced.
            self._cell = self._display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._cell.update({"text/plain": text}, raw=True)


def _notebook_display() -> Callable[..., Any] | None:
    """What shows something in the running notebook; None: no notebook runs."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or not hasattr(shell, "kernel"):
        return None
    display: Callable[..., Any] = ipython.display.display
    return display


def shown_on(line: ProgressLine) -> Callable[[SearchProgress], None]:
    """A listener of the search that shows the best plan and its gap on this line."""

    def show(progress: SearchProgress) -> None:
        best = "no plan yet"
        if progress.best_seconds != float("inf"):
            bound = progress.lower_bound_seconds
            gap = f"gap {progress.gap:.1%}" if bound > 0.0 else "no bound yet"
            best = f"best {format_brief(progress.best_seconds)}, {gap}"
        line.show(progress.candidates_done, progress.candidates, None, best)

    return show


def each_shown_on(line: ProgressLine) -> Callable[[str], Callable[[SearchProgress], None]]:
    """The same for searches that follow each other: the line names the one that runs."""

    def listener(name: str) -> Callable[[SearchProgress], None]:
        line.begin(f"closing candidates of {name}")
        return shown_on(line)

    return listener
