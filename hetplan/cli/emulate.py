"""`hetplan emulate`: a cluster of several hosts and regions, on this machine alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    AsJson,
    PredictorFile,
    Stores,
    emit,
    positive_numbers,
    read_predictor,
    say,
)

if TYPE_CHECKING:
    from hetplan.cluster.spec import Cluster
    from hetplan.emulation.running import HostStatus

RUN_SCHEMA, DOWN_SCHEMA = "hetplan.emulate-run/1", "hetplan.emulate-down/1"
SHOW_SCHEMA, LIST_SCHEMA = "hetplan.emulate-show/1", "hetplan.emulate-list/1"

ClusterFile = Annotated[Path, typer.Argument(help="Cluster file.")]
Name = Annotated[str, typer.Argument(help="Name of the emulation.")]
OtherName = Annotated[
    str | None, typer.Option("--name", help="Name of the emulation. Default: the cluster's.")
]
Command = Annotated[list[str], typer.Argument(help="Write -- before it.")]
FailFast = Annotated[
    bool, typer.Option("--fail-fast", help="One failure ends the other hosts' commands too.")
]

app = typer.Typer(
    help="Emulate a cluster of several hosts and regions on this machine (Linux, root). Each host "
    "is a network namespace with a shaped link to the others and an unshaped control network "
    "beside it; links between regions have their rate and delay.",
    no_args_is_help=True,
)


@app.command()
def up(cluster: ClusterFile, name: OtherName = None, as_json: AsJson = False) -> None:
    """Bring a cluster up."""
    from hetplan.emulation.making import make
    from hetplan.emulation.values import SCHEMA
    from hetplan.files.encoding import encode

    spec, name = _load(cluster, name)
    emulation = make(spec, name=name, file=str(cluster))
    for note in emulation.notes:
        say(f"note: {note}")
    if as_json:
        emit(encode(emulation, schema=SCHEMA))
        return
    emit(
        f"emulation {name} is up; hosts: {len(emulation.hosts)}, long links: "
        f"{len(emulation.pipes)} (hetplan emulate show {name})"
    )


@app.command()
def down(
    name: Annotated[
        str | None, typer.Option(help="Name of the emulation. Default: the only one.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove every emulation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove an emulation and what runs on its hosts."""
    from hetplan.emulation.making import remove, remove_every
    from hetplan.emulation.state import all_written
    from hetplan.errors import InputError

    if every and name is not None:
        raise InputError("--all and --name: give one")
    if not every and name is None:
        names = [emulation.name for emulation in all_written()]
        if len(names) > 1:
            raise InputError(f"which one? --name of {', '.join(names)}, or --all")
        name = names[0] if names else None
    removed = remove_every() if name is None else remove(name)
    if as_json:
        emit(json.dumps({"schema": DOWN_SCHEMA, "removed": list(removed)}, indent=2))
    elif removed:
        emit(f"removed {len(removed)} namespaces and all that was in them")
    else:
        emit("there was nothing to remove" + ("" if name is None else f" of emulation {name}"))


@app.command("list")
def list_emulations(as_json: AsJson = False) -> None:
    """List the emulations of this machine."""
    from hetplan.emulation import state

    emulations = state.all_written()
    if as_json:
        entries = [
            {
                "name": emulation.name,
                "hosts": len(emulation.hosts),
                "up": state.is_up(emulation.name),
            }
            for emulation in emulations
        ]
        emit(json.dumps({"schema": LIST_SCHEMA, "emulations": entries}, indent=2))
        return
    from hetplan.units import counted

    for emulation in emulations:
        how = "up" if state.is_up(emulation.name) else "half made (hetplan emulate down removes it)"
        emit(f"{emulation.name}: {counted(len(emulation.hosts), 'host')}, {how}")
    if not emulations:
        emit("no emulation on this machine")


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show hosts, links, and the bytes that have crossed them."""
    from hetplan.emulation.traffic import status_of
    from hetplan.files.encoding import to_plain
    from hetplan.reports.emulation import show_emulation

    status = status_of(name)
    if as_json:
        plain = to_plain(status)
        emit(json.dumps({"schema": SHOW_SCHEMA, **plain}, indent=2))  # type: ignore[dict-item]
    else:
        show_emulation(status)


@app.command()
def run(
    name: Name,
    host: Annotated[str, typer.Argument(help="Host of the emulation.")],
    command: Command,
) -> None:
    """Run a command on one host."""
    from hetplan.emulation.enter import become
    from hetplan.emulation.tools import require

    require()
    sys.stdout.flush()
    become(name, host, command)


@app.command("run-all")
def run_all(
    name: Name, command: Command, fail_fast: FailFast = False, as_json: AsJson = False
) -> None:
    """Run a command on every host at once."""
    from hetplan.emulation.tools import require

    require()
    _finish(_on_all(name, command, fail_fast=fail_fast, as_json=as_json), as_json=as_json)


@app.command("with")
def with_cluster(
    cluster: ClusterFile,
    command: Command,
    name: OtherName = None,
    host: Annotated[
        str | None, typer.Option(help="Run the command on this host, not on every one.")
    ] = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Run the command on this machine; HETPLAN_EMULATION names the emulation.",
        ),
    ] = False,
    fail_fast: FailFast = False,
    as_json: AsJson = False,
) -> None:
    """Bring a cluster up, run a command, and remove it."""
    from hetplan.emulation.running import HostStatus, emulated, run_on_one
    from hetplan.emulation.values import HERE
    from hetplan.errors import InputError

    if host is not None and here:
        raise InputError("--here and --host: give one")
    spec, name = _load(cluster, name)
    with emulated(spec, name=name, file=str(cluster)) as emulation:
        for note in emulation.notes:
            say(f"note: {note}")
        if here or host is not None:
            if host is not None:
                emulation.host(host)
            place = HERE if host is None else host
            status = run_on_one(emulation, place, command)
            statuses: tuple[HostStatus, ...] = (HostStatus(host=place, status=status),)
        else:
            statuses = _on_all(name, command, fail_fast=fail_fast, as_json=as_json)
    _finish(statuses, as_json=as_json and not here and host is None)


@app.command()
def pace(
    cluster: ClusterFile,
    model: Annotated[Path, typer.Option(help="Model file.")],
    job: Annotated[Path, typer.Option(help="Job file.")],
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    slow_down: Annotated[
        list[str] | None,
        typer.Option(help="KIND=FACTOR, for each kind. Default: the cluster file's peak rates."),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(
            help="Fastest kind: times slower than a core. Default: so that all "
            "ranks fit on this machine's cores."
        ),
    ] = None,
    microbatch: Annotated[str | None, typer.Option(help="Microbatch sizes, as in 1,2,4,8.")] = None,
    tp: Annotated[str | None, typer.Option(help="Tensor-parallel degrees, as in 1,2.")] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Write how fast each device kind of a cluster computes, for `hetplan launch --pace`."""
    from hetplan.cluster.load import load_cluster
    from hetplan.emulation.pace import pace_of_cluster
    from hetplan.errors import InputError
    from hetplan.files.encoding import encode
    from hetplan.files.writing import check_writable
    from hetplan.job.load import load_job
    from hetplan.model.load import load_model
    from hetplan.profiling.pacing import SCHEMA, save_pace

    if out is None and not as_json:
        raise InputError("hetplan emulate pace needs --out FILE, or --json")
    if out is not None:
        check_writable(out)
    factors, sizes, degrees = (
        _factors(slow_down or ()),
        positive_numbers("--microbatch", microbatch),
        positive_numbers("--tp", tp),
    )
    inputs = load_cluster(cluster), load_model(model), load_job(job)
    known, _ = read_predictor(predictor, store)
    made = pace_of_cluster(
        known,
        *inputs,
        slow_down=factors,
        headroom=headroom,
        microbatch_sizes=sizes,
        tp_degrees=degrees,
    )
    if out is not None:
        save_pace(made, out)
        say(f"wrote {out}")
    if as_json:
        emit(encode(made, schema=SCHEMA))
        return
    for kind in made.kinds:
        emit(f"{kind.device}: {kind.slow_down:.3g} times slower than a core of this machine")


def _load(path: Path, name: str | None) -> tuple[Cluster, str]:
    from hetplan.cluster.load import load_cluster
    from hetplan.emulation.values import check_name

    cluster = load_cluster(path)
    return cluster, check_name(name or cluster.name)


def _on_all(
    name: str, command: Sequence[str], *, fail_fast: bool, as_json: bool
) -> tuple[HostStatus, ...]:
    """Run on every host, with the host's name before each line of output."""
    from hetplan.emulation.running import run_on_all

    def tell(host: str, is_error: bool, line: str) -> None:
        # With --json stdout carries the result only.
        stream = sys.stderr if is_error or as_json else sys.stdout
        print(f"{host} | {line}", file=stream, flush=True)

    return run_on_all(name, command, on_line=tell, end_others=fail_fast)


def _finish(statuses: Sequence[HostStatus], *, as_json: bool) -> None:
    """The result, and the exit status of the first host whose command failed."""
    failed = [status for status in statuses if status.status]
    if as_json:
        hosts = [{"host": status.host, "status": status.status} for status in statuses]
        emit(json.dumps({"schema": RUN_SCHEMA, "hosts": hosts}, indent=2))
    elif len(statuses) > 1:
        for status in failed:
            say(f"{status.host} ended with status {status.status}")
    if failed:
        raise typer.Exit(failed[0].status)


def _factors(texts: Sequence[str]) -> dict[str, float]:
    from hetplan.errors import InputError

    factors: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = 0.0
        if not kind or not 0 < factor < 1e6:
            raise InputError(f"--slow-down {text}: write KIND=FACTOR, as in my-card=2.5")
        factors[kind] = factor
    return factors
