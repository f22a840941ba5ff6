"""Measure the devices and links of the closed loop by the commands that a user would type.

Devices are measured on their own hosts, all kinds at the same time as they will train; links
between hosts by torchrun, which meets on the control network. A complete measurement is marked, so
that an interrupted loop measures only what is missing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from evaluation.closed_loop.values import CLUSTER_FILE, MODEL_FILE, LoopInputs
from hetplan.emulation.pace import least_headroom, slow_downs
from hetplan.emulation.running import end, exit_status, start
from hetplan.emulation.values import HERE
from hetplan.errors import HetplanError
from hetplan.files.writing import write_atomically
from hetplan.profiling.pacing import Pace, load_pace, save_pace

PLAIN, JITTER = "plain", "jitter"
"""The two passes, which have paces of their own."""
PROFILED_SIZES, SHORT_SIZES = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2)
"""Microbatch sizes of one rank that are paced and measured: more than the pool draws, because the
search may choose any."""
SHORT_MESSAGES = "4KiB,64KiB,512KiB,2694656"
"""Of the links in a short loop; the last is the size of all gradients of gpt-tiny."""
MORE_HEADROOM = 1.5
"""Times the least headroom of `hetplan emulate pace`: with sends that do not wait hosts compute
nearly all of the time, and one that is late makes the others late."""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
_PORT = 29500
_HETPLAN = ("-m", "hetplan")


HostCommand = tuple[str, tuple[str, ...]]
"""A host (`HERE`: the machine itself) and the words of a command of Python on it."""


def make_paces(inputs: LoopInputs) -> None:
    """Measure a core, and write the paces of all kinds: without jitter, and with it."""
    spec, plain = inputs.spec, inputs.pace(PLAIN)
    stores = () if spec.short else ("--store", str(inputs.path("core")))
    if not spec.short:
        words = ("profile", "layers", *_of_job(inputs), "--device", "cpu", "--kind", "cpu")
        _run_once(inputs, "core", _here(*words, *_shapes(inputs), *stores))
    if not plain.exists():
        factors = slow_downs(inputs.cluster, inputs.job.precision.value, {})
        headroom = MORE_HEADROOM * least_headroom(inputs.cluster, factors, os.cpu_count() or 1)
        words = ("emulate", "pace", str(CLUSTER_FILE), *_of_job(inputs))
        options = ("--headroom", f"{headroom:.3g}", "--out", str(plain))
        _run(inputs, "pace", _here(*words, *_shapes(inputs), *stores, *options))
    if spec.jitter and not inputs.pace(JITTER).exists():
        kinds = load_pace(plain).kinds
        jittered = (replace(kind, jitter=spec.jitter, seed=spec.seed) for kind in kinds)
        save_pace(Pace(kinds=tuple(jittered)), inputs.pace(JITTER))


def measure_devices(inputs: LoopInputs, kind: str) -> None:
    """Profile every device kind at a pace, each on the first host that has it; fit devices and
    links.
    """
    first = {host.device: host.name for host in reversed(inputs.emulation.hosts)}
    options = (*_shapes(inputs), "--pace", str(inputs.pace(kind)))
    store = inputs.path(f"devices-{kind}")
    commands = [
        (
            host,
            (
                *(*_HETPLAN, "profile", "layers", *_of_job(inputs), *options),
                *("--device", "cpu", "--kind", device, "--store", str(store)),
            ),
        )
        for device, host in first.items()
    ]
    _run_once(inputs, store.name, commands)
    if not inputs.predictor(kind).exists():
        stores = ("--store", str(store), "--store", str(inputs.path("links")))
        _run(inputs, f"fit-{kind}", _here("fit", *stores, "--out", str(inputs.predictor(kind))))


def measure_links(inputs: LoopInputs) -> None:
    """Profile the links that the cluster file names, between two hosts each.

    Larger groups need no samples: inside an island of this cluster there are two hosts, and over
    several islands the trainer sums by messages of its own (`hetplan.runtime.gradient_groups`).
    """
    for number, (link, hosts) in enumerate(links_of(inputs)):
        words = (
            *("profile", "links", link, "--groups", "2", *_of_job(inputs), "--device", "cpu"),
            *("--store", str(inputs.path("links"))),
            *(("--sizes", SHORT_MESSAGES) if inputs.spec.short else ()),
        )
        torchrun = (
            *("-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node", "1"),
            *("--master-addr", inputs.emulation.host(hosts[0]).control_address),
            *("--master-port", str(_PORT + number)),
        )
        commands = [
            (host, (*torchrun, "--node-rank", str(rank), *_HETPLAN, *words))
            for rank, host in enumerate(hosts)
        ]
        _run_once(inputs, f"link-{link}", commands)


def links_of(inputs: LoopInputs) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name of its samples, two hosts) of every link that the cluster file names."""
    hosts = {
        island.name: [host.name for host in inputs.emulation.hosts if host.island == island.name]
        for island in inputs.cluster.islands
    }
    ends: dict[str | None, tuple[str, str]] = {}
    for island in inputs.cluster.islands:
        if len(hosts[island.name]) > 1:
            first, second, *_ = hosts[island.name]
            ends.setdefault(island.inter_node.samples, (first, second))
    for one, two in combinations(inputs.cluster.islands, 2):
        link = inputs.cluster.link_between(one.name, two.name)
        ends.setdefault(link.samples, (hosts[one.name][0], hosts[two.name][0]))
    return ((name, pair) for name, pair in ends.items() if name)


def search_plan(inputs: LoopInputs, job: Path, out: Path) -> None:
    """Search the best plan of a job."""
    if not out.exists():
        files = ("--model", str(MODEL_FILE), "--cluster", str(CLUSTER_FILE), "--job", str(job))
        options = ("--predictor", str(inputs.predictor(PLAIN)), "--out", str(out))
        _run(inputs, out.stem, _here("plan", *files, *options))


def _shapes(inputs: LoopInputs) -> tuple[str, ...]:
    sizes = SHORT_SIZES if inputs.spec.short else PROFILED_SIZES
    return ("--microbatch", ",".join(map(str, sizes)), "--tp", "1")


def _of_job(inputs: LoopInputs) -> tuple[str, ...]:
    return ("--model", str(MODEL_FILE), "--job", str(inputs.job_file))


def _here(*words: str) -> tuple[HostCommand, ...]:
    return ((HERE, (*_HETPLAN, *words)),)


def _run_once(inputs: LoopInputs, what: str, commands: Sequence[HostCommand]) -> None:
    """Run the commands unless they are marked as done; mark them."""
    mark = inputs.path(f"{what}.done")
    if not mark.exists():
        _run(inputs, what, commands)
        write_atomically(mark, "")


def _run(inputs: LoopInputs, what: str, commands: Sequence[HostCommand]) -> None:
    """Run the commands at the same time, their output in files; an error if one fails.

    Started through the emulation, they end with this process.
    """
    started = []
    try:
        for host, words in commands:
            where = "" if host == HERE else host
            inputs.say(f"{where}$ python {shlex.join(words)}")
            output = inputs.path(f"{what}-{where}.txt" if where else f"{what}.txt")
            with output.open("w") as stream:
                process = start(
                    inputs.emulation,
                    host,
                    (sys.executable, *words),
                    environment=ENVIRONMENT,
                    stdout=stream.fileno(),
                    stderr=subprocess.STDOUT,
                )
            started.append((words, process, output))
        for words, process, output in started:
            status = exit_status(process.wait())
            if status:
                lines = output.read_text(errors="replace").strip().splitlines() or ["no output"]
                raise HetplanError(
                    f"`{shlex.join(words[:5])} ...` ended with exit code {status}: "
                    f"{lines[-1]} ({output})"
                )
    finally:
        end(tuple(process for _, process, _ in started))
