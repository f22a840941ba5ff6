"""`hetplan doctor`: what this machine has and what hetplan can measure here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, Verbose, emit

if TYPE_CHECKING:
    from rich.table import Table

    from hetplan.cluster.devices import DeviceKind

KINDS_SCHEMA = "hetplan.device-kinds/3"


def doctor(
    kinds: Annotated[
        bool, typer.Option("--kinds", help="Print the device catalogue instead; asks no device.")
    ] = False,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Print what `node` of an island may be instead.")
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """What this machine has, what hetplan can measure here, and what is missing.

    Reads only. What is broken is reported, not an error.
    """
    if kinds:
        _print_kinds(verbose, as_json)
        return
    if nodes:
        _print_nodes(as_json)
        return
    import sys

    from hetplan.files.encoding import encode
    from hetplan.machine.host import Probe, run_program
    from hetplan.machine.look import look
    from hetplan.machine.report import DOCTOR_SCHEMA, screen

    catalogue, problems = _catalogue()
    probe = Probe(run=run_program)
    report = look(probe, kinds=catalogue, python=sys.executable, problems=problems)
    shown = encode(report, schema=DOCTOR_SCHEMA) if as_json else screen(report, verbose=verbose)
    emit(shown)


def _catalogue() -> tuple[tuple[DeviceKind, ...], list[str]]:
    """The device kinds, and what is wrong with the files: it must not keep the doctor away."""
    from hetplan.cluster.catalogue import load_catalogue
    from hetplan.errors import InputError
    from hetplan.files.shipped import shipped_folder

    problems: list[str] = []
    for folder in (None, shipped_folder("configs") / "devices"):
        try:
            return load_catalogue(folder), problems
        except InputError as error:
            problems += [f"device catalogue: {line}" for line in str(error).splitlines()[:3]]
    return (), problems


def _print_kinds(verbose: bool, as_json: bool) -> None:
    from hetplan.cluster.catalogue import load_catalogue
    from hetplan.cluster.devices import DeviceKinds
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import print_small, print_table

    catalogue = load_catalogue()
    if as_json:
        emit(encode(DeviceKinds(kinds=catalogue), schema=KINDS_SCHEMA))
    else:
        (print_table if verbose else print_small)(_kinds_table(catalogue, verbose))


def _print_nodes(as_json: bool) -> None:
    from rich.table import Table

    from hetplan.cluster.catalogue import load_catalogue
    from hetplan.cluster.templates import NODES_SCHEMA, NodeTemplates, node_templates
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import print_small

    templates = [*node_templates().values()]
    if as_json:
        emit(encode(NodeTemplates(nodes=templates), schema=NODES_SCHEMA))
        return
    kinds = {kind.kind: kind for kind in load_catalogue()}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("node", "devices", "device", "fabric", "GB/s", "NICs", "Gbit/s each"):
        table.add_column(name, no_wrap=True)
    for each in templates:
        table.add_row(
            each.node,
            str(each.devices),
            each.device,
            each.fabric,
            _number(each.bandwidth_bytes_per_second(kinds[each.device]) / 1e9),
            str(each.nics.per_node),
            _number(each.nics.bandwidth * 8 / 1e9),
        )
    print_small(table)


_SHORT_DTYPES = ("bfloat16", "float8")
"""Whose rates are shown without --verbose."""


def _kinds_table(catalogue: tuple[DeviceKind, ...], verbose: bool) -> Table:
    from rich.table import Table

    from hetplan.cluster.devices import DTYPES
    from hetplan.units import format_bytes

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kind", no_wrap=True)
    dtypes = DTYPES if verbose else _SHORT_DTYPES
    for name in (*dtypes, "memory", "TB/s", "link GB/s", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("torch", "collectives") if verbose else ():
        table.add_column(name, no_wrap=True)
    for kind in catalogue:
        rates = dict(kind.peak_flops_per_second)
        links = kind.scale_up
        table.add_row(
            kind.kind,
            *(_number(rates.get(dtype, 0.0) / 1e12) for dtype in dtypes),
            format_bytes(kind.memory_bytes) if kind.memory_bytes else "",
            _number(kind.memory_bandwidth_bytes_per_second / 1e12),
            _number(links.bandwidth_bytes_per_second / 1e9) if links else "",
            _number(kind.max_power_watts),
            *((kind.torch_device, kind.collectives) if verbose else ()),
        )
    return table


def _number(value: float) -> str:
    return f"{float(f'{value:.4g}'):g}" if value else ""
