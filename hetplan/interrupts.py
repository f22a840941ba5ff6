"""Ctrl-C waits until compiled code has returned.

Compiled code reads its arguments through Python's own functions, and those may run a signal
handler: an exception raised there is lost, or ends the process with a segmentation fault.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Held:
    """Whether compiled code runs, and what is to be raised when it has returned."""

    __slots__ = ("inside", "pending")

    def __init__(self) -> None:
        self.inside = False
        self.pending: type[BaseException] | None = None

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def stop(self, error: type[BaseException]) -> None:
        """Raise it, after compiled code where that runs; of two the first."""
        if not self.inside:
            raise error
        self.pending = self.pending or error


held = _Held()
"""Entered while compiled code runs."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: KeyboardInterrupt, after compiled code where that runs.

    A second signal does not wait: compiling a function can take a while.
    """
    if held.inside and held.pending is not KeyboardInterrupt:
        held.pending = KeyboardInterrupt
        return
    held.pending = None
    raise KeyboardInterrupt


_AGAIN_SECONDS = 0.01
"""A finalizer takes microseconds; where one takes longer, the next one is tried."""


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Within it Ctrl-C waits for compiled code, where it had Python's own handler before."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        """A KeyboardInterrupt that came in a finalizer, where Python prints and drops it, comes
        again when that has ended.
        """
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(unraisable)

    signal.signal(signal.SIGINT, interrupt)
    before, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGINT, signal.default_int_handler)
