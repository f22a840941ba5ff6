"""Small pictures of numbers in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, from the lowest (▁) to the highest (█)."""
    low, high = min(values), max(values)
    span = high - low
    if span <= 0:
        return _BARS[0] * len(values)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top)] for value in values)
