"""What `hetplan fit` prints: the error of every law on sizes left out of its fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from hetplan.predict.fit import FittedLaws
from hetplan.predict.law_parts import OWN_ROWS
from hetplan.predict.layer.values import COEFFICIENT_UNITS, Column, LayerLaw
from hetplan.predict.link.shapes import SizeTable
from hetplan.predict.operator.values import (
    OPERATOR_COEFFICIENT_UNITS,
    OperatorColumn,
    OperatorLaw,
)
from hetplan.reports.terminal import (
    folded,
    new_table,
    print_small,
    print_table,
    small_table,
    text_width,
)
from hetplan.units import format_bytes, format_seconds

_FIT = ">rows | >left out | >mean | >median | >worst | >90 %"
_ERRORS = "errors on sizes left out of the fit"


def print_fit(laws: FittedLaws) -> None:
    """One line per device kind and precision, and per link: rows, errors, interval."""
    table = small_table("fitted | of | >rows | >median error | >90 % interval")
    groups: dict[tuple[str, str], list[LayerLaw | OperatorLaw | SizeTable]] = {}
    for law in laws.layers:
        groups.setdefault((law.device, f"layers, {law.precision}"), []).append(law)
    for operator in laws.operators:
        groups.setdefault((operator.device, f"operators, {operator.precision}"), []).append(
            operator
        )
    for link in laws.links:
        for each in link.tables:
            groups.setdefault((link.link, f"link, {each.backend}"), []).append(each)
    for (name, what), members in groups.items():
        errors = [law.validation.median for law in members if law.validation.left_out]
        wide = [math.expm1(law.log_halfwidth) for law in members]
        rows = sum(law.rows for law in members)
        table.add_row(escape(name), escape(what), f"{rows:,}", _span(errors), f"+{_span(wide)}")
    print_small(table)
    notes = len(laws.notes) + len(_law_notes(laws))
    lines = ["median error: least and most over the laws of a line, on sizes left out of their fit"]
    if notes:
        lines.append(f"{notes} note{'s' * (notes > 1)} on these laws, and each law: --verbose")
    for line in folded(lines, text_width()):
        print(line, flush=True)


def _span(parts: Sequence[float]) -> str:
    """`8 to 36%`; `-` where nothing was left out."""
    if not parts:
        return "-"
    least, most = (f"{100 * each:.0f}" for each in (min(parts), max(parts)))
    return f"{most}%" if least == most else f"{least} to {most}%"


def print_laws(laws: FittedLaws) -> None:
    """Tables of layers, operators and links, and what to know about them."""
    if laws.layers:
        print_table(layer_table(laws))
    if laws.operators:
        print_table(operator_table(laws))
    if laws.links:
        print_table(link_table(laws))
    for population in laws.populations:
        print(f"used: {population}", flush=True)
    for note in (*laws.notes, *_law_notes(laws)):
        print(f"note: {note}", flush=True)


def layer_table(laws: FittedLaws) -> Table:
    """One row per device kind, layer and phase."""
    columns = f"device | precision | layer | phase | {_FIT} | seconds ="
    table = new_table(columns, title=f"Layers: {_ERRORS}")
    for law in laws.layers:
        table.add_row(law.device, law.precision, law.layer, law.phase, *_fit(law), _formula(law))
    return table


def operator_table(laws: FittedLaws) -> Table:
    """One row per device kind, operator and pass."""
    columns = f"device | precision | operator | pass | {_FIT} | >floor | seconds of one launch ="
    table = new_table(columns, title=f"Operators: {_ERRORS}")
    for law in laws.operators:
        floor = format_seconds(law.floor_seconds) if law.floor_seconds else "-"
        table.add_row(
            law.device,
            law.precision,
            law.operator,
            law.phase,
            *_fit(law),
            floor,
            operator_formula(law),
        )
    return table


def _fit(law: LayerLaw | OperatorLaw) -> tuple[str, ...]:
    """Rows, what was left out, errors and interval."""
    validation = law.validation
    return (
        str(law.rows),
        f"{validation.folds} {validation.left_out}" if validation.left_out else "-",
        *_errors(validation.left_out, validation.mean, validation.median, validation.worst),
        _interval(law.log_halfwidth),
    )


def link_table(laws: FittedLaws) -> Table:
    """One row per link, operation and group size."""
    table = new_table(
        "link | operation | backend | >ranks | >rows | >from | >to | >mean | >median | "
        ">worst | >90 %",
        title="Links: errors on sizes left out of the table",
    )
    for link in laws.links:
        for law in link.tables:
            validation = law.validation
            ends = (
                f"{format_bytes(law.message_bytes[at])} {format_seconds(law.seconds[at])}"
                for at in (0, -1)
            )
            table.add_row(
                link.link,
                law.operation,
                law.backend,
                str(law.group_size),
                str(law.rows),
                *ends,
                *_errors(validation.left_out, validation.mean, validation.median, validation.worst),
                _interval(law.log_halfwidth),
            )
    return table


def _errors(left_out: str, *errors: float) -> tuple[str, ...]:
    return tuple(f"{error:.1%}" if left_out else "-" for error in errors)


def _interval(log_halfwidth: float) -> str:
    """`+4.1 %`: how far above the prediction the 90 % interval reaches."""
    return f"+{math.expm1(log_halfwidth):.1%}"


def _formula(law: LayerLaw) -> str:
    """`1.2e-05 s + 3.3e-15 s/flop * matrix_flops`; columns with coefficient zero are left out."""
    units = dict(COEFFICIENT_UNITS)
    parts = []
    for term in law.terms:
        column = Column(term.column)
        if term.coefficient > 0:
            name = "" if column is Column.CONSTANT else f" * {column.value}"
            parts.append(f"{term.coefficient:.3g} {units[column]}{name}")
    return " + ".join(parts)


def operator_formula(law: OperatorLaw) -> str:
    """As `_formula`; a learned residual by what leaving sizes out says of it."""
    units = dict(OPERATOR_COEFFICIENT_UNITS)
    parts = []
    for term in law.terms:
        column = OperatorColumn(term.column)
        if term.coefficient > 0:
            name = "" if column is OperatorColumn.LAUNCHES else f" * {column.value}"
            parts.append(f"{term.coefficient:.3g} {units[column]}{name}")
    text = " + ".join(parts)
    if law.residual is None:
        return text
    before, after = law.residual.error_before, law.residual.error_after
    return f"({text}) * learned residual ({before:.1%} to {after:.1%})"


def _law_notes(laws: FittedLaws) -> list[str]:
    """Notes on single laws; the same note on several laws of one device or link is one line."""
    subjects: dict[tuple[str, str], list[str]] = {}
    laws_with_notes: tuple[LayerLaw | OperatorLaw, ...] = (*laws.layers, *laws.operators)
    for law in laws_with_notes:
        notes = list(law.notes)
        if law.calibration != OWN_ROWS:
            notes.append(f"interval from {law.calibration}")
        for note in notes:
            what = law.layer if isinstance(law, LayerLaw) else law.operator
            subjects.setdefault((law.device, note), []).append(f"{what} {law.phase}")
    for link in laws.links:
        for table in link.tables:
            if table.calibration != OWN_ROWS:
                note = f"interval from {table.calibration}"
                subjects.setdefault((link.link, note), []).append(
                    f"{table.operation} of {table.group_size}"
                )
    return [f"{device} {', '.join(names)}: {note}" for (device, note), names in subjects.items()]
