"""Train the plans of the closed loop one after another, with one process per emulated host.

The processes stay for all plans (`evaluation.closed_loop.host`), because each would import torch
for seconds. Every result is written before the next plan begins, so that an interrupted pass
resumes with what is missing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from evaluation.closed_loop.host import ITEM_SCHEMA, REPORT_SUFFIX, Item
from evaluation.closed_loop.measuring import ENVIRONMENT
from evaluation.closed_loop.values import LoopInputs, LoopPlan, TrainedPlan
from hetplan.cluster.spec import Cluster
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.traffic import ledger
from hetplan.emulation.running import GRACE_SECONDS, end, start
from hetplan.emulation.state import folder_of
from hetplan.emulation.traffic import pipe_bytes
from hetplan.emulation.values import Emulation
from hetplan.errors import HetplanError, LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Job
from hetplan.launchers.run_folder import RunFolder
from hetplan.model.spec import ModelSpec
from hetplan.profiling.pacing import Pace, load_pace
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.measured import TrainingReport
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.training import Training

TRAINED_SCHEMA = "hetplan.closed-loop-pass/1"
STEP_TIMEOUT_SECONDS = 120.0
"""Longest wait of a rank for the others; the slowest plan of a pass is far from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """One training."""

    name: str
    """Name of its file."""
    plan: LoopPlan
    job: Job


def train_missing(
    inputs: LoopInputs,
    kind: str,
    what: str,
    tasks: Sequence[TrainingTask],
    *,
    warmup_steps: int,
    steps: int,
) -> list[TrainedPlan]:
    """Each training's measurement, at the pace of `kind`; those done earlier are read."""
    folder = inputs.path(f"trained-{what}")
    files = [folder / f"{task.name}.json" for task in tasks]
    missing = [(task, file) for task, file in zip(tasks, files, strict=True) if not file.exists()]
    if missing:
        folder.mkdir(exist_ok=True)
        pace = load_pace(inputs.pace(kind))
        with host_processes(inputs.emulation) as hosts:
            for at, (task, file) in enumerate(missing, start=1):
                training = training_of(
                    inputs.model,
                    inputs.cluster,
                    task,
                    pace,
                    warmup_steps=warmup_steps,
                    steps=steps,
                )
                trained = hosts.train(training, task.plan, inputs.cluster)
                write_atomically(file, encode(trained, schema=TRAINED_SCHEMA))
                inputs.say(
                    f"{what} {at}/{len(missing)}: {trained.name}: predicted "
                    f"{trained.predicted_seconds:.3f} s, measured {trained.measured_seconds:.3f} s "
                    f"({trained.error:+.1%}), overrun {trained.overrun:.0%}"
                )
    return [decode(read_document(file), TrainedPlan, schema=TRAINED_SCHEMA) for file in files]


def training_of(
    model: ModelSpec,
    cluster: Cluster,
    task: TrainingTask,
    pace: Pace,
    *,
    warmup_steps: int,
    steps: int,
) -> Training:
    """The run of a task, with `steps` measured steps."""
    plan = task.plan.plan
    kinds = [cluster.island_of_device(place.device).device.kind for place in place_ranks(plan)]
    return Training(
        model=model,
        job=task.job,
        plan=plan,
        device_kinds=tuple(kinds),
        backend="cpu",
        pace=pace,
        steps=warmup_steps + steps,
        warmup_steps=warmup_steps,
        timeout_seconds=STEP_TIMEOUT_SECONDS + 10 * task.plan.predicted_seconds,
        sums=sums_of(plan, cluster),
    )


@dataclass(slots=True)
class HostProcesses:
    """The processes of a pass, in the order of the emulation's hosts."""

    emulation: Emulation
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    items: int = 0

    def train(self, training: Training, plan: LoopPlan, cluster: Cluster) -> TrainedPlan:
        """Train a plan now; a LaunchError says which host failed, and why."""
        devices = [place.device for place in place_ranks(plan.plan)]
        carried = self._carried_bytes()
        psutil.cpu_times_percent()  # the next call is about the time from here
        report = self._report(training, [self._host_of(device) for device in devices], plan.name)
        counted = [step.seconds for step in report.steps[training.warmup_steps :]]
        regions = [cluster.island_of_device(device).region for device in devices]
        return TrainedPlan(
            name=plan.name,
            predicted_seconds=plan.predicted_seconds,
            measured_seconds=statistics.median(counted),
            step_seconds=tuple(counted),
            losses=tuple(step.loss for step in report.steps),
            paced_passes=sum(rank.paced_passes for rank in report.ranks),
            overruns=sum(rank.overruns for rank in report.ranks),
            counted_long_bytes=sum(
                sent.bytes_per_step
                for sent in report.sent
                if regions[sent.source] != regions[sent.target]
            ),
            ledger_long_bytes=ledger_long_bytes(plan, training.model, cluster, training.job),
            carried_long_bytes=self._carried_bytes() - carried,
            all_steps=training.steps,
            load_average=os.getloadavg()[0],
            steal=psutil.cpu_times_percent().steal / 100.0,
        )

    def _report(self, training: Training, hosts: Sequence[int], name: str) -> TrainingReport:
        path = self.folder / f"item-{self.items}.json"
        self.items += 1
        item = Item(training=training, hosts=tuple(hosts))
        write_atomically(path, encode(item, schema=ITEM_SCHEMA))
        for host in hosts:
            stdin = self.processes[host].stdin
            assert stdin is not None
            stdin.write(f"{path}\n".encode())
            stdin.flush()
        self.expect(b"done\n", hosts, name)
        document = read_document(path.with_suffix(REPORT_SUFFIX))
        return decode(document, TrainingReport, schema=RunFolder.REPORT_SCHEMA)

    def expect(self, answer: bytes, hosts: Sequence[int], what: str) -> None:
        """Wait for this answer of each host; a LaunchError where one ends instead."""
        for host in hosts:
            stdout = self.processes[host].stdout
            assert stdout is not None
            if stdout.readline() != answer:
                with suppress(subprocess.TimeoutExpired):
                    self.processes[host].wait(GRACE_SECONDS)
                raise LaunchError(f"{what}: {'; '.join(self._ended(hosts)) or 'no answer'}")

    def _ended(self, hosts: Sequence[int]) -> Iterator[str]:
        """The last words of those hosts whose processes have ended."""
        for host in hosts:
            code = self.processes[host].poll()
            if code is not None:
                log = self.log(host).read_text(errors="replace").strip().splitlines()
                last = log[-1] if log else "it printed nothing"
                name = self.emulation.hosts[host].name
                yield f"host {name} ended with exit code {code}: {last}"

    def log(self, host: int) -> Path:
        """What a host's process printed."""
        return self.folder / f"host-{host}.log"

    def _host_of(self, device: int) -> int:
        for number, host in enumerate(self.emulation.hosts):
            if host.first_device <= device < host.first_device + host.devices:
                return number
        raise HetplanError(f"device {device} is on no host of emulation {self.emulation.name}")

    def _carried_bytes(self) -> int:
        return sum(pipe.sent_bytes for pipe in pipe_bytes(self.emulation))


@contextmanager
def host_processes(emulation: Emulation) -> Iterator[HostProcesses]:
    """The processes on all hosts, for as long as the block runs.

    Their folder is inside the emulation's, which the guard removes when this process is killed.
    """
    path = Path(tempfile.mkdtemp(prefix="items-", dir=folder_of(emulation.name)))
    hosts = HostProcesses(emulation=emulation, folder=path, processes=[])
    try:
        for number, host in enumerate(emulation.hosts):
            with hosts.log(number).open("w") as log:
                process = start(
                    emulation,
                    host.name,
                    (sys.executable, "-m", "evaluation.closed_loop.host"),
                    environment=ENVIRONMENT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log.fileno(),
                )
            hosts.processes.append(process)
        hosts.expect(b"ready\n", range(len(hosts.processes)), "the start")
        yield hosts
    finally:
        end(tuple(hosts.processes))
        for process in hosts.processes:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def ledger_long_bytes(plan: LoopPlan, model: ModelSpec, cluster: Cluster, job: Job) -> float:
    """Bytes over links between regions in a step, both ways, as the cost model counts them."""
    return sum(
        entry.bytes_per_step
        for entry in ledger(plan.plan, model, cluster, job).entries
        if entry.link.scope is LinkScope.ISLANDS
        and cluster.island(entry.link.left).region != cluster.island(entry.link.right).region
    )
