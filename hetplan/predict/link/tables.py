"""What does a table of measured times say of a message of any size?

Between two measured sizes time is linear in bytes; measured sizes are met exactly. Beyond the
largest size the last segment goes on: alpha + bytes * beta of the largest messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hetplan.predict.laws import MeasuredRange, SizeTable, outside


def segment(sizes: Sequence[float], size: float) -> int:
    """Index of the right end of the segment that holds the size, or of the nearest one."""
    return min(max(bisect_left(sizes, size), 1), len(sizes) - 1)


def slope(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Seconds per further byte at this size."""
    if len(sizes) == 1:
        # Latency and bandwidth cannot be told apart: all of it is taken to grow with size.
        return seconds[0] / sizes[0]
    right = segment(sizes, size)
    found = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
    if size > sizes[-1] and found == 0.0:
        # A flat end is noise: bytes cost what they cost over the whole table.
        found = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]) or seconds[-1] / sizes[-1]
    return found


def interpolate(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Time of a message, linear in bytes between sizes; non-decreasing and never negative."""
    if size > sizes[-1]:
        return seconds[-1] + (size - sizes[-1]) * slope(sizes, seconds, size)
    if size <= sizes[0]:
        if len(sizes) == 1:
            # Down from the only size nothing is known about the bytes' part: an upper bound.
            return seconds[0]
        # The first segment's line, unless that would make an empty message take less than nothing.
        least = min(slope(sizes, seconds, size), seconds[0] / sizes[0])
        return seconds[0] - (sizes[0] - size) * least
    right = bisect_left(sizes, size)
    if sizes[right] == size:
        return seconds[right]
    part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return seconds[right - 1] + part * (seconds[right] - seconds[right - 1])


def table_seconds(table: SizeTable, message_bytes: float, floor_seconds: float = 0.0) -> float:
    """Time of a message of this size by the table.

    `floor_seconds`: what any message takes at least, as far as the smallest measured one does.
    """
    found = interpolate(table.message_bytes, table.seconds, message_bytes)
    if message_bytes < table.message_bytes[0]:
        return max(found, min(floor_seconds, table.seconds[0]))
    return found


def outside_sizes(
    table: SizeTable, operation: str, message_bytes: float
) -> tuple[float, tuple[str, ...]]:
    """Half-width at this size, and a warning where it was not measured."""
    measured = MeasuredRange(
        quantity=f"{operation} message", least=table.message_bytes[0], most=table.message_bytes[-1]
    )
    return outside((measured,), (max(message_bytes, 1.0),), table.log_halfwidth)
