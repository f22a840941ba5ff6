"""How busy was the machine meanwhile? Load average and stolen time, as Linux counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STEAL = 7
"""Column of /proc/stat after the name: time that other virtual machines had (proc(5))."""
_COLUMNS = 8
"""What of the cores' time is counted once; guests' time stands in `user` too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMark:
    """Counters at one moment, in the kernel's ticks."""

    all_ticks: int
    stolen_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Between two moments."""

    load_average: float
    """Of the last minute, at the second moment."""
    steal: float
    """Part of the cores' time."""


def load_now() -> LoadMark:
    """The counters now; zeros where there are none."""
    try:
        columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return LoadMark(all_ticks=0, stolen_ticks=0)
    numbers = [int(column) for column in columns[:_COLUMNS]]
    return LoadMark(all_ticks=sum(numbers), stolen_ticks=numbers[_STEAL])


def load_between(before: LoadMark, after: LoadMark) -> Load:
    """What the counters say of the time between."""
    ticks = after.all_ticks - before.all_ticks
    stolen = after.stolen_ticks - before.stolen_ticks
    return Load(load_average=os.getloadavg()[0], steal=stolen / ticks if ticks > 0 else 0.0)
