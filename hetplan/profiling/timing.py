"""How long a piece of work takes once it has settled, and how much that varies.

A body is run until the medians of two windows of passes agree (and for a minimum time: caches,
allocators and boost clocks settle by being used), then repeated. A body has one or more sections,
such as forward and backward, with a mark before and after each. Outliers are counted and kept.
Passes follow each other without a wait for the device, as in training, so times of an accelerator
come from its own marks.

Part of the stand-alone measure.py: Python 3.8 and the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetplan.errors import ProfileError


@dataclass(frozen=True)
class TimingLimits:
    """When warm-up is over and how often to repeat."""

    window_passes: int
    """Passes of one warm-up window, and between two waits for an accelerator."""
    tolerance: float
    """Relative difference of two successive windows' medians that counts as steady."""
    warmup_min_seconds: float
    warmup_max_seconds: float
    min_repeats: int
    max_repeats: int
    min_seconds: float
    """Repeat at least this long (or `max_repeats` times)."""
    max_seconds: float
    """Begin no repeat after this long."""


# A core reaches its clock within milliseconds; the allocator and the caches have to settle.
CPU_LIMITS = TimingLimits(3, 0.1, 0.01, 0.5, 11, 200, 0.08, 5.0)
# Accelerators lower their clock within a second of full load, over power and then over heat.
ACCELERATOR_LIMITS = TimingLimits(10, 0.02, 1.0, 5.0, 20, 200, 0.5, 10.0)
OUTLIER_RANGES = 3.0  # interquartile ranges above the median ("far out" in Tukey 1977)


@dataclass(frozen=True)
class Timing:
    """Times of one section over all repeats."""

    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    steady: bool = True
    """Whether warm-up reached a steady time before its limit."""


def summarise(seconds: Sequence[float], *, steady: bool = True) -> Timing:
    """Median, deciles (linear between neighbours) and outliers of the repeats."""
    ordered = sorted(seconds)
    low, quarter, half, three_quarters, high = (
        quantile(ordered, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)
    )
    limit = half + OUTLIER_RANGES * (three_quarters - quarter)
    outliers = sum(value > limit for value in ordered)
    return Timing(half, low, high, len(ordered), outliers, steady)


def quantile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between the sorted values."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def measure(
    body: Callable[[Callable[[], None]], None],
    backend: Any,
    limits: TimingLimits,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, ...]:
    """One timing per section of `body`, which calls its argument before and after each section."""
    steady = _warm_up(body, backend, limits, clock)
    passes: list[tuple[float, ...]] = []
    started = clock()
    while True:
        spent = clock() - started
        enough = len(passes) >= limits.min_repeats and spent >= limits.min_seconds
        count = min(limits.window_passes, limits.max_repeats - len(passes))
        if passes and (enough or spent >= limits.max_seconds or count < 1):
            return tuple(summarise(section, steady=steady) for section in zip(*passes))  # noqa: B905
        passes += _window(body, backend, count, limits.max_seconds - spent, clock)


def _warm_up(body: Any, backend: Any, limits: TimingLimits, clock: Callable[[], float]) -> bool:
    """Run windows until two agree; whether they did before the limit."""
    started, before = clock(), 0.0
    while True:
        left = started + limits.warmup_max_seconds - clock()
        middle = median(map(sum, _window(body, backend, limits.window_passes, left, clock)))
        steady = before > 0 and abs(middle - before) <= limits.tolerance * before
        spent = clock() - started
        if spent >= limits.warmup_max_seconds or (steady and spent >= limits.warmup_min_seconds):
            return steady
        before = middle


def _window(
    body: Any, backend: Any, passes: int, seconds: float, clock: Callable[[], float]
) -> list[tuple[float, ...]]:
    """Section times of at most `passes` passes, at least one, none begun after `seconds`."""
    marks: list[list[Any]] = []
    started = clock()
    while len(marks) < passes and (not marks or clock() - started < seconds):
        marks.append([])
        body(lambda: marks[-1].append(backend.mark()))
        if len(marks[-1]) < 2:
            raise ProfileError("a timed body made fewer than two marks; it has no section")
    backend.synchronise()
    return [
        tuple(backend.seconds_between(*pair) for pair in zip(each, each[1:]))  # noqa: B905, RUF007 (3.8)
        for each in marks
    ]


def expected_seconds(limits: TimingLimits, pass_seconds: float) -> float:
    """About how long `measure` takes where one pass takes `pass_seconds`."""
    warmup = max(limits.warmup_min_seconds, 2 * limits.window_passes * pass_seconds)
    repeats = max(limits.min_seconds, limits.min_repeats * pass_seconds)
    return min(warmup, limits.warmup_max_seconds + pass_seconds) + min(
        repeats, limits.max_repeats * pass_seconds, limits.max_seconds + pass_seconds
    )
