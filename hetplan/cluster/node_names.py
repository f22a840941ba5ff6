"""How nodes are named: a word, or a range such as `node[001-016,020]` as launchers write it.

One pair of brackets per entry; the numbers of a range are as wide as its first one is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hetplan.errors import InputError

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ENTRY = re.compile(
    r"(?P<before>[A-Za-z0-9][A-Za-z0-9._-]*)?"
    r"(?:\[(?P<ranges>[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\](?P<after>[A-Za-z0-9._-]*))?",
    re.ASCII,
)
_MAX_DIGITS = 9

NODE_NAMES_PATTERN = (
    rf"^(?:{_WORD}|(?:{_WORD})?\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\][A-Za-z0-9._-]*)$"
)
"""Regular expression of one entry, for JSON Schema."""


def _ranges(entry: str) -> tuple[str, list[tuple[str, int, int]], str]:
    """(text before, (first number as written, first, last) of every range, text after)."""
    found = _ENTRY.fullmatch(entry)
    if not entry or found is None:
        raise InputError(
            f"found the text {entry[:60]!a}; write a name or a range, such as node[001-016]"
        )
    ranges = []
    for part in (found["ranges"] or "").split(","):
        first, _, last = part.partition("-")
        if len(first) > _MAX_DIGITS or len(last) > _MAX_DIGITS:
            raise InputError(f"{entry[:60]!a} has a number of more than {_MAX_DIGITS} digits")
        if part:
            low, high = int(first), int(last or first)
            if high < low:
                raise InputError(f"{entry[:60]!a}: the range {part} ends before it begins")
            ranges.append((first, low, high))
    return found["before"] or "", ranges, found["after"] or ""


def count_names(entry: str) -> int:
    """Nodes that an entry stands for; an InputError where it is neither a name nor a range."""
    _, ranges, _ = _ranges(entry)
    return sum(high - low + 1 for _, low, high in ranges) if ranges else 1


def expand_names(entries: Sequence[str]) -> Iterator[str]:
    """Every name, in order; an InputError where an entry is neither a name nor a range."""
    for entry in entries:
        before, ranges, after = _ranges(entry)
        if not ranges:
            yield before
        for first, low, high in ranges:
            for number in range(low, high + 1):
                yield f"{before}{number:0{len(first)}d}{after}"
