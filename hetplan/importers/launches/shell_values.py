"""What do the words of a script say, as far as its text alone tells it?

A value is a row of pieces, each with the line on which it was written. What only the host knows
stays a piece that names its variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hetplan.errors import Fault, InputError
from hetplan.importers.launches.shell_words import Part, PartKind, Word

_SPACE = re.compile(r"([ \t\r\n]+)")
_NUMBER = re.compile(r"\s*([0-9]+)", re.ASCII)
_VARIABLE = re.compile(r"\s*\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?", re.ASCII)
_OPERATORS = (("+", "-"), ("*", "/", "%"))
MAX_NUMBER = 10**15
"""Larger numbers than any count or size of a launch are not worked out."""
_MAX_CHARACTERS = 4_000_000
MAX_PIECES = 200_000
"""Pieces of one command; lists that double themselves would not end otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of a value."""

    text: str
    """Of an unknown one, how it was written: `$TP`."""
    line: int
    unknown: str = ""
    """Variable that only the host knows; empty: the text is known."""
    whole: bool = False
    """Quoted inside of an expansion that is not: its spaces do not end a word."""


Field: TypeAlias = tuple[Piece, ...]
"""One word of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a variable holds."""

    items: tuple[Field, ...]
    """One, or those of an array."""
    array: bool = False


def text_of_field(field: Field) -> str:
    """The word as text; what is unknown as it was written."""
    return "".join(piece.text for piece in field)


def line_of_field(field: Field) -> int:
    """Line of the first piece that says something; 0 for a word of nothing."""
    return next((each.line for each in field if each.text), field[0].line if field else 0)


def unknown_of(field: Field) -> str:
    """The first variable in it that only the host knows; empty where it is known."""
    return next((piece.unknown for piece in field if piece.unknown), "")


def known_text(field: Field) -> str | None:
    """The text of a word that is known throughout."""
    return None if unknown_of(field) else text_of_field(field)


Variables: TypeAlias = Mapping[str, Value]


def fields_of(word: Word, variables: Variables) -> tuple[Field, ...]:
    """The words that a word becomes: none, one, or those of a list."""
    done: list[Field] = []
    current: list[Piece] = []
    begun = False
    for part in word:
        _check_size(done, part.line)
        _check_size(current, part.line)
        lists = _list_of(part, variables)
        if lists is not None:
            for at, item in enumerate(lists):
                if at:
                    done.append(tuple(current))
                    current = []
                current += item
                begun = True
            continue
        pieces = pieces_of(part, variables)
        if part.quoted or part.kind is PartKind.TEXT:
            current += pieces
            begun = True
            continue
        for piece in pieces:
            if piece.unknown or piece.whole:
                current.append(piece)
                begun = True
                continue
            begun = _split(piece, done, current, begun)
    if begun:
        done.append(tuple(current))
    return tuple(map(settled, done))


def settled(field: Field) -> Field:
    """The same once quotes have done their work: what is kept of it may be split again."""
    if not any(piece.whole for piece in field):
        return field
    return tuple(replace(piece, whole=False) for piece in field)


def _split(piece: Piece, done: list[Field], current: list[Piece], begun: bool) -> bool:
    """Cut a value without quotes at its spaces; whether a word is begun after it."""
    line = piece.line
    for part in _SPACE.split(piece.text):
        if _SPACE.fullmatch(part):
            if begun:
                done.append(tuple(current))
                current.clear()
            begun = False
            line += part.count("\n")
        elif part:
            current.append(Piece(text=part, line=line))
            begun = True
    return begun


def _list_of(part: Part, variables: Variables) -> tuple[Field, ...] | None:
    """The words of `${NAME[@]}`, each split where it is not quoted; None for anything else."""
    if part.kind is not PartKind.VARIABLE or part.index not in ("@", "*") or part.operator:
        return None
    if part.quoted and part.index == "*":
        return None
    value = variables.get(part.text)
    if value is None:
        return None
    if part.quoted:
        return value.items[:MAX_PIECES]
    found: list[Field] = []
    for item in value.items:
        done: list[Field] = []
        current: list[Piece] = []
        begun = False
        for piece in item:
            if piece.unknown:
                current.append(piece)
                begun = True
            else:
                begun = _split(piece, done, current, begun)
        found += done
        if begun:
            found.append(tuple(current))
    return tuple(found)


def pieces_of(part: Part, variables: Variables) -> Field:
    """The value of one part, not split."""
    if part.kind is PartKind.TEXT:
        return (Piece(text=part.text, line=part.line, whole=part.quoted),)
    if part.kind is PartKind.ARITHMETIC:
        return (_arithmetic(part, variables),)
    if part.kind is PartKind.OTHER:
        return (Piece(text=part.text, line=part.line, unknown=part.text),)
    value = variables.get(part.text)
    if part.kind is PartKind.LENGTH:
        if value is None or any(unknown_of(item) for item in value.items):
            return (_unknown(part),)
        size = len(value.items) if part.index else len(text_of_field(value.items[0]))
        return (Piece(text=str(size), line=part.line),)
    if value is None and part.text == "@" and part.quoted:
        return (_unknown(part),)
    return _variable(part, value, variables)


def _variable(part: Part, value: Value | None, variables: Variables) -> Field:
    """`$NAME`, or `${NAME:-other}` where NAME has no value."""
    found = None if value is None else _item(part, value)
    kind = part.operator.removeprefix(":")
    if not kind:
        return (_unknown(part),) if found is None else found
    if found is not None and unknown_of(found):
        return found
    empty = found is None or (part.operator.startswith(":") and not text_of_field(found))
    if kind == "+":
        return () if empty else _pieces_of_word(part.argument, variables)
    if not empty and found is not None:
        return found
    # The script has a default, which counts unless the host's environment sets the variable.
    return (_unknown(part),) if kind == "?" else _pieces_of_word(part.argument, variables)


def _item(part: Part, value: Value) -> Field | None:
    """The value that is meant: the first of an array, that of an index, or all joined."""
    items = value.items
    if part.index in ("*", "@"):
        joined: list[Piece] = []
        for at, item in enumerate(items):
            joined += (*((Piece(text=" ", line=line_of_field(item)),) if at else ()), *item)
        return tuple(joined)
    if part.index and value.array:
        at = int(part.index) if part.index.isdecimal() and len(part.index) < 9 else -1
        return items[at] if 0 <= at < len(items) else None
    return items[0] if items else ()


def _unknown(part: Part) -> Piece:
    return Piece(text=part.shown, line=part.line, unknown=part.text)


def value_of(word: Word, variables: Variables) -> Field:
    """The value of a word that is assigned: not split."""
    return settled(_pieces_of_word(word, variables))


def _pieces_of_word(word: Word, variables: Variables) -> Field:
    found: list[Piece] = []
    for part in word:
        found += pieces_of(part, variables)
        _check_size(found, part.line)
    if word and sum(len(piece.text) for piece in found) > _MAX_CHARACTERS:
        message = f"a value of over {_MAX_CHARACTERS:,} characters"
        raise InputError(Fault(line=word[0].line, message=message))
    return tuple(found)


def _check_size(found: Sequence[object], line: int) -> None:
    if len(found) > MAX_PIECES:
        message = f"a value of over {MAX_PIECES:,} pieces; no launch has so many words"
        raise InputError(Fault(line=line, message=message))


# ---- arithmetic


def _arithmetic(part: Part, variables: Variables) -> Piece:
    """`$((...))` of whole numbers and known variables; unknown otherwise."""
    reader = _Numbers(part.text, variables)
    number = reader.level(0)
    if reader.unknown or number is None or reader.rest():
        unknown = reader.unknown or part.shown
        return Piece(text=part.shown, line=part.line, unknown=unknown)
    return Piece(text=str(number), line=part.line)


class _Numbers:
    """Reads + - * / % and brackets, as bash counts: whole numbers, cut towards zero."""

    def __init__(self, text: str, variables: Variables) -> None:
        self._text = text
        self._at = 0
        self._variables = variables
        self._depth = 0
        self.unknown = ""

    def rest(self) -> str:
        return self._text[self._at :].strip()

    def level(self, at: int) -> int | None:
        if at == len(_OPERATORS):
            return self._single()
        left = self.level(at + 1)
        while left is not None:
            sign = self._sign(_OPERATORS[at])
            if not sign:
                return left
            right = self.level(at + 1)
            left = None if right is None else _counted(left, sign, right)
        return None

    def _sign(self, signs: tuple[str, ...]) -> str:
        rest = self._text[self._at :]
        stripped = rest.lstrip()
        if stripped[:1] not in signs or not stripped or stripped.startswith("**"):
            return ""
        self._at += len(rest) - len(stripped) + 1
        return stripped[0]

    def _single(self) -> int | None:
        self._depth += 1
        rest = self._text[self._at :]
        found = _NUMBER.match(rest)
        if self._depth > 200 or len(rest) > 2000:
            return None
        if found is not None:
            self._at += found.end()
            text = found.group(1)
            return int(text) if len(text) < 16 and not (text[0] == "0" and text != "0") else None
        if rest.lstrip().startswith("("):
            self._at += len(rest) - len(rest.lstrip()) + 1
            inner = self.level(0)
            return inner if inner is not None and self._sign((")",)) else None
        if rest.lstrip().startswith("-"):
            self._at += len(rest) - len(rest.lstrip()) + 1
            inner = self._single()
            return None if inner is None else -inner
        name = _VARIABLE.match(rest)
        if name is None:
            return None
        self._at += name.end()
        value = self._variables.get(name.group(1))
        text = None if value is None else known_text(value.items[0] if value.items else ())
        if text is not None and text.strip().isascii() and text.strip().isdecimal():
            return int(text) if len(text.strip()) < 16 else None
        self.unknown = self.unknown or name.group(1)
        return 0


def _counted(left: int, sign: str, right: int) -> int | None:
    if sign in "/%" and right == 0:
        return None
    if sign in "/%":
        whole = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        found = whole if sign == "/" else left - whole * right
    else:
        found = {"+": left + right, "-": left - right}.get(sign, left * right)
    return found if abs(found) <= MAX_NUMBER else None
