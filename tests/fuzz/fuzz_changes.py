"""Inputs that are nearly right: texts that are read, after a few changes that hypothesis draws.

A change is a kind and three numbers, which are drawn fast and which hypothesis makes smaller when
it finds a fault.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from mutations import leaves

HOSTILE = (
    *("0", "-1", "-0.0", "1e-320", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", ".inf"),
    *("9" * 400, "9" * 5000, "1." + "0" * 400, "0x10", "1_000", "1:30", "9" * 18, "1e308"),
    *("true", "null", "~", '""', "[]", "{}", '"\\ud800"', "2026-11-28", "!!int x", "&a", "*a"),
    "\u0663\u0664",  # digits, but not ASCII
    *("\u00b2", "\x00", "\u2028", "\x85", "\x1b[2J", "\u202e", "e\u0301", "\ufeff"),
    *("[" * 3000, "{" * 3000, '{"a":' * 1000, " " * 3000, "- " * 1000, "a" * 70_000),
    *("../../etc/passwd", "/dev/zero", "$(touch pwned)", "`id`", "'; id #", "-n", "%n%s", "~root"),
)
SIGNS = (
    *("$", "${", "$(", "$((", "`", "'", '"', "(", ")", "{", "}", "[", "]", "|", "&&", ";;", "<<E"),
    *("\\", "#", "*", "--", "\n", "\t", "if ", "fi ", "case ", "done ", "[[ ", "]] ", ",", ": "),
    *(":", "&a ", "*a ", "<<: ", "? ", "---\n", "!!", "\r", "\x00", "\u2028", "\x1b[", "|", ">"),
)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**63, 10**30, 0.0, -0.5, 1e-320, 1e308, 0.3, True, False),
    *(None, "", "x", "a b", "\x1b[2J", "$(id)", "\n", "é" * 50, [], {}, [[]], [None], {"a": 1}),
    *(float("nan"), float("inf"), "1 GB", "3 us", "nan", "0", "a/0", "x" * 5000),
)


def _cut(text: str, at: int, other: int, _: int) -> str:
    return text[: _in(at, len(text) + 1)] if other % 2 else text[_in(at, len(text) + 1) :]


def _byte(text: str, at: int, other: int, _: int) -> str:
    start = _in(at, len(text))
    # A surrogate of `surrogateescape` is written as the byte itself, which is no UTF-8.
    return text[:start] + chr(other if other < 128 else 0xDC00 + other) + text[start + 1 :]


def _found(pattern: str, of: Sequence[str]) -> Callable[[str, int, int, int], str]:
    """A change of one match of the pattern to a hostile value, or to another match."""

    def change(text: str, at: int, other: int, which: int) -> str:
        matches = list(re.finditer(pattern, text))
        if not matches:
            return text
        found = matches[_in(at, len(matches))]
        other_match = matches[_in(which, len(matches))].group()
        new = other_match if other % 5 == 4 else of[_in(which, len(of))]
        return text[: found.start()] + new + text[found.end() :]

    return change


def _lines(text: str, at: int, other: int, which: int) -> str:
    lines = text.split("\n")
    one, two = _in(at, len(lines)), _in(which, len(lines))
    if other % 4 == 0:
        del lines[one]
    elif other % 4 == 1:
        lines.insert(two, lines[one])
    elif other % 4 == 2:
        lines[one], lines[two] = lines[two], lines[one]
    else:
        lines[one] += lines[two]
    return "\n".join(lines)


def _repeat(text: str, at: int, other: int, which: int) -> str:
    start = _in(at, len(text) + 1)
    piece = text[start : start + 1 + other % 30]
    return text[:start] + piece * (3, 30, 3000)[which % 3] + text[start:]


def _put(text: str, at: int, _: int, which: int) -> str:
    start = _in(at, len(text) + 1)
    return text[:start] + SIGNS[_in(which, len(SIGNS))] + text[start:]


Place = tuple[str | int, ...]
Edit = tuple[Place, str, Any]
"""Of a JSON value: place, `set`, `delete` or `repeat`, and what is set."""


def edit_of(data: Any, at: int, other: int, which: int) -> Edit:
    """The edit of a drawn change: one value of the data another one, gone, or twice."""
    places = list(leaves(data))
    place = places[_in(at, len(places))]
    # Sometimes what holds the value instead of the value.
    place = place[: max(1, len(place) - other // 8 % 3)]
    if other % 8 == 0:
        return place, "delete", None
    if other % 8 == 1:
        return place, "repeat", None
    if other % 8 == 2:
        return place, "set", _at(data, places[_in(which, len(places))])
    return place, "set", VALUES[_in(which, len(VALUES))]


def edited(data: Any, edit: Edit) -> Any:
    """The data after the edit; as they are where the place is not there any more."""
    place, what, value = edit
    new = copy.deepcopy(data)
    try:
        holder = _at(new, place[:-1])
        if what == "delete":
            del holder[place[-1]]
        elif what == "repeat" and isinstance(holder, list):
            holder.insert(place[-1], copy.deepcopy(holder[place[-1]]))
        elif what == "set":
            _at(holder, place[-1:])
            holder[place[-1]] = value
    except (LookupError, TypeError):
        return data
    return new


def _value(text: str, at: int, other: int, which: int) -> str:
    """An edit of a JSON text; other texts as they are."""
    try:
        data = json.loads(text)
        return json.dumps(edited(data, edit_of(data, at, other, which)))
    except (ValueError, RecursionError, IndexError):  # IndexError: one value has no places
        return text


def _at(data: Any, place: tuple[str | int, ...]) -> Any:
    for step in place:
        data = data[step]
    return data


def _in(number: int, size: int) -> int:
    """A position below `size`, spread evenly over it."""
    return number * size >> 16


_NUMBER = _found(r"\d+(?:\.\d+)?", HOSTILE)
_WORD = _found(r"[A-Za-z_]{2,}", HOSTILE)
CHANGES = (_cut, _byte, _byte, _NUMBER, _NUMBER, _WORD, _lines, _lines, _repeat, _put, _put, _value)

Change = tuple[int, int, int, int]
_PLACE = st.integers(0, 2**16 - 1)
DRAWN: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(st.integers(0, len(CHANGES) - 1), _PLACE, st.integers(0, 255), _PLACE),
    min_size=1,
    max_size=4,
)


def changed(text: str, drawn: Sequence[Change]) -> str:
    """The text after these changes."""
    for kind, at, other, which in drawn:
        text = CHANGES[kind](text, at, other, which)
    return text


def edits(data: Any, drawn: Sequence[Change]) -> list[Edit]:
    """The edits of these changes, one after the other."""
    found: list[Edit] = []
    for _, at, other, which in drawn:
        edit = edit_of(data, at, other, which)
        data = edited(data, edit)
        found.append(edit)
    return found
