"""CPU time and gap of the search against the number of devices, as one drawing.

Above the CPU seconds, below the gap; one line per target, filled points of dense models, hollow
ones of mixtures of experts. The same figures give the same file, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetplan.benchmarks.drawing import save_drawing
from hetplan.benchmarks.search.scaling import ScalingRow
from hetplan.errors import InputError


def draw(rows: Sequence[ScalingRow], path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib, rows or a folder to write to."""
    planned = [row for row in rows if row.gap is not None]
    if not planned:
        raise InputError(f"no instance was planned, so there is nothing to draw into {path}")

    def fill(figure: Any) -> None:
        above, below = figure.subplots(2, sharex=True)
        _fill(above, planned, [row.seconds for row in planned], "CPU time (s)")
        # A gap of 0 has no place on a logarithmic axis.
        _fill(below, planned, [100 * max(row.gap or 0.0, 1e-5) for row in planned], "gap (%)")
        below.set_xlabel("devices")
        above.legend(loc="upper left", fontsize=8, frameon=False)

    save_drawing(path, fill)


def _fill(axes: Any, rows: Sequence[ScalingRow], values: Sequence[float], label: str) -> None:
    for at, target in enumerate(dict.fromkeys(row.target for row in rows)):
        for model in ("dense", "moe"):
            points = sorted(
                (row.devices, value)
                for row, value in zip(rows, values, strict=True)
                if (row.target, row.model) == (target, model)
            )
            if points:
                axes.plot(
                    [devices for devices, _ in points],
                    [value for _, value in points],
                    color=f"C{at}",
                    marker="o",
                    markersize=5,
                    linestyle="-" if model == "dense" else ":",
                    markerfacecolor=f"C{at}" if model == "dense" else "none",
                    label=target if model == "dense" else f"{target}, experts",
                )
    axes.set(xscale="log", yscale="log", ylabel=label)
