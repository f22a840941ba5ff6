"""Runs on emulated hosts of two regions: each fault ends the run in time and is named right; an
elastic run goes on without a host that is killed, and with it when it comes back.

Four hosts, one rank each, in a pipeline that crosses the long link in its middle. What the ranks
say that they sent is what crossed the shaped interfaces.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import elastic_cases
import pytest
import torch
from elastic_cases import processes_on, set_link
from launch_results import result_of
from runtime_cases import GPT, gpt, job, pipeline_of, unlike_plan

from hetplan.emulation import making, namespaces
from hetplan.emulation.tools import missing
from hetplan.emulation.traffic import host_bytes
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.files.reading import decode, read_document
from hetplan.launchers.elastic_backend import reachable
from hetplan.launchers.hosts import hosts_of_emulation
from hetplan.launchers.local import LaunchSettings, launch
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.run_log import read_runs
from hetplan.launchers.watching import FaultKind, RunFailed
from hetplan.predict.fit import FittedPredictor, save_predictor
from hetplan.profiling.pacing import save_pace
from hetplan.runtime.checkpoints import checkpoints_in, steps_of
from hetplan.runtime.measured import StepRecord, TrainingReport
from hetplan.runtime.single import reference_losses
from hetplan.search.files import save_result
from hetplan.search.result import SearchResult

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}"),
    # Seconds are judged: nothing else may run meanwhile.
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.xdist_group("emulation"),
]
NAME = f"test-faults-{os.getpid()}"
CLUSTER = elastic_cases.cluster()
STAGES = (("fast 1 1 1", 1), ("fast 1 1 1", 1), ("medium 1 1 1", 1), ("slow 1 1 1", 1))
BOUND_SECONDS = 15.0
"""From a fault to the end of the last process: what is promised."""


@pytest.fixture(scope="module")
def live() -> Iterator[Emulation]:
    try:
        yield making.make(CLUSTER, name=NAME)
    finally:
        making.remove(NAME)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def result() -> SearchResult:
    plan = unlike_plan(GPT, job(), pipeline_of(8, *STAGES), machines=CLUSTER)
    return result_of(GPT, CLUSTER, job(), plan)


def failed(live: Emulation, break_it: Callable[[], None]) -> tuple[RunFailed, float]:
    """What the run fails with, and the seconds from the fault until all was over."""
    at: list[float] = []

    def on_step(record: StepRecord) -> None:
        if record.step == 2:
            at.append(time.monotonic())
            break_it()

    with pytest.raises(RunFailed) as caught:
        launch(result(), LaunchSettings(steps=10_000, emulation=live.name), on_step=on_step)
    seconds = time.monotonic() - at[0]
    assert processes_on(live) == ()
    return caught.value, seconds


@pytest.mark.parametrize(
    ("host", "rank", "number", "kind", "words"),
    [
        (
            "south1",
            2,
            signal.SIGKILL,
            FaultKind.RANK_DIED,
            "rank 2 was ended by SIGKILL on south1 (emulated-medium, stage 2)",
        ),
        ("north2", 1, signal.SIGSTOP, FaultKind.HOST_HANGS, "host north2 hangs"),
    ],
)
def test_a_host_whose_processes_are_killed_or_stopped(
    live: Emulation, host: str, rank: int, number: signal.Signals, kind: FaultKind, words: str
) -> None:
    def send() -> None:
        for process in processes_on(live, host):
            os.kill(process, number)

    error, seconds = failed(live, send)
    fault = error.fault
    assert (fault.kind, fault.hosts, fault.ranks) == (kind, (host,), (rank,))
    assert words in str(error)
    assert seconds < BOUND_SECONDS


def test_a_host_that_is_cut_off(live: Emulation) -> None:
    try:
        error, seconds = failed(live, lambda: set_link(live, "south1", "down"))
    finally:
        set_link(live, "south1", "up")
    fault = error.fault
    assert fault.kind is FaultKind.LINK_DOWN
    assert "south1" in fault.hosts
    assert fault.host == "south1" or len(fault.hosts) == 2
    assert " on south1 (emulated-medium, stage 2)" in str(error)
    assert seconds < BOUND_SECONDS


def test_what_ranks_send_is_what_crosses_the_shaped_network(
    live: Emulation, tmp_path: Path
) -> None:
    model = gpt(hidden_size=256, head_dim=64, ffn_hidden_size=512, max_sequence_length=64)
    task = job(32, sequence_length=64)
    plan = unlike_plan(model, task, pipeline_of(32, *STAGES), machines=CLUSTER)
    before = host_bytes(live)
    launch(
        result_of(model, CLUSTER, task, plan),
        LaunchSettings(steps=4, emulation=live.name, log_folder=tmp_path),
    )
    after = host_bytes(live)
    folder = RunFolder(tmp_path)
    report = decode(read_document(folder.report), TrainingReport, schema=RunFolder.REPORT_SCHEMA)
    said = [0.0] * 4
    for each in report.sent:
        said[each.source] += 4 * each.bytes_per_step
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        crossed = new.sent_bytes - old.sent_bytes
        # 2 MB per boundary, direction and step; headers, barriers and measurements come on top.
        assert said[rank] > 8e6
        assert said[rank] <= crossed < 1.06 * said[rank] + 200e3
        # Rendezvous only.
        assert new.control_sent_bytes - old.control_sent_bytes < 100e3


def test_a_plan_for_another_cluster_is_refused(live: Emulation) -> None:
    with pytest.raises(InputError, match=r"is up with cluster .*, the plan is for other"):
        hosts_of_emulation(live.name, replace(CLUSTER, name="other"), [0])
    with pytest.raises(InputError, match="there is no emulation none"):
        hosts_of_emulation("none", CLUSTER, [0])
    island = replace(CLUSTER.islands[0], node_names=("east[1-2]",))
    renamed = replace(CLUSTER, islands=(island, *CLUSTER.islands[1:]))
    with pytest.raises(InputError, match="host east1 of the plan's cluster is missing"):
        hosts_of_emulation(live.name, renamed, [0, 2])


ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY = 44, 5
LOST = "south1"
ALL = ("north1", "north2", "south1", "south2")
LIMIT_SECONDS = 400.0
"""A guard against hanging; a quiet machine takes a minute."""


def kill_host(live: Emulation, host: str) -> None:
    """Nothing of it answers any more, and its processes are gone."""
    set_link(live, host, "down")
    for number in processes_on(live, host):
        os.kill(number, signal.SIGKILL)


@dataclass
class Command:
    """`hetplan launch elastic` while it runs."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def until(self, pattern: str, count: int = 1) -> str:
        """The line that matches for the `count`th time from here on."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if re.search(pattern, line):
                count -= 1
                if not count:
                    return line
        pytest.fail(f"no line has {pattern}:\n{''.join(self.lines[-40:])}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan, pace and predictor."""
    path = tmp_path_factory.mktemp("elastic")
    asks, digest = elastic_cases.predictor()
    assert isinstance(asks, FittedPredictor)
    save_predictor(asks, path / "fit.json")
    assert read_document(path / "fit.json").sha256 == digest
    save_result(elastic_cases.planned(), path / "plan.json")
    save_pace(elastic_cases.pace(), path / "pace.json")
    return path


def launch_elastic(folder: Path, live: Emulation) -> Command:
    arguments = (
        *("launch", "elastic", folder / "plan.json", "--emulation", live.name),
        *("--pace", folder / "pace.json", "--predictor", folder / "fit.json"),
        *("--steps", STEPS, "--save", folder / "ckpt", "--save-every", SAVE_EVERY),
        *("--grow", "always", "--run-log", folder / "runs.jsonl", "--json", "--verbose"),
    )
    with (folder / "out.json").open("w") as out:
        return Command(
            subprocess.Popen(
                (sys.executable, "-m", "hetplan", *map(str, arguments)),
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder),
                },
            )
        )


def ended_within(live: Emulation, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while processes_on(live) and time.monotonic() < limit:
        time.sleep(0.1)
    return not processes_on(live)


def test_a_host_is_killed_in_the_middle_and_comes_back(folder: Path, live: Emulation) -> None:
    # The launcher itself is killed first: no rank outlives it, on no host.
    first = launch_elastic(folder, live)
    told = [first.until(rf"^step {step}/") for step in range(1, SAVE_EVERY + 2)]
    first.process.kill()
    first.process.communicate()
    assert ended_within(live, 20.0)

    # The same command goes on from what was saved.
    second = launch_elastic(folder, live)
    try:
        second.until(rf"goes on from .*step-{SAVE_EVERY:08d}")
        second.until(rf"^step {SAVE_EVERY + 7}/")
        kill_host(live, LOST)
        second.until(rf"^{LOST}: no answer")
        second.until(r"^step ", count=2)
        set_link(live, LOST, "up")
        second.until(f"{LOST} came back")
        _, rest = second.process.communicate(timeout=LIMIT_SECONDS)
    finally:
        second.process.kill()
        second.process.wait()
    assert second.process.returncode == 0, rest
    assert ended_within(live, 5.0)

    report = json.loads((folder / "out.json").read_text())
    phases = report["phases"]
    assert phases[0]["hosts"] == list(ALL)
    assert phases[0]["first_step"] == SAVE_EVERY
    assert phases[0]["ended"] == "fault"
    assert LOST in phases[0]["reason"]
    without = [phase for phase in phases if LOST not in phase["hosts"]]
    assert without
    assert set(without[0]["hosts"]) <= set(ALL) - {LOST}
    assert phases[-1]["hosts"] == list(ALL)
    assert phases[-1]["ended"] == "finished"
    assert phases[-1]["steps_done"] == phases[-1]["checkpoint_step"] == STEPS
    for before, after in pairwise(phases):
        assert after["first_step"] == before["checkpoint_step"]

    # The loss of every step is that of one process which nothing disturbed.
    torch.set_num_threads(1)
    expected = reference_losses(
        elastic_cases.model(), elastic_cases.job(), steps=STEPS, microbatch_size=elastic_cases.BATCH
    )
    numbers = [step["step"] for step in report["steps"]]
    assert numbers == list(range(SAVE_EVERY, STEPS))
    for step in report["steps"]:
        assert step["loss"] == pytest.approx(expected[step["step"]], rel=1e-4)
    for number, line in enumerate(told):
        loss = float(line.split("loss ")[1].split(",")[0])
        assert loss == pytest.approx(expected[number], abs=6e-5)

    # One line per phase that finished a step, as the report has them.
    runs = read_runs(folder / "runs.jsonl")
    logged = [run.phase for run in runs if run.phase is not None]
    assert [list(phase.hosts) for phase in logged] == [
        phase["hosts"] for phase in phases if phase["median_step_seconds"] is not None
    ]
    # Nothing is left but two whole checkpoints.
    saved = checkpoints_in(folder / "ckpt")
    assert steps_of(saved[0]) == STEPS
    assert len(saved) == 2
    assert len(list((folder / "ckpt").iterdir())) == 2


def test_hosts_are_found_that_answer_and_reach_each_other(live: Emulation) -> None:
    assert reachable(live, ALL) == ALL
    for interface in ("eth0", "ctl0"):
        set_link(live, LOST, "down", interface)
        try:
            assert reachable(live, ALL) == ("north1", "north2", "south2")
            assert reachable(live, (LOST,), ("north1",)) == ()
        finally:
            set_link(live, LOST, "up", interface)
    assert reachable(live, (LOST,), ("north1", "north2", "south2")) == (LOST,)


def test_a_long_link_that_is_lost(live: Emulation) -> None:
    """The last test of this module: the relay does not come back."""
    fabric = {os.stat(namespaces.path_of(live.fabric)).st_ino}

    def kill() -> None:
        for process in namespaces.processes_in(fabric):
            if b"hetplan.emulation.relay" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)

    error, seconds = failed(live, kill)
    fault = error.fault
    assert fault.kind is FaultKind.LINK_DOWN
    # Every pair that is named has one end in each region.
    regions = {live.host(host).region for host in fault.hosts}
    assert regions == {"north", "south"}
    assert "nothing passes between" in str(error) or "answers nothing" in str(error)
    assert seconds < BOUND_SECONDS
