"""Predicted against measured step times, as one drawing: where is hetplan right, and where not?

Both axes are logarithmic; on the line prediction and measurement agree, the grey band is 10 % to
either side. Published times are filled, derived ones (computed from a published rate) hollow, rows
that are marked suspect crosses. The same figures give the same file, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetplan.benchmarks.accuracy.accuracy import AccuracyBench, PredictedRow
from hetplan.errors import InputError

_INSTALL = "drawing needs matplotlib: pip install 'hetplan[plots]'"
_MARKERS = "os^DvP*<>ph"
_SETTINGS: Any = {
    # Names of shapes in an SVG are hashes of a salt that is random unless it is given.
    "svg.hashsalt": "hetplan",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}


def draw(bench: AccuracyBench, path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib, rows or a folder to write to."""
    if path.suffix.lower() != ".svg":
        raise InputError(f"{path} must end in .svg, which is what is drawn")
    if not bench.rows:
        raise InputError(f"nothing was predicted, so there is nothing to draw into {path}")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(_INSTALL) from None
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(8.0, 7.0), layout="constrained")
        _fill(figure.add_subplot(), bench)
        # A date would make every drawing a new file.
        figure.savefig(path, format="svg", metadata={"Date": None})


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
