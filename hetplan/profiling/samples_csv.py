"""How samples stand in a CSV file: one row each, columns named like the fields of the value.

Numbers are written by repr, which is exact. A reader names file, line and column of every fault.
"""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hetplan.errors import Fault, InputError
from hetplan.profiling.samples import LayerSample, LinkSample

Sample = TypeVar("Sample", LayerSample, LinkSample)

_LOGGER = logging.getLogger(__name__)
_BOOLEANS = {"true": True, "false": False}
_TIMES = ("median_seconds", "p10_seconds", "p90_seconds")
# Counts of which there is at least one; the others may be zero.
_POSITIVE = ("repeats", "microbatch_size", "tp", "hidden_size", "sequence_length", "group_size")


def header(sample_type: type[LayerSample] | type[LinkSample]) -> str:
    """The first line of the file, without a line break."""
    return ",".join(field.name for field in fields(sample_type))


def row(sample: LayerSample | LinkSample) -> str:
    """The sample's line, without a line break."""
    values = (getattr(sample, field.name) for field in fields(sample))
    texts = [
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
        for value in values
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(texts)
    if "\n" in text.getvalue() or "\r" in text.getvalue():
        raise InputError(f"a sample's text has a line break: {text.getvalue()!r}")
    return text.getvalue()


def read_samples(path: Path, sample_type: type[Sample]) -> tuple[Sample, ...]:
    """Every sample of the file; an InputError that lists all faults.

    A last line without a line break was torn by a kill while it was written: it is dropped, with
    a warning in the log.
    """
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if torn := data[end:]:
        line = data.count(b"\n") + 1
        _LOGGER.warning("%s:%d: a torn last line was dropped: %r", path, line, torn[:60])
    try:
        whole = data[:end].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(Fault(file=str(path), message=f"is not UTF-8 text: {error}")) from error
    if not whole:
        raise InputError(Fault(file=str(path), line=1, message="the header line is missing"))
    lines = csv.reader(io.StringIO(whole))
    names = next(lines)
    _check_header(path, names, sample_type)
    samples, faults = [], []
    for cells in lines:
        if len(cells) != len(names):
            message = f"found {len(cells)} columns where the header has {len(names)}; mend the line"
            faults.append(Fault(file=str(path), line=lines.line_num, message=message))
            continue
        values, wrong = _read_row(
            path, lines.line_num, dict(zip(names, cells, strict=True)), sample_type
        )
        faults += wrong
        if not wrong:
            samples.append(sample_type(**values))
    if faults:
        raise InputError(*faults)
    return tuple(samples)


def _check_header(
    path: Path, names: list[str], sample_type: type[LayerSample] | type[LinkSample]
) -> None:
    wanted = [field.name for field in fields(sample_type)]
    faults = [
        Fault(file=str(path), line=1, field=name, message="the column is missing")
        for name in wanted
        if name not in names
    ]
    faults += [
        Fault(file=str(path), line=1, field=name, message=f"unknown column; {', '.join(wanted)}")
        for name in names
        if name not in wanted
    ]
    if len(set(names)) != len(names):
        faults.append(Fault(file=str(path), line=1, message="a column appears twice"))
    if faults:
        raise InputError(*faults)


def _read_row(
    path: Path,
    line: int,
    cells: dict[str, str],
    sample_type: type[LayerSample] | type[LinkSample],
) -> tuple[dict[str, Any], list[Fault]]:
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, type_ in get_type_hints(sample_type).items():
        value, message = _read_cell(name, cells[name], type_)
        values[name] = value
        if message:
            faults.append(Fault(file=str(path), line=line, field=name, message=message))
    return values, faults


def _read_cell(name: str, text: str, type_: Callable[[str], object]) -> tuple[object, str]:
    """The value, and what is wrong with it (empty: nothing)."""
    if type_ is str:
        return text, "" if text else "found nothing; a name must stand here"
    if type_ is bool:
        return _BOOLEANS.get(text), "" if text in _BOOLEANS else f"found {text!r}; true or false"
    try:
        value = type_(text)
    except ValueError:
        wanted = "a whole number" if type_ is int else "a number"
        return None, f"found {text!r}; {wanted} must stand here"
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None, f"found {text!r}; the number must be finite and not negative"
    if not value and name in (*_TIMES, *_POSITIVE):
        return None, f"found {text!r}; the number must be above 0"
    return value, ""
