"""Text of a shell script to words: quotes, variables, arithmetic, line by line; nothing is run.

The part of bash's grammar (bash manual, sections 3.1 and 3.5) in which launch scripts are written.
What a command would print, `$(...)`, is kept as text and has no value here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from hetplan.errors import InputError
from hetplan.importers.lines import fault_at

MAX_DEPTH = 40
"""Expansions and blocks inside each other; no script that a person wrote has a tenth of it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SPECIAL = re.compile(r"[0-9]+|[@*#?$!-]", re.ASCII)
_PLAIN = re.compile(r"[^ \t\r\n;&|<>()\\'\"$`}]*")
_IN_QUOTES = re.compile(r'[^"$`\\\n]*\n|[^"$`\\\n]+')
_ENDS = frozenset(" \t\r\n;&|<>()")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class PartKind(StrEnum):
    """What a part of a word is."""

    TEXT = "text"
    VARIABLE = "variable"
    LENGTH = "length"
    """`${#NAME}` or `${#NAME[@]}`."""
    ARITHMETIC = "arithmetic"
    OTHER = "other"
    """Output of a command, or an expansion whose value is not worked out here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Text, or something that stands for text."""

    kind: PartKind
    text: str
    """The text; of a variable its name; of anything else as it was written."""
    line: int
    quoted: bool
    """Whether its value stays one word."""
    index: str = ""
    """Of an array: `@`, `*` or a number."""
    operator: str = ""
    """Of a variable: `:-`, `-`, `:=`, `=`, `:+`, `+`, `:?`, `?` or nothing."""
    argument: tuple[Part, ...] = ()
    """What follows the operator."""
    shown: str = ""
    """As it was written."""


Word: TypeAlias = tuple[Part, ...]


class Cursor:
    """A place in a text, with its line."""

    def __init__(
        self, file: str, text: str, marks: tuple[tuple[int, int], ...] = ((0, 1),)
    ) -> None:
        self.file = file
        self.text = text
        self.at = 0
        self.line = marks[0][1]
        self.depth = 0
        self._marks = marks[1:]
        """(place in the text, line) where another line begins than the one after the last."""

    @property
    def done(self) -> bool:
        """Whether the text is at its end."""
        return self.at >= len(self.text)

    def peek(self, count: int = 1) -> str:
        """The next characters, fewer at the end."""
        return self.text[self.at : self.at + count]

    def take(self, count: int = 1) -> str:
        """The same, stepping over them."""
        found = self.text[self.at : self.at + count]
        self.at += len(found)
        self.line += found.count("\n")
        while self._marks and self._marks[0][0] <= self.at:
            self.line = self._marks[0][1] + self.text.count("\n", self._marks[0][0], self.at)
            self._marks = self._marks[1:]
        return found

    def fault(self, message: str, line: int | None = None) -> InputError:
        """The error that something is wrong here."""
        return fault_at(self.file, self.line if line is None else line, message)

    def deeper(self) -> None:
        """One level in; an InputError where it is too deep."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fault(f"more than {MAX_DEPTH} quotes, blocks or expansions in each other")


def read_word(cursor: Cursor) -> Word:
    """The word that begins here, up to a space or an operator."""
    parts: list[Part] = []
    while not cursor.done and cursor.peek() not in _ENDS:
        _read_part(cursor, parts, quoted=False)
    return tuple(parts)


def text_part(text: str, line: int, *, quoted: bool) -> Part:
    """A part that is its own value."""
    return Part(kind=PartKind.TEXT, text=text, line=line, quoted=quoted, shown=text)


def plain_text(word: Word) -> str | None:
    """The text of a word without expansions and quotes; None for any other."""
    if any(part.kind is not PartKind.TEXT or part.quoted for part in word):
        return None
    return "".join(part.text for part in word)


def _read_part(cursor: Cursor, parts: list[Part], *, quoted: bool) -> None:
    """One part outside single and double quotes."""
    line, sign = cursor.line, cursor.peek()
    if sign == "\\":
        cursor.take()
        escaped = cursor.take()
        if escaped not in ("\n", ""):
            parts.append(text_part(escaped, line, quoted=True))
    elif sign == "'":
        parts.append(text_part(_single(cursor), line, quoted=True))
    elif sign == '"':
        cursor.take()
        _double(cursor, parts)
    elif cursor.peek(2) == "$'":
        cursor.take()
        parts.append(text_part(_ansi(cursor), line, quoted=True))
    elif sign in "$`":
        parts.append(_expansion(cursor, quoted=quoted))
    else:
        start = cursor.at
        cursor.take()
        plain = _PLAIN.match(cursor.text, cursor.at)
        cursor.take(0 if plain is None else plain.end() - start - 1)
        parts.append(text_part(cursor.text[start : cursor.at], line, quoted=quoted))


def _single(cursor: Cursor) -> str:
    line = cursor.line
    cursor.take()
    end = cursor.text.find("'", cursor.at)
    if end < 0:
        raise cursor.fault("a ' opens here and is never closed", line)
    text = cursor.take(end - cursor.at)
    cursor.take()
    return text


def _ansi(cursor: Cursor) -> str:
    """What stands in $'...'."""
    line = cursor.line
    cursor.take()
    found: list[str] = []
    while not cursor.done:
        sign = cursor.take()
        if sign == "'":
            return "".join(found)
        if sign == "\\":
            sign = cursor.take()
            sign = _ESCAPED.get(sign, "\\" + sign)
        found.append(sign)
    raise cursor.fault("a $' opens here and is never closed", line)


def _double(cursor: Cursor, parts: list[Part]) -> None:
    """What stands between double quotes, a part for each line; an empty text where nothing does."""
    line, before = cursor.line, len(parts)
    cursor.deeper()
    begin, found = cursor.line, ""
    while not cursor.done:
        sign = cursor.peek()
        if sign in '"$`':
            if found:
                parts.append(text_part(found, begin, quoted=True))
                found = ""
            if sign == '"':
                cursor.take()
                cursor.depth -= 1
                if len(parts) == before:
                    parts.append(text_part("", line, quoted=True))
                return
            parts.append(_expansion(cursor, quoted=True))
            begin = cursor.line
        elif sign == "\\":
            cursor.take()
            escaped = cursor.take()
            if escaped == "\n":
                escaped = ""
                if found:
                    parts.append(text_part(found, begin, quoted=True))
                    found = ""
                begin = cursor.line
            found += escaped if escaped in ("", '"', "\\", "$", "`") else "\\" + escaped
        else:
            plain = _IN_QUOTES.match(cursor.text, cursor.at)
            found += cursor.take(1 if plain is None else plain.end() - cursor.at)
            if found.endswith("\n"):
                parts.append(text_part(found, begin, quoted=True))
                found, begin = "", cursor.line
    raise cursor.fault('a " opens here and is never closed', line)


def _expansion(cursor: Cursor, *, quoted: bool) -> Part:
    """What `$` or a backtick begins; the sign itself where it begins nothing."""
    line, start = cursor.line, cursor.at
    if cursor.peek() == "`":
        cursor.take()
        _until(cursor, "`", line)
        return _other(cursor, start, line, quoted)
    if cursor.peek(3) == "$((":
        cursor.take(3)
        inner = cursor.at
        _closing(cursor, line, "(", ")", depth=2)
        text = cursor.text[inner : cursor.at]
        if text.endswith("))"):
            return Part(
                kind=PartKind.ARITHMETIC,
                text=text[:-2],
                line=line,
                quoted=quoted,
                shown=cursor.text[start : cursor.at],
            )
        return _other(cursor, start, line, quoted)
    if cursor.peek(2) == "$(":
        cursor.take(2)
        _closing(cursor, line, "(", ")", depth=1)
        return _other(cursor, start, line, quoted)
    if cursor.peek(2) == "${":
        cursor.take(2)
        return _braced(cursor, start, line, quoted)
    cursor.take()
    name = _NAME.match(cursor.text, cursor.at)
    if name is None and cursor.peek() in "0123456789@*#?$!-" and not cursor.done:
        return _variable(cursor, cursor.take(), start, line, quoted)
    if name is None:
        return text_part("$", line, quoted=quoted)
    cursor.take(len(name.group()))
    return _variable(cursor, name.group(), start, line, quoted)


def _variable(cursor: Cursor, name: str, start: int, line: int, quoted: bool) -> Part:
    return Part(
        kind=PartKind.VARIABLE,
        text=name,
        line=line,
        quoted=quoted,
        index=name if name in ("@", "*") else "",
        shown=cursor.text[start : cursor.at],
    )


def _braced(cursor: Cursor, start: int, line: int, quoted: bool) -> Part:
    """A variable in braces, with what is done to it."""
    length = cursor.peek() == "#" and cursor.peek(2) != "#}"
    if length:
        cursor.take()
    name = _NAME.match(cursor.text, cursor.at) or _SPECIAL.match(cursor.text, cursor.at)
    index = ""
    if name is not None:
        cursor.take(len(name.group()))
        if cursor.peek() == "[":
            end = cursor.text.find("]", cursor.at)
            if end > 0 and end - cursor.at < 100:
                index = cursor.take(end + 1 - cursor.at)[1:-1].strip("'\" ")
    operator = next((each for each in (":-", ":=", ":+", ":?") if cursor.peek(2) == each), "")
    if not operator and cursor.peek() in ("-", "=", "+", "?"):
        operator = cursor.peek()
    argument: tuple[Part, ...] = ()
    if name is not None and operator and not length:
        cursor.take(len(operator))
        argument = _argument(cursor, line, quoted)
    if cursor.peek() == "}":
        cursor.take()
    else:  # an operator whose value is not worked out, as in ${NAME%.*}
        name = None
        _closing(cursor, line, "{", "}", depth=1)
    if name is None:
        return _other(cursor, start, line, quoted)
    return Part(
        kind=PartKind.LENGTH if length else PartKind.VARIABLE,
        text=name.group(),
        line=line,
        quoted=quoted,
        index=index or (name.group() if name.group() in ("@", "*") else ""),
        operator=operator,
        argument=argument,
        shown=cursor.text[start : cursor.at],
    )


def _argument(cursor: Cursor, line: int, quoted: bool) -> tuple[Part, ...]:
    """The word after an operator, up to the brace that ends the variable."""
    cursor.deeper()
    parts: list[Part] = []
    while not cursor.done and cursor.peek() != "}":
        if cursor.peek() in _ENDS or (quoted and cursor.peek() == "'"):
            parts.append(text_part(cursor.take(), cursor.line, quoted=quoted))
        else:
            _read_part(cursor, parts, quoted=quoted)
    if cursor.done:
        raise cursor.fault("a ${ opens here and is never closed", line)
    cursor.depth -= 1
    return tuple(parts)


def _other(cursor: Cursor, start: int, line: int, quoted: bool) -> Part:
    shown = cursor.text[start : cursor.at]
    return Part(kind=PartKind.OTHER, text=shown, line=line, quoted=quoted, shown=shown)


def _until(cursor: Cursor, sign: str, line: int) -> None:
    while not cursor.done:
        found = cursor.take()
        if found == "\\":
            cursor.take()
        elif found == sign:
            return
    raise cursor.fault(f"a {sign} opens here and is never closed", line)


def _closing(cursor: Cursor, line: int, left: str, right: str, depth: int) -> None:
    """Step over everything up to the bracket that closes, brackets in quotes left out."""
    while not cursor.done:
        sign = cursor.take()
        if sign == "\\":
            cursor.take()
        elif sign == "'":
            cursor.at -= 1
            _single(cursor)
        elif sign == '"':
            _until(cursor, '"', line)
        elif sign == left:
            depth += 1
        elif sign == right:
            depth -= 1
            if depth == 0:
                return
    raise cursor.fault(f"a ${left} opens here and is never closed", line)
