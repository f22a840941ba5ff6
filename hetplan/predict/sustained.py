"""Which share of its peak did anybody ever sustain on a device kind?

`configs/sustained.yaml` has shares, spreads and sources. A kind is meant by the beginning of its
name. What is not in the table takes the best share of every measured kind, as a bound: a kind
without a row of its own may be as good as the best that was measured.
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

SCHEMA = "hetplan.sustained/1"
_LIKE = {"float16": "bfloat16"}
"""Formats with one rate on every kind that has both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained(FileForm):
    """Best sustained share of the dense peak."""

    kinds: list[Name]
    """Beginnings of kinds' names; `all`: every kind."""
    format: Name
    share: Annotated[float, Field(gt=0, le=1)]
    spread: Annotated[float, Field(ge=0, le=1)]
    """How far points of one product scatter, as a part of the share."""
    measured: Literal["sustained", "burst", "class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table(FileForm):
    sustained: list[Sustained]


@lru_cache(maxsize=1)
def _table() -> tuple[Sustained, ...]:
    document = read_document(shipped_folder("configs") / "sustained.yaml")
    return tuple(decode(document, _Table, schema=SCHEMA).sustained)


def sustained_rate(device: DeviceKind, precision: str) -> float | None:
    """Operations per second that nobody exceeded for long; None where no peak is known.

    The spread is on top: a bound must hold for the best point. float32 may have run as TF32.
    """
    peaks = dict(device.peak_flops_per_second)
    peak = peaks.get(precision, 0.0)
    if precision == "float32":
        return max(peak, peaks.get("tf32", 0.0)) or None
    wanted = _LIKE.get(precision, precision)
    fitting = [each for each in _table() if each.format == wanted]
    own = [each for each in fitting if any(map(device.kind.startswith, each.kinds))]
    found = own or [each for each in fitting if "all" in each.kinds]
    if not found or not peak:
        return peak or None
    return peak * min(1.0, max(each.share * (1.0 + each.spread) for each in found))
