"""Predicted against measured steps of the closed loop, as one drawing.

On the line prediction and measurement agree, the grey band is 3 % to either side, the goal of the
mean. Filled: without jitter, hollow: with it; the star is the plan that the search found. The same
figures give the same file, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetplan.benchmarks.closed_loop.pool import FORMS
from hetplan.benchmarks.closed_loop.values import ClosedLoop, LoopPass
from hetplan.benchmarks.drawing import save_drawing

_MARKERS = "osD^v"
_BAND = 0.03


def draw(found: ClosedLoop, path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib or a folder to write to."""
    save_drawing(path, lambda figure: _fill(figure.add_subplot(), found))


def _fill(axes: Any, found: ClosedLoop) -> None:
    trained = [row.trained for each in found.passes for row in each.rows]
    times = [each.measured_seconds for each in trained]
    times += [each.predicted_seconds for each in trained]
    ends = [min(times) / 1.1, max(times) * 1.1]
    low, high = ([(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="0.9", lw=0)
    axes.plot(ends, ends, color="0.5", lw=0.8)
    for each in found.passes:
        _pass(axes, each)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured step (s)",
        ylabel="predicted step (s)",
    )
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _pass(axes: Any, found: LoopPass) -> None:
    what = f"{found.jitter:.0%} jitter" if found.jitter else "no jitter"
    note = f"{what}: MAPE {found.totals.mape:.1%}, Spearman {found.totals.spearman:.3f}"
    axes.scatter([], [], s=0, label=note)
    for form in FORMS:
        rows = [row for row in found.rows if row.form == form]
        colour = f"C{FORMS.index(form)}"
        if rows:
            axes.scatter(
                [row.trained.measured_seconds for row in rows],
                [row.trained.predicted_seconds for row in rows],
                s=28,
                marker=_MARKERS[FORMS.index(form)],
                linewidths=0.9,
                edgecolors=colour,
                facecolors="none" if found.jitter else colour,
                label=f"{form} ({len(rows)})",
            )
    searched = [row.trained for row in found.rows if row.searched]
    axes.scatter(
        [each.measured_seconds for each in searched],
        [each.predicted_seconds for each in searched],
        s=160,
        marker="*",
        linewidths=0.9,
        edgecolors="black",
        facecolors="none",
    )
