"""`hetplan import`: what other tools printed, as samples, figures or a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.import_launch import launch
from hetplan.cli.options import AsJson, emit, say
from hetplan.files.writing import check_new, write_atomically

if TYPE_CHECKING:
    from hetplan.errors import Fault
    from hetplan.importers.records import ImportContext, Imported
    from hetplan.importers.table import Gives
    from hetplan.profiling.samples import Provenance

app = typer.Typer(
    help="Read what other tools printed; the format is detected.", no_args_is_help=True
)

MEASUREMENT, WRITING = "The measurement", "Writing"

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Outputs of the tools; - is standard input."),
]
Kind = Annotated[
    str | None,
    typer.Option("--kind", metavar="KIND", help="What wrote the files, if it is not detected."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File for the records as JSON.", rich_help_panel=WRITING),
]


@app.command(short_help="Add measured times to the profile store.")
def samples(
    files: Files,
    link: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Link of the samples. Default: the file's name."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="KIND", help="Device kind that was measured.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Profile store. Default: your own.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Add samples that are there already.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what was read; store nothing.")
    ] = False,
    measured_on: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Default: the file's date.", rich_help_panel=MEASUREMENT),
    ] = None,
    driver: Annotated[
        str, typer.Option(help="Driver and library versions.", rich_help_panel=MEASUREMENT)
    ] = "",
    clocks: Annotated[
        str, typer.Option(help="Clock and power settings.", rich_help_panel=MEASUREMENT)
    ] = "",
    framework: Annotated[
        str | None,
        typer.Option(help="Rows of this framework only.", rich_help_panel=MEASUREMENT),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="Rows of this version only.", rich_help_panel=MEASUREMENT),
    ] = None,
    kind: Kind = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Add times of collectives, sends and products to the profile store.

    Read are nccl-tests, rccl-tests, and AIConfigurator's gemm_perf.txt and nccl_perf.txt.
    """
    from hetplan.errors import InputError
    from hetplan.files.shipped import default_store
    from hetplan.importers.records import ImportContext
    from hetplan.importers.storing import import_provenance, store_files
    from hetplan.importers.table import Gives

    said = ImportContext(file="", link=link, device=device, framework=framework, version=version)
    imported = _read_all(files, (Gives.SAMPLES,), kind, said)
    stored = [
        (path, each)
        for path, each in zip(files, imported, strict=True)
        if each.links or each.operator_samples
    ]
    provenances: list[Provenance] = []
    faults: list[Fault] = []
    for path, each in stored if not dry_run else ():
        try:
            provenances.append(
                import_provenance(
                    path,
                    each,
                    device=device,
                    measured_on=measured_on,
                    driver=driver,
                    clocks=clocks,
                )
            )
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    _show(imported, as_json=as_json, out=out)
    if not dry_run:
        paths, records = [path for path, _ in stored], [each for _, each in stored]
        for line in store_files(paths, records, provenances, store or default_store(), again=again):
            say(line)


@app.command(short_help="Show what perftest or iperf3 measured.")
def links(files: Files, kind: Kind = None, out: Out = None, as_json: AsJson = False) -> None:
    """Show bandwidth and latency between two hosts (perftest, iperf3)."""
    from hetplan.importers.table import Gives

    _show(_read_all(files, (Gives.LINKS,), kind), as_json=as_json, out=out)


@app.command(short_help="Show a node's parts, or a list of hosts.")
def topology(files: Files, kind: Kind = None, out: Out = None, as_json: AsJson = False) -> None:
    """Show the parts of a node (nvidia-smi, rocm-smi, npu-smi), or a list of hosts."""
    from hetplan.importers.table import Gives

    imported = _read_all(files, (Gives.TOPOLOGY, Gives.HOSTS), kind)
    _show(imported, as_json=as_json, out=out)


@app.command(short_help="Show the steps of a training log.")
def log(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Log files of one run.")],
    trainer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose log it is. Default: detected.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the steps of a training log (Megatron-LM, NeMo, torchtitan)."""
    from hetplan.cli.import_tables import log_table
    from hetplan.files.encoding import encode
    from hetplan.reports.terminal import print_small
    from hetplan.trainers.read_log import read_training_log

    found = read_training_log(files, trainer)
    if as_json:
        emit(encode(found, schema="hetplan.training-log/1"))
        return
    print_small(log_table(found))
    for text in found.notes:
        emit(f"note: {text}")


app.command("launch", short_help="Price a trainer's launch as a plan.")(launch)


def _read_all(
    files: list[Path],
    gives: tuple[Gives, ...],
    kind: str | None,
    said: ImportContext | None = None,
) -> list[Imported]:
    """The records of every file; one InputError with the faults of all of them."""
    from hetplan.errors import InputError
    from hetplan.files.reading import read_bytes
    from hetplan.importers.table import import_text, output_text

    if files.count(Path("-")) > 1:
        raise InputError("- (standard input) is named twice; it can be read once")
    imported: list[Imported] = []
    faults: list[Fault] = []
    for path in files:
        is_stdin = path == Path("-")
        name = "standard input" if is_stdin else str(path)
        try:
            text = output_text(name, sys.stdin.buffer.read() if is_stdin else read_bytes(path))
            imported.append(import_text(text, name, kind=kind, said=said, gives=gives))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    return imported


def _show(imported: list[Imported], *, as_json: bool, out: Path | None) -> None:
    from hetplan.files.encoding import encode
    from hetplan.importers.records import IMPORT_SCHEMA

    check_new(out, force=False)
    texts = [encode(each, schema=IMPORT_SCHEMA) for each in imported]
    text = texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "]\n"
    if as_json:
        emit(text)
    else:
        from hetplan.cli.import_tables import show_all

        show_all(imported)
    if out is not None:
        write_atomically(out, text)
        say(f"wrote {out}")
