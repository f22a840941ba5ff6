"""Nothing is left behind: not after a kill at any step, nor of processes that refuse to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from emulation_cases import (
    ENVIRONMENT,
    FOUR_HOSTS,
    HERE,
    Traces,
    four_hosts,
    needs_machine,
    traces,
)

from hetplan.emulation import making, state
from hetplan.emulation.running import start
from hetplan.emulation.values import CONTROL_HOST
from hetplan.errors import HetplanError

pytestmark = [needs_machine, pytest.mark.xdist_group("emulation"), pytest.mark.slow]
NAME = f"test-killed-{os.getpid()}"
STEPS = 12
"""That `make` tells of four hosts: one for each, and eight others."""


def interrupted(how: str, *moments: float) -> list[dict[str, object]]:
    done = subprocess.run(
        (sys.executable, str(HERE / "emulation_kills.py"), NAME, how, *map(str, moments)),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((ENVIRONMENT["PYTHONPATH"], str(HERE)))},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(moments)
    return results


def gone(before: Traces, name: str, seconds: float = 30.0) -> bool:
    limit = time.monotonic() + seconds
    while traces(name) != before and time.monotonic() < limit:
        time.sleep(0.05)
    return traces(name) == before


def test_down_removes_what_a_kill_leaves_after_every_step() -> None:
    results = interrupted("kill", *range(STEPS))
    assert [result["status"] for result in results] == [-9] * STEPS
    assert all(result["clean"] for result in results), results
    # The test would see nothing if there were nothing to see.
    assert [result["left_namespaces"] for result in results][2:] == [5] * (STEPS - 2)
    assert results[-1]["left_processes"] == 1


def test_ctrl_c_leaves_nothing_without_down() -> None:
    moments = (0, 1, 2, 4, 8, 9, 11)
    results = interrupted("int", *moments)
    assert [result["status"] for result in results] == [130] * len(moments)
    for result in results:
        assert not result["left_namespaces"]
        assert not result["left_processes"]
        assert not result["left_folder"]
        assert result["clean"], result


def test_down_removes_what_a_kill_leaves_at_any_moment() -> None:
    moments = [0.003 * number for number in range(1, 101)]
    assert all(result["clean"] for result in interrupted("kill-after", *moments))
    moments = [0.003 * number for number in range(1, 31)]
    assert all(result["clean"] for result in interrupted("kill-remove", *moments))


def using(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (
            *(sys.executable, "-m", "hetplan", "emulate", "with", str(FOUR_HOSTS)),
            *("--name", NAME, "--here", "--", *command),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def test_the_guard_removes_what_a_killed_command_used() -> None:
    before = traces(NAME)
    program = "import subprocess, time; print('in use', flush=True); time.sleep(600)"
    with using(sys.executable, "-c", program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in use\n"
        assert len(traces(NAME).namespaces) == 5
        process.kill()
        assert gone(before, NAME)


def test_processes_on_hosts_end_also_those_that_do_not_want_to() -> None:
    before = traces(NAME)
    emulation = making.make(four_hosts(), name=NAME)
    willing = start(
        emulation, "north1", ("sh", "-c", "echo on; exec sleep 600"), stdout=subprocess.PIPE
    )
    stubborn = start(
        emulation, CONTROL_HOST, ("sh", "-c", "trap '' TERM; echo on; while :; do sleep 1; done"),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    for process in (willing, stubborn):
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == b"on\n"
    making.remove(NAME)
    assert willing.wait(timeout=30) == -signal.SIGTERM
    assert stubborn.wait(timeout=30) == -signal.SIGKILL
    assert traces(NAME) == before


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        (
            "fabric_queue_lines",
            ("qdisc add dev d1 root netem delay one",),
            r"tc failed: .*qdisc add dev d1 root netem delay one",
        ),
        ("relay_config", {"pipes": []}, r"the relay .* did not start: .*KeyError"),
    ],
)
def test_a_failing_tool_says_what_it_did_and_leaves_nothing(
    recipe: str, given: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = traces(NAME)
    monkeypatch.setattr(f"hetplan.emulation.recipe.{recipe}", lambda emulation: given)
    with pytest.raises(HetplanError, match=said):
        making.make(four_hosts(), name=NAME)
    assert traces(NAME) == before


def test_down_of_all_removes_what_no_file_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces(NAME)
    making.make(four_hosts(), name=NAME)
    key = state.folder_of(NAME).name
    (state.folder_of(NAME) / "emulation.json").write_text("{")
    assert NAME not in {emulation.name for emulation in state.all_written()}
    assert key in state.written_keys()
    assert key in making.keys_of_namespaces()
    # Others on this machine may have emulations of their own, which stay.
    monkeypatch.setattr(state, "all_written", lambda: ())
    monkeypatch.setattr(state, "written_keys", lambda: ())
    monkeypatch.setattr(making, "keys_of_namespaces", lambda: {key})
    assert len(making.remove_every()) == 5
    assert traces(NAME) == before
