"""Text of a tool to numbered lines and to numbers, without surprises.

A file may begin with a byte order mark and end its lines as Windows does; launchers put a rank or
a host before each line, logs a time. Numbers are ASCII and finite; a whole number has at most 18
digits, which is more than any count or size that a tool prints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.errors import Fault, InputError

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.([0-9]{0,40}))?(?:[eE]([+-]?[0-9]{1,4}))?", re.ASCII)
_LABEL = re.compile(
    r"\s{0,8}\[\d{1,9},\d{1,9}\]<std\w{1,6}>:?"  # Open MPI --tag-output
    r"|\s{0,8}\d{1,6}:(?!\d)"  # srun --label
    r"|\s{0,8}\[\d{1,6}\](?= )"  # MPICH -prepend-rank
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?(?= )"  # kubectl logs
    r"|(?!rccl-tests:)[A-Za-z][\w.-]{0,60}:(?= )",  # pdsh, clush
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of an input."""

    number: int
    """From 1."""
    text: str
    """Without its end."""


def text_lines(text: str) -> list[Line]:
    """Every line, also the empty ones."""
    parts = text.removeprefix("\ufeff").split("\n")
    return [Line(number=at, text=part.rstrip("\r")) for at, part in enumerate(parts, start=1)]


def without_rank_label(text: str) -> str:
    """The line as its process wrote it: without what a launcher and a log put before it."""
    for _ in range(2):
        found = _LABEL.match(text)
        if found is None:
            break
        text = text[found.end() :]
    return text


def fault_at(file: str, line: int, message: str, field: str = "") -> InputError:
    """The error that something on this line is wrong."""
    return InputError(Fault(file=file, line=line, field=field, message=message))


def refuse_all(faults: Sequence[Fault], most: int = 30) -> None:
    """Raise one InputError with the faults, where there are any: each once, the first of many.

    A wrong kind of file has thousands of faults, and they all say the same.
    """
    unique = list(dict.fromkeys(faults))
    if not unique:
        return
    if len(unique) > most:
        rest = f"{len(unique) - most} more faults of the same file are not shown"
        unique = [*unique[:most], Fault(file=unique[0].file, message=rest)]
    raise InputError(*unique)


def shown(text: str) -> str:
    """What stands in a file, short enough for a message and without control characters."""
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def whole_number(text: str) -> int | None:
    """The whole number; None where it is none."""
    return int(text) if _WHOLE.fullmatch(text) else None


def finite_number(text: str) -> float | None:
    """The finite number; None where it is none."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def rounding_of(text: str) -> float:
    """The step to which a printed number was rounded: 0.01 for `12.34`, 10 for `1.2e+02`.

    0 for what is no number.
    """
    found = _NUMBER.fullmatch(text)
    if found is None:
        return 0.0
    exponent = int(found.group(2) or 0) - len(found.group(1) or "")
    return float(10.0**exponent) if -300 < exponent < 300 else 0.0
