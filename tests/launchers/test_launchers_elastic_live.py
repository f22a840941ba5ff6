"""An elastic run on real hosts of an emulation: one is killed in the middle, and comes back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from elastic_cases import BATCH, cluster, job, model, pace, planned, predictor

from hetplan.emulation import making
from hetplan.emulation.running import start
from hetplan.emulation.tools import missing
from hetplan.emulation.values import Emulation
from hetplan.files.reading import read_document
from hetplan.launchers.elastic_backend import reachable
from hetplan.launchers.run_log import read_runs
from hetplan.predict.fit import FittedPredictor, save_predictor
from hetplan.profiling.pacing import save_pace
from hetplan.runtime.checkpoints import checkpoints_in, steps_of
from hetplan.runtime.single import reference_losses
from hetplan.search.files import save_result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}"),
    pytest.mark.xdist_group("emulation"),
]
ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY = 44, 5
LOST = "south1"
ALL = ("north1", "north2", "south1", "south2")
LIMIT_SECONDS = 400.0
"""A guard against hanging; a quiet machine takes a minute."""


@pytest.fixture(scope="module")
def emulation() -> Iterator[Emulation]:
    name = f"test-elastic-{os.getpid()}"
    made = making.make(cluster(), name=name)
    try:
        yield made
    finally:
        making.remove(name)


def on_host(emulation: Emulation, host: str, *command: str) -> None:
    assert start(emulation, host, command).wait(30) == 0


def processes(emulation: Emulation) -> list[int]:
    """Of all hosts."""
    return [
        int(number)
        for host in emulation.hosts
        for number in subprocess.run(
            ("ip", "netns", "pids", host.namespace), capture_output=True, text=True, check=True
        ).stdout.split()
    ]


def kill_host(emulation: Emulation, host: str) -> None:
    """Nothing of it answers any more, and its processes are gone."""
    on_host(emulation, host, "ip", "link", "set", "eth0", "down")
    space = emulation.host(host).namespace
    found = subprocess.run(("ip", "netns", "pids", space), capture_output=True, text=True)
    for number in found.stdout.split():
        os.kill(int(number), signal.SIGKILL)


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
    asks, digest = predictor()
    assert isinstance(asks, FittedPredictor)
    save_predictor(asks, path / "fit.json")
    assert read_document(path / "fit.json").sha256 == digest
    save_result(planned(), path / "plan.json")
    save_pace(pace(), path / "pace.json")
    return path


def launch(folder: Path, emulation: Emulation) -> Command:
    arguments = (
        *("launch", "elastic", folder / "plan.json", "--emulation", emulation.name),
        *("--pace", folder / "pace.json", "--predictor", folder / "fit.json"),
        *("--steps", STEPS, "--save", folder / "ckpt", "--save-every", SAVE_EVERY),
        *("--grow", "always", "--run-log", folder / "runs.jsonl", "--json"),
    )
    with (folder / "out.json").open("w") as out:
        return Command(
            subprocess.Popen(
                (sys.executable, "-m", "hetplan", *map(str, arguments)),
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        )


def ended_within(emulation: Emulation, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while processes(emulation) and time.monotonic() < limit:
        time.sleep(0.1)
    return not processes(emulation)


def test_a_host_is_killed_in_the_middle_and_comes_back(folder: Path, emulation: Emulation) -> None:
    logs_before = set(Path(tempfile.gettempdir()).glob("hetplan-elastic-*"))
    # The launcher itself is killed first: no rank outlives it, on no host.
    first = launch(folder, emulation)
    told = [first.until(rf"^step {step}/") for step in range(1, SAVE_EVERY + 2)]
    first.process.kill()
    first.process.communicate()
    assert ended_within(emulation, 20.0)

    # The same command goes on from what was saved.
    second = launch(folder, emulation)
    try:
        second.until(rf"goes on from .*step-{SAVE_EVERY:08d}")
        second.until(rf"^step {SAVE_EVERY + 7}/")
        kill_host(emulation, LOST)
        second.until(rf"^{LOST}: no answer")
        second.until(r"^step ", count=2)
        on_host(emulation, LOST, "ip", "link", "set", "eth0", "up")
        second.until(f"{LOST} came back")
        _, rest = second.process.communicate(timeout=LIMIT_SECONDS)
    finally:
        second.process.kill()
        second.process.wait()
    assert second.process.returncode == 0, rest
    assert ended_within(emulation, 5.0)

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
    expected = reference_losses(model(), job(), steps=STEPS, microbatch_size=BATCH)
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
    # Nothing is left but two whole checkpoints, and the logs of the launcher that was killed.
    saved = checkpoints_in(folder / "ckpt")
    assert steps_of(saved[0]) == STEPS
    assert len(saved) == 2
    assert len(list((folder / "ckpt").iterdir())) == 2
    logs = set(Path(tempfile.gettempdir()).glob("hetplan-elastic-*")) - logs_before
    assert len(logs) == 1
    shutil.rmtree(logs.pop())


def test_hosts_are_found_that_answer_and_reach_each_other(emulation: Emulation) -> None:
    assert reachable(emulation, ALL) == ALL
    for interface in ("eth0", "ctl0"):
        on_host(emulation, LOST, "ip", "link", "set", interface, "down")
        try:
            assert reachable(emulation, ALL) == ("north1", "north2", "south2")
            assert reachable(emulation, (LOST,), ("north1",)) == ()
        finally:
            on_host(emulation, LOST, "ip", "link", "set", interface, "up")
    assert reachable(emulation, (LOST,), ("north1", "north2", "south2")) == (LOST,)


def test_a_region_that_is_cut_off_is_no_part_of_the_run(emulation: Emulation) -> None:
    fabric = emulation.fabric
    taps = [segment.tap for segment in emulation.segments]
    subprocess.run(("ip", "-n", fabric, "link", "set", taps[0], "down"), check=True)
    try:
        assert reachable(emulation, ALL) == ("north1", "north2")
    finally:
        subprocess.run(("ip", "-n", fabric, "link", "set", taps[0], "up"), check=True)
    assert reachable(emulation, ALL) == ALL
