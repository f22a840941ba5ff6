"""Which parts of a node reach each other by what, from a matrix that a driver's tool prints.

nvidia-smi and npu-smi print the same shape: a line of column names, then one line per name with
one word per column and, at the end, affinities of which some stand in every line and some may be
left out. Terminals add escapes and break long lines at a space; both are undone here. A matrix
that is not whole, or whose two halves differ, is refused: half of it would look like a node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import refuse_all, text_lines
from hetplan.importers.topo_copied import split_cells, split_names, without_escapes, words_before

_MAX_FAULTS = 10  # one mend usually serves them all
_MAX_COLUMNS = 1024  # the largest node has 64 devices and as many NICs
_COLUMN = re.compile(r"[A-Za-z0-9][\w.:+-]{0,63}", re.ASCII)  # GPU0, Phy-ID0, mlx5_0, rocep1s0f0
SELF = "X"
"""What both tools print on the diagonal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one tool writes its matrix."""

    command: str
    """Command that prints it, for messages."""
    device: re.Pattern[str]
    """Name of a device; its first group is the device's number."""
    label: re.Pattern[str]
    """Word for a path, `X` left out."""
    labels: str
    """The words for paths, for messages."""
    headings: tuple[str, ...]
    """Headings that may follow the columns, as in `CPU Affinity`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineWords:
    """One line of the text without escapes."""

    number: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the matrix."""

    line: int
    name: str
    labels: tuple[str, ...]
    affinities: tuple[str, ...]
    """What follows the labels; empty where the tool leaves cells out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A whole, symmetric matrix."""

    columns: tuple[str, ...]
    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    rest: tuple[LineWords, ...]
    """Lines below the matrix: legends."""


def read_matrix(text: str, dialect: Dialect, *, file: str) -> Matrix:
    """The matrix of the text; an InputError with every fault and its line otherwise."""
    lines = _without_log(split_lines(text), dialect)
    start = _header_at(lines, dialect, file=file)
    columns, headings, below = _header(lines, start, dialect, file=file)
    rows, faults, end = _rows(lines, below, columns, headings, dialect, file=file)
    if not faults:
        faults = _asymmetries(columns, rows, file=file)
    refuse_all(faults, most=_MAX_FAULTS)
    return Matrix(columns=columns, headings=headings, rows=tuple(rows), rest=tuple(lines[end:]))


def split_lines(text: str) -> list[LineWords]:
    """The text's lines, without terminal escapes, as words."""
    return [
        LineWords(
            number=line.number,
            words=tuple(part for word in line.text.split() for part in split_names(word)),
        )
        for line in text_lines(without_escapes(text))
    ]


def _without_log(lines: list[LineWords], dialect: Dialect) -> list[LineWords]:
    """The lines without what a log, a mail or a prompt put before the matrix."""

    def is_label(word: str) -> bool:
        return _begins_path(word, dialect)

    for at, line in enumerate(lines):
        below = next((each.words for each in lines[at + 1 : at + 3] if each.words), ())
        before = words_before(line.words, below, dialect.device, is_label)
        if before is None:
            continue
        mine, theirs = before
        header = LineWords(number=line.number, words=line.words[mine:])
        if not theirs:
            return [*lines[:at], header, *lines[at + 1 :]]
        rest = [LineWords(number=each.number, words=each.words[theirs:]) for each in lines[at:]]
        return [*lines[:at], header, *rest[1:]]
    return lines


def _is_label(word: str, dialect: Dialect) -> bool:
    return word == SELF or dialect.label.fullmatch(word) is not None


def _begins_path(word: str, dialect: Dialect) -> bool:
    """Whether the word is a path, or begins with one that ran into the next cell."""
    return word.startswith(SELF) or dialect.label.match(word) is not None


def _header_at(lines: Sequence[LineWords], dialect: Dialect, *, file: str) -> int:
    """Position of the line with the column names."""
    for at, line in enumerate(lines):
        if not line.words or not dialect.device.fullmatch(line.words[0]):
            continue
        if len(line.words) > 1 and _begins_path(line.words[1], dialect):
            message = (
                f"a row of the matrix without the line of column names above it; save the whole "
                f"output of `{dialect.command}`"
            )
            raise InputError(Fault(file=file, line=line.number, message=message))
        return at
    message = f"there is no matrix here; save the whole output of `{dialect.command}`"
    raise InputError(Fault(file=file, message=message))


def _header(
    lines: Sequence[LineWords], start: int, dialect: Dialect, *, file: str
) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Column names, headings behind them, and the position of the first row."""
    words: list[str] = list(lines[start].words)
    at = start + 1
    while at < len(lines) and lines[at].words and not _starts_row(lines[at], words, dialect):
        if len(words) > _MAX_COLUMNS:
            break
        words += lines[at].words
        at += 1
    number = lines[start].number
    first_words = {heading.split()[0] for heading in dialect.headings}
    size = next((k for k, word in enumerate(words) if word in first_words), len(words))
    columns, rest = tuple(words[:size]), "".join(words[size:])
    headings = []
    while rest:
        # Compared without spaces: a terminal breaks a long line within a word.
        squeezed = {each.replace(" ", ""): each for each in dialect.headings}
        found = next((each for each in squeezed if rest.startswith(each)), None)
        if found is None:
            rest = " ".join(words[size:])
            message = (
                f"{rest[:60]!a} after the columns; {', '.join(dialect.headings)} are known there. "
                f"Was the line of column names cut off?"
            )
            raise InputError(Fault(file=file, line=number, message=message))
        headings.append(squeezed[found])
        rest = rest[len(found) :]
    message = _column_fault(columns)
    if message:
        raise InputError(Fault(file=file, line=number, message=message))
    return columns, tuple(headings), at


def _column_fault(columns: tuple[str, ...]) -> str:
    """What is wrong with the names of the columns; empty where nothing is."""
    if len(columns) > _MAX_COLUMNS:
        return f"more than {_MAX_COLUMNS} columns; no node has so many devices and NICs"
    seen: set[str] = set()
    for name in columns:
        if not is_column_name(name):
            return f"{name[:60]!a} is no name of a device or NIC"
        if name in seen:
            return f"column {name!a} is there twice; keep one"
        seen.add(name)
    return ""


def is_column_name(word: str) -> bool:
    """Whether the word can be the name of a device or NIC."""
    return _COLUMN.fullmatch(word) is not None


def _starts_row(line: LineWords, names: Sequence[str], dialect: Dialect) -> bool:
    """Whether the line is a row: a column's name and then a path."""
    words = line.words
    return len(words) > 1 and words[0] in names and _begins_path(words[1], dialect)


def _rows(
    lines: Sequence[LineWords],
    at: int,
    columns: tuple[str, ...],
    headings: tuple[str, ...],
    dialect: Dialect,
    *,
    file: str,
) -> tuple[list[Row], list[Fault], int]:
    """Every row, every fault of a row, and the position below the last row."""
    rows: list[Row] = []
    faults: list[Fault] = []
    for name in columns:
        if at >= len(lines) or not lines[at].words or lines[at].words[0] != name:
            # An empty last line is no line of the file: the end is the last one with words.
            last = max((line.number for line in lines[:at] if line.words), default=1)
            number = lines[at].number if at < len(lines) and lines[at].words else last
            message = (
                f"the row of {name[:60]} should follow here, row {len(rows) + 1} of "
                f"{len(columns)}; the output was cut off or lines were lost: save it again"
            )
            faults.append(Fault(file=file, line=number, message=message))
            break
        number = lines[at].number
        cells = list(lines[at].words[1:])
        at += 1
        while at < len(lines) and _continues(lines[at], columns, cells, headings):
            cells += lines[at].words
            at += 1
        cells = split_cells(cells, len(columns), dialect.label, SELF)
        labels, affinities = tuple(cells[: len(columns)]), _affinities(cells[len(columns) :])
        rows.append(Row(line=number, name=name, labels=labels, affinities=affinities))
        faults += _row_faults(rows[-1], columns, headings, dialect, file=file)
    return rows, faults, at


def _continues(
    line: LineWords, columns: tuple[str, ...], cells: Sequence[str], headings: tuple[str, ...]
) -> bool:
    """Whether a terminal broke the row above in front of this line."""
    if not line.words or line.words[0] in columns or line.words[0].startswith("Legend"):
        return False
    return len(cells) < len(columns) + len(headings)


def _affinities(cells: Sequence[str]) -> tuple[str, ...]:
    """The cells behind the labels; a list of cores with spaces after its commas is one cell."""
    joined: list[str] = []
    for cell in cells:
        if joined and joined[-1].endswith(","):
            joined[-1] += cell
        elif cell.endswith("N/A") and cell[:-3].isdecimal():
            joined += [cell[:-3], "N/A"]  # a terminal swallowed the tabs between the two
        else:
            joined.append(cell)
    return tuple(joined)


def _row_faults(
    row: Row, columns: tuple[str, ...], headings: tuple[str, ...], dialect: Dialect, *, file: str
) -> list[Fault]:
    def fault(message: str) -> Fault:
        return Fault(file=file, line=row.line, field=row.name, message=message)

    if len(row.labels) < len(columns):
        found = f"{len(row.labels)} paths for {len(columns)} columns"
        return [fault(f"{found}; the line was cut off: save the output again")]
    faults = []
    for column, label in zip(columns, row.labels, strict=True):
        if (label == SELF) != (column == row.name):
            wanted = "X stands" if label == SELF else "X should stand"
            where = f"{label[:20]!a} in column {column}"
            faults.append(fault(f"{where}; {wanted} where a name meets itself: a cell was lost"))
        elif not _is_label(label, dialect):
            faults.append(
                fault(f"{label[:20]!a} in column {column} is no path; known: {dialect.labels}")
            )
    if len(row.affinities) > len(headings):
        extra = row.affinities[len(headings)]
        faults.append(fault(f"{extra[:20]!a} after the last column; a column has no name"))
    return faults[:2]  # a lost cell shifts the whole row


def _asymmetries(columns: tuple[str, ...], rows: Sequence[Row], *, file: str) -> list[Fault]:
    faults = []
    for low in range(len(columns)):
        for high in range(low + 1, len(columns)):
            there, back = rows[low].labels[high], rows[high].labels[low]
            if there != back:
                message = (
                    f"{columns[high]} to {columns[low]} is {back}, but line {rows[low].line} says "
                    f"{there} for {columns[low]} to {columns[high]}; save the output again, and if "
                    "it stays so, a link works in one direction only"
                )
                faults.append(Fault(file=file, line=rows[high].line, message=message))
    return faults
