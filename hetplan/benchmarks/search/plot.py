"""CPU time and gap of the search against the number of devices, as one drawing.

Above the CPU seconds, below the gap; one line per target, filled points of dense models, hollow
ones of mixtures of experts. The same figures give the same file, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetplan.benchmarks.search.scaling import ScalingRow
from hetplan.errors import InputError

_INSTALL = "drawing needs matplotlib: pip install 'hetplan[plots]'"
_SETTINGS: Any = {
    # Names of shapes in an SVG are hashes of a salt that is random unless it is given.
    "svg.hashsalt": "hetplan",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}


def draw(rows: Sequence[ScalingRow], path: Path) -> None:
    """Write the drawing as SVG; an InputError without matplotlib, rows or a folder to write to."""
    if path.suffix.lower() != ".svg":
        raise InputError(f"{path} must end in .svg, which is what is drawn")
    planned = [row for row in rows if row.gap is not None]
    if not planned:
        raise InputError(f"no instance was planned, so there is nothing to draw into {path}")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it, or name a file in another one")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(_INSTALL) from None
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(8.0, 7.0), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        _fill(above, planned, [row.seconds for row in planned], "CPU time (s)")
        # A gap of 0 has no place on a logarithmic axis.
        _fill(below, planned, [100 * max(row.gap or 0.0, 1e-5) for row in planned], "gap (%)")
        below.set_xlabel("devices")
        above.legend(loc="upper left", fontsize=8, frameon=False)
        # A date would make every drawing a new file.
        figure.savefig(path, format="svg", metadata={"Date": None})


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
