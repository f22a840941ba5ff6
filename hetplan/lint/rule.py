"""What a rule is, and how the rows that break it become sightings, one per file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Severity
from hetplan.lint.rows import Place

T = TypeVar("T")

MAX_LINES = 10
"""Lines that a finding names, as `Finding.lines` promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Rows of one file that break a rule."""

    file: str
    lines: tuple[int, ...]
    count: int
    found: str


Check: TypeAlias = Callable[[Evidence], Iterable[Sighting]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that is wrong in measurements more often than people think."""

    id: str
    severity: Severity
    title: str
    """What is found, in a few words."""
    explanation: str
    """Why it is wrong or suspicious, and what usually causes it."""
    advice: str
    """What to do."""
    check: Check


def sighting(places: Iterable[Place], found: str, *, count: int | None = None) -> Sighting:
    """Places of one file as one sighting; `count` where more values than places show it."""
    rows = list(places)
    lines = sorted({row.line for row in rows if row.line})
    return Sighting(
        file=rows[0].file,
        lines=tuple(lines[:MAX_LINES]),
        count=len(rows) if count is None else count,
        found=found,
    )


def per_file(
    rows: Sequence[T], place: Callable[[T], Place], found: Callable[[Sequence[T]], str]
) -> Iterator[Sighting]:
    """One sighting per file that has such rows; none where there are none."""
    for group in grouped(rows, lambda row: place(row).file).values():
        yield sighting((place(row) for row in group), found(group))


K = TypeVar("K")


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The rows by key, in the order in which the keys first occur."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def some(names: Iterable[str], most: int = 4) -> str:
    """The names, sorted, each once; only a few of them where there are many."""
    every = sorted(set(names))
    rest = len(every) - most
    return ", ".join(every[:most]) + (f" and {rest} more" if rest > 0 else "")
