"""Nothing is left behind, also of processes that refuse to end; kills at counted moments are in
tests/kills."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from emulation_cases import (
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
