"""Measure the devices and links of the closed loop, then train its plans one after another.

Paces, profiles and fit are made by the commands that a user would type. The devices are measured on
their own hosts, all kinds at a time as they will train; the links between hosts by torchrun, which
meets on the control network. What was measured whole is marked, so that an interrupted loop
measures only what is missing.

One set of processes, one per host, trains all plans (`hetplan.launchers.persistent_ranks`). Every
result is written before the next plan begins, so that an interrupted pass goes on with what is
missing.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from evaluation.closed_loop.values import TRAINED_SCHEMA, LoopFiles, LoopPlan, LoopSpec, TrainedPlan
from hetplan.cluster.spec import Cluster
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.traffic import ledger
from hetplan.emulation.measuring import pipe_bytes
from hetplan.emulation.running import end, exit_status, start
from hetplan.emulation.values import HERE, Emulation
from hetplan.errors import HetplanError, LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Job
from hetplan.launchers.persistent_ranks import ITEM_SCHEMA, REPORT_SCHEMA, Item, TurnFolder
from hetplan.launchers.run_folder import START_SECONDS
from hetplan.model.spec import ModelSpec
from hetplan.profiling.pacing import Pace, load_pace
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.measured import TrainingReport
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.training import Training

Say = Callable[[str], None]
_PORT = 29500
_SIZES, _SHORT_SIZES = "1,2,3,4,5,6,7,8", "1,2"
"""Microbatch sizes of one rank that are paced and measured: more than the pool draws, because the
search may choose any."""
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


_LOOK_SECONDS = 0.02
STEP_TIMEOUT_SECONDS = 120.0
"""Without any end of a plan's steps; the slowest plan of a pass is far from it."""


@dataclass(slots=True)
class HostProcesses:
    """One process per host, and how many plans they have trained."""

    emulation: Emulation
    inputs: LoopInputs
    pace: Pace
    folder: TurnFolder
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    turn: int = 0

    def train(self, plan: LoopPlan) -> TrainedPlan:
        """Train a plan now; a LaunchError says which host failed, and why."""
        inputs, spec = self.inputs, self.inputs.spec
        cluster = inputs.cluster
        places = place_ranks(plan.plan)
        training = Training(
            model=inputs.model,
            job=inputs.job,
            plan=plan.plan,
            device_kinds=tuple(
                cluster.island_of_device(place.device).device.kind for place in places
            ),
            backend="cpu",
            pace=self.pace,
            steps=spec.warmup_steps + spec.steps,
            warmup_steps=spec.warmup_steps,
            timeout_seconds=STEP_TIMEOUT_SECONDS + 10 * plan.predicted_seconds,
            sums=sums_of(plan.plan, cluster),
        )
        carried = self._carried()
        item = Item(training=training, hosts=tuple(self._host(place.device) for place in places))
        write_atomically(self.folder.item(self.turn), encode(item, schema=ITEM_SCHEMA))
        report = self._report(training.timeout_seconds + START_SECONDS, plan.name)
        self.turn += 1
        counted = [step.seconds for step in report.steps[spec.warmup_steps :]]
        return TrainedPlan(
            name=plan.name,
            predicted_seconds=plan.predicted_seconds,
            measured_seconds=statistics.median(counted),
            step_seconds=tuple(counted),
            losses=tuple(step.loss for step in report.steps),
            paced_passes=sum(rank.paced_passes for rank in report.ranks),
            overruns=sum(rank.overruns for rank in report.ranks),
            counted_long_bytes=self._long_bytes(report, [place.device for place in places]),
            ledger_long_bytes=ledger_long_bytes(plan, inputs),
            carried_long_bytes=self._carried() - carried,
            all_steps=training.steps,
            load_average=os.getloadavg()[0],
        )

    def _report(self, seconds: float, name: str) -> TrainingReport:
        path, limit = self.folder.report(self.turn), time.monotonic() + seconds
        while not path.exists():
            self._check(name)
            if time.monotonic() > limit:
                raise LaunchError(f"{name} was not trained after {seconds:.0f} s")
            time.sleep(_LOOK_SECONDS)
        return decode(read_document(path), TrainingReport, schema=REPORT_SCHEMA)

    def wait_until_ready(self) -> None:
        """Until every host waits for plans; a LaunchError where one does not."""
        limit = time.monotonic() + START_SECONDS
        while not all(self.folder.ready(number).exists() for number in range(len(self.processes))):
            self._check("the start")
            if time.monotonic() > limit:
                raise LaunchError(f"the hosts were not ready after {START_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def _check(self, name: str) -> None:
        for number, process in enumerate(self.processes):
            if process.poll() is None:
                continue
            host = self.emulation.hosts[number].name
            failed = self.folder.failure(number)
            log = self.folder.log(number)
            said = failed.read_text() if failed.exists() else log.read_text(errors="replace")
            last = said.strip().splitlines()[-1:] or ["it said nothing"]
            raise LaunchError(
                f"{name}: host {host} ended with exit code {process.returncode}: {last[0]}"
            )

    def _host(self, device: int) -> int:
        for number, host in enumerate(self.emulation.hosts):
            if host.first_device <= device < host.first_device + host.devices:
                return number
        raise HetplanError(f"device {device} is on no host of emulation {self.emulation.name}")

    def _long_bytes(self, report: TrainingReport, devices: Sequence[int]) -> float:
        regions = [self.inputs.cluster.island_of_device(device).region for device in devices]
        return sum(
            sent.bytes_per_step
            for sent in report.sent
            if regions[sent.source] != regions[sent.target]
        )

    def _carried(self) -> int:
        return sum(each.sent_bytes for each in pipe_bytes(self.emulation))


def ledger_long_bytes(plan: LoopPlan, inputs: LoopInputs) -> float:
    """Bytes over links between regions in a step, both ways, as the cost model counts them."""
    cluster = inputs.cluster
    return sum(
        entry.bytes_per_step
        for entry in ledger(plan.plan, inputs.model, cluster, inputs.job).entries
        if entry.link.scope is LinkScope.ISLANDS
        and cluster.island(entry.link.left).region != cluster.island(entry.link.right).region
    )


@contextmanager
def host_processes(emulation: Emulation, inputs: LoopInputs) -> Iterator[HostProcesses]:
    """The processes on all hosts, for as long as the block runs.

    Their folder is inside the emulation's, which the guard removes when this process is killed.
    """
    from hetplan.emulation.state import folder_of

    path = Path(tempfile.mkdtemp(prefix="turns-", dir=folder_of(emulation.name)))
    turns = HostProcesses(
        emulation=emulation,
        inputs=inputs,
        pace=load_pace(inputs.files.pace),
        folder=TurnFolder(path),
    )
    try:
        for number, host in enumerate(emulation.hosts):
            with turns.folder.log(number).open("w") as log:
                turns.processes.append(
                    start(
                        emulation,
                        host.name,
                        (sys.executable, "-m", "hetplan.launchers.persistent_ranks", str(path)),
                        environment={**os.environ, **_ENVIRONMENT},
                        stdout=log.fileno(),
                        stderr=subprocess.STDOUT,
                    )
                )
        turns.wait_until_ready()
        yield turns
    finally:
        end(tuple(turns.processes))


def train_missing(
    inputs: LoopInputs, emulation: Emulation, order: Sequence[tuple[str, LoopPlan]]
) -> list[TrainedPlan]:
    """What each training of `order` (its name and plan) measured; those done before are read."""
    paths = [inputs.files.trained(name) for name, _ in order]
    missing = [
        (path, plan) for path, (_, plan) in zip(paths, order, strict=True) if not path.exists()
    ]
    if missing:
        paths[0].parent.mkdir(exist_ok=True)
        with host_processes(emulation, inputs) as hosts:
            for at, (path, plan) in enumerate(missing, start=1):
                done = hosts.train(plan)
                write_atomically(path, encode(done, schema=TRAINED_SCHEMA))
                inputs.say(
                    f"plan {at}/{len(missing)}: {done.name}: predicted "
                    f"{done.predicted_seconds:.3f} s, measured {done.measured_seconds:.3f} s "
                    f"({done.error:+.1%}), overrun {done.overrun:.0%}"
                )
    return [decode(read_document(path), TrainedPlan, schema=TRAINED_SCHEMA) for path in paths]
