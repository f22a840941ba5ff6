"""Calibration: factors only where left-out runs become better, widths that hold, tails apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.predict.calibration.factors import (
    SCALE,
    calibrate,
    fit_factors,
    left_out_runs,
)
from hetplan.predict.calibration.values import (
    COMMUNICATION,
    COMPUTE,
    FIXED,
    RunError,
    RunPart,
)

KIND, WIRE = "some-kind", "link wire"


def run(
    number: int,
    measured_over_predicted: float = 1.0,
    *,
    compute: float = 8.0,
    wire: float = 2.0,
    own: float = 0.05,
    regime: str = "several nodes",
    devices: tuple[str, ...] = (KIND,),
    source: str = "a data set",
) -> RunError:
    return RunError(
        cell=f"layout {number}",
        devices=devices,
        regime=regime,
        predicted_seconds=compute + wire,
        log_halfwidth=own,
        measured_seconds=(compute + wire) * measured_over_predicted,
        parts=(
            RunPart(cause=KIND, name=COMPUTE, seconds=compute, log_halfwidth=own),
            RunPart(cause=WIRE, name=COMMUNICATION, seconds=wire, log_halfwidth=0.3),
        ),
        source=source,
    )


def runs_of(
    count: int, seed: int, compute: float, wire: float, noise: float, own: float = 0.05
) -> list[RunError]:
    """Runs of many mixtures of both parts on a machine with these true factors."""
    draws = np.random.default_rng(seed)
    found = []
    for number in range(count):
        one, two = draws.uniform(2.0, 10.0), draws.uniform(1.0, 8.0)
        truth = one * compute + two * wire
        error = math.exp(noise * draws.standard_normal())
        made = run(number, compute=one, wire=two, own=own)
        found.append(replace(made, measured_seconds=truth * error))
    return found


@pytest.mark.parametrize(("compute", "wire"), [(1.1, 0.8), (0.7, 2.0)])
def test_true_factors_come_out_of_many_consistent_runs(compute: float, wire: float) -> None:
    # Also where the laws were far surer of themselves than they should have been.
    found = calibrate(runs_of(40, 1, compute, wire, 0.005))
    assert found.held_back is not None
    assert found.held_back.accepted
    assert found.factor(KIND, COMPUTE) == pytest.approx(compute, rel=0.01)
    assert found.factor(WIRE, COMMUNICATION) == pytest.approx(wire, rel=0.02)
    (one, two) = found.factors
    for each, truth in ((one, wire), (two, compute)):
        assert abs(math.log(each.factor / truth)) < 2 * each.log_halfwidth
        assert each.runs == 40


def test_a_wild_run_of_eight_moves_nothing() -> None:
    right = runs_of(8, 2, 1.0, 1.0, 0.004)
    for factor in (0.5, 1.3, 2.0):
        wild = [replace(right[0], measured_seconds=right[0].measured_seconds * factor), *right[1:]]
        refused = calibrate(wild)
        assert refused.factors == ()
        assert refused.held_back is not None
        assert refused.notes[0].startswith("factors refused, predictions stay as they are; ")
        assert f"{refused.held_back.better} of 8 better" in refused.notes[0]
        assert all(abs(math.log(each.factor)) < 0.01 for each in fit_factors(wild))


def test_accepted_factors_made_left_out_runs_better() -> None:
    for seed in range(6):
        runs = runs_of(9, seed, 1.04, 1.1, 0.02)
        found = calibrate(runs)
        before = np.abs([each.log_error for each in runs])
        after = np.abs(
            [run.log_error for run in left_out_runs(sorted(runs, key=lambda each: each.cell))]
        )
        judged = found.held_back
        assert judged is not None
        assert judged.mean_after == pytest.approx(after.mean())
        assert judged.mean_before == pytest.approx(before.mean())
        if found.factors:
            assert np.median(after) < np.median(before)
            assert after.mean() < before.mean()


def test_what_is_certain_is_never_corrected() -> None:
    fixed = RunPart(cause=FIXED, name=FIXED, seconds=10.0, log_halfwidth=0.0)
    runs = [replace(run(n, 1.3), parts=(fixed,)) for n in range(12)]
    found = calibrate(runs)
    assert found.factors == ()
    assert found.width((KIND,), "several nodes", 0.05) is not None


@settings(max_examples=20, deadline=None)
@given(
    errors=st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=12),
    halfwidth=st.floats(0.01, 0.6),
)
def test_one_factor_is_the_posteriors_mode(errors: list[float], halfwidth: float) -> None:
    # Written apart: with one cause the step scales with its factor, and a grid finds the mode.
    runs = [
        replace(
            run(n),
            measured_seconds=10.0 * math.exp(error),
            parts=(RunPart(cause=KIND, name=COMPUTE, seconds=10.0, log_halfwidth=halfwidth),),
        )
        for n, error in enumerate(errors)
    ]
    scale = min(halfwidth / 1.6448536, 0.03)
    grid = np.linspace(-0.6, 0.6, 24001)
    loss = np.log1p((grid / scale) ** 2)
    for error in errors:
        loss = loss + np.log1p(((error - grid) / SCALE) ** 2)
    (found,) = fit_factors(runs)
    log = math.log(found.factor)
    mine = np.log1p((log / scale) ** 2) + sum(
        np.log1p(((error - log) / SCALE) ** 2) for error in errors
    )
    # No worse than no factor at all, and a mode; the deepest one where it is clear.
    assert mine <= loss[12000] + 1e-9
    near = np.abs(grid - log) < 2e-3
    assert mine <= loss[near].min() + 1e-3


def test_intervals_hold_nine_times_in_ten() -> None:
    # 200 worlds of 30 runs each: the next run is inside in 90 % of them, give or take 3 deviations.
    draws, inside = np.random.default_rng(7), 0
    for _ in range(200):
        errors = 0.05 * draws.standard_t(4, 31)
        found = calibrate(
            [run(n, math.exp(error)) for n, error in enumerate(errors[:-1])], factors=False
        )
        width = found.width((KIND,), "several nodes", 0.05)
        assert width is not None
        inside += abs(errors[-1]) <= width.log_halfwidth
    assert abs(inside - 180) <= 3 * math.sqrt(200 * 0.9 * 0.1) + 4


def test_widths_follow_the_predictions_where_those_know_their_errors() -> None:
    draws = np.random.default_rng(8)
    owns = [0.02, 0.2] * 30
    knowing = [
        run(n, math.exp(own / 1.645 * draws.standard_normal()), own=own)
        for n, own in enumerate(owns)
    ]
    alike = [
        run(n, math.exp(0.05 * draws.standard_normal()), own=own) for n, own in enumerate(owns)
    ]
    (group, *_) = calibrate(knowing, factors=False).intervals
    assert group.scale is not None
    assert 3 < group.halfwidth(0.2) / group.halfwidth(0.02) <= 10.001
    (plain, *_) = calibrate(alike, factors=False).intervals
    assert plain.scale is None
    assert plain.halfwidth(0.2) == plain.halfwidth(0.02) == plain.log_halfwidth


def test_groups_below_nine_runs_are_pooled_and_say_so() -> None:
    many = [run(n, 1.02 + 0.001 * n) for n in range(18)]
    few = [run(100 + n, 1.1, regime="one node") for n in range(8)]
    found = calibrate([*many, *few], factors=False)
    own = found.width((KIND,), "several nodes", 0.05)
    assert own is not None
    assert own.note == ("interval by 18 measured runs of some-kind, several nodes")
    pooled = found.width((KIND,), "one node", 0.05)
    assert pooled is not None
    assert "26 measured runs of some-kind, any size: pooled" in pooled.note
    other = found.width(("another-kind",), "several nodes", 0.05)
    assert other is not None
    assert "any device kind, several nodes: pooled" in other.note
    assert any("one node: 8 runs, fewer than the 9" in note for note in found.notes)
    assert calibrate(few, factors=False).width((KIND,), "one node", 0.05) is None
    nine = [*few, run(200, 1.1, regime="one node")]
    assert calibrate(nine, factors=False).width((KIND,), "one node", 0.05) is not None


def test_slow_runs_are_a_tail_beside_the_interval() -> None:
    draws = np.random.default_rng(10)
    core = [run(n, math.exp(0.02 * draws.standard_normal())) for n in range(32)]
    slow = [run(100 + n, 1.2 + 0.04 * n) for n in range(8)]
    found = calibrate([*core, *slow], factors=False)
    (tail,) = found.tails
    assert (tail.runs, tail.slow) == (40, 8)
    assert tail.note == (
        "slow cluster tail: 20 % of 40 runs of several nodes were 20 to 48 % slower than their "
        "configuration explains; the interval is of the others"
    )
    width = found.width((KIND,), "several nodes", 0.05)
    assert width is not None
    assert width.log_halfwidth < 0.06
    # What is left after a choice widens an interval, and narrows none.
    wide = found.width((KIND,), "several nodes", 0.3)
    assert wide is not None
    assert wide.log_halfwidth >= 0.3
    assert found.tail((KIND,), "several nodes") == tail
    assert found.tail((KIND,), "one node") is None


def test_tails_are_never_invented() -> None:
    draws = np.random.default_rng(11)
    for count in (12, 40, 200):
        runs = [run(n, math.exp(0.02 * draws.standard_normal())) for n in range(count)]
        assert calibrate(runs, factors=False).tails == ()
    # Runs that are faster are no tail of slow ones, and a few slow ones of a dozen are no rule.
    fast = [run(n, 0.7 if n < 5 else 1.0) for n in range(30)]
    assert calibrate(fast, factors=False).tails == ()
    dozen = [run(n, 1.4 if n < 2 else 1.0 + 0.001 * n) for n in range(12)]
    assert calibrate(dozen, factors=False).tails == ()


@pytest.mark.parametrize("own", [-0.1, math.nan, math.inf])
def test_a_half_width_that_is_none_is_refused(own: float) -> None:
    with pytest.raises(InputError, match="log_halfwidth of run layout 0"):
        replace(run(0), log_halfwidth=own)
