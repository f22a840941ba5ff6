"""One line of progress: a bar on a terminal, a line that is replaced in a notebook, and where
nobody watches a line on stderr every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hetplan.units import format_seconds

if TYPE_CHECKING:
    from hetplan.search.solver import Progress as SearchProgress

# Often enough to see that it lives, seldom enough for a log.
_LOG_INTERVAL_SECONDS = 2.0
_NOTEBOOK_INTERVAL_SECONDS = 0.2


class ProgressLine:
    """Shows how far long work is and how long it will still take."""

    def __init__(self, verb: str, shown: bool | None = True) -> None:
        """`shown`: None: on a terminal and in a notebook only, as a library has it."""
        self._verb = verb
        self._said_at = float("-inf")
        self._said_all = False
        self._bar: Progress | None = None
        self._display = None if shown is False else _notebook_display()
        self._cell: Any = None
        self._silent = shown is False
        if self._silent:
            return
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
                console=Console(stderr=True),
                transient=True,
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
        self._verb, self._said_all = verb, False
        if self._bar is not None:
            self._bar.update(self._task, description=verb)

    def show(self, finished: int, total: int, left_seconds: float | None, what: str) -> None:
        """`finished` of `total` are done; `what` was the last of them, or how things stand."""
        if self._silent:
            return
        left = f"{format_seconds(left_seconds)} left" if left_seconds is not None else ""
        note = ", ".join(part for part in (left, what) if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, total=total, note=note)
            return
        now = time.monotonic()
        ends = finished == total and not self._said_all
        interval = _LOG_INTERVAL_SECONDS if self._display is None else _NOTEBOOK_INTERVAL_SECONDS
        if ends or now - self._said_at >= interval:
            self._said_at, self._said_all = now, finished == total
            self._say(f"{self._verb}: {finished}/{total}, {note}")

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
    """A listener of the search that shows best plan, bound and gap on this line."""

    def show(progress: SearchProgress) -> None:
        best = (
            "no plan yet"
            if progress.best_seconds == float("inf")
            else f"best {progress.best_seconds:.4g} s, bound {progress.lower_bound_seconds:.4g} s, "
            f"gap {progress.gap:.2%}"
        )
        elapsed = f"{progress.elapsed_seconds:.1f} s"
        line.show(progress.candidates_done, progress.candidates, None, f"{best}, {elapsed}")

    return show


def each_shown_on(line: ProgressLine) -> Callable[[str], Callable[[SearchProgress], None]]:
    """The same for searches that follow each other: the line names the one that runs."""

    def listener(name: str) -> Callable[[SearchProgress], None]:
        line.begin(f"closing candidates of {name}")
        return shown_on(line)

    return listener
