"""Ctrl-C waits until compiled code has returned.

Compiled code reads its arguments through Python's own functions, and those may run a signal
handler: an exception raised there is lost, or ends the process with a segmentation fault.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Held:
    """Whether compiled code runs, and whether a signal came meanwhile."""

    __slots__ = ("inside", "pending")

    def __init__(self) -> None:
        self.inside = False
        self.pending = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


held = _Held()
"""Entered while compiled code runs; KeyboardInterrupt at its end where a signal came."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: KeyboardInterrupt, after compiled code where that runs.

    A second signal does not wait: compiling a function can take a while.
    """
    if held.inside and not held.pending:
        held.pending = True
        return
    held.pending = False
    raise KeyboardInterrupt


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Within it Ctrl-C waits for compiled code, where it had Python's own handler before."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
