"""Faults of runs on this machine: each ends the run, and is named with what the rank did."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from test_launchers_local import cpu_result, rank_of, workers

from hetplan.launchers import ranks
from hetplan.launchers.local import LaunchSettings, launch
from hetplan.launchers.ranks import OnStep
from hetplan.launchers.watching import SILENT_SECONDS, FaultKind, RunFailed, RunFault
from hetplan.runtime.measured import StepRecord
from hetplan.runtime.training import CheckpointRequest

pytestmark = pytest.mark.slow
# What the ranks need to be ended, on a machine whose cores are shared with other tests.
ALLOWANCE_SECONDS = 9.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make every launch start ranks that go wrong."""
    monkeypatch.setattr(ranks, "WORKER", "faulty_worker")
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def fault_of(on_step: OnStep | None = None, **settings: object) -> tuple[RunFault, str]:
    with pytest.raises(RunFailed) as caught:
        launch(
            cpu_result(),
            LaunchSettings(steps=10_000, **settings),  # type: ignore[arg-type]
            on_step=on_step,
        )
    assert workers() == []
    return caught.value.fault, str(caught.value)


def test_a_rank_that_raises_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "raise:1:6")
    fault, text = fault_of()
    assert (fault.kind, fault.ranks) == (FaultKind.RANK_FAILED, (1,))
    assert text.splitlines()[0] == (
        "rank 1 ended with code 1 (cpu, stage 1) in forward pass of microbatch 1: "
        "ValueError: a matrix of the wrong shape"
    )
    assert "faulty_worker.py" in text  # where it was raised


def test_a_rank_that_computes_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "loop:0:7")
    began: list[float] = []
    fault, text = fault_of(stall_seconds=3.0, on_step=lambda step: began.append(time.monotonic()))
    assert (fault.kind, fault.ranks) == (FaultKind.RANK_HANGS, (0,))
    assert fault.operation == "forward pass of microbatch 2"
    assert "rank 0 (cpu, stage 0) hangs: forward pass of microbatch 2 goes on" in text
    assert time.monotonic() - began[0] < 3.0 + ALLOWANCE_SECONDS


def test_a_stopped_rank_is_named_and_the_last_checkpoint_too(tmp_path: Path) -> None:
    stopped: list[float] = []

    def stop(record: StepRecord) -> None:
        if record.step == 3:
            stopped.append(time.monotonic())
            os.kill(next(pid for pid in workers() if rank_of(pid) == 1), signal.SIGSTOP)

    save = tmp_path / "checkpoints"
    fault, text = fault_of(
        on_step=stop, checkpoints=CheckpointRequest(save=str(save), save_every=2)
    )
    assert time.monotonic() - stopped[0] < SILENT_SECONDS + ALLOWANCE_SECONDS
    assert (fault.kind, fault.ranks) == (FaultKind.RANK_HANGS, (1,))
    assert fault.seconds >= SILENT_SECONDS
    assert "its process was not heard of" in text
    # The stop may have come while the checkpoint of the fourth step was saved.
    last = next(name for name in ("step-00000004", "step-00000002") if (save / name).is_dir())
    assert f"the last good checkpoint is {save / last}; go on from it with --load" in text
