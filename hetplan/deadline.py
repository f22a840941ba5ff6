"""The moment by which a command, and every search in it, has to end.

    with ends_by(moment):   of `hetplan.kernels.clock`; OutOfTimeError when it has come. Of one
        ...                 inside of another the earlier moment counts

Who works for long looks at the clock (`check_time`). Where nobody has looked for `LATE_SECONDS` an
alarm raises the same error between any two operations of Python, as Ctrl-C would, so that a limit
holds whatever is asked. The alarm waits for compiled code. It comes in the main thread alone, and
only where the caller has no alarm of its own.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from hetplan.errors import OutOfTimeError
from hetplan.interrupts import held
from hetplan.kernels import clock

LATE_SECONDS = 0.5
"""How late the alarm is: who looks at the clock ends in better order. A limit may be overrun by a
second."""

_AGAIN_SECONDS = 2.0
"""Until a second alarm: the first is lost where it comes inside of what Python calls by itself."""

_LONGEST_SECONDS = 1e6
"""Of one alarm, which is set anew then: the system takes no number of any size."""


_moment: ContextVar[float] = ContextVar("_moment", default=math.inf)


def moment() -> float:
    """By which what runs now has to end; infinite where nothing limits it."""
    return _moment.get()


def seconds_left() -> float:
    """Until that moment."""
    return moment() - clock()


def check_time() -> None:
    """Raise OutOfTimeError where it is over."""
    if clock() > moment():
        raise OutOfTimeError


def moment_in(seconds: float | None) -> float:
    """So many seconds from now; None: never."""
    return math.inf if seconds is None else clock() + seconds


@contextmanager
def ends_by(last: float) -> Iterator[None]:
    """Within it time is over at this moment, or at an earlier one that was there before."""
    around, token = moment(), _moment.set(min(last, moment()))
    handler = _alarm_before()
    try:
        if handler is not None:
            _set_alarm()
        yield
    finally:
        try:
            if handler is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:
            _moment.reset(token)
            if handler is not None and around < math.inf:
                _set_alarm()
            elif handler is not None:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _alarm_before() -> Any:
    """The handler of alarms before this; None where there is none to set."""
    if threading.current_thread() is not threading.main_thread() or moment() == math.inf:
        return None
    handler = signal.getsignal(signal.SIGALRM)
    return handler if handler in (signal.SIG_DFL, _ring) else None


def _set_alarm() -> None:
    signal.signal(signal.SIGALRM, _ring)
    left = max(1e-3, min(seconds_left() + LATE_SECONDS, _LONGEST_SECONDS))
    signal.setitimer(signal.ITIMER_REAL, left, _AGAIN_SECONDS)


def _ring(number: int, frame: FrameType | None) -> None:
    """The alarm's handler."""
    if seconds_left() + LATE_SECONDS <= 0.0:
        held.stop(OutOfTimeError)
    else:  # the clock has stood still
        _set_alarm()
