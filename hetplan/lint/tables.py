"""Tables of measurements (CSV) to rows, each kind recognised by its header.

Columns that a kind does not need are passed over; a cell that must be a number and is not is an
error with its line. Units follow the column's name: `_us` microseconds, `_mb` MiB, `_GBps` 1e9
bytes per second.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hetplan.errors import Fault, InputError
from hetplan.lint.rows import (
    CollectiveRow,
    EfficiencyRow,
    Inputs,
    LayerRow,
    Place,
)

MAX_FAULTS = 20
"""Faults of one file that are reported; a file with more is of another kind, or broken."""
MAX_NUMBER = 1e30
"""A cell above it is no measurement: bytes, seconds and rates all stay far below."""
MICROSECOND = 1e-6
MIB = float(2**20)
MAX_CELL = 1 << 20  # csv's own limit is 128 KiB; notes are long, a megabyte is a wrong file


@dataclass(slots=True)
class Cells:
    """One row of a table, read by column name; wrong cells are collected, not raised."""

    file: str
    line: int
    values: Mapping[str, str]
    faults: list[Fault] = field(default_factory=list)

    def text(self, column: str) -> str:
        """The cell; empty where the column is missing."""
        return (self.values.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A finite number; None where the cell is empty (or wrong, which is noted)."""
        text = self.text(column)
        if not text or text.lower() in ("nan", "none"):
            return None
        try:
            value = float(text)
        except ValueError:
            self._wrong(column, f"found {text[:60]!a}; write a number")
            return None
        if not math.isfinite(value) or abs(value) > MAX_NUMBER:
            self._wrong(column, f"found {text[:60]!a}; write a finite number")
            return None
        return value

    def count(self, column: str) -> int | None:
        """A whole number of at least 1; None where the cell is empty (or wrong)."""
        value = self.number(column)
        if value is None:
            return None
        if value < 1 or value != int(value):
            self._wrong(column, f"found {value:g}; write a whole number of at least 1")
            return None
        return int(value)

    def _wrong(self, column: str, message: str) -> None:
        self.faults.append(Fault(file=self.file, line=self.line, field=column, message=message))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKind:
    """One kind of table."""

    title: str
    columns: frozenset[str]
    """Columns that it must have."""
    read: Callable[[Iterator[Cells]], Inputs]


def _layer_rows(rows: Iterator[Cells]) -> Inputs:
    found = []
    for cells in rows:
        forward, microbatch = cells.number("fwd_us"), cells.count("mbs")
        if forward is None or microbatch is None:
            continue  # forward-only totals of several layers: nothing to compare them with
        backward = cells.number("bwd_us")
        weights, activations = cells.number("weights_mb"), cells.number("act_mb")
        layer = cells.number("layer")
        found.append(
            LayerRow(
                place=Place(file=cells.file, line=cells.line),
                source=cells.text("source"),
                precision=cells.text("dtype"),
                device=cells.text("gpu"),
                model=cells.text("model"),
                operation=cells.text("op"),
                layer=None if layer is None else int(layer),
                microbatch_size=microbatch,
                tp=cells.count("tp") or 1,
                variant=cells.text("algo"),
                forward_seconds=forward * MICROSECOND,
                backward_seconds=None if backward is None else backward * MICROSECOND,
                weight_bytes=None if weights is None else weights * MIB,
                activation_bytes=None if activations is None else activations * MIB,
            )
        )
    return Inputs(layers=tuple(found))


def _collective_rows(rows: Iterator[Cells]) -> Inputs:
    found = []
    for cells in rows:
        microseconds, bandwidth = cells.number("time_us"), cells.number("busbw_GBps")
        found.append(
            CollectiveRow(
                place=Place(file=cells.file, line=cells.line),
                source=cells.text("source"),
                device=cells.text("gpu"),
                operation=cells.text("op"),
                ranks=cells.text("ranks"),
                scope=cells.text("scope"),
                size_bytes=cells.number("size_bytes"),
                seconds=None if microseconds is None else microseconds * MICROSECOND,
                bus_bytes_per_second=None if bandwidth is None else bandwidth * 1e9,
            )
        )
    return Inputs(collectives=tuple(found))


def _efficiency_rows(rows: Iterator[Cells]) -> Inputs:
    found = []
    for cells in rows:
        efficiency, peak = cells.number("efficiency"), cells.number("peak_tflops")
        if efficiency is None:
            continue
        found.append(
            EfficiencyRow(
                place=Place(file=cells.file, line=cells.line),
                source=cells.text("source"),
                device=cells.text("gpu"),
                operation=cells.text("op"),
                shape=cells.text("shape"),
                efficiency=efficiency,
                peak_flops_per_second=None if peak is None else peak * 1e12,
            )
        )
    return Inputs(efficiencies=tuple(found))


TABLES = (
    TableKind(
        title="layer or operator times",
        columns=frozenset({"gpu", "model", "op", "mbs", "tp", "fwd_us", "bwd_us"}),
        read=_layer_rows,
    ),
    TableKind(
        title="collectives by size",
        columns=frozenset({"gpu", "op", "ranks", "size_bytes", "time_us", "busbw_GBps"}),
        read=_collective_rows,
    ),
    TableKind(
        title="efficiency by shape",
        columns=frozenset({"gpu", "op", "shape", "efficiency"}),
        read=_efficiency_rows,
    ),
)


def table_kind(header: str) -> TableKind | None:
    """The kind of table that has such a first line; None where lint knows none."""
    try:
        columns = next(csv.reader([header]), [])
    except csv.Error:
        return None
    return next((kind for kind in TABLES if kind.columns <= set(columns)), None)


def read_table(file: str, text: str, kind: TableKind) -> Inputs:
    """The rows of the table; an InputError that lists the cells that are wrong."""
    faults: list[Fault] = []
    material = kind.read(_rows(file, text, faults))
    if faults:
        raise InputError(*faults[:MAX_FAULTS])
    return material


def _rows(file: str, text: str, faults: list[Fault]) -> Iterator[Cells]:
    lines = csv.reader(io.StringIO(text, newline=""))
    previous = csv.field_size_limit(MAX_CELL)
    try:
        names = next(lines, [])
        for values in lines:
            if not values:
                continue
            if len(values) != len(names):
                message = f"found {len(values)} columns where the header has {len(names)}"
                faults.append(Fault(file=file, line=lines.line_num, message=message))
                continue
            yield Cells(
                file=file,
                line=lines.line_num,
                values=dict(zip(names, values, strict=True)),
                faults=faults,
            )
    except csv.Error as error:
        faults.append(Fault(file=file, line=lines.line_num, message=f"not CSV: {error}"))
    finally:
        csv.field_size_limit(previous)
