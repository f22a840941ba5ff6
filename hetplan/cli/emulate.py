"""`hetplan emulate`: a cluster of several hosts and regions, on this machine alone.

What the verbs do is in hetplan/emulation; the pace files are in `emulate_pace`, the tables in
`emulate_show`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, emit, say

if TYPE_CHECKING:
    from hetplan.cluster.spec import Cluster
    from hetplan.emulation.running import HostStatus

VERBS = {
    "up": "CLUSTER",
    "down": "",
    "run": "NAME HOST -- COMMAND...",
    "show": "[NAME]",
    "with": "CLUSTER -- COMMAND...",
    "measure": "NAME",
    "pace": "CLUSTER",
}
"""What each verb is followed by."""
RUN_SCHEMA, DOWN_SCHEMA = "hetplan.emulate-run/1", "hetplan.emulate-down/1"


def emulate(
    verb: Annotated[
        str,
        typer.Argument(
            help="; ".join(f"{verb} {rest}".strip() for verb, rest in VERBS.items()) + "."
        ),
    ],
    words: Annotated[list[str] | None, typer.Argument(help="See VERB.", show_default=False)] = None,
    name: Annotated[
        str | None,
        typer.Option(help="up, with, down: name of the emulation. Default: the cluster's."),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="run: on every host (leave out HOST). down: every emulation."),
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="with: run the command on this host, not on every one.")
    ] = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="with: run the command on this machine; HETPLAN_EMULATION names the rest.",
        ),
    ] = False,
    fail_fast: Annotated[
        bool,
        typer.Option("--fail-fast", help="run --all, with: one failure ends the other hosts' too."),
    ] = False,
    model: Annotated[Path | None, typer.Option(help="pace: model file.")] = None,
    job: Annotated[Path | None, typer.Option(help="pace: job file.")] = None,
    predictor: Annotated[
        Path | None, typer.Option(help="pace: predictor that knows this machine's cores.")
    ] = None,
    store: Annotated[
        list[Path] | None, typer.Option(help="pace: profile store with this machine's cores.")
    ] = None,
    slow_down: Annotated[
        list[str] | None,
        typer.Option(
            help="pace: KIND=FACTOR, for each kind. Default: the cluster file's peak rates."
        ),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(
            help="pace: how many times slower than a core the fastest kind is. Default: so that "
            "all ranks fit on this machine's cores."
        ),
    ] = None,
    microbatch: Annotated[
        str | None, typer.Option(help="pace: microbatch sizes, as in 1,2,4,8.")
    ] = None,
    tp: Annotated[
        str | None, typer.Option(help="pace: tensor-parallel degrees, as in 1,2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="pace: file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Emulate a cluster of several hosts and regions on this machine (Linux, root).

    Each host is a network namespace with a shaped link to the others and an unshaped control
    network beside it; links between regions have their rate and delay. Put `--` before COMMAND.
    """
    from hetplan.errors import InputError

    words = words or []
    if verb == "up":
        (path,) = _take(verb, words, 1)
        _up(Path(path), name, as_json=as_json)
    elif verb == "down":
        _take(verb, words, 0)
        _down(name, every=every, as_json=as_json)
    elif verb == "run":
        _run(words, every=every, fail_fast=fail_fast, as_json=as_json)
    elif verb == "show":
        from hetplan.cli.emulate_show import show

        show(words[0] if words else name, as_json=as_json)
    elif verb == "measure":
        from hetplan.cli.emulate_show import measure

        (name,) = _take(verb, words, 1)
        measure(name, as_json=as_json)
    elif verb == "with":
        path, *command = _take(verb, words, 2, more=True)
        if host is not None and here:
            raise InputError("--here and --host: give one")
        _with(Path(path), name, command, host, here=here, fail_fast=fail_fast, as_json=as_json)
    elif verb == "pace":
        from hetplan.cli.emulate_pace import PaceRequest, write_pace

        (path,) = _take(verb, words, 1)
        request = PaceRequest(
            cluster=Path(path),
            model=model,
            job=job,
            predictor=predictor,
            stores=tuple(store or ()),
            slow_down=tuple(slow_down or ()),
            headroom=headroom,
            microbatch=microbatch,
            tp=tp,
            out=out,
        )
        write_pace(request, as_json=as_json)
    else:
        raise InputError(f"hetplan emulate {verb}: the verbs are {', '.join(VERBS)}")


def _take(verb: str, words: Sequence[str], count: int, *, more: bool = False) -> Sequence[str]:
    """The words, if there are as many as the verb takes."""
    from hetplan.errors import InputError

    if len(words) < count or (len(words) > count and not more):
        raise InputError(f"hetplan emulate {verb}: write {verb} {VERBS[verb]}".rstrip())
    return words


def _load(path: Path, name: str | None) -> tuple[Cluster, str]:
    from hetplan.cluster.load import load_cluster
    from hetplan.emulation.values import check_name

    cluster = load_cluster(path)
    return cluster, check_name(cluster.name[:63] if name is None else name)


def _up(path: Path, name: str | None, *, as_json: bool) -> None:
    from hetplan.emulation.making import make
    from hetplan.emulation.values import SCHEMA
    from hetplan.files.encoding import encode

    cluster, name = _load(path, name)
    emulation = make(cluster, name=name, file=str(path))
    for note in emulation.notes:
        say(f"note: {note}")
    if as_json:
        emit(encode(emulation, schema=SCHEMA))
        return
    emit(
        f"emulation {name} is up; hosts: {len(emulation.hosts)}, long links: "
        f"{len(emulation.pipes)} (hetplan emulate show {name})"
    )


def _down(name: str | None, *, every: bool, as_json: bool) -> None:
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
        every = name is None
    removed = remove_every() if name is None else remove(name)
    if as_json:
        emit(json.dumps({"schema": DOWN_SCHEMA, "removed": list(removed)}, indent=2))
    elif removed:
        emit(f"removed {len(removed)} namespaces and all that was in them")
    else:
        emit("there was nothing to remove" + ("" if name is None else f" of emulation {name}"))


def _run(words: Sequence[str], *, every: bool, fail_fast: bool, as_json: bool) -> None:
    from hetplan.emulation.tools import require
    from hetplan.errors import InputError

    if not every:
        name, host, *command = _take("run", words, 3, more=True)
        if as_json:
            raise InputError("--json goes with run --all; one host's command has the output alone")
        from hetplan.emulation.enter import become

        require()
        sys.stdout.flush()
        become(name, host, command)
    name, *command = _take("run", words, 2, more=True)
    require()
    _finish(_on_all(name, command, fail_fast=fail_fast, as_json=as_json), as_json=as_json)


def _with(
    path: Path,
    name: str | None,
    command: Sequence[str],
    host: str | None,
    *,
    here: bool,
    fail_fast: bool,
    as_json: bool,
) -> None:
    from hetplan.emulation.running import HostStatus, emulated, run_on_one
    from hetplan.emulation.values import HERE

    cluster, name = _load(path, name)
    with emulated(cluster, name=name, file=str(path)) as emulation:
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
    failed = [each for each in statuses if each.status]
    if as_json:
        hosts = [{"host": each.host, "status": each.status} for each in statuses]
        emit(json.dumps({"schema": RUN_SCHEMA, "hosts": hosts}, indent=2))
    elif len(statuses) > 1:
        for each in failed:
            say(f"{each.host} ended with status {each.status}")
    if failed:
        raise typer.Exit(failed[0].status)
