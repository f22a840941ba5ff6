"""What `hetplan fit` prints: the error of every law on sizes left out of its fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape

from hetplan.predict.fit import FittedLaws
from hetplan.predict.law_parts import OWN_ROWS
from hetplan.predict.layer.values import LayerLaw
from hetplan.predict.link.shapes import SizeTable
from hetplan.predict.operator.values import (
    OperatorLaw,
)
from hetplan.reports.terminal import (
    folded,
    print_small,
    small_table,
    text_width,
)


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
    """One line for each law of layers, operators and links, and what to know about them."""
    table = small_table("device or link | law | >rows | >mean | >median | >worst | >90 %")
    own: list[tuple[str, str, LayerLaw | OperatorLaw | SizeTable]] = [
        (law.device, f"{law.layer} {law.phase}, {law.precision}", law) for law in laws.layers
    ]
    own += [
        (law.device, f"{law.operator} {law.phase}, {law.precision}", law) for law in laws.operators
    ]
    own += [
        (link.link, f"{law.operation} among {law.group_size}, {law.backend}", law)
        for link in laws.links
        for law in link.tables
    ]
    for name, what, law in own:
        found = law.validation
        errors = (found.mean, found.median, found.worst)
        table.add_row(
            escape(name),
            escape(what),
            f"{law.rows:,}",
            *(f"{error:.1%}" if found.left_out else "-" for error in errors),
            f"+{math.expm1(law.log_halfwidth):.1%}",
        )
    print_small(table)
    lines = ["mean, median and worst: errors on sizes left out of the fit"]
    lines += [f"used: {population}" for population in laws.populations]
    lines += [f"note: {note}" for note in (*laws.notes, *_law_notes(laws))]
    for line in folded(lines, text_width()):
        print(line, flush=True)


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
