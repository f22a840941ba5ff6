"""What copying a matrix out of a terminal, a log or a web page did to it, undone.

A terminal's last column swallows a tab, so that `NODE` and `NODE` become `NODENODE`; logs put a
level and a time before each line, mail and issues a `>`, web pages a fence of backticks; an escape
that was lost leaves `[4m`. Whoever undoes this guesses nothing: a word is split only where its
parts can be told in one way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# ECMA-48 sequences, also where the escape itself became another character or was lost; charsets
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]"
    r"|(?:\ufffd|\u241b|\^\[)?\[(?:\d{1,3}(?:;\d{1,3}){0,4})?m"
)
_NAMES = re.compile(r"(?:(?:GPU|NIC|NPU|Phy-ID)\d{1,4})+", re.ASCII)
_NAME = re.compile(r"[A-Za-z-]+\d+", re.ASCII)
_MAX_BEFORE = 8  # words of a level, a date, a time, a host and a rank
_MAX_GLUED = 60


def without_escapes(text: str) -> str:
    """The text without terminal escapes and without fences of backticks."""
    return _ESCAPE.sub("", text).replace("```", " ")


def split_names(word: str) -> list[str]:
    """`NIC6NIC7` as two words, `NIC8CPU` as two; any other word as itself."""
    found = _NAMES.match(word)
    if found is None or len(word) > _MAX_GLUED:
        return [word]
    rest = word[found.end() :]
    if rest and not rest.isalpha():
        return [word]
    return [*_NAME.findall(found.group()), *([rest] if rest else [])]


def split_cells(cells: Sequence[str], width: int, label: re.Pattern[str], self_: str) -> list[str]:
    """The cells, with the paths among the first `width` taken apart where two ran together.

    Where that does not give `width` paths, the cells as they are.
    """
    split: list[str] = []
    for cell in cells:
        if len(split) >= width or cell == self_ or label.fullmatch(cell):
            split.append(cell)
            continue
        parts = _parts(cell, width - len(split), label, self_)
        if not parts:
            return list(cells)
        split += parts
    return split if len(split) >= width else list(cells)


def _parts(cell: str, room: int, label: re.Pattern[str], self_: str) -> list[str]:
    """The paths that make up the cell, with the cores behind the last; empty where none do."""
    if len(cell) > _MAX_GLUED:
        return []
    found: list[list[str]] = []

    def walk(at: int, parts: list[str]) -> None:
        if at == len(cell):
            found.append(parts)
            return
        if len(parts) == room and cell[at].isdigit() and not cell[at - 1].isdigit():
            found.append([*parts, cell[at:]])  # the affinity behind the last path
            return
        for end in range(at + 1, min(len(cell), at + 8) + 1):
            word = cell[at:end]
            if len(found) < 2 and len(parts) < room and (word == self_ or label.fullmatch(word)):
                walk(end, [*parts, word])

    walk(0, [])
    return found[0] if len(found) == 1 else []


def words_before(
    words: Sequence[str],
    below: Sequence[str],
    device: re.Pattern[str],
    is_label: Callable[[str], bool],
) -> tuple[int, int] | None:
    """How many words of a log stand before the column names, and before the row below them.

    None where these two lines do not begin a matrix.
    """
    for before in range(min(len(words), _MAX_BEFORE + 1)):
        if not device.fullmatch(words[before]):
            continue
        for at in range(min(len(below) - 1, _MAX_BEFORE + 1)):
            if below[at] == words[before] and is_label(below[at + 1]):
                return before, at
        return None
    return None
