"""Measure the devices and links of the closed loop, then train its plans one after another.

Paces, profiles and fit are made by the commands that a user would type. The devices are measured on
their own hosts, all kinds at a time as they will train; the links between hosts by torchrun, which
meets on the control network. What was measured whole is marked, so that an interrupted loop
measures only what is missing.

Every plan is trained as `hetplan launch` does (`hetplan.launchers.local`). Its result is written
before the next plan begins, so that an interrupted loop goes on with what is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from evaluation.closed_loop.values import TRAINED_SCHEMA, LoopFiles, LoopPlan, LoopSpec, TrainedPlan
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.emulation.running import end, exit_status, start
from hetplan.emulation.values import HERE, Emulation
from hetplan.errors import HetplanError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Job
from hetplan.launchers.local import LaunchSettings, launch
from hetplan.model.spec import ModelSpec
from hetplan.predict.fit import load_predictor
from hetplan.predict.predictor import Predictor
from hetplan.profiling.pacing import Pace, load_pace
from hetplan.search.files import SCHEMA
from hetplan.search.result import Inputs, SearchResult
from hetplan.version import __version__

Say = Callable[[str], None]
_PORT = 29500
_SIZES, _SHORT_SIZES = "1,2,3,4,5,6,7,8", "1,2"
"""Microbatch sizes of one rank that are paced and measured: more than the pool draws, because the
search may choose any."""
STEP_TIMEOUT_SECONDS = 120.0
"""Without any finished step; the slowest plan is far from it."""
SHORT_MESSAGES = "4KiB,64KiB,512KiB,2694656"
"""Of the links in a short loop; the last is the size of all gradients of gpt-tiny."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """What the loop trains, read once."""

    files: LoopFiles
    spec: LoopSpec
    model: ModelSpec
    cluster: Cluster
    job: Job
    say: Say


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """A command on one host."""

    host: str
    words: tuple[str, ...]


def measure(inputs: LoopInputs, emulation: Emulation, *, headroom: float) -> None:
    """Pace, links and devices, and the fit of both; what was measured before is left.

    The fastest kind is `headroom` times slower than a core.
    """
    files = inputs.files
    _make_pace(inputs, emulation, headroom)
    _measure_links(inputs, emulation)
    _measure_devices(inputs, emulation)
    if not files.predictor.exists():
        _here(
            emulation,
            inputs.say,
            files.folder / "fit.txt",
            *("fit", "--store", str(files.device_store), "--store", str(files.link_store)),
            *("--out", str(files.predictor)),
        )


def search_plan(inputs: LoopInputs, emulation: Emulation) -> None:
    """The best plan of the job, as a user would search it."""
    files = inputs.files
    _here(
        emulation,
        inputs.say,
        files.searched.with_suffix(".txt"),
        *("plan", "--model", str(files.model), "--cluster", str(files.cluster)),
        *("--job", str(files.job), "--predictor", str(files.predictor)),
        *("--out", str(files.searched)),
    )


def _make_pace(inputs: LoopInputs, emulation: Emulation, headroom: float) -> None:
    """Measure a core, and write the pace of all kinds."""
    files = inputs.files
    stores = () if files.short else ("--store", str(files.core_store))
    if not files.short and not files.done("core").exists():
        _here(
            emulation,
            inputs.say,
            files.folder / "core.txt",
            *("profile", "layers"),
            *_of_job(files),
            *("--device", "cpu", "--kind", "cpu", *_shapes(files), *stores),
        )
        write_atomically(files.done("core"), "")
    if not files.pace.exists():
        _here(
            emulation,
            inputs.say,
            files.folder / "pace.txt",
            *("emulate", "pace", str(files.cluster), *_of_job(files)),
            *("--headroom", f"{headroom:.3g}"),
            *(*_shapes(files), *stores, "--out", str(files.pace)),
        )


def _measure_devices(inputs: LoopInputs, emulation: Emulation) -> None:
    """Profile every device kind at its pace, each on the first host that has it."""
    files = inputs.files
    if files.done("devices").exists():
        return
    first = {host.device: host.name for host in reversed(emulation.hosts)}
    commands = [
        HostCommand(
            host=host,
            words=(
                *("-m", "hetplan", "profile", "layers", *_of_job(files), "--device", "cpu"),
                *("--kind", device, *_shapes(files), "--pace", str(files.pace)),
                *("--store", str(files.device_store)),
            ),
        )
        for device, host in first.items()
    ]
    _on_hosts(inputs, emulation, commands, "devices")


def _measure_links(inputs: LoopInputs, emulation: Emulation) -> None:
    """Profile the links that the cluster file names, between two hosts each.

    Larger groups need no samples: inside an island of this cluster there are two hosts, and over
    several islands the trainer sums by messages of its own (`hetplan.runtime.gradient_groups`).
    """
    files = inputs.files
    for number, (link, hosts) in enumerate(links_of(inputs.cluster, emulation)):
        what = f"link-{link}"
        if files.done(what).exists():
            continue
        commands = [
            HostCommand(
                host=host,
                words=(
                    *("-m", "torch.distributed.run", "--nnodes", str(len(hosts))),
                    *("--nproc-per-node", "1", "--master-port", str(_PORT + number)),
                    *("--master-addr", emulation.host(hosts[0]).control_address),
                    *("--node-rank", str(rank), "-m", "hetplan", "profile", "links", link),
                    *("--groups", "2", *_of_job(files), "--device", "cpu"),
                    *("--store", str(files.link_store)),
                    *(("--sizes", SHORT_MESSAGES) if files.short else ()),
                ),
            )
            for rank, host in enumerate(hosts)
        ]
        _on_hosts(inputs, emulation, commands, what)


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
    inputs: LoopInputs, emulation: Emulation, commands: Sequence[HostCommand], what: str
) -> None:
    """Run the commands at the same time, each on its host; then mark `what` as done."""
    files = inputs.files
    started = []
    try:
        for command in commands:
            inputs.say(f"{command.host}$ python {shlex.join(command.words)}")
            into = files.folder / f"{what}-{command.host}.txt"
            with into.open("w") as stream:
                process = start(
                    emulation,
                    command.host,
                    (sys.executable, *command.words),
                    environment={**os.environ, **_ENVIRONMENT},
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


def train_missing(
    inputs: LoopInputs, emulation: Emulation, order: Sequence[tuple[str, LoopPlan]]
) -> list[TrainedPlan]:
    """What each training of `order` (its name and plan) measured; those done before are read."""
    files = inputs.files
    paths = [files.trained(name) for name, _ in order]
    missing = [
        (path, plan) for path, (_, plan) in zip(paths, order, strict=True) if not path.exists()
    ]
    pace, predictor = load_pace(files.pace), load_predictor(files.predictor)
    files.trained("").parent.mkdir(exist_ok=True)
    for at, (path, plan) in enumerate(missing, start=1):
        done = _train(inputs, emulation, plan, pace, predictor)
        write_atomically(path, encode(done, schema=TRAINED_SCHEMA))
        inputs.say(
            f"plan {at}/{len(missing)}: {done.name}: predicted {done.predicted_seconds:.3f} s, "
            f"measured {done.measured_seconds:.3f} s ({done.error:+.1%}), overrun "
            f"{done.overrun:.0%}"
        )
    return [decode(read_document(path), TrainedPlan, schema=TRAINED_SCHEMA) for path in paths]


def _train(
    inputs: LoopInputs, emulation: Emulation, plan: LoopPlan, pace: Pace, predictor: Predictor
) -> TrainedPlan:
    """Train a plan now; an error says which host failed, and why."""
    spec = inputs.spec
    model, cluster, job = inputs.model, inputs.cluster, inputs.job
    result = SearchResult(
        schema=SCHEMA,
        hetplan_version=__version__,
        seed=job.seed,
        inputs=Inputs(model=model, cluster=cluster, job=job, sha256=()),
        plan=plan.plan,
        estimate=estimate(plan.plan, model, cluster, job, predictor),
        certificate=None,
    )
    settings = LaunchSettings(
        steps=spec.warmup_steps + spec.steps,
        warmup_steps=spec.warmup_steps,
        pace=pace,
        emulation=emulation.name,
        log_folder=inputs.files.logs,
        timeout_seconds=STEP_TIMEOUT_SECONDS + 10 * plan.predicted_seconds,
    )
    shutil.rmtree(inputs.files.logs, ignore_errors=True)
    log = launch(result, settings)
    return TrainedPlan(
        name=plan.name,
        predicted_seconds=log.predicted_step_seconds,
        measured_seconds=log.median_step_seconds,
        step_seconds=tuple(step.seconds for step in log.steps[spec.warmup_steps :]),
        losses=tuple(step.loss for step in log.steps),
        paced_passes=sum(log.paced_passes),
        overruns=sum(log.overruns),
        load_average=os.getloadavg()[0],
    )
