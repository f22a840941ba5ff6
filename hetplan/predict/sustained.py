"""What part of its peak do a kind's matrix products keep up, at best and where samples say nothing?

`configs/sustained.yaml` has shares and sources. A kind is meant by the beginning of its
name. What has no best share of its own takes that of every measured kind, as a bound: it may be as
good as the best that was measured. What has no typical share takes that of most kinds
(`hetplan.predict.datasheet.MATRIX_EFFICIENCY`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from hetplan.cluster.devices import DeviceKind
from hetplan.files.quantities import FileForm, Name
from hetplan.files.reading import decode, read_document
from hetplan.files.shipped import shipped_folder

SCHEMA = "hetplan.sustained/2"
_LIKE = {"float16": "bfloat16"}
"""Formats with one rate on every kind that has both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestShare(FileForm):
    """Best sustained share of the dense peak."""

    kinds: list[Name]
    """Beginnings of kinds' names; `all`: every kind."""
    format: Name
    share: Annotated[float, Field(gt=0, le=1)]
    measured: Literal["sustained", "burst", "class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalShare(FileForm):
    """Share of the dense peak that large products of 16 bit sustain."""

    kinds: list[Name]
    """Beginnings of kinds' names."""
    share: Annotated[float, Field(gt=0, le=1)]
    log_halfwidth: Annotated[float, Field(gt=0)]
    """Judged, not fitted: wider where the figure is of a best shape, another board or a class."""
    source: str
    attention: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same of causal attention; None: in proportion to the products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedTable(FileForm):
    """The file."""

    step_share: Annotated[float, Field(gt=0, le=1)]
    """Best rate of a whole step over that of bare products in a burst."""
    best: list[BestShare]
    typical: list[TypicalShare]


@lru_cache(maxsize=1)
def sustained_table() -> SustainedTable:
    """The shipped table."""
    document = read_document(shipped_folder("configs") / "sustained.yaml")
    return decode(document, SustainedTable, schema=SCHEMA)


@lru_cache(maxsize=1024)
def typical_share(kind: str) -> TypicalShare | None:
    """The first line that has a beginning of the kind's name; None: as most kinds."""
    for line in sustained_table().typical:
        if kind.startswith(tuple(line.kinds)):
            return line
    return None


def sustained_rate(device: DeviceKind, precision: str) -> float | None:
    """Operations per second that nobody's steps exceeded; None where no peak is known.

    float32 may have run as TF32.
    """
    peaks = dict(device.peak_flops_per_second)
    peak = peaks.get(precision, 0.0)
    if precision == "float32":
        return max(peak, peaks.get("tf32", 0.0)) or None
    wanted = _LIKE.get(precision, precision)
    fitting = [each for each in sustained_table().best if each.format == wanted]
    own = [each for each in fitting if any(map(device.kind.startswith, each.kinds))]
    found = own or [each for each in fitting if "all" in each.kinds]
    if not found or not peak:
        return peak or None
    part = sustained_table().step_share
    return peak * max(
        each.share * (1.0 if each.measured == "sustained" else part) for each in found
    )


def typical_halfwidth(kind: str) -> float:
    """Log half-width of a kind's typical share; 0: as most kinds."""
    line = typical_share(kind)
    return line.log_halfwidth if line is not None else 0.0
