"""The closed forms of a run against the same run event by event, and their optimum."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from goodput_events import Events, Path, Rules

from hetplan.cost.goodput.renewal import Renewal, Slowing, speed

HOUR = 3600.0
YEAR = 365.25 * 24 * HOUR

RULES = {
    "saves that wait": Rules(
        failures_per_second=1 / (200 * HOUR),
        work=45 * HOUR,
        save=2.5 * HOUR,
        delay=0.0,
        recovery=7.5 * HOUR,
    ),
    "saves beside the steps, long recovery": Rules(
        failures_per_second=1 / (150 * HOUR),
        work=45 * HOUR,
        save=300.0,
        delay=30 * HOUR,
        recovery=50 * HOUR,
    ),
    "two sorts of paths that fall back": Rules(
        failures_per_second=1 / (250 * HOUR),
        work=40 * HOUR,
        save=1 * HOUR,
        delay=0.0,
        recovery=5 * HOUR,
        paths=(
            Path(failures_per_second=1 / (300 * HOUR), step_factor=1.3),
            Path(failures_per_second=1 / (450 * HOUR), step_factor=1.1),
        ),
        freeze=1.5 * HOUR,
        repair=120 * HOUR,
    ),
}


def closed(rules: Rules) -> tuple[Renewal, float]:
    """The closed form, and the wall time of a segment's work."""
    slowings = tuple(
        Slowing(failures_per_second=each.failures_per_second, step_factor=each.step_factor)
        for each in rules.paths
    )
    renewal = Renewal(
        failures_per_second=rules.failures_per_second,
        save_seconds=rules.save,
        delay_seconds=rules.delay,
        recovery_seconds=rules.recovery,
    )
    return renewal, rules.work / speed(slowings, rules.freeze, rules.repair)


@pytest.mark.parametrize("name", RULES)
def test_the_closed_forms_are_within_1_percent_of_1000_years_of_events(name: str) -> None:
    rules = RULES[name]
    events = Events(rules=rules, rng=random.Random(1))
    saved = events.run(1000 * YEAR)
    renewal, wall = closed(rules)
    expected = rules.work / renewal.segment_seconds(wall)
    assert saved / events.now == pytest.approx(expected, rel=0.01)
    # What is lost as well, to within what 1,000 years of failures leave to chance.
    assert 1 - saved / events.now == pytest.approx(1 - expected, rel=0.03)
    assert events.down / events.now == pytest.approx(renewal.share_before(rules.recovery), rel=0.01)


@pytest.mark.parametrize("save", [1e-6, 1.0, 300.0, 1e5])
@pytest.mark.parametrize("mean", [1e3, 1e5, 1e9])
def test_the_best_interval_is_where_no_other_is_shorter(save: float, mean: float) -> None:
    renewal = Renewal(
        failures_per_second=1 / mean,
        save_seconds=save,
        delay_seconds=0.0,
        recovery_seconds=600.0,
    )
    best = renewal.best_seconds
    least = renewal.stretch(best)
    assert all(renewal.stretch(best * part) >= least * (1 - 1e-9) for part in (0.9, 0.99, 1.01))
    if save < 1e-3 * mean:
        young = math.sqrt(2 * save * mean)
        assert best == pytest.approx(young, rel=0.03)
    steps = renewal.best_steps(10.0, most=1e9)
    near = [count for count in (steps - 1, steps + 1) if count > 0]
    assert all(renewal.stretch(10.0 * steps) <= renewal.stretch(10.0 * each) for each in near)


def test_a_save_that_is_still_written_lets_no_other_begin() -> None:
    renewal = Renewal(
        failures_per_second=1e-4, save_seconds=1.0, delay_seconds=500.0, recovery_seconds=0.0
    )
    assert renewal.best_seconds == 499.0
    assert renewal.best_steps(10.0, most=1e9) == 50


def test_without_failures_nothing_is_lost_but_the_saves() -> None:
    renewal = Renewal(
        failures_per_second=0.0, save_seconds=5.0, delay_seconds=9.0, recovery_seconds=1e3
    )
    assert renewal.best_seconds == math.inf
    assert renewal.best_steps(10.0, most=77.0) == 77
    assert renewal.segment_seconds(100.0) == 105.0
    assert speed((), 10.0, 1e5) == 1.0


def test_a_run_whose_recovery_takes_longer_than_it_lives_never_ends() -> None:
    renewal = Renewal(
        failures_per_second=1.0, save_seconds=1.0, delay_seconds=0.0, recovery_seconds=1e4
    )
    assert renewal.segment_seconds(1.0) == math.inf
    assert replace(renewal, recovery_seconds=7.0).segment_seconds(1.0) == math.inf
    assert replace(renewal, recovery_seconds=4.0).segment_seconds(1.0) < 1e3
