"""One line of progress on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from textwrap import shorten
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from hetplan.cli.options import say
from hetplan.units import format_about, format_brief

if TYPE_CHECKING:
    from hetplan.search.solver import Progress as SearchProgress

_QUIET_SECONDS = 2.0
"""Work that ends sooner leaves nothing in a log."""
_COLUMNS = 80
"""Of a line in a log."""
_LOG_INTERVAL_SECONDS = 5.0
"""Often enough to see that it lives, seldom enough for a log."""


class ProgressLine:
    """Shows how far long work is and how long it will still take."""

    def __init__(self, verb: str, *, terminal_only: bool = False) -> None:
        self._verb = verb
        self._next_at = math.inf if terminal_only else time.monotonic() + _QUIET_SECONDS
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )

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

    def begin(self, verb: str) -> None:
        """Other work of the same command."""
        self._verb = verb
        if self._bar is not None:
            self._bar.update(self._task, description=verb)

    def show(self, finished: int, total: int, left_seconds: float | None, what: str) -> None:
        """`finished` of `total` are done; `what` was the last of them, or how things stand."""
        count = f"{finished:,} of {total:,}" if total else ""
        left = f"{format_about(left_seconds)} left" if left_seconds else ""
        note = ", ".join(part for part in (count, left, what) if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, total=total or None, note=note)
            return
        now = time.monotonic()
        if note and now >= self._next_at:
            self._next_at = now + _LOG_INTERVAL_SECONDS
            say(shorten(f"{self._verb}: {note}", _COLUMNS, placeholder=" ..."))


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
