"""`hetplan compare --calibrate`: the fit, corrected by measured runs, where that helped."""

from __future__ import annotations

import json
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


def check_replaceable(out: Path) -> None:
    """An InputError where the predictor cannot be written there, or would replace another file
    than a predictor: the run's log, its plan, a person's notes.
    """
    from hetplan.errors import Fault, InputError
    from hetplan.files.writing import check_writable
    from hetplan.predict.laws import SCHEMA

    check_writable(out)
    if not out.exists() or out.stat().st_size == 0:
        return
    try:
        found = json.loads(out.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    schema = found.get("schema") if isinstance(found, dict) else None
    if str(schema).partition("/")[0] != SCHEMA.partition("/")[0]:
        message = (
            "exists and is no predictor; nothing was changed: --calibrate writes a new file, or "
            "replaces a predictor"
        )
        raise InputError(Fault(file=str(out), message=message))


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
