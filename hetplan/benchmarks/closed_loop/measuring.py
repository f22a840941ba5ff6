"""How are pace, profiles and fit of the loop made? By the commands that a user would type.

What was measured whole is marked, so that an interrupted loop measures only what is missing. The
devices are measured on their own hosts, all kinds at a time as they will train; the links between
hosts by torchrun, which meets on the control network.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from hetplan.benchmarks.closed_loop.files import LoopFiles
from hetplan.cluster.spec import Cluster
from hetplan.emulation.running import end, exit_status, start
from hetplan.emulation.values import HERE, Emulation
from hetplan.errors import HetplanError
from hetplan.files.writing import write_atomically

Say = Callable[[str], None]
PLAIN, JITTER = "plain", "jitter"
_PORT = 29500
_SIZES, _SHORT_SIZES = "1,2,3,4,5,6,7,8", "1,2"
"""Microbatch sizes of one rank that are paced and measured: more than the pool draws, because the
search may choose any."""
SHORT_MESSAGES = "4KiB,64KiB,512KiB,2694656"
"""Of the links in a short loop; the last is the size of all gradients of gpt-tiny."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """A command on one host."""

    host: str
    words: tuple[str, ...]


def make_paces(
    files: LoopFiles, emulation: Emulation, *, headroom: float, jitter: float, seed: int, say: Say
) -> None:
    """Measure a core, and write the paces of all kinds: without jitter, and with it.

    The fastest kind is `headroom` times slower than a core.
    """
    from hetplan.profiling.pacing import Pace, load_pace, save_pace

    stores = () if files.short else ("--store", str(files.core_store))
    if not files.short and not files.done("core").exists():
        _here(
            emulation,
            say,
            files.folder / "core.txt",
            "profile",
            *_of_job(files),
            *("--device", "cpu", "--kind", "cpu", *_shapes(files), *stores),
        )
        write_atomically(files.done("core"), "")
    if not files.pace(PLAIN).exists():
        _here(
            emulation,
            say,
            files.folder / "pace.txt",
            *("emulate", "pace", str(files.cluster), *_of_job(files)),
            *("--headroom", f"{headroom:.3g}"),
            *(*_shapes(files), *stores, "--out", str(files.pace(PLAIN))),
        )
    if jitter and not files.pace(JITTER).exists():
        plain = load_pace(files.pace(PLAIN))
        kinds = tuple(replace(kind, jitter=jitter, seed=seed) for kind in plain.kinds)
        save_pace(Pace(kinds=kinds), files.pace(JITTER))


def measure_devices(files: LoopFiles, emulation: Emulation, kind: str, say: Say) -> None:
    """Profile every device kind at a pace, each on the first host that has it."""
    if files.done(f"devices-{kind}").exists():
        return
    first = {host.device: host.name for host in reversed(emulation.hosts)}
    _on_hosts(
        files,
        emulation,
        [
            HostCommand(
                host=host,
                words=(
                    *("profile", *_of_job(files), "--device", "cpu", "--kind", device),
                    *(*_shapes(files), "--pace", str(files.pace(kind))),
                    *("--store", str(files.device_store(kind))),
                ),
            )
            for device, host in first.items()
        ],
        say,
        f"devices-{kind}",
    )


def measure_links(files: LoopFiles, emulation: Emulation, cluster: Cluster, *, say: Say) -> None:
    """Profile the links that the cluster file names, between two hosts each.

    Larger groups need no samples: inside an island of this cluster there are two hosts, and over
    several islands the trainer sums by messages of its own (`hetplan.runtime.gradient_groups`).
    """
    for number, (link, hosts) in enumerate(links_of(cluster, emulation)):
        what = f"link-{link}"
        if files.done(what).exists():
            continue
        words = (
            *("profile", "--link", link, "--groups", "2"),
            *(*_of_job(files), "--device", "cpu", "--store", str(files.link_store)),
            *(("--sizes", SHORT_MESSAGES) if files.short else ()),
        )
        torchrun = (
            *("-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node", "1"),
            *("--master-addr", emulation.host(hosts[0]).control_address),
            *("--master-port", str(_PORT + number)),
        )
        commands = [
            HostCommand(host=host, words=(*torchrun, "--node-rank", str(rank), "-m", "hetplan"))
            for rank, host in enumerate(hosts)
        ]
        _on_hosts(
            files,
            emulation,
            [replace(each, words=(*each.words, *words)) for each in commands],
            say,
            what,
            torchrun=True,
        )


def links_of(cluster: Cluster, emulation: Emulation) -> tuple[tuple[str, tuple[str, str]], ...]:
    """(name of its samples, two hosts) of every link that the cluster file names."""
    hosts = {
        island.name: [host.name for host in emulation.hosts if host.island == island.name]
        for island in cluster.islands
    }
    found: dict[str, tuple[str, str]] = {}
    for island in cluster.islands:
        name = island.inter_node.samples
        if name and len(hosts[island.name]) > 1:
            found.setdefault(name, (hosts[island.name][0], hosts[island.name][1]))
    for one, two in combinations(cluster.islands, 2):
        name = cluster.link_between(one.name, two.name).samples
        if name:
            found.setdefault(name, (hosts[one.name][0], hosts[two.name][0]))
    return tuple(found.items())


def fit(files: LoopFiles, emulation: Emulation, kind: str, say: Say) -> None:
    """Fit the devices of a pass and the links."""
    if files.predictor(kind).exists():
        return
    _here(
        emulation,
        say,
        files.folder / f"fit-{kind}.txt",
        *("fit", "--store", str(files.device_store(kind)), "--store", str(files.link_store)),
        *("--out", str(files.predictor(kind))),
    )


def plan(files: LoopFiles, emulation: Emulation, kind: str, job: Path, out: Path, say: Say) -> None:
    """Search the best plan of a job."""
    if out.exists():
        return
    _here(
        emulation,
        say,
        out.with_suffix(".txt"),
        *("plan", "--model", str(files.model), "--cluster", str(files.cluster), "--job", str(job)),
        *("--predictor", str(files.predictor(kind)), "--out", str(out)),
    )


def _shapes(files: LoopFiles) -> tuple[str, ...]:
    return ("--microbatch", _SHORT_SIZES if files.short else _SIZES, "--tp", "1")


def _of_job(files: LoopFiles) -> tuple[str, ...]:
    return ("--model", str(files.model), "--job", str(files.job))


def _here(emulation: Emulation, say: Say, into: Path, *words: str) -> None:
    """A command on the machine itself, with what it says in a file; an error if it fails.

    Started through the emulation, it ends with this process.
    """
    say(f"$ hetplan {shlex.join(words)}")
    with into.open("w") as stream:
        process = start(
            emulation,
            HERE,
            (sys.executable, "-m", "hetplan", *words),
            environment={**os.environ, **_ENVIRONMENT},
            stdout=stream.fileno(),
            stderr=subprocess.STDOUT,
        )
        try:
            status = exit_status(process.wait())
        finally:
            end((process,))
    if status:
        raise HetplanError(_failed("hetplan", words, status, into))


def _on_hosts(
    files: LoopFiles,
    emulation: Emulation,
    commands: Sequence[HostCommand],
    say: Say,
    what: str,
    *,
    torchrun: bool = False,
) -> None:
    """Run the commands at the same time, each on its host; then mark `what` as done."""
    environment: Mapping[str, str] = {**os.environ, **_ENVIRONMENT}
    started = []
    try:
        for command in commands:
            words = command.words if torchrun else ("-m", "hetplan", *command.words)
            shown = command.words if torchrun else ("hetplan", *command.words)
            say(f"{command.host}$ {shlex.join(shown)}")
            into = files.folder / f"{what}-{command.host}.txt"
            with into.open("w") as stream:
                process = start(
                    emulation,
                    command.host,
                    (sys.executable, *words),
                    environment=environment,
                    stdout=stream.fileno(),
                    stderr=subprocess.STDOUT,
                )
            started.append((command, process, into))
        for command, process, into in started:
            status = exit_status(process.wait())
            if status:
                raise HetplanError(_failed(command.host, command.words, status, into))
    finally:
        end(tuple(process for _, process, _ in started))
    write_atomically(files.done(what), "")


def _failed(where: str, words: Sequence[str], status: int, into: Path) -> str:
    said = into.read_text(errors="replace").strip().splitlines()
    last = f": {said[-1]}" if said else ""
    return f"{where}: `{shlex.join(words[:3])} ...` ended with exit code {status}{last} ({into})"
