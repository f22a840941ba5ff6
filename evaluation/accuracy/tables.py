"""Tables, lines and drawing of `python -m evaluation accuracy`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.accuracy.left_out import ALL_OPERATORS, COLLECTIVES
from evaluation.accuracy.peers import PeerFigure
from evaluation.accuracy.run import AccuracyBench, DataSetErrors, PredictedRow
from evaluation.accuracy.scores import Errors
from evaluation.output import save_drawing, table_of
from hetplan.errors import InputError

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
            (row for each in bench.data_sets for row in _data_set(each)),
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


def _data_set(each: DataSetErrors) -> Iterator[tuple[str, ...]]:
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
                (_row(row) for row in rows),
            )


def _row(row: PredictedRow) -> tuple[str, ...]:
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
