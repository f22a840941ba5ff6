"""One line of progress: a bar on a terminal, a line that is replaced in a notebook, and where
nobody watches a line on stderr every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from textwrap import shorten
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from hetplan.units import format_about, format_brief

if TYPE_CHECKING:
    from hetplan.search.solver import Progress as SearchProgress

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
