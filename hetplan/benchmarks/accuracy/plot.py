"""Predicted against measured step times, as one drawing: where is hetplan right, and where not?

Both axes are logarithmic; on the line prediction and measurement agree, the grey band is 10 % to
either side. Published times are filled, derived ones (computed from a published rate) hollow, rows
that are marked suspect crosses. The same figures give the same file, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetplan.benchmarks.accuracy.accuracy import AccuracyBench, PredictedRow
from hetplan.benchmarks.drawing import save_drawing
from hetplan.errors import InputError

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
