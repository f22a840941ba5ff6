"""Rows of AIConfigurator's tables: columns by name, what the user asked for, sizes and seconds.

CSV with a header; latencies are milliseconds. A fault names its line and column.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetplan.cluster.catalogue import kind_called, load_catalogue, meant_kinds
from hetplan.errors import Fault, InputError
from hetplan.importers.lines import fault_at, finite_number, refuse_all, shown, whole_number
from hetplan.importers.records import ImportContext

_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its line, from 1, and its cells by column."""

    line: int
    cells: Mapping[str, str]


def header_of(text: str, file: str) -> list[str]:
    """The names of the columns; an InputError where two have the same."""
    names = [name.strip() for name in text.split("\n", 1)[0].split(",")]
    faults = [
        Fault(
            file=file,
            line=1,
            field=name,
            message=f"{count} columns have this name: rename or remove all but one",
        )
        for name, count in Counter(names).items()
        if name and count > 1
    ]
    refuse_all(faults)
    return names


def rows_of(text: str, file: str) -> Iterator[Row]:
    """Every row that is not empty; an InputError where one has other columns than the header."""
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = [name.strip() for name in next(reader, [])]
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                message = f"found {len(cells)} columns where the header has {len(header)}"
                raise fault_at(file, reader.line_num, message)
            named = zip(header, (cell.strip() for cell in cells), strict=True)
            yield Row(reader.line_num, dict(named))
    except csv.Error as error:
        raise fault_at(file, 1, f"is no CSV: {str(error)[:80]}") from error


def asked(rows: Sequence[Row], context: ImportContext) -> list[Row]:
    """Rows of the framework and the version that the user names."""
    kept = list(rows)
    for column, wanted in (("framework", context.framework), ("version", context.version)):
        if wanted is None:
            continue
        found = sorted({row.cells.get(column, "") for row in kept})
        kept = [row for row in kept if row.cells.get(column, "").lower() == wanted.lower()]
        if not kept:
            names = ", ".join(map(shown, found[:6]))
            message = f"no row is of {shown(wanted)}; there are {names}"
            raise fault_at(context.file, 1, message, column)
    return kept


def only_one(column: str, rows: Sequence[Row], context: ImportContext, mend: str) -> None:
    """Refuse rows of several devices or frameworks, whose times do not mix."""
    found: dict[str, int] = {}
    for row in rows:
        found.setdefault(row.cells.get(column, "").lower(), row.line)
    if len(found) > 1:
        names = ", ".join(map(shown, list(found)[:4]))
        message = f"rows of several {column}s, {names}: {mend}"
        raise fault_at(context.file, list(found.values())[1], message, column)


def told(rows: Sequence[Row], context: ImportContext) -> tuple[str, str, str]:
    """What the rows call the device, its kind (or that name), and what measured."""
    called = "".join(filter(str.isprintable, rows[0].cells.get("device", "")))
    versions = sorted({row.cells.get("version", "") for row in rows}, key=sortable)
    tool = f"{rows[0].cells.get('framework', '')} {versions[-1]}".strip()
    return called, context.device or _kind(called) or called, tool[:60]


def check_kind(device: str | None) -> None:
    """Refuse a kind of the catalogue that is cut short or misspelt: no plan would find its samples.

    Other names are of kinds in cluster files, and the store keeps their samples.
    """
    kinds = [each.kind for each in load_catalogue()]
    meant = meant_kinds(device, kinds) if device and device not in kinds else ()
    if meant:
        message = (
            f"unknown device kind {shown(device or '')}; nearest: {', '.join(meant)}; a kind of "
            "your own goes into a file of ~/.config/hetplan/devices (docs/device-kinds.md)"
        )
        raise InputError(Fault(field="--device", message=message))


def _kind(device: str) -> str:
    return kind_called(device, load_catalogue()) if device else ""


def counted(skipped: Counter[str], most: int = 20) -> tuple[str, ...]:
    """Lines for `Imported.skipped`, the most frequent first."""
    lines = [f"{count} rows: {reason}" for reason, count in skipped.most_common()]
    rest = sum(count for _, count in skipped.most_common()[most:])
    return (*lines[:most], *((f"{rest} rows of other names",) if rest else ()))


def size(row: Row, column: str, context: ImportContext, faults: list[Fault]) -> int:
    """The whole number of a column; a fault and 1 where there is none."""
    number = whole_number(row.cells[column])
    if number is None or not 1 <= number < 2**40:
        message = f"found {shown(row.cells[column])}; write a whole number of at least 1"
        faults.append(Fault(file=context.file, line=row.line, field=column, message=message))
        return 1
    return number


def seconds_of(row: Row, context: ImportContext, faults: list[Fault]) -> float:
    """The latency; a fault and 1 where there is none."""
    milliseconds = finite_number(row.cells["latency"])
    seconds = (milliseconds or 0.0) * 1e-3
    if not 1e-9 <= seconds <= _LONGEST_SECONDS:
        message = (
            f"found {shown(row.cells['latency'])}; a latency is milliseconds above 0: measure the "
            "row again, or remove it"
        )
        faults.append(Fault(file=context.file, line=row.line, field="latency", message=message))
        return 1.0
    return seconds


def was_sustained(row: Row, context: ImportContext, faults: list[Fault]) -> bool:
    """Whether power was measured, which the collector does in long runs; a fault for no power."""
    text = row.cells.get("power", "")
    watts = finite_number(text) if text else 0.0
    if watts is None or watts < 0:
        message = f"found {shown(text)}; write watts, or nothing or 0 where none were measured"
        faults.append(Fault(file=context.file, line=row.line, field="power", message=message))
    return bool(watts)


def sortable(text: str) -> tuple[object, ...]:
    """Sorts 1.10 after 1.9, and a candidate (1.3.0rc4) before its release."""
    rest = text.lstrip("v.0123456789")
    early = re.match(r"[._-]?(?:rc|a|b|dev)", rest) is not None
    return _numbers(text.removesuffix(rest)), not early, _numbers(rest)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in re.findall(r"[0-9]+", text)[:6])


def other_device(called: str, context: ImportContext) -> tuple[str, ...]:
    """A note where the user's kind is not the one that the rows name."""
    if not context.device or not called or _kind(called) == context.device:
        return ()
    return (f"the table says {shown(called)}; it is taken for {context.device}",)
