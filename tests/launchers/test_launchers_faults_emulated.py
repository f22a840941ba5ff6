"""Faults on emulated hosts of two regions: each ends the run in time and is named right.

Four hosts, one rank each, in a pipeline that crosses the long link in its middle. What the ranks
say that they sent is what crossed the shaped interfaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launch_results import result_of
from runtime_cases import GPT, gpt, job, pipeline_of, unlike_plan

from hetplan.cluster.hosts import part_left
from hetplan.cluster.load import load_cluster
from hetplan.emulation import making, namespaces
from hetplan.emulation.measuring import host_bytes
from hetplan.emulation.running import start
from hetplan.emulation.tools import missing
from hetplan.emulation.values import Emulation
from hetplan.errors import InputError
from hetplan.files.reading import decode, read_document
from hetplan.launchers.hosts import hosts_of_emulation
from hetplan.launchers.local import LaunchSettings, launch
from hetplan.launchers.run_folder import RunFolder
from hetplan.launchers.watching import FaultKind, RunFailed
from hetplan.runtime.measured import StepRecord, TrainingReport
from hetplan.search.result import SearchResult

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}"),
    # Seconds are judged: nothing else may run meanwhile.
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.xdist_group("emulation"),
]
NAME = f"test-faults-{os.getpid()}"
CLUSTER = load_cluster(
    Path(__file__).resolve().parents[2] / "configs/clusters/emulated-two-regions.yaml"
)
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


def processes_on(emulation: Emulation, *hosts: str) -> tuple[int, ...]:
    """On these hosts, or on all."""
    spaces = [host.namespace for host in emulation.hosts if not hosts or host.name in hosts]
    inodes = {os.stat(namespaces.path_of(space)).st_ino for space in spaces}
    return namespaces.processes_in(inodes)


def set_link(emulation: Emulation, host: str, state: str) -> None:
    command = ("ip", "link", "set", "eth0", state)
    assert start(emulation, host, command, stderr=subprocess.DEVNULL).wait(20) == 0


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
    wrong = replace(CLUSTER.islands[1], device=CLUSTER.islands[0].device)
    unlike = replace(CLUSTER, islands=(CLUSTER.islands[0], wrong, CLUSTER.islands[2]))
    with pytest.raises(
        InputError, match=r"host south1 .* has 1 x emulated-fast, but 1 x emulated-"
    ):
        hosts_of_emulation(live.name, unlike, [0, 2])


def test_a_part_of_the_cluster_has_its_devices_on_the_same_hosts(live: Emulation) -> None:
    found = hosts_of_emulation(live.name, part_left(CLUSTER, ["north1", "south2"]), [2, 1])
    assert found.of_rank == ("south1", "north2")
    assert found.meeting_address == live.host("south1").control_address
    assert found.host_of_address(live.host("south2").data_address) == "south2"
    assert found.host_of_address("192.168.0.1") == ""


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
