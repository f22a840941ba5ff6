"""`hetplan import`: another tool's output as hetplan's records, into a store or a cluster file.

The records are shown by `import_tables`, the cluster file is drafted by `import_draft`, both beside
this module.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit, say
from hetplan.importers.kinds import KINDS, ImporterKind

if TYPE_CHECKING:
    from hetplan.cluster.devices import DeviceKind
    from hetplan.errors import Fault
    from hetplan.importers.records import ImportContext, Imported
    from hetplan.importers.storing import ImportFacts

_STDIN = Path("-")

_ALL_KINDS = tuple((each.kind, each.title) for each in KINDS)
_WIDTH = max(len(kind) for kind, _ in _ALL_KINDS)
# click fills the lines of a paragraph unless \b stands in front of it.
KINDS_HELP = "Kinds:\n\n\b\n" + "\n".join(
    f"{kind.ljust(_WIDTH)}  {title}" for kind, title in _ALL_KINDS
)
"""The list below the options of `hetplan import --help`."""


def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What wrote the files; see below.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Its outputs; - is standard input.")
    ],
    link: Annotated[
        str | None, typer.Option(help="Name that link samples get; cluster files use it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device kind that was measured, or of the drafted island.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model whose layers were measured.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision that was measured: float32, bfloat16, float16.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length that was measured.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Profile store to add to. Default: your own.")
    ] = None,
    measured_on: Annotated[
        str | None,
        typer.Option(help="Day of the measurement, as in 2026-11-20. Default: of the file."),
    ] = None,
    driver: Annotated[
        str | None, typer.Option(help="Driver and library versions of the measurement.")
    ] = None,
    clocks: Annotated[
        str | None, typer.Option(help="Clock and power settings that somebody chose.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Add samples that the store already has once more.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what was read; write nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File for the records as JSON.")] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Cluster file to draft, from a topology or a list of hosts."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write --draft and --out over files that exist.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Draft: name of the cluster. Default: of its file.")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]NAME of the region. Default: here."),
    ] = None,
    island: Annotated[
        str | None,
        typer.Option(help="Draft: name of the island. Default: its device kind."),
    ] = None,
    type_: Annotated[
        list[str] | None,
        typer.Option(
            "--type", help="Draft: TYPE=KIND, device kind of hosts with type=TYPE; an island each."
        ),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(help="Draft: list of the hosts (hostfile or Slurm)."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Draft: number of nodes like this one.")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(help="Draft: devices of one node, where no file says it.")
    ] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]FILE, a driver's topology of one of its nodes."),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]SIZE, memory of one device that a job may use."),
    ] = None,
    intra_samples: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]NAME of link samples inside a node."),
    ] = None,
    intra_bandwidth: Annotated[
        list[str] | None, typer.Option(help='Draft: inside a node, as in "300 GB/s".')
    ] = None,
    intra_latency: Annotated[
        list[str] | None, typer.Option(help='Draft: inside a node, one way, as in "3 us".')
    ] = None,
    inter_samples: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]NAME of link samples between nodes."),
    ] = None,
    inter_node: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]FILE of perftest or iperf3 between two nodes."),
    ] = None,
    inter_bandwidth: Annotated[
        list[str] | None,
        typer.Option(help="Draft: between nodes, one device's share of its node's cards."),
    ] = None,
    inter_latency: Annotated[
        list[str] | None, typer.Option(help="Draft: between nodes, one way.")
    ] = None,
    nics_per_node: Annotated[
        list[str] | None,
        typer.Option(help="Draft: [ISLAND=]N cards of a node, where no topology lists them."),
    ] = None,
    nic_bandwidth: Annotated[
        list[str] | None,
        typer.Option(help='Draft: [ISLAND=]of one card, as in "200 Gbit/s".'),
    ] = None,
    across: Annotated[
        list[str] | None,
        typer.Option(help="Draft: FILE of perftest or iperf3 between two islands."),
    ] = None,
    across_samples: Annotated[
        str | None, typer.Option(help="Draft: NAME of link samples between islands.")
    ] = None,
    across_bandwidth: Annotated[
        str | None, typer.Option(help="Draft: between islands, what one device can count on.")
    ] = None,
    across_shared: Annotated[
        str | None, typer.Option(help="Draft: between islands, what all that send share.")
    ] = None,
    across_latency: Annotated[
        str | None, typer.Option(help="Draft: between islands, one way.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the output of another tool: measurements into the store, topologies into a cluster file.

    Measurements (links, layers) are added to the profile store; what is already there is skipped.
    Topologies, hosts, paths and device kinds are shown, and with --draft become a cluster file.
    """
    from hetplan.cli.import_draft import DraftRequest, write_draft
    from hetplan.importers.open import importer_kind

    importer = importer_kind(kind)
    request = DraftRequest(
        draft=draft, force=force, name=name, region=tuple(region or ()), island=island,
        device=device,
        types=tuple(type_ or ()), hosts=hosts, nodes=nodes, devices_per_node=devices_per_node,
        topology=tuple(topology or ()), memory=tuple(memory or ()), store=store,
        intra_samples=tuple(intra_samples or ()), intra_bandwidth=tuple(intra_bandwidth or ()),
        intra_latency=tuple(intra_latency or ()), inter_samples=tuple(inter_samples or ()),
        inter_node=tuple(inter_node or ()), inter_bandwidth=tuple(inter_bandwidth or ()),
        inter_latency=tuple(inter_latency or ()), nics_per_node=tuple(nics_per_node or ()),
        across=tuple(across or ()), across_samples=across_samples,
        across_bandwidth=across_bandwidth, nic_bandwidth=tuple(nic_bandwidth or ()),
        across_shared=across_shared, across_latency=across_latency,
    )  # fmt: skip
    request.check_use()
    check_new(out, force=force)
    context = _context(link, device, model, precision, seq)
    imported = read_all(importer, files, context)
    if draft is not None:
        write_draft(request, files, imported, dry_run=dry_run, as_json=as_json)
        _write_records(imported, out)
        return
    facts = _facts(files, imported, device, measured_on, driver, clocks) if not dry_run else []
    _show(imported, as_json=as_json)
    _write_records(imported, out)
    for path, each, fact in zip(files, imported, facts, strict=False):
        if fact is not None:
            _store(path, each, fact, store, again=again)


def _context(
    link: str | None,
    device: str | None,
    model: Path | None,
    precision: str | None,
    seq: int | None,
) -> ImportContext:
    """What the options say about every file; `file` is filled in per file."""
    from hetplan.errors import Fault, InputError
    from hetplan.importers.open import known_precision
    from hetplan.importers.records import ImportContext
    from hetplan.model.load import load_model

    if seq is not None and seq < 1:
        raise InputError(Fault(field="--seq", message=f"{seq}; a length is at least 1"))
    return ImportContext(
        file="",
        link=link,
        device=device,
        model=None if model is None else load_model(model),
        precision=None if precision is None else known_precision(precision),
        sequence_length=seq,
    )


def read_all(importer: ImporterKind, files: list[Path], context: ImportContext) -> list[Imported]:
    """The records of every file; one InputError with the faults of all of them."""
    from hetplan.errors import InputError
    from hetplan.importers.open import check_context, read_with

    if files.count(_STDIN) > 1:
        raise InputError("- (standard input) is named twice; it can be read once")
    check_context(importer, context)
    imported: list[Imported] = []
    faults: list[Fault] = []
    for path in files:
        shown = "standard input" if path == _STDIN else str(path)
        try:
            imported.append(read_with(importer, _text(path, shown), replace(context, file=shown)))
        except InputError as error:
            faults += [_with_option(fault) for fault in error.faults]
    if faults:
        raise InputError(*faults)
    return imported


def _with_option(fault: Fault) -> Fault:
    """A fault of what the options say, with the option: some files need more than others."""
    from hetplan.importers.open import NEEDED

    if fault.line or fault.field not in NEEDED:
        return fault
    option, what = NEEDED[fault.field]
    return replace(fault, field="", message=f"{fault.message} ({option}: {what})")


def _text(path: Path, shown: str) -> str:
    from hetplan.files.reading import read_text, text_of

    return text_of(shown, sys.stdin.buffer.read()) if path == _STDIN else read_text(path)


def check_new(path: Path | None, *, force: bool) -> None:
    """An InputError where the file is there and must not be written over, or cannot be written."""
    from hetplan.errors import InputError
    from hetplan.files.writing import check_writable

    if path is None:
        return
    if path.exists() and not force:
        raise InputError(f"{path} is there already; give another name, or --force to replace it")
    check_writable(path)


def _write_records(imported: list[Imported], out: Path | None) -> None:
    from hetplan.files.writing import write_atomically

    if out is not None:
        write_atomically(out, _json(imported))
        say(f"wrote {out}")


def _json(imported: list[Imported]) -> str:
    """One record set as an object, several as a list of them."""
    from hetplan.files.encoding import encode
    from hetplan.importers.records import IMPORT_SCHEMA

    texts = [encode(each, schema=IMPORT_SCHEMA) for each in imported]
    return texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "]\n"


def _show(imported: list[Imported], *, as_json: bool) -> None:
    if as_json:
        emit(_json(imported))
        return
    from hetplan.cli.import_tables import show_all

    if imported:
        show_all(imported)


def _facts(
    files: list[Path],
    imported: list[Imported],
    device: str | None,
    measured_on: str | None,
    driver: str | None,
    clocks: str | None,
) -> list[ImportFacts | None]:
    """What the store must know of every file with samples; None where a file has none."""
    return [
        _facts_of(path, each, device, measured_on, driver, clocks)
        if each.links or each.layers or each.operators
        else None
        for path, each in zip(files, imported, strict=True)
    ]


def _facts_of(
    path: Path,
    imported: Imported,
    device: str | None,
    measured_on: str | None,
    driver: str | None,
    clocks: str | None,
) -> ImportFacts:
    from hetplan.cluster.catalogue import load_catalogue, nearest_kinds
    from hetplan.importers.storing import ImportFacts

    catalogue = {kind.kind: kind for kind in load_catalogue()}
    device = device or _named_device(path, imported, tuple(catalogue.values()))
    known = catalogue.get(device)
    if known is None:
        near = ", ".join(nearest_kinds(device, catalogue))
        hint = f" (nearest: {near})" if near else ""
        say(
            f"note: {device} is no kind of the catalogue{hint}; plans use these samples where a "
            "cluster file calls its devices the same"
        )
    return ImportFacts(
        device=device,
        backend=known.torch_device if known is not None and known.torch_device else "unknown",
        measured_on=measured_on or _day_of(path),
        command=f"hetplan import {imported.kind} {path.name}",
        driver=driver or "",
        clocks=clocks or "",
    )


def _named_device(path: Path, imported: Imported, catalogue: tuple[DeviceKind, ...]) -> str:
    """The device kind that the file itself names; an InputError where it names none."""
    from hetplan.cluster.catalogue import kind_called
    from hetplan.errors import Fault, InputError

    called = imported.device_name
    found = kind_called(called, catalogue) if called else ""
    devices = [*(each.device for each in imported.layers), *(o.device for o in imported.operators)]
    if found or devices:
        return found or devices[0]
    says = f" (the file says {called[:60]!a})" if called else ""
    raise InputError(
        Fault(
            file=str(path),
            message=f"whose link is it? give the device kind of its ends{says} with "
            "--device, as in nvidia-a100-80gb-sxm; --dry-run only shows what was read",
        )
    )


def _day_of(path: Path) -> str:
    """The day of the file's last change; today for standard input."""
    if path == _STDIN:
        return date.today().isoformat()
    return datetime.fromtimestamp(os.stat(path).st_mtime, tz=UTC).date().isoformat()


def _store(
    path: Path, imported: Imported, facts: ImportFacts, store: Path | None, *, again: bool
) -> None:
    from hetplan.files.shipped import default_store
    from hetplan.importers.storing import store_imported

    folder = store or default_store()
    stored = store_imported(imported, folder, facts, again=again)
    added = stored.links_added + stored.layers_added + stored.operators_added
    there = stored.links_there + stored.layers_there + stored.operators_there
    skipped = f"; {there} were there already (--again adds them once more)" if there else ""
    say(f"{path}: {added} samples added to {folder}, measured on {facts.measured_on}{skipped}")


import_.__doc__ = f"{inspect.cleandoc(import_.__doc__ or '')}\n\n{KINDS_HELP}"
