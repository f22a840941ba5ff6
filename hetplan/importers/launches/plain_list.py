"""A file of nothing but arguments, on one line or many, as words: no shell has a say in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hetplan.importers.launches.shell_values import Field, Piece
from hetplan.importers.lines import fault_at, text_lines

_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_QUOTED = re.compile(r""""([^"]*)"|'([^']*)'|([^"']+)""")
_WHOLE_QUOTES = re.compile(r""""[^"]*"|'[^']*'""")
_VARIABLE = re.compile(r"\$(?:\{(\w{1,80})(?::?-([^{}]*)|:?\?[^{}]*)?\}|(\w{1,80}))", re.ASCII)


def is_plain_list(text: str) -> bool:
    """Whether the first word of the text is a flag."""
    for line in text_lines(text):
        stripped = line.text.strip()
        if stripped and not stripped.startswith("#"):
            return stripped.startswith("--")
    return False


def plain_words(file: str, text: str, given: dict[str, str]) -> tuple[Field, ...]:
    """Its words; quotes keep spaces, `#` at the beginning of a word begins a comment.

    A variable that is not given, and has no default, stays unknown.
    """
    found: list[Field] = []
    for line in text_lines(text):
        rest = line.text.strip()
        rest = rest.removesuffix("\\")
        if re.search(r"""["']""", _WHOLE_QUOTES.sub("", rest)) is not None:
            raise fault_at(file, line.number, "a quote opens here and is never closed")
        for word in _WORD.findall(rest):
            if word.startswith("#"):
                break
            found.append(tuple(_pieces(word, line.number, given)))
    return tuple(found)


def _pieces(word: str, line: int, given: dict[str, str]) -> Iterator[Piece]:
    for part in _QUOTED.finditer(word):
        text = part.group(1) or part.group(2) or part.group(3) or ""
        at = 0
        for each in _VARIABLE.finditer(text):
            if each.start() > at:
                yield Piece(text=text[at : each.start()], line=line)
            name = each.group(1) or each.group(3)
            value = given.get(name, each.group(2))
            if value is None:
                yield Piece(text=each.group(), line=line, unknown=name)
            else:
                yield Piece(text=value, line=line)
            at = each.end()
        if at < len(text) or not text:
            yield Piece(text=text[at:], line=line)
