"""How long a piece of work takes once it has settled, and how much that varies.

A body is run until the medians of two windows of passes agree (and for a minimum time: caches,
allocators and boost clocks settle by being used), then repeated. A body may have several sections,
such as forward and backward, with a mark at each of their ends; each section gets its own timing.
Nothing is dropped: outliers are counted.

Passes follow each other without a wait for the device, as they do in training, so that times
of an accelerator come from its own marks and launching counts only where it is the bottleneck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from hetplan.errors import ProfileError

# A repeat this many interquartile ranges above the median is an outlier ("far out" in Tukey 1977).
OUTLIER_RANGES = 3.0


class Marker(Protocol):
    """The part of a backend that timing needs."""

    def synchronise(self) -> None:
        """Wait until all queued work is done."""
        ...

    def mark(self) -> Any:
        """A point in the device's order of work."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Time between two marks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Do not begin another repeat after this long."""


# A core reaches its clock within milliseconds; what has to settle is the allocator and the caches.
CPU_LIMITS = TimingLimits(
    window_passes=3,
    tolerance=0.1,
    warmup_min_seconds=0.01,
    warmup_max_seconds=0.5,
    min_repeats=11,
    max_repeats=200,
    min_seconds=0.08,
    max_seconds=5.0,
)
# Accelerators lower their clock within a second of full load, over power and then over heat.
ACCELERATOR_LIMITS = TimingLimits(
    window_passes=10,
    tolerance=0.02,
    warmup_min_seconds=1.0,
    warmup_max_seconds=5.0,
    min_repeats=20,
    max_repeats=200,
    min_seconds=0.5,
    max_seconds=10.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one section over all repeats."""

    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    repeats: int
    outliers: int
    steady: bool


Body = Callable[[Callable[[], None]], None]
"""One pass: runs the sections and calls its argument before the first and after each."""


def measure(
    body: Body,
    marker: Marker,
    limits: TimingLimits,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, ...]:
    """One timing per section of the body, after warm-up."""
    steady = _warm_up(body, marker, limits, clock)
    passes: list[tuple[float, ...]] = []
    started = clock()
    while True:
        spent = clock() - started
        enough = len(passes) >= limits.min_repeats and spent >= limits.min_seconds
        if passes and (enough or spent >= limits.max_seconds):
            break
        count = min(limits.window_passes, limits.max_repeats - len(passes))
        if count < 1:
            break
        passes += _window(body, marker, count, limits.max_seconds - spent, clock)
    return tuple(summarise(section, steady=steady) for section in zip(*passes, strict=True))


def summarise(seconds: tuple[float, ...], *, steady: bool) -> Timing:
    """Median, deciles and outliers of the repeats."""
    ordered = sorted(seconds)
    p10, p25, p50, p75, p90 = (_quantile(ordered, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))
    limit = p50 + OUTLIER_RANGES * (p75 - p25)
    return Timing(
        median_seconds=p50,
        p10_seconds=p10,
        p90_seconds=p90,
        repeats=len(seconds),
        outliers=sum(value > limit for value in ordered),
        steady=steady,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the ordered values, which lie at i / (n - 1)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def expected_seconds(limits: TimingLimits, pass_seconds: float) -> float:
    """About how long `measure` takes where one pass takes `pass_seconds`."""
    window = limits.window_passes * pass_seconds
    warmup = max(limits.warmup_min_seconds, 2 * window)
    repeats = max(limits.min_seconds, limits.min_repeats * pass_seconds)
    return min(warmup, limits.warmup_max_seconds + pass_seconds) + min(
        repeats, limits.max_repeats * pass_seconds, limits.max_seconds + pass_seconds
    )


def _warm_up(body: Body, marker: Marker, limits: TimingLimits, clock: Callable[[], float]) -> bool:
    """Run windows until two agree; whether they did before the limit."""
    started = clock()
    before: float | None = None
    while True:
        left = started + limits.warmup_max_seconds - clock()
        window = _window(body, marker, limits.window_passes, left, clock)
        middle = median(sum(sections) for sections in window)
        steady = before is not None and abs(middle - before) <= limits.tolerance * before
        spent = clock() - started
        if steady and spent >= limits.warmup_min_seconds:
            return True
        if spent >= limits.warmup_max_seconds:
            return steady
        before = middle


def _window(
    body: Body, marker: Marker, passes: int, seconds: float, clock: Callable[[], float]
) -> list[tuple[float, ...]]:
    """Section times of up to `passes` passes, at least one, none begun after `seconds`."""
    marks: list[list[Any]] = []
    started = clock()
    while len(marks) < passes and (not marks or clock() - started < seconds):
        of_pass: list[Any] = []
        body(lambda of_pass=of_pass: of_pass.append(marker.mark()))  # type: ignore[misc]
        if len(of_pass) < 2:
            raise ProfileError("a timed body made fewer than two marks; it has no section")
        marks.append(of_pass)
    marker.synchronise()
    return [
        tuple(marker.seconds_between(first, second) for first, second in pairwise(of_pass))
        for of_pass in marks
    ]
