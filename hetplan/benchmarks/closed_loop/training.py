"""How are plans trained one after another on the emulated hosts, and what did each measure?

One set of processes for all of them (`hetplan.launchers.persistent_ranks`), one per host. Every
result is written before the next plan begins, so that an interrupted pass goes on with what is
missing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hetplan.benchmarks.closed_loop.machine_load import load_between, load_now
from hetplan.benchmarks.closed_loop.values import PASS_SCHEMA, LoopPlan, TrainedPlan
from hetplan.cluster.spec import Cluster
from hetplan.cost.network.link_names import LinkScope
from hetplan.cost.traffic.ledger import ledger
from hetplan.emulation.measuring import pipe_bytes
from hetplan.emulation.running import end, start
from hetplan.emulation.values import Emulation
from hetplan.errors import HetplanError, LaunchError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.job.spec import Job
from hetplan.launchers.persistent_ranks import ITEM_SCHEMA, REPORT_SCHEMA, Item, TurnFolder
from hetplan.launchers.run_folder import START_SECONDS
from hetplan.model.spec import ModelSpec
from hetplan.profiling.pacing import Pace
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.measured import TrainingReport
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.training import Training

_LOOK_SECONDS = 0.02
STEP_TIMEOUT_SECONDS = 120.0
"""Without any end of a plan's steps; the slowest plan of a pass is far from it."""


@dataclass(slots=True)
class Turns:
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
def in_turn(emulation: Emulation, cluster: Cluster) -> Iterator[Turns]:
    """The processes on all hosts, for as long as the block runs.

    Their folder is inside the emulation's, which the guard removes when this process is killed.
    """
    from hetplan.emulation.state import folder_of

    path = Path(tempfile.mkdtemp(prefix="turns-", dir=folder_of(emulation.name)))
    turns = Turns(emulation=emulation, cluster=cluster, folder=TurnFolder(path))
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


def keep_trained(path: Path, trained: TrainedPlan) -> None:
    """Write what a training measured."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, encode(trained, schema=PASS_SCHEMA))
