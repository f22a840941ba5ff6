"""`hetplan fit`: measurements to a predictor, and how good it is on sizes it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, Stores, check_replaceable, emit, say, stores_to_read

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.predict.laws import FittedLaws, LayerLaw
    from hetplan.predict.operator.values import OperatorLaw

Out = Annotated[
    Path | None,
    typer.Option("--out", help="File for the predictor (JSON), for --predictor of other commands."),
]


def fit(store: Stores = None, out: Out = None, as_json: AsJson = False) -> None:
    """Fit a predictor to the measurements of a profile store.

    Prints, per device kind, layer (or class of operators) and phase, the error on whole sizes that
    the fit did not see, and the half-width of the 90 % interval that follows.
    """
    from hetplan.errors import InputError
    from hetplan.predict.fit import fit_stores, predictor_text, save_predictor
    from hetplan.predict.laws import SCHEMA

    replacing = "" if out is None else check_replaceable(out, SCHEMA, "predictor")
    folders = stores_to_read(store)
    predictor, digest = fit_stores(*folders)
    laws = predictor.laws
    if not laws.layers and not laws.links and not laws.operators:
        where = ", ".join(str(folder) for folder in folders) or "your own or the shipped store"
        raise InputError(
            f"there are no samples in {where}; measure some with `hetplan profile`, or plan "
            "without a fit, which uses datasheet figures"
        )
    if as_json:
        emit(predictor_text(predictor))
    else:
        _print_report(laws)
    if out is not None:
        save_predictor(predictor, out)
        say(f"wrote {out} (sha256 {digest[:12]}){replacing}")


def _print_report(laws: FittedLaws) -> None:
    from hetplan.reports.terminal import print_table

    if laws.layers:
        print_table(_layer_table(laws))
    if laws.operators:
        print_table(_operator_table(laws))
    if laws.links:
        print_table(_link_table(laws))
    for population in laws.populations:
        emit(f"used: {population}")
    for note in (*laws.notes, *_law_notes(laws)):
        emit(f"note: {note}")


def _layer_table(laws: FittedLaws) -> Table:
    from rich.table import Table

    table = Table(title="Layers: errors on sizes left out of the fit", title_justify="left")
    for name in ("device", "precision", "layer", "phase"):
        table.add_column(name)
    for name in ("rows", "left out", "mean", "median", "worst", "90 %"):
        table.add_column(name, justify="right")
    table.add_column("seconds =")
    for law in laws.layers:
        validation = law.validation
        table.add_row(
            law.device,
            law.precision,
            law.layer,
            law.phase,
            str(law.rows),
            f"{validation.folds} {validation.left_out}" if validation.left_out else "-",
            *_errors(validation.left_out, validation.mean, validation.median, validation.worst),
            _interval(law.log_halfwidth),
            _formula(law),
        )
    return table


def _operator_table(laws: FittedLaws) -> Table:
    from rich.table import Table

    from hetplan.units import format_seconds

    table = Table(title="Operators: errors on sizes left out of the fit", title_justify="left")
    for name in ("device", "precision", "operator", "pass"):
        table.add_column(name)
    for name in ("rows", "left out", "mean", "median", "worst", "90 %", "floor"):
        table.add_column(name, justify="right")
    table.add_column("seconds of one launch =")
    for law in laws.operators:
        validation = law.validation
        table.add_row(
            law.device,
            law.precision,
            law.operator,
            law.phase,
            str(law.rows),
            f"{validation.folds} {validation.left_out}" if validation.left_out else "-",
            *_errors(validation.left_out, validation.mean, validation.median, validation.worst),
            _interval(law.log_halfwidth),
            format_seconds(law.floor_seconds) if law.floor_seconds else "-",
            _operator_formula(law),
        )
    return table


def _link_table(laws: FittedLaws) -> Table:
    from rich.table import Table

    from hetplan.units import format_bytes, format_seconds

    table = Table(title="Links: errors on sizes left out of the table", title_justify="left")
    for name in ("link", "operation", "backend"):
        table.add_column(name)
    for name in ("ranks", "rows", "from", "to", "mean", "median", "worst", "90 %"):
        table.add_column(name, justify="right")
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
    from math import expm1

    return f"+{expm1(log_halfwidth):.1%}"


def _formula(law: LayerLaw) -> str:
    """`1.2e-05 s + 3.3e-15 s/flop * matrix_flops`; columns with coefficient zero are left out."""
    from hetplan.predict.layer.columns import COEFFICIENT_UNITS, Column

    units = dict(COEFFICIENT_UNITS)
    parts = []
    for term in law.terms:
        column = Column(term.column)
        if term.coefficient > 0:
            name = "" if column is Column.CONSTANT else f" * {column.value}"
            parts.append(f"{term.coefficient:.3g} {units[column]}{name}")
    return " + ".join(parts)


def _operator_formula(law: OperatorLaw) -> str:
    """As `_formula`; a learned residual by what leaving sizes out says of it."""
    from hetplan.predict.operator.values import OPERATOR_COEFFICIENT_UNITS, OperatorColumn

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
    """What single laws have to say, laws of a device or link that say the same in one line."""
    from hetplan.predict.laws import OWN_ROWS, LayerLaw

    said: dict[tuple[str, str], list[str]] = {}
    every: tuple[LayerLaw | OperatorLaw, ...] = (*laws.layers, *laws.operators)
    for law in every:
        notes = list(law.notes)
        if law.calibration != OWN_ROWS:
            notes.append(f"interval from {law.calibration}")
        for note in notes:
            what = law.layer if isinstance(law, LayerLaw) else law.operator
            said.setdefault((law.device, note), []).append(f"{what} {law.phase}")
    for link in laws.links:
        for table in link.tables:
            if table.calibration != OWN_ROWS:
                note = f"interval from {table.calibration}"
                said.setdefault((link.link, note), []).append(
                    f"{table.operation} of {table.group_size}"
                )
    return [f"{device} {', '.join(names)}: {note}" for (device, note), names in said.items()]
