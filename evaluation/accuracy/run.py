"""Predicted against published measurements: everything of `python -m evaluation accuracy`.

A predictor is fitted on one folder's unit measurements (layers, operators, collectives; never its
runs), and judged on the runs of another, or of the same. Both folders have the form of the folder
of reference data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas

from evaluation.accuracy.calibration import (
    NotPredicted,
    PredictedRun,
    RunInterval,
    own_frame,
    predict_rows,
    run_intervals,
    tails_of,
)
from evaluation.accuracy.left_out import (
    ALL_OPERATORS,
    COLLECTIVES,
    UnitData,
    UnitJudge,
    left_out,
    other_folder,
    read_unit,
)
from evaluation.accuracy.rows import RunRow, read_runs
from evaluation.accuracy.scores import band, errors_of, judged, peers_of
from evaluation.output import WORDS, Answer, Section
from hetplan.errors import InputError
from hetplan.predict.fit import FittedPredictor, fit_populations, with_shipped

_NO_RUNS = "steps: the judged folder has no row of runs (runs/*.csv with a column step_time_s)"
_NO_FOLDER = (
    "every table: no folder of measured runs was given and the usual one is not there; give "
    "--reference DIR, or --fit DIR and --judge DIR"
)
_MAX_PLACES = 4
"""Rows that a line names; more are counted."""
_ERRORS = {
    "rows": ("rows", "{:d}"),
    "MAPE": ("mape", "{:.2%}"),
    "median": ("median", "{:.2%}"),
    "bias": ("bias", "{:+.2%}"),
    "worst": ("worst", "{:+.1%}"),
}
"""Columns of `errors_of` that every table has."""


def accuracy(fit: Path | None, judge: Path | None) -> Answer:
    """Fitted on the unit data of one folder, judged on the runs of another, or of the same.

    None: no such folder, so nothing is fitted, or nothing judged.
    """
    if judge is None:
        return Answer(lines=(f"left out: {_NO_FOLDER}",), values={"missing": [_NO_FOLDER]})
    unit = UnitData() if fit is None else read_unit(fit)
    predictor = with_shipped(fit_populations(unit.populations))
    same = fit is not None and judge.resolve() == fit.resolve()
    (runs, faults), of_units = (
        read_runs(judge),
        _judged_units(unit, predictor, None if same else judge),
    )
    folders = tuple(dict.fromkeys(folder for folder in (judge, fit) if folder is not None))
    done, left = predict_rows(runs, folders, predictor)
    known = done
    if not same:
        # Of another folder none of its own runs says how wide its intervals are.
        known = () if fit is None else predict_rows(read_runs(fit)[0], (fit,), predictor)[0]
    rows = run_frame(done, run_intervals(done, known))
    rows["default_error"] = _default_errors(rows, runs, folders)
    values = {
        "skipped": _skipped(left),
        "tails": tails_of(known),
        "faults": [str(fault) for fault in faults],
        "notes": [*unit.notes, *of_units.notes],
        "missing": [] if runs else [_NO_RUNS],
    }
    return Answer(
        sections=(
            *_run_sections(done, rows, left),
            *_unit_sections(of_units.errors()),
        ),
        lines=tuple(_lines(values)),
        values=values,
    )


def _judged_units(unit: UnitData, predictor: FittedPredictor, judge: Path | None) -> UnitJudge:
    """The fitted folder's own unit data left out in turn; those of another folder as they are.

    Unit data of another folder that cannot be read do not end the judging of its runs.
    """
    if judge is None:
        return left_out(unit.populations, predictor)
    try:
        read = read_unit(judge)
    except InputError as error:
        read = UnitData(notes=(f"unit data of the judged folder are not read: {error}",))
    found = other_folder(read.populations, predictor)
    found.notes = {**dict.fromkeys(read.notes), **found.notes}
    return found


def _default_errors(
    rows: pandas.DataFrame, runs: Sequence[RunRow], folders: Sequence[Path]
) -> list[float | None]:
    """Errors of the same rows where nobody measured anything himself."""
    done, _ = predict_rows(runs, folders, with_shipped(FittedPredictor.datasheet_only()))
    frame = own_frame(done)
    if frame.empty:
        return [None] * len(rows)
    errors = frame["predicted_seconds"] / frame["measured_seconds"] - 1.0
    found = dict(zip((run.row.place for run in done), errors, strict=True))
    return [found.get(place) for place in rows.get("place", ())]


def run_frame(runs: Sequence[PredictedRun], intervals: Sequence[RunInterval]) -> pandas.DataFrame:
    """A row per predicted run.

    `memory_error`: predicted over measured peak memory, less 1. `log_halfwidth` is that of the 90 %
    interval by measured runs of other cells where there are some, `own_log_halfwidth` by the
    predictions alone. `suspect` says why a row is listed apart.
    """
    frame = own_frame(runs)
    frame["own_log_halfwidth"] = frame.get("log_halfwidth")
    frame["log_halfwidth"] = [each.log_halfwidth for each in intervals]
    frame["intervals_from"] = [each.stands_on for each in intervals]
    for name in ("data_set", "place", "layout", "derived", "suspect"):
        frame[name] = [getattr(run.row, name) for run in runs]
    estimates = [run.estimate for run in runs]
    frame["least_seconds"] = [each.least_seconds for each in estimates]
    frame["mfu"] = [each.mfu for each in estimates]
    frame["memory_error"] = [run.memory_error for run in runs]
    parts = [[(one.component.value, one.seconds) for one in each.components] for each in estimates]
    frame["components"] = pandas.Series(parts, index=frame.index, dtype=object)
    frame["sources"] = [each.sources for each in estimates]
    frame["notes"] = [run.notes for run in runs]
    frame["warnings"] = [each.warnings for each in estimates]
    return judged(frame) if len(frame) else frame


def _run_sections(
    done: Sequence[PredictedRun],
    rows: pandas.DataFrame,
    left: Sequence[NotPredicted],
) -> Iterator[Section]:
    if rows.empty:
        return
    sets = []
    for name, group in rows.groupby("data_set", sort=False):
        mine = [done[at] for at in group.index]
        alone = errors_of(group.assign(log_halfwidth=group["own_log_halfwidth"]))
        suspect = group["suspect"] != ""
        sets.append(
            {
                "data_set": name,
                **errors_of(group),
                "default_mape": group["default_error"].abs().mean(),
                "suspect_rows": int(suspect.sum()),
                "not_predicted": sum(each.row.data_set == name for each in left),
                "intervals_from": "; ".join(group["intervals_from"].unique()),
                **{f"{key}_alone": alone[key] for key in ("inside", "median_width")},
                "interval_score_alone": alone["interval_score"],
                "memory_mape": group["memory_error"].abs().mean(),
                "peers": peers_of([run.row for run in mine]),
            }
        )
        if suspect.any() and not suspect.all():
            label = f"  without its {suspect.sum()} suspect rows"
            sets.append({"data_set": label, "of": name, **errors_of(group[~suspect])})
    yield _data_set_section(pandas.DataFrame(sets))
    yield Section(name="rows", frame=rows)
    for title, some in (
        ("Rows that are marked suspect, with their residual", rows["suspect"] != ""),
        ("Other rows outside their 90 % interval", (rows["suspect"] == "") & ~rows["inside"]),
    ):
        yield _row_section(title, rows[some])


def _skipped(left: Sequence[NotPredicted]) -> list[dict[str, Any]]:
    """Rows for which there is no prediction, by reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in left:
        groups.setdefault((each.row.data_set, each.reason), []).append(each.row.place)
    return [
        {"data_set": name, "reason": reason, "places": places}
        for (name, reason), places in groups.items()
    ]


def _data_set_section(sets: pandas.DataFrame) -> Section:
    sets["inside_part"] = sets["inside"] / sets["rows"]
    sets["band"] = sets.apply(band, axis=1)
    sets["inside_alone_part"] = sets["inside_alone"] / sets["rows"]
    return Section(
        name="data_sets",
        title="Step times of measured runs, none of which was fitted",
        frame=sets,
        columns={
            "data set": ("data_set", WORDS),
            **_ERRORS,
            "default kinds": ("default_mape", "{:.1%}"),
            "Spearman": ("spearman", "{:.3f}"),
            "inside 90 %": ("inside_part", "{:.0%}"),
            "true if": ("band", "{:>}"),
            "width": ("median_width", "{:.3f}"),
            "score": ("interval_score", "{:.3f}"),
            "inside alone": ("inside_alone_part", "{:.0%}"),
            "width alone": ("median_width_alone", "{:.3f}"),
            "memory": ("memory_mape", "{:.1%}"),
            "peers": ("peers", WORDS),
        },
    )


def _row_section(title: str, rows: pandas.DataFrame) -> Section:
    seconds = "{:.3f} s"
    return Section(
        title=title,
        frame=rows,
        columns={
            "data set": ("data_set", WORDS),
            "row": ("place", WORDS),
            "run": ("layout", WORDS),
            "measured": ("measured_seconds", seconds),
            "predicted": ("predicted_seconds", seconds),
            "error": ("error", "{:+.1%}"),
            "from": ("lower_seconds", seconds),
            "to": ("upper_seconds", seconds),
        },
    )


def _unit_sections(found: pandas.DataFrame) -> Iterator[Section]:
    """Whole layers, all operators and collectives; single classes of operators in JSON alone."""
    yield Section(name="unit", frame=found)
    if found.empty:
        return
    whole = found["what"].isin((ALL_OPERATORS, COLLECTIVES)) | found["what"].str.endswith(" layers")
    shown = found[whole].copy()
    shown["inside_part"] = shown["inside"] / shown["rows"]
    shown["band"] = shown.apply(band, axis=1)
    yield Section(
        title="Layers, operators and collectives that the fit did not see",
        frame=shown,
        columns={
            "what": ("what", WORDS),
            "device or link": ("device", WORDS),
            "precision": ("precision", WORDS),
            "left out": ("left_out", WORDS),
            **_ERRORS,
            "inside 90 %": ("inside_part", "{:.0%}"),
            "true if": ("band", "{:>}"),
            "width": ("median_width", "{:.2f}"),
        },
    )


def _lines(values: dict[str, Any]) -> Iterator[str]:
    """What was left out and why, one line each."""
    for line in values["missing"]:
        yield f"left out: {line}"
    yield from values["tails"]
    for group in values["skipped"]:
        places = group["places"]
        more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
        yield (
            f"not predicted: {len(places)} row{'s' if len(places) != 1 else ''} of "
            f"{group['data_set']}: {group['reason']} ({', '.join(places[:_MAX_PLACES])}{more})"
        )
    for fault in values["faults"]:
        yield f"wrong cell: {fault}"
    for note in values["notes"]:
        yield f"note: {note}"
