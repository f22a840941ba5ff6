"""Where things stand in a cluster file, for the rules that read its raw data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hetplan.errors import InputError
from hetplan.units import Dimension, parse_quantity

if TYPE_CHECKING:
    # Values of a cluster use `unknown`, and need no reader of files.
    from hetplan.files.nodes import Path
    from hetplan.files.reading import Document

_MAX_NAMES = 10
_MAX_COMPARED = 2000  # comparing spellings takes long where both a name and its list are many


def island_paths(document: Document) -> Iterator[tuple[int, Path]]:
    """(position of the region, path) of every island, in file order."""
    for region in document.entries(("regions",)):
        for island in document.entries(("regions", region, "islands")):
            yield region, ("regions", region, "islands", island)


def quantity(document: Document, path: Path, dimension: Dimension) -> float | None:
    """The quantity at this path; None where there is none or it is wrong."""
    text = document.at(*path)
    if not isinstance(text, str):
        return None
    try:
        return parse_quantity(text, dimension)
    except InputError:
        return None  # reported where the field itself is read


def unknown(name: str, known: Collection[str], what: str) -> str:
    """What to say of a name that is not there."""
    near: list[str] = []
    if len(known) <= _MAX_COMPARED:
        near = get_close_matches(name[:100], sorted(known), n=3, cutoff=0.4)
    if near:
        hint = f"nearest: {', '.join(near)}"
    else:
        shown = sorted(known)[:_MAX_NAMES]
        more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
        hint = f"known: {', '.join(shown)}{more}" if known else "there is none in the file"
    return f"unknown {what} {name[:60]!a}; {hint}"
