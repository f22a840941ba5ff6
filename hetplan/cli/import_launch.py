"""`hetplan import launch`: an existing launch as a plan, priced like any other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    TargetName,
    Verbose,
    emit,
    name_values,
    read_predictor,
    say,
    say_lines,
)

if TYPE_CHECKING:
    from hetplan.search.result import SearchResult
    from hetplan.trainers.import_launch import ImportedLaunch

_OUTPUT = "Output"
_PLACES = "Where it runs"


def launch(
    file: Annotated[
        Path,
        typer.Argument(
            help="Script, arguments, Megatron-LM's log, FlagScale YAML, torchtitan TOML, or a "
            "folder of hetplan emit."
        ),
    ],
    cluster: Annotated[Path | None, typer.Option(help="Cluster file on which it runs.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model file. Default: the model that the launch describes.")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE that only the host knows; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write.", rich_help_panel=_OUTPUT)
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(help="Hostfile in rank order; overrides its own.", rich_help_panel=_PLACES),
    ] = None,
    island: Annotated[
        str | None,
        typer.Option(
            help="Islands that a launch without hosts uses: A,B.", rich_help_panel=_PLACES
        ),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="Job file: what the launch does not say.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="megatron, flagscale or torchtitan. Default: detected.")
    ] = None,
    target: TargetName = None,
    predictor: PredictorFile = None,
    drafts: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the launch's model.yaml and job.yaml.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that exist.", hidden=True)
    ] = False,
) -> None:
    """Read a launch, price it on a cluster, and show its stages and times."""
    from hetplan.cli.estimate import show_estimate
    from hetplan.cost.estimate import misfits
    from hetplan.errors import InfeasibleError, InputError
    from hetplan.files.locks import Lock
    from hetplan.trainers.import_launch import import_launch, price_launch

    if hosts is not None and island is not None:
        raise InputError(
            "--hosts names the nodes, --island the islands of a launch without: give one"
        )
    outputs = _outputs(out, drafts)
    _check_new(outputs, force)
    imported = import_launch(
        file,
        cluster=cluster,
        model=model,
        job=job,
        trainer=trainer,
        target=target,
        given=name_values(given or []),
        nodes=hosts or (() if island is None else tuple(map(str.strip, island.split(",")))),
    )
    priced = price_launch(imported, *read_predictor(predictor, None))
    remarks = [f"note: {remark}" for remark in imported.remarks]
    say_lines(remarks, most=None if verbose else _REMARKS, more="--verbose")
    with ExitStack() as kept:
        for place in filter(None, (out, drafts)):
            kept.enter_context(Lock(place).take())
        _check_new(outputs, force)
        _write(outputs, imported, priced)
    if verbose and not as_json:
        emit(imported.title)
    show_estimate(priced, verbose=verbose, as_json=as_json)
    unfit = misfits(priced.estimate)
    if unfit:
        raise InfeasibleError(unfit)


_REMARKS = 3
"""On the launch, that are said without --verbose."""


def _outputs(out: Path | None, drafts: Path | None) -> dict[str, Path]:
    """The files to write by what they hold."""
    from hetplan.files.writing import make_folder

    outputs = {} if out is None else {"plan": out}
    if drafts is not None:
        make_folder(drafts)
        outputs |= {"model": drafts / "model.yaml", "job": drafts / "job.yaml"}
    return outputs


def _check_new(outputs: dict[str, Path], force: bool) -> None:
    from hetplan.files.writing import check_new

    for path in outputs.values():
        check_new(path, force=force)


def _write(outputs: dict[str, Path], imported: ImportedLaunch, priced: SearchResult) -> None:
    """All files or none."""
    from hetplan.files.writing import write_together
    from hetplan.search.files import result_text
    from hetplan.trainers.import_launch import job_text, model_text

    texts = {
        "plan": lambda: result_text(priced),
        "model": lambda: model_text(imported.model),
        "job": lambda: job_text(imported.job),
    }
    write_together({path: texts[what]() for what, path in outputs.items()})
    for path in outputs.values():
        say(f"wrote {path}")
