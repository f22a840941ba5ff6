"""How far is hetplan off on published measurements? The whole of `evaluation accuracy`.

A predictor is fitted on one folder's unit measurements (layers, operators, collectives; never its
runs), and judged on the runs of another, or of the same. Both folders have the form of the folder
of reference data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.accuracy.calibration import (
    CalibratedOn,
    RunInterval,
    eight_rows,
    run_intervals,
    tails_of,
)
from evaluation.accuracy.fitting import Fitted, fitted
from evaluation.accuracy.heldout_data import read_judged_unit
from evaluation.accuracy.left_out import (
    UnitErrors,
    UnitJudgement,
    left_out,
    other_folder,
)
from evaluation.accuracy.peers import PeerFigure, peers_of
from evaluation.accuracy.predict_run import NotPredicted, PredictedRun, predict_rows
from evaluation.accuracy.readings import ReadingErrors, other_readings
from evaluation.accuracy.rows import read_runs
from evaluation.accuracy.scores import Errors, errors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFigures:
    """What of `Errors` depends on the intervals."""

    inside: int
    median_width: float
    interval_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetErrors:
    """Figures of one data set; errors are fractions."""

    data_set: str
    """Its name; `, derived` where step times were computed from published rates."""
    rows: int
    fitted_on: str
    mape: float
    """Of all predicted rows, suspect ones included."""
    all_rows: Errors
    without_suspect: Errors | None
    """The same without rows that are marked suspect; None where none is."""
    suspect_rows: int
    not_predicted: int
    intervals_from: str
    """What the 90 % intervals of `all_rows` and `without_suspect` stand on."""
    alone: IntervalFigures
    """The same intervals by the predictions alone, without any measured run."""
    peers: tuple[PeerFigure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """One run beside its prediction."""

    data_set: str
    place: str
    """File and line."""
    layout: str
    measured_seconds: float
    predicted_seconds: float
    lower_seconds: float
    upper_seconds: float
    """Of the 90 % interval, by measured runs of other cells where there are some."""
    own_log_halfwidth: float
    """Of the interval that the predictions alone give."""
    error: float
    inside: bool
    derived: bool
    suspect: str
    """Why it is listed apart; empty where it is not."""
    components: tuple[tuple[str, float], ...]
    """(component, seconds) of the predicted step."""
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    """What was assumed of the run."""
    warnings: tuple[str, ...]
    """What the estimate warns of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRows:
    """Rows for which there is no prediction, by reason."""

    reason: str
    data_set: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyBench:
    """Every table of `python -m evaluation accuracy`; errors are fractions, times seconds."""

    data_sets: tuple[DataSetErrors, ...]
    rows: tuple[PredictedRow, ...]
    calibrated: tuple[CalibratedOn, ...]
    """What factors from eight rows do to the rest of a data set."""
    tails: tuple[str, ...]
    """Slow runs of clusters that the intervals leave out, in words."""
    unit: tuple[UnitErrors, ...]
    """Of layers, operators and collectives that the fit did not see."""
    skipped: tuple[SkippedRows, ...]
    faults: tuple[str, ...]
    """Cells and files that could not be read."""
    notes: tuple[str, ...]
    """What of the unit data was not used, and what was assumed of runs."""
    missing: tuple[str, ...] = ()
    """Tables that are left out, and why."""
    readings: tuple[ReadingErrors, ...] = ()
    """The same runs under other readings of their clusters, where they were asked for."""


def accuracy(fit: Path | None, judge: Path | None, *, readings: bool = False) -> AccuracyBench:
    """Fitted on the unit data of one folder, judged on the runs of another, or of the same.

    None: no such folder, so nothing is fitted, or nothing judged. `readings`: the runs are also
    predicted under other readings of their clusters, which takes as long again for each.
    """
    base = fitted(fit)
    if judge is None:
        return AccuracyBench(
            data_sets=(),
            rows=(),
            calibrated=(),
            tails=(),
            unit=(),
            skipped=(),
            faults=(),
            notes=(),
            missing=(_NO_FOLDER,),
        )
    runs = read_runs(judge)
    unit = _unit(base, fit, judge)
    folders = tuple(dict.fromkeys(folder for folder in (judge, fit) if folder is not None))
    done, left = predict_rows(runs.rows, folders, base.predictor)
    known = done
    if not _same(fit, judge):
        # Of another folder none of its own runs says how wide its intervals are.
        known = () if fit is None else predict_rows(read_runs(fit).rows, (fit,), base.predictor)[0]
    intervals = run_intervals(done, known)
    return AccuracyBench(
        data_sets=_data_sets(done, intervals, left, base),
        rows=tuple(_row(*each) for each in zip(done, intervals, strict=True)),
        calibrated=eight_rows(done, base.predictor),
        tails=tails_of(known),
        unit=unit.rows,
        skipped=_skipped(left),
        faults=tuple(str(fault) for fault in runs.faults),
        notes=(*base.notes, *unit.notes),
        missing=(*(() if runs.rows else (_NO_RUNS,)), *(() if readings else (_NO_READINGS,))),
        readings=other_readings(done, base.predictor) if readings else (),
    )


def _same(fit: Path | None, judge: Path) -> bool:
    return fit is not None and judge.resolve() == fit.resolve()


def _unit(base: Fitted, fit: Path | None, judge: Path) -> UnitJudgement:
    """The fitted folder's own unit data left out in turn; another one's as they are."""
    if _same(fit, judge):
        return left_out(base.populations, base.predictor)
    read = read_judged_unit(judge)
    found = other_folder(read.populations, base.predictor)
    return UnitJudgement(rows=found.rows, notes=(*read.notes, *found.notes))


_NO_READINGS = "other readings of clusters: give --readings, which predicts every run again"
_NO_RUNS = "steps: the judged folder has no row of runs (runs/*.csv with a column step_time_s)"
_NO_FOLDER = (
    "every table: no folder of measured runs was given and the usual one is not there; give "
    "--reference DIR, or --fit DIR and --judge DIR"
)


def _data_sets(
    done: Sequence[PredictedRun],
    intervals: Sequence[RunInterval],
    left: Sequence[NotPredicted],
    base: Fitted,
) -> tuple[DataSetErrors, ...]:
    found = []
    for name in dict.fromkeys(each.row.data_set for each in done):
        pairs = [
            (run, interval)
            for run, interval in zip(done, intervals, strict=True)
            if run.row.data_set == name
        ]
        every = [run.judged(interval.log_halfwidth) for run, interval in pairs]
        alone = errors_of([run.judged(interval.own) for run, interval in pairs])
        errors = errors_of(every)
        if errors is None or alone is None:
            continue
        clean = [each for each in every if not each.suspect]
        runs = [run for run, _ in pairs]
        found.append(
            DataSetErrors(
                data_set=name,
                rows=len(every),
                fitted_on=_fitted_on(runs, base),
                mape=errors.mape,
                all_rows=errors,
                without_suspect=errors_of(clean) if len(clean) < len(every) else None,
                suspect_rows=len(every) - len(clean),
                not_predicted=sum(each.row.data_set == name for each in left),
                intervals_from="; ".join(dict.fromkeys(each.stands_on for _, each in pairs)),
                alone=IntervalFigures(
                    inside=alone.inside,
                    median_width=alone.median_width,
                    interval_score=alone.interval_score,
                ),
                peers=peers_of([run.row for run in runs]),
            )
        )
    return tuple(found)


def _fitted_on(runs: Sequence[PredictedRun], base: Fitted) -> str:
    """What is known of every device kind of these runs."""
    asked = [
        (island.device, run.run.planned.job.precision)
        for run in runs
        for island in run.run.cluster.islands
    ]
    kinds = {(device.kind, precision): device for device, precision in asked}
    words = [base.what(kind, precision.value) for kind, precision in kinds]
    lent = (base.lent(device, precision) for (_, precision), device in kinds.items())
    words += dict.fromkeys(filter(None, lent))
    return "; ".join(words)


def _row(run: PredictedRun, interval: RunInterval) -> PredictedRow:
    seen, row = run.judged(interval.log_halfwidth), run.row
    return PredictedRow(
        data_set=row.data_set,
        place=row.place,
        layout=row.layout,
        measured_seconds=run.measured_seconds,
        predicted_seconds=run.estimate.step_seconds,
        lower_seconds=seen.lower,
        upper_seconds=seen.upper,
        own_log_halfwidth=interval.own,
        error=seen.error,
        inside=seen.inside,
        derived=row.derived,
        suspect=row.suspect,
        components=tuple((each.component.value, each.seconds) for each in run.estimate.components),
        sources=run.estimate.sources,
        notes=run.run.notes,
        warnings=run.estimate.warnings,
    )


def _skipped(left: Sequence[NotPredicted]) -> tuple[SkippedRows, ...]:
    groups = dict.fromkeys((each.row.data_set, each.reason) for each in left)
    return tuple(
        SkippedRows(
            reason=reason,
            data_set=name,
            places=tuple(
                each.row.place
                for each in left
                if each.row.data_set == name and each.reason == reason
            ),
        )
        for name, reason in groups
    )
