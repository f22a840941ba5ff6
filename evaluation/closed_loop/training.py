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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from evaluation.closed_loop.cgroup import load_between, load_now
from evaluation.closed_loop.values import PASS_SCHEMA, LoopFiles, LoopPlan, LoopSpec, TrainedPlan
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
            *("profile", "layers"),
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
                    *("profile", "layers", *_of_job(files), "--device", "cpu", "--kind", device),
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
            *("profile", "links", link, "--groups", "2"),
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


def fit_devices(files: LoopFiles, emulation: Emulation, kind: str, say: Say) -> None:
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


def search_plan(
    files: LoopFiles, emulation: Emulation, kind: str, job: Path, out: Path, say: Say
) -> None:
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


_LOOK_SECONDS = 0.02
STEP_TIMEOUT_SECONDS = 120.0
"""Without any end of a plan's steps; the slowest plan of a pass is far from it."""


@dataclass(slots=True)
class HostProcesses:
    """The processes of a pass, and how many plans they have trained."""

    emulation: Emulation
    cluster: Cluster
    folder: TurnFolder
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    turn: int = 0

    def train(
        self,
        model: ModelSpec,
        job: Job,
        plan: LoopPlan,
        pace: Pace,
        *,
        warmup_steps: int,
        steps: int,
    ) -> TrainedPlan:
        """Train a plan now; a LaunchError says which host failed, and why."""
        places = place_ranks(plan.plan)
        training = Training(
            model=model,
            job=job,
            plan=plan.plan,
            device_kinds=tuple(
                self.cluster.island_of_device(place.device).device.kind for place in places
            ),
            backend="cpu",
            pace=pace,
            steps=warmup_steps + steps,
            warmup_steps=warmup_steps,
            timeout_seconds=STEP_TIMEOUT_SECONDS + 10 * plan.predicted_seconds,
            sums=sums_of(plan.plan, self.cluster),
        )
        carried, before = self._carried(), load_now()
        item = Item(training=training, hosts=tuple(self._host(place.device) for place in places))
        write_atomically(self.folder.item(self.turn), encode(item, schema=ITEM_SCHEMA))
        report = self._report(training.timeout_seconds + START_SECONDS, plan.name)
        self.turn += 1
        counted = [step.seconds for step in report.steps[warmup_steps:]]
        load = load_between(before, load_now())
        return TrainedPlan(
            name=plan.name,
            predicted_seconds=plan.predicted_seconds,
            measured_seconds=statistics.median(counted),
            step_seconds=tuple(counted),
            losses=tuple(step.loss for step in report.steps),
            paced_passes=sum(rank.paced_passes for rank in report.ranks),
            overruns=sum(rank.overruns for rank in report.ranks),
            counted_long_bytes=self._long_bytes(report, [place.device for place in places]),
            ledger_long_bytes=ledger_long_bytes(plan, model, self.cluster, job),
            carried_long_bytes=self._carried() - carried,
            all_steps=training.steps,
            load_average=load.load_average,
            steal=load.steal,
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
        regions = [self.cluster.island_of_device(device).region for device in devices]
        return sum(
            sent.bytes_per_step
            for sent in report.sent
            if regions[sent.source] != regions[sent.target]
        )

    def _carried(self) -> int:
        return sum(each.sent_bytes for each in pipe_bytes(self.emulation))


def ledger_long_bytes(plan: LoopPlan, model: ModelSpec, cluster: Cluster, job: Job) -> float:
    """Bytes over links between regions in a step, both ways, as the cost model counts them."""
    return sum(
        entry.bytes_per_step
        for entry in ledger(plan.plan, model, cluster, job).entries
        if entry.link.scope is LinkScope.ISLANDS
        and cluster.island(entry.link.left).region != cluster.island(entry.link.right).region
    )


@contextmanager
def host_processes(emulation: Emulation, cluster: Cluster) -> Iterator[HostProcesses]:
    """The processes on all hosts, for as long as the block runs.

    Their folder is inside the emulation's, which the guard removes when this process is killed.
    """
    from hetplan.emulation.state import folder_of

    path = Path(tempfile.mkdtemp(prefix="turns-", dir=folder_of(emulation.name)))
    turns = HostProcesses(emulation=emulation, cluster=cluster, folder=TurnFolder(path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    try:
        for number, host in enumerate(emulation.hosts):
            with turns.folder.log(number).open("w") as log:
                turns.processes.append(
                    start(
                        emulation,
                        host.name,
                        (sys.executable, "-m", "hetplan.launchers.persistent_ranks", str(path)),
                        environment=environment,
                        stdout=log.fileno(),
                        stderr=subprocess.STDOUT,
                    )
                )
        turns.wait_until_ready()
        yield turns
    finally:
        end(tuple(turns.processes))


def read_trained(path: Path) -> TrainedPlan | None:
    """What a training measured, if it was done."""
    if not path.exists():
        return None
    return decode(read_document(path), TrainedPlan, schema=PASS_SCHEMA)


def save_trained(path: Path, trained: TrainedPlan) -> None:
    """Write what a training measured."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, encode(trained, schema=PASS_SCHEMA))


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
class TrainingTask:
    """One training."""

    name: str
    """Of its file."""
    plan: LoopPlan
    job: Job


def train_missing(
    inputs: LoopInputs,
    emulation: Emulation,
    kind: str,
    where: str,
    order: Sequence[TrainingTask],
    *,
    warmup_steps: int,
    steps: int,
) -> list[TrainedPlan]:
    """What each training measured at the pace of `kind`; those done before are read.

    `where` names their folder.
    """
    files = inputs.files
    have = {each.name: read_trained(files.trained(where, each.name)) for each in order}
    missing = [each for each in order if have[each.name] is None]
    if missing:
        pace = load_pace(files.pace(kind))
        with host_processes(emulation, inputs.cluster) as turns:
            for at, each in enumerate(missing, start=1):
                done = turns.train(
                    inputs.model,
                    each.job,
                    each.plan,
                    pace,
                    warmup_steps=warmup_steps,
                    steps=steps,
                )
                save_trained(files.trained(where, each.name), done)
                have[each.name] = done
                inputs.say(f"{where} {at}/{len(missing)}: {progress_line(done)}")
    return [one for each in order if (one := have[each.name]) is not None]


def progress_line(done: TrainedPlan) -> str:
    """One line of progress."""
    return (
        f"{done.name}: predicted {done.predicted_seconds:.3f} s, measured "
        f"{done.measured_seconds:.3f} s ({done.error:+.1%}), overrun {done.overrun:.0%}"
    )
