"""How samples are shown on stdout: a table for people, or JSON."""

from __future__ import annotations

from rich import box
from rich.table import Table

from hetplan.cli.options import emit
from hetplan.files.encoding import encode
from hetplan.profiling.samples import ProfileSet
from hetplan.reports.terminal import print_table
from hetplan.units import format_bytes, format_seconds

SCHEMA = "hetplan.profiles/1"


def show_layers(result: ProfileSet, *, as_json: bool) -> None:
    """One row per layer sample."""
    if as_json:
        emit(encode(result, schema=SCHEMA))
        return
    table = new_table(
        "layer", "phase", "hidden", "seq", "microbatch", "tp", "layers", "precision",
        "median", "p10", "p90", "repeats", "outliers", "steady", "kept",
    )  # fmt: skip
    for sample in sorted(
        result.layers,
        key=lambda each: (each.layer, each.hidden_size, each.tp, each.microbatch_size),
    ):
        table.add_row(
            sample.layer,
            sample.phase,
            str(sample.hidden_size),
            str(sample.sequence_length),
            str(sample.microbatch_size),
            str(sample.tp),
            str(sample.copies),
            sample.precision,
            format_seconds(sample.median_seconds),
            format_seconds(sample.p10_seconds),
            format_seconds(sample.p90_seconds),
            str(sample.repeats),
            str(sample.outliers),
            "yes" if sample.steady else "no",
            format_bytes(sample.activation_bytes) if sample.activation_bytes else "",
        )
    print_table(table)


def show_operators(result: ProfileSet, *, as_json: bool) -> None:
    """One row per operator sample."""
    if as_json:
        emit(encode(result, schema=SCHEMA))
        return
    table = new_table(
        "operator", "pass", "precision", "batch", "m", "n", "k",
        "median", "p10", "p90", "repeats", "outliers",
    )  # fmt: skip
    for sample in sorted(result.operators, key=lambda each: each.shape):
        table.add_row(
            sample.operator,
            sample.phase,
            sample.precision,
            *(str(size) for size in (sample.batch, sample.m, sample.n, sample.k)),
            format_seconds(sample.median_seconds),
            format_seconds(sample.p10_seconds),
            format_seconds(sample.p90_seconds),
            str(sample.repeats),
            str(sample.outliers),
        )
    print_table(table)


def show_links(result: ProfileSet, *, as_json: bool) -> None:
    """One row per link sample."""
    if as_json:
        emit(encode(result, schema=SCHEMA))
        return
    table = new_table(
        "link", "operation", "backend", "ranks", "message",
        "median", "p10", "p90", "repeats", "outliers",
    )  # fmt: skip
    for sample in sorted(
        result.links, key=lambda each: (each.operation, each.group_size, each.message_bytes)
    ):
        table.add_row(
            sample.link,
            sample.operation,
            sample.backend,
            str(sample.group_size),
            format_bytes(sample.message_bytes),
            format_seconds(sample.median_seconds),
            format_seconds(sample.p10_seconds),
            format_seconds(sample.p90_seconds),
            str(sample.repeats),
            str(sample.outliers),
        )
    print_table(table)


def new_table(*columns: str) -> Table:
    """An empty table of these columns, which are never broken into lines."""
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
