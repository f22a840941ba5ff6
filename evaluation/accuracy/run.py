"""Predicted against published measurements: everything of `python -m evaluation accuracy`.

A predictor is fitted on one folder's unit measurements (layers, operators, collectives; never its
runs), and judged on the runs of another, or of the same. Both folders have the form of the folder
of reference data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.accuracy.calibration import (
    CalibratedOn,
    NotPredicted,
    PredictedRun,
    ReadingErrors,
    RunInterval,
    eight_rows,
    other_readings,
    predict_rows,
    run_intervals,
    tails_of,
)
from evaluation.accuracy.left_out import (
    ALL_OPERATORS,
    COLLECTIVES,
    UnitErrors,
    UnitReport,
    left_out,
    other_folder,
)
from evaluation.accuracy.rows import read_runs
from evaluation.accuracy.scores import Errors, PeerFigure, errors_of, peers_of
from evaluation.accuracy.unit_data import read_judged_unit
from evaluation.output import save_drawing, table_of
from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.predict.fit import FittedPredictor, fit_populations
from hetplan.profiling.samples import LayerSample, OperatorSample, ProfileSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A predictor and what it knows."""

    predictor: FittedPredictor
    populations: tuple[ProfileSet, ...]
    notes: tuple[str, ...]
    """Measurements that were not used, by reason."""

    def lent(self, device: DeviceKind, precision: Precision) -> str:
        """Whose laws of operators stand in for a kind that has no sample of its own; else empty."""
        key = device.kind, precision.value
        if any(_count(one.layers, *key) or _count(one.operators, *key) for one in self.populations):
            return ""
        found = self.predictor.lent(device, precision)
        return "" if found is None else found.lenders

    def what(self, device: str, precision: str) -> str:
        """In a few words, what is known of a device kind in one number format."""
        layers = operators = links = 0
        for each in self.populations:
            layers += _count(each.layers, device, precision)
            operators += _count(each.operators, device, precision)
            links += sum(sample.link.startswith(f"{device} ") for sample in each.links)
        counted = ((operators, "operators"), (layers, "layers"), (links, "collectives"))
        words = ", ".join(f"{count} {name}" for count, name in counted if count)
        return f"{device} {precision}: {words or 'nothing'}"


def _count(
    samples: Sequence[LayerSample] | Sequence[OperatorSample], device: str, precision: str
) -> int:
    return sum(each.device == device and each.precision == precision for each in samples)


def fit_folder(folder: Path | None) -> Fitted:
    """Fitted on `unit/` and `sailor/` of a folder; on nothing where there is none of them."""
    if folder is None:
        nothing = FittedPredictor.datasheet_only()
        return Fitted(predictor=nothing, populations=(), notes=())
    from evaluation.accuracy.unit_data import read_unit

    unit = read_unit(folder)
    return Fitted(
        predictor=fit_populations(unit.populations),
        populations=unit.populations,
        notes=unit.notes,
    )


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

    None: no such folder, so nothing is fit_folder, or nothing judged. `readings`: the runs are also
    predicted under other readings of their clusters, which takes as long again for each.
    """
    base = fit_folder(fit)
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
        unit=tuple(unit.rows),
        skipped=_skipped(left),
        faults=tuple(str(fault) for fault in runs.faults),
        notes=(*base.notes, *unit.notes),
        missing=(*(() if runs.rows else (_NO_RUNS,)), *(() if readings else (_NO_READINGS,))),
        readings=other_readings(done, base.predictor) if readings else (),
    )


def _same(fit: Path | None, judge: Path) -> bool:
    return fit is not None and judge.resolve() == fit.resolve()


def _unit(base: Fitted, fit: Path | None, judge: Path) -> UnitReport:
    """The fit_folder folder's own unit data left out in turn; another one's as they are."""
    if _same(fit, judge):
        return left_out(base.populations, base.predictor)
    read = read_judged_unit(judge)
    report = other_folder(read.populations, base.predictor)
    report.notes = {**dict.fromkeys(read.notes), **report.notes}
    return report


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


_MAX_PLACES = 4
"""Rows that a line names; more are counted."""


def accuracy_tables(bench: AccuracyBench) -> Iterator[Table]:
    """Those that have rows, the whole of the answer first."""
    if bench.data_sets:
        yield table_of(
            "Step times of measured runs, none of which was fitted",
            ("data set", "fitted on"),
            (
                "rows", "MAPE", "MAPE, derived times", "median", "bias", "worst", "Spearman",
                "inside 90 %", "true if", "width", "score", "inside alone", "width alone",
            ),
            (row for each in bench.data_sets for row in _data_set_cells(each)),
            names_after=("peers",),
        )  # fmt: skip
    if bench.readings:
        yield table_of(
            "The same runs under other readings of their clusters",
            ("reading", "data set"),
            ("rows", "changed", "MAPE", "published", "median", "published", "bias", "published"),
            (
                (
                    each.reading, each.data_set, each.errors.rows, each.changed_rows,
                    f"{each.errors.mape:.2%}", f"{each.as_published.mape:.2%}",
                    f"{each.errors.median:.2%}", f"{each.as_published.median:.2%}",
                    f"{each.errors.bias:+.2%}", f"{each.as_published.bias:+.2%}",
                )
                for each in bench.readings
            ),
        )  # fmt: skip
    if bench.calibrated:
        yield table_of(
            "Calibration on eight runs of a data set, judged on its other rows",
            ("data set", "factors"),
            ("rows", "MAPE before", "after", "median before", "after", "worst before", "after"),
            (
                (
                    each.data_set, "kept" if each.accepted else "refused", each.before.rows,
                    f"{each.before.mape:.2%}", f"{each.after.mape:.2%}",
                    f"{each.before.median:.2%}", f"{each.after.median:.2%}",
                    f"{each.before.worst:+.1%}", f"{each.after.worst:+.1%}",
                )
                for each in bench.calibrated
            ),
        )  # fmt: skip
    yield from _row_tables(bench)
    yield from _unit_tables(bench)


def _data_set_cells(each: DataSetErrors) -> Iterator[tuple[str, ...]]:
    derived = each.data_set.endswith(", derived")
    yield (
        each.data_set,
        each.fitted_on,
        *_figures(each.all_rows, derived=derived),
        f"{each.alone.inside / each.rows:.0%}",
        f"{each.alone.median_width:.3f}",
        "; ".join(map(_peer, each.peers)),
    )
    if each.without_suspect is not None:
        yield (
            f"  without its {each.suspect_rows} suspect rows",
            "",
            *_figures(each.without_suspect, derived=derived),
            "",
            "",
            "",
        )


def _figures(errors: Errors, *, derived: bool) -> tuple[str, ...]:
    mape = f"{errors.mape:.2%}"
    return (
        str(errors.rows),
        "" if derived else mape,
        mape if derived else "",
        f"{errors.median:.2%}",
        f"{errors.bias:+.2%}",
        f"{errors.worst:+.1%}",
        "" if errors.spearman is None else f"{errors.spearman:.3f}",
        f"{errors.coverage:.0%}",
        _band(errors),
        f"{errors.median_width:.3f}",
        f"{errors.interval_score:.3f}",
    )


def _peer(figure: PeerFigure) -> str:
    median = "" if figure.median is None else f" (median {figure.median:.1%})"
    note = f", {figure.note}" if figure.note else ""
    return f"{figure.tool} {figure.mape:.1%}{median}{note}"


def _row_tables(bench: AccuracyBench) -> Iterator[Table]:
    suspect = [row for row in bench.rows if row.suspect]
    missed = [row for row in bench.rows if not row.suspect and not row.inside]
    for title, rows in (
        ("Rows that are marked suspect, with their residual", suspect),
        ("Other rows outside their 90 % interval", missed),
    ):
        if rows:
            yield table_of(
                title,
                ("data set", "row", "run"),
                ("measured", "predicted", "error", "interval"),
                (_row_cells(row) for row in rows),
            )


def _row_cells(row: PredictedRow) -> tuple[str, ...]:
    return (
        row.data_set,
        row.place,
        row.layout,
        f"{row.measured_seconds:.3f} s",
        f"{row.predicted_seconds:.3f} s",
        f"{row.error:+.1%}",
        f"{row.lower_seconds:.3f} to {row.upper_seconds:.3f} s",
    )


def _unit_tables(bench: AccuracyBench) -> Iterator[Table]:
    if bench.unit:
        yield table_of(
            "Layers, operators and collectives that the fit did not see",
            ("what", "device or link", "precision", "left out"),
            ("rows", "MAPE", "median", "bias", "worst", "inside 90 %", "true if", "width"),
            (
                (
                    each.what, each.device, each.precision, each.left_out, each.errors.rows,
                    f"{each.errors.mape:.1%}", f"{each.errors.median:.1%}",
                    f"{each.errors.bias:+.1%}", f"{each.errors.worst:+.0%}",
                    f"{each.errors.coverage:.0%}", _band(each.errors),
                    f"{each.errors.median_width:.2f}",
                )
                for each in bench.unit
                if each.what in (ALL_OPERATORS, COLLECTIVES) or each.what.endswith(" layers")
            ),
        )  # fmt: skip


def _band(errors: Errors) -> str:
    return f"{errors.least_inside / errors.rows:.0%} to {errors.most_inside / errors.rows:.0%}"


def accuracy_lines(bench: AccuracyBench) -> Iterator[str]:
    """What was left out and why, one line each."""
    for line in bench.missing:
        yield f"left out: {line}"
    for each in bench.calibrated:
        for note in each.notes:
            yield f"calibration of {each.data_set}: {note}"
    yield from bench.tails
    for group in bench.skipped:
        places = ", ".join(group.places[:_MAX_PLACES])
        more = len(group.places) - _MAX_PLACES
        rows = f"{len(group.places)} row{'s' if len(group.places) != 1 else ''}"
        yield (
            f"not predicted: {rows} of {group.data_set}: {group.reason} "
            f"({places}{f' and {more} more' if more > 0 else ''})"
        )
    for fault in bench.faults:
        yield f"wrong cell: {fault}"
    for note in bench.notes:
        yield f"note: {note}"


_MARKERS = "os^DvP*<>ph"


def draw(bench: AccuracyBench, path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib, rows or a folder to write to."""
    if not bench.rows:
        raise InputError(f"nothing was predicted, so there is nothing to draw into {path}")
    save_drawing(path, lambda figure: _fill(figure.add_subplot(), bench))


def _fill(axes: Any, bench: AccuracyBench) -> None:
    times = [row.measured_seconds for row in bench.rows]
    times += [row.predicted_seconds for row in bench.rows]
    ends = [min(times) / 1.3, max(times) * 1.3]
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.9", lw=0
    )
    axes.plot(ends, ends, color="0.5", lw=0.8)
    for at, name in enumerate(dict.fromkeys(row.data_set for row in bench.rows)):
        rows = [row for row in bench.rows if row.data_set == name]
        colour, marker = f"C{at % 10}", _MARKERS[at % len(_MARKERS)]
        sound = [row for row in rows if not row.suspect]
        mean = sum(abs(row.error) for row in rows) / len(rows)
        _points(
            axes,
            sound,
            marker=marker,
            label=f"{name} ({len(rows)} rows, MAPE {mean:.1%})",
            edgecolors=colour,
            facecolors="none" if rows[0].derived else colour,
        )
        _points(axes, [row for row in rows if row.suspect], marker="x", color=colour)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured step (s)",
        ylabel="predicted step (s)",
    )
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _points(axes: Any, rows: list[PredictedRow], **style: Any) -> None:
    axes.scatter(
        [row.measured_seconds for row in rows],
        [row.predicted_seconds for row in rows],
        s=24,
        linewidths=0.9,
        **style,
    )
