"""Where things stand in a cluster file, for the rules that read its raw data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hetplan.errors import Fault, InputError
from hetplan.units import Dimension, parse_quantity

if TYPE_CHECKING:
    # Values of a cluster use `unknown`, and need no reader of files.
    from hetplan.cluster.devices import DeviceKind
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


_STEPS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def field_steps(field: str) -> list[str | int]:
    """List positions and keys of a field's text, as in kinds[0].image."""
    return [int(number) if number else word for number, word in _STEPS.findall(field)]


def placed(document: Document, path: Path, fault: Fault) -> Fault:
    """The fault of a value that is written at this path, at its place in the file."""
    return document.fault((*path, *field_steps(fault.field)), fault.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """What the rules ask of a device kind."""

    vendor: str
    memory_bytes: float | None
    """None where neither the file nor the catalogue says it."""
    max_power_watts: float
    """Limit of the board; 0 where nobody says it."""


def kind_figures(document: Document, catalogue: Mapping[str, DeviceKind]) -> dict[str, KindFigures]:
    """Every device kind that islands may name: the catalogue's, and the file's own over them."""
    kinds = {
        name: KindFigures(
            vendor=kind.vendor,
            memory_bytes=kind.memory_bytes or None,
            max_power_watts=kind.max_power_watts,
        )
        for name, kind in catalogue.items()
    }
    for at in document.entries(("devices",)):
        own = document.word(("devices", at, "kind"))
        if own is not None:
            kinds[own] = KindFigures(
                vendor=document.word(("devices", at, "vendor")) or "",
                memory_bytes=quantity(document, ("devices", at, "memory"), Dimension.MEMORY),
                max_power_watts=quantity(document, ("devices", at, "max_power"), Dimension.POWER)
                or 0.0,
            )
    return kinds


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
