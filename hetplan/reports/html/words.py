"""Numbers of the report in words: three digits, one unit, with their interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hetplan.units import (
    UNITS,
    Dimension,
    digits,
    format_brief,
    format_bytes,
    format_rate,
    format_seconds,
)

SPACE = "\u00a0"
"""Between a number and its unit: it breaks no line."""


def share_words(part: float | None) -> str:
    """`41.2 %`, or that it is not known."""
    return "not known" if part is None else f"{_three(100 * part)}{SPACE}%"


def change_words(part: float | None) -> str:
    """`+12.3 %`; below a tenth of a thousandth nothing changes."""
    if part is None:
        return "not known"
    return f"{'-' if part < 0 else '+'}{share_words(abs(part))}" if abs(part) >= 1e-4 else "same"


def gain_words(least: float, most: float | None) -> str:
    """`+3.1 % to +5.3 %`, `-12 %`, `0 % or more`: what a change is worth, from and to."""
    low, high = (_signed(least), _signed(least if most is None else most))
    return f"{low} or more" if most is None else low if low == high else f"{low} to {high}"


def _signed(part: float) -> str:
    return change_words(part) if abs(part) >= 1e-4 else f"0{SPACE}%"


def seconds_words(seconds: float, like: float | None = None) -> str:
    """A time with three digits, in the unit of another one where that is given."""
    return format_brief(seconds, like).replace(" ", SPACE)


def _three(number: float) -> str:
    return digits(number) if number else "0"


def bytes_words(size: float) -> str:
    """As memory is counted, with three digits."""
    number, unit = format_bytes(size).split()
    return f"{_three(float(number))}{SPACE}{unit}"


def decimal_bytes(size: float) -> str:
    """As networks count, with three digits."""
    return format_rate(float(f"{size:.3g}"), "B").replace(" ", SPACE)


def range_words(share: str, least: str, most: str) -> str:
    """`(90 %: 22.3 to 48.1 s)`, the unit once."""
    unit = most.partition(SPACE)[2]
    return f"({share.replace(' ', SPACE)}: {least.removesuffix(unit).rstrip()} to {most})"


def number_runs(numbers: Sequence[int]) -> str:
    """`0, 2-5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def ticks(end: float, count: int = 6) -> Iterator[tuple[float, str]]:
    """(part of the way, words) of round times from 0 to the end, about so many."""
    unit = format_seconds(end).split()[1]
    whole = end / UNITS[Dimension.TIME][unit]
    size = 10.0 ** math.floor(math.log10(whole / count))
    size = next(size * each for each in (1, 2, 5, 10) if whole / (size * each) <= count)
    for number in range(math.floor(whole / size * (1 + 1e-9)) + 1):
        at = number * size
        yield at / whole, f"{float(f'{at:.6g}'):,.10g}{SPACE}{unit}"
