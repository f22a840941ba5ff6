"""`hetplan compare --calibrate`: the fit, corrected by measured runs, where that helped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import emit, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.cli.compare_runs import ComparedRun
    from hetplan.launchers.compare_calibrate import Trial
    from hetplan.predict.fit import FittedPredictor


def calibrate_with(
    runs: Sequence[ComparedRun],
    predictor: FittedPredictor,
    out: Path,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Judge factors from these runs and, where they helped or by force, write the predictor."""
    from dataclasses import replace

    from hetplan.launchers.compare_calibrate import MeasuredRun, try_calibration
    from hetplan.predict.fit import FittedPredictor, save_predictor

    trial = try_calibration(
        [
            MeasuredRun(
                source=", ".join(map(str, run.files.logs)), result=run.result, chosen=run.chosen
            )
            for run in runs
        ]
    )
    if as_json:
        emit(_text(trial))
    else:
        _show(trial)
        for run in runs:
            for doubt in run.doubts:
                emit(f"note: {', '.join(map(str, run.files.logs))}: {doubt}")
    if trial.helped or force:
        laws = replace(predictor.laws, calibration=trial.calibration)
        save_predictor(FittedPredictor(laws), out)
        forced = "" if trial.helped else ", by --force: it did NOT help on what was held back"
        say(f"wrote {out}{forced}")
    else:
        say(
            f"{out} was not written: factors from these runs did not make what was held back "
            "better; the fit stays as it is (--force writes it all the same)"
        )


def _text(trial: Trial) -> str:
    from hetplan.files.encoding import encode
    from hetplan.launchers.compare_calibrate import SCHEMA

    return encode(trial, schema=SCHEMA)


def _show(trial: Trial) -> None:
    from hetplan.reports.compare import factor_table, trial_lines, trial_table
    from hetplan.reports.terminal import print_table

    print_table(trial_table(trial))
    if trial.calibration.factors:
        print_table(factor_table(trial))
    for line in trial_lines(trial):
        emit(line)
