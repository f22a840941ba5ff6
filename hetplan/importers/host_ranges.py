"""Names of hosts as a cluster file lists them: `node[001-016,020]` for runs of numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBERED = re.compile(r"(.*?)(\d{1,9})([^\d]*)", re.ASCII | re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_MAX_LENGTH = 180  # a cluster file takes entries of up to 200 characters


@dataclass(slots=True)
class _Run:
    """Numbers that follow each other, as wide as the first is written."""

    first: str
    low: int
    high: int

    def takes(self, digits: str) -> bool:
        """Whether these digits are the run's next number."""
        return digits == f"{self.high + 1:0{len(self.first)}d}"

    @property
    def text(self) -> str:
        last = f"{self.high:0{len(self.first)}d}"
        return self.first if self.low == self.high else f"{self.first}-{last}"


def listable(name: str) -> bool:
    """Whether a cluster file can name a node so (an IPv6 address it cannot)."""
    return len(name) <= _MAX_LENGTH and _WORD.fullmatch(name) is not None


def host_ranges(names: Sequence[str]) -> tuple[str, ...]:
    """Entries that stand for exactly these names in this order; every name is `listable`."""
    entries: list[str] = []
    place: tuple[str, str] | None = None
    runs: list[_Run] = []

    def close() -> None:
        if place is not None:
            before, after = place
            single = len(runs) == 1 and runs[0].low == runs[0].high
            inside = ",".join(run.text for run in runs)
            entries.append(f"{before}{inside if single else f'[{inside}]'}{after}")

    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            close()
            place, runs = None, []
            entries.append(name)
            continue
        before, digits, after = found.groups()
        size = sum(len(run.text) + 1 for run in runs) + len(name) + 2 * len(digits)
        if place != (before, after) or size > _MAX_LENGTH:
            close()
            place, runs = (before, after), []
        if runs and runs[-1].takes(digits):
            runs[-1].high += 1
        else:
            runs.append(_Run(first=digits, low=int(digits), high=int(digits)))
    close()
    return tuple(entries)
