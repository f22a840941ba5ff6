import random

import pytest

from hetplan.profiling.timing import TimingLimits, measure, summarise

LIMITS = TimingLimits(
    window_passes=3,
    tolerance=0.05,
    warmup_min_seconds=0.5,
    warmup_max_seconds=10.0,
    min_repeats=10,
    max_repeats=60,
    min_seconds=2.0,
    max_seconds=20.0,
)


class FakeDevice:
    """A device whose passes take what a function of the pass's number says."""

    def __init__(self, *sections) -> None:
        self.now, self.passes, self.sections = 0.0, 0, sections
        self.waits = 0

    def clock(self) -> float:
        return self.now

    def synchronise(self) -> None:
        self.waits += 1

    def mark(self) -> float:
        return self.now

    def seconds_between(self, first: float, second: float) -> float:
        return second - first

    def body(self, mark) -> None:
        mark()
        for section in self.sections:
            self.now += section(self.passes)
            mark()
        self.passes += 1

    def measure(self, limits: TimingLimits = LIMITS):
        return measure(self.body, self, limits, clock=self.clock)


def test_warm_up_is_not_measured() -> None:
    # Passes become faster until the 6th, as when a clock rises.
    device = FakeDevice(lambda n: 0.1 * max(1.0, 6.0 - n), lambda n: 0.2)
    forward, backward = device.measure()
    assert forward.median_seconds == pytest.approx(0.1)
    assert forward.p90_seconds == pytest.approx(0.1)
    assert backward.median_seconds == pytest.approx(0.2)
    assert forward.steady
    assert forward.repeats >= LIMITS.min_repeats
    assert forward.outliers == 0


def test_warm_up_that_never_settles_is_told() -> None:
    device = FakeDevice(lambda n: 0.1 * 1.1**n if n < 40 else 0.1 * 1.1**40)
    (timing,) = device.measure()
    assert not timing.steady


def test_outliers_are_counted_and_kept() -> None:
    seconds = [1.0, 1.01, 1.02, 1.03, 1.04] * 6 + [9.0, 12.0]
    random.Random(0).shuffle(seconds)
    timing = summarise(tuple(seconds), steady=True)
    assert timing.outliers == 2
    assert timing.repeats == 32
    assert timing.median_seconds == pytest.approx(1.02)
    assert timing.p10_seconds < timing.median_seconds < timing.p90_seconds
    # Just inside three interquartile ranges (0.02 wide) is no outlier.
    inside = summarise((1.0, 1.01, 1.02, 1.03, 1.04, 1.02 + 0.05), steady=True)
    assert inside.outliers == 0
