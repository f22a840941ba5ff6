"""Calibration by runs: what it learns, what it is judged on, and when it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from compare_cases import PREDICTOR, run_text, small_result

from hetplan.comparison.calibration import MeasuredRun, try_calibration
from hetplan.comparison.compare import chosen_steps
from hetplan.cost.estimate import estimate
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.trainers.read_log import read_training_log

LAYOUTS = [(6, (4, 4)), (4, (4, 4)), (6, (2, 2)), (4, (2, 2)), (6, (8, 8)), (8, (4, 4))]


def runs(
    folder: Path, factor_of: Callable[[int], float], layouts=tuple(LAYOUTS)
) -> list[MeasuredRun]:
    found = []
    for at, (cut, sizes) in enumerate(layouts):
        result = small_result(cut, sizes)
        text = run_text(result, timers=False, lines=21, factor=factor_of(at))
        path = folder / f"{at}.log"
        path.write_text(text)
        log = read_training_log([path])
        found.append(MeasuredRun(source=path.name, result=result, chosen=chosen_steps(log, result)))
    return found


def priced(result: SearchResult, predictor: FittedPredictor) -> float:
    inputs = result.inputs
    return estimate(result.plan, inputs.model, inputs.cluster, inputs.job, predictor).step_seconds


def test_runs_that_are_all_slower_make_left_out_runs_better(tmp_path: Path) -> None:
    trial = try_calibration(runs(tmp_path, lambda at: 1.25))
    assert trial.helped
    assert trial.held_back == "one layout after the other"
    assert trial.mean_before == pytest.approx(0.2, abs=0.01)
    assert trial.mean_after < 0.3 * trial.mean_before
    assert all(row.error_before == pytest.approx(-0.2, abs=0.01) for row in trial.rows)
    # And so it is by pricing a plan that was none of them.
    laws = replace(PREDICTOR.laws, calibration=trial.calibration)
    other = small_result(3, (1, 1))
    ratio = priced(other, FittedPredictor(laws)) / other.estimate.step_seconds
    assert ratio == pytest.approx(1.25, rel=0.08)


def test_runs_without_a_common_cause_are_refused(tmp_path: Path) -> None:
    odd = (1.3, 0.8, 1.35, 0.75, 1.0, 0.7)
    trial = try_calibration(runs(tmp_path, lambda at: odd[at]))
    assert not trial.helped


def test_one_run_is_judged_by_its_second_half_which_shows_steadiness_only(tmp_path: Path) -> None:
    trial = try_calibration(runs(tmp_path, lambda at: 1.25, LAYOUTS[:1]))
    assert trial.helped
    assert trial.held_back == "the second half of each run's steps"
    assert any("only shows that the runs are steady" in note for note in trial.notes)
    assert any("only shows" in note for note in trial.calibration.notes)
    assert abs(trial.rows[0].error_after) < abs(trial.rows[0].error_before)
