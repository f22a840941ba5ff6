"""What do measured runs add: true intervals, and do factors from eight of them help the others?

Intervals: the width of a run's 90 % interval comes from the errors of runs of other cells (a cell:
one model, tp and pp), by `hetplan.predict.calibration.factors` without any factor, so predictions
stay those of unit measurements alone. No run is in what its own interval rests on, nor is any of
its cell; where another folder is judged, none of its runs is in any.

Eight rows: the first eight of a data set by the hash of their configuration calibrate the
predictor, factors included; the rest of the data set is predicted with and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.benchmarks.accuracy.judge import Errors, Judged, errors_of
from hetplan.benchmarks.accuracy.predicted import PredictedRun, predict_run
from hetplan.cost.run_error import own_halfwidth, run_error
from hetplan.errors import InputError
from hetplan.predict.calibration.factors import calibrate, devices_of, regime_of
from hetplan.predict.calibration.values import Calibration, GroupInterval, RunError
from hetplan.predict.fit import FittedPredictor

CALIBRATING_ROWS = 8
"""What somebody has who ran a handful of configurations before a search: a step of each takes
seconds, and a calibration judges itself from 8 runs on (`hetplan.predict.calibration.factors`)."""
_MIN_LEFT = CALIBRATING_ROWS
"""Rows that must be left to judge: no fewer than those that calibrate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterval:
    """Half-widths of a run's 90 % interval, in the logarithm."""

    own: float
    """By the predictions alone."""
    group: GroupInterval | None
    """Measured runs of other cells that say how wide it must be; None where too few do."""
    asked: tuple[str, ...]
    """The run's device kinds, and what it spans."""

    @property
    def by_runs(self) -> float | None:
        """By measured runs of other cells."""
        return None if self.group is None else self.group.halfwidth(self.own)

    @property
    def stands_on(self) -> str:
        """In words, without how many runs there are: leaving out another cell leaves another
        number and nothing else.
        """
        if self.group is None:
            return "by the predictions alone"
        kinds = ", ".join(self.group.devices) or "any device kind"
        found = f"interval by measured runs of {kinds}, {self.group.regime or 'any size'}"
        if not self.group.pooled:
            return found
        return f"{found}: pooled, too few are of {', '.join(self.asked)}"

    @property
    def log_halfwidth(self) -> float:
        """By runs where they say anything, else by the predictions alone."""
        return self.own if self.by_runs is None else self.by_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedOn:
    """A data set's rows without the eight that calibrated, before and after."""

    data_set: str
    calibrated_on: tuple[str, ...]
    """Places of the eight."""
    accepted: bool
    """Whether the product kept the factors: they must help left-out rows among the eight."""
    before: Errors
    after: Errors
    notes: tuple[str, ...]


def cell_of(run: PredictedRun) -> str:
    """Runs that are left out together."""
    row = run.row
    return f"{row.model} tp{row.tp or 1} pp{row.pp or 1}"


def error_of(run: PredictedRun) -> RunError:
    """The run as calibration wants it."""
    return run_error(
        run.estimate,
        run.run.planned.plan,
        run.run.cluster,
        measured_seconds=run.measured_seconds,
        cell=cell_of(run),
        source=run.row.data_set,
    )


def _is_narrow(run: PredictedRun) -> bool:
    """Whether its products' format was measured nowhere: errors of such runs say nothing of others,
    nor others' of them.
    """
    return run.row.product_format is not None


def run_intervals(
    runs: Sequence[PredictedRun], known: Sequence[PredictedRun]
) -> tuple[RunInterval, ...]:
    """The interval of every run, by those of the `known` ones that are of other cells.

    `known`: runs whose measured times may be used, which are those of the fitted folder.
    """
    errors = [(error_of(run), _is_narrow(run)) for run in known]
    kept: dict[tuple[str, bool], Calibration] = {}
    found = []
    for run in runs:
        key = cell, narrow = cell_of(run), _is_narrow(run)
        if key not in kept:
            others = [e for e, of_narrow in errors if e.cell != cell and of_narrow == narrow]
            kept[key] = calibrate(others, factors=False)
        plan, cluster = run.run.planned.plan, run.run.cluster
        devices, regime = devices_of(plan, cluster), regime_of(plan, cluster)
        found.append(
            RunInterval(
                own=own_halfwidth(run.estimate),
                group=kept[key].group(devices, regime),
                asked=(*devices, regime),
            )
        )
    return tuple(found)


def tails_of(known: Sequence[PredictedRun]) -> tuple[str, ...]:
    """Slow tails among these runs, in words: intervals are of the others."""
    calibration = calibrate([error_of(run) for run in known], factors=False)
    return tuple(
        f"{', '.join(tail.devices) or 'any device'}: {tail.note}" for tail in calibration.tails
    )


def eight_rows(
    runs: Sequence[PredictedRun], predictor: FittedPredictor
) -> tuple[CalibratedOn, ...]:
    """Every data set with rows enough, calibrated on its first eight by hash."""
    found = []
    for name in dict.fromkeys(run.row.data_set for run in runs):
        order = sorted(
            (run for run in runs if run.row.data_set == name),
            key=lambda run: run.row.configuration_hash,
        )
        first, rest = order[:CALIBRATING_ROWS], order[CALIBRATING_ROWS:]
        if len(rest) < _MIN_LEFT:
            continue
        calibration = calibrate([error_of(run) for run in first])
        after = _again(rest, calibration, predictor)
        one, two = errors_of([run.judged() for run in rest]), errors_of(after)
        if one is None or two is None:
            continue
        found.append(
            CalibratedOn(
                data_set=name,
                calibrated_on=tuple(run.row.place for run in first),
                accepted=bool(calibration.factors),
                before=one,
                after=two,
                notes=calibration.notes,
            )
        )
    return tuple(found)


def _again(
    runs: Sequence[PredictedRun], calibration: Calibration, predictor: FittedPredictor
) -> list[Judged]:
    """The same runs by the predictor with this calibration."""
    calibrated = FittedPredictor(replace(predictor.laws, calibration=calibration))
    found = []
    for run in runs:
        try:
            found.append(predict_run(run.run, calibrated).judged())
        except InputError:
            # A factor cannot make a prediction impossible; if it does the row is judged as it was.
            found.append(run.judged())
    return found
