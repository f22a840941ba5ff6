"""How much work is an action, in lines of Python? What tests assert instead of seconds.

Seconds of a shared machine say little. How many lines run, each pass of a loop anew, says how work
grows, and is the same on every machine with one version of Python. Work inside one call of C (a
regular expression, numpy) is not seen: tests bound its input or its result.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def counted_steps(action: Callable[[], T]) -> tuple[T, int]:
    """(what the action gives, lines of Python that ran in it); what it raises is passed on."""
    counted = 0

    def line(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal counted
        if in_kernel(frame):
            return None
        if event == "line":
            counted += 1
        return line

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # finalizers of what other tests left are no work of the action
    sys.settrace(line)
    try:
        found = action()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return found, counted


def in_kernel(frame: FrameType) -> bool:
    """Whether this is a kernel that runs in Python, or what runs kernels: compiled code is not
    seen either, and which of the two it is differs from process to process.
    """
    return "_count_one" in frame.f_globals or frame.f_globals.get("__name__") == "hetplan.kernels"


def steps_of(action: Callable[[], object]) -> int:
    """Lines of Python of an action that has run once before, so that nothing is made anew."""
    action()
    return counted_steps(action)[1]
