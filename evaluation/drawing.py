"""Drawings of the closed loop. Equal figures give equal SVG files, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetplan.errors import InputError

_INSTALL = "drawing needs matplotlib: pip install 'hetplan[plots]'"
_SETTINGS: Any = {
    # Names of shapes in an SVG are hashes of a salt that is random unless it is given.
    "svg.hashsalt": "hetplan",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}
_INCHES = (8.0, 7.0)


def check_drawable(path: Path) -> None:
    """An InputError without matplotlib, or where nothing can be drawn into the path."""
    if path.suffix.lower() != ".svg":
        raise InputError(f"{path} must end in .svg, which is what is drawn")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it, or name a file in another one")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(_INSTALL) from None


def save_drawing(path: Path, fill: Callable[[Any], None]) -> None:
    """Write what `fill` draws into the figure that it gets; InputError as `check_drawable`."""
    check_drawable(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=_INCHES, layout="constrained")
        fill(figure)
        # A date would make every drawing a new file.
        figure.savefig(path, format="svg", metadata={"Date": None})
