from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cost.components.step import (
    Ranks,
    slowest,
    straggler_factors,
    stragglers,
)
from hetplan.errors import InputError

spreads = st.floats(0.001, 0.8)
counts = st.integers(1, 200_000)


def simulated(parts: list[Ranks], draws: int, seed: int) -> tuple[float, float, float]:
    """(mean, its standard error, p90) of the largest, drawn."""
    rng = np.random.default_rng(seed)
    largest = np.full(draws, -np.inf)
    for part in parts:
        # One rank at a time keeps memory small.
        for _ in range(part.count):
            times = part.seconds * np.exp(part.spread * rng.standard_normal(draws))
            np.maximum(largest, times, out=largest)
    error = float(largest.std() / math.sqrt(draws))
    return float(largest.mean()), error, float(np.quantile(largest, 0.9))


@pytest.mark.parametrize(
    "parts",
    [
        [Ranks(seconds=1.0, spread=0.03, count=64)],
        [Ranks(seconds=2.0, spread=0.3, count=7)],
        [Ranks(seconds=1.0, spread=0.05, count=32), Ranks(seconds=1.1, spread=0.02, count=8)],
        [Ranks(seconds=1.0, spread=0.05, count=16), Ranks(seconds=1.08, spread=0.0, count=8)],
    ],
)
def test_drawn_ranks_agree(parts):
    mean, error, p90 = simulated(parts, 100_000, seed=5)
    found = slowest(parts)
    assert found.mean_seconds == pytest.approx(mean, abs=5 * error)
    assert found.p90_seconds == pytest.approx(p90, rel=0.004)


@settings(max_examples=100, deadline=None)
@given(spread=spreads)
def test_one_rank_is_log_normal(spread):
    found = straggler_factors(spread, 1)
    assert found.mean_seconds == pytest.approx(math.exp(spread**2 / 2), rel=1e-9)
    p90 = math.exp(spread * NormalDist().inv_cdf(0.9))
    assert found.p90_seconds == pytest.approx(p90, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(spread=spreads, count=counts)
def test_the_p90_is_where_all_ranks_are_below_in_nine_of_ten_steps(spread, count):
    found = straggler_factors(spread, count)
    z = math.log(found.p90_seconds) / spread
    assert NormalDist().cdf(z) ** count == pytest.approx(0.9, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(spread=spreads, count=counts, more=st.floats(1.0, 3.0), seconds=st.floats(1e-6, 1e3))
def test_laws_of_the_maximum(spread, count, more, seconds):
    one = straggler_factors(spread, count)
    assert one.mean_seconds <= straggler_factors(spread, 2 * count).mean_seconds + 1e-12
    assert one.p90_seconds <= straggler_factors(spread, 2 * count).p90_seconds + 1e-12
    assert one.mean_seconds <= straggler_factors(spread * more, count).mean_seconds + 1e-9
    # Times scale, and ranks may be listed together or apart, in any order.
    scaled = slowest((Ranks(seconds=seconds, spread=spread, count=count),))
    assert scaled.mean_seconds == pytest.approx(seconds * one.mean_seconds, rel=1e-9)
    apart = (
        Ranks(seconds=1.0, spread=spread, count=count),
        Ranks(seconds=1.0, spread=spread, count=3),
    )
    together = straggler_factors(spread, count + 3)
    assert slowest(apart).mean_seconds == pytest.approx(together.mean_seconds, rel=1e-8)
    assert slowest(apart[::-1]).p90_seconds == pytest.approx(together.p90_seconds, rel=1e-8)
    # E[max] is at least the largest of the means.
    assert together.mean_seconds >= math.exp(spread**2 / 2) - 1e-12


def test_equal_devices_cost_nothing_and_say_so():
    alike = slowest((Ranks(seconds=2.0, spread=0.0, count=9),))
    assert (alike.mean_seconds, alike.p90_seconds) == (2.0, 2.0)
    for spread, why in ((None, "is not given"), (0.0, "all devices are alike")):
        mean, p90 = stragglers(10.0, spread, 64)
        assert mean.seconds == p90.seconds == 0
        assert why in mean.note
    mean, p90 = stragglers(10.0, 0.03, 64)
    assert mean.seconds == pytest.approx(0.729, abs=1e-3)
    assert p90.seconds > mean.seconds
    assert "64 ranks" in mean.note


def test_a_far_slower_island_decides_alone():
    slow = Ranks(seconds=2.0, spread=0.01, count=4)
    both = slowest((Ranks(seconds=1.0, spread=0.01, count=1000), slow))
    assert both.mean_seconds == pytest.approx(slowest((slow,)).mean_seconds, rel=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"spread": -0.1}, {"spread": math.nan}, {"seconds": 0.0}],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(InputError, match="there must be at least one"):
        Ranks(**{"seconds": 1.0, "spread": 0.1, "count": 1, **wrong})
    with pytest.raises(InputError, match="no ranks"):
        slowest(())
