"""What is refused, what survives a kill or a full disk, and what a rank writes of its vectors."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runtime_cases import SAVED_JOB as JOB
from runtime_cases import SAVED_MODEL as MODEL
from runtime_cases import TIED_GPT, saving

from hetplan.errors import InputError, LaunchError
from hetplan.job.spec import Optimizer, Precision
from hetplan.profiling.backends import CpuBackend
from hetplan.runtime.checkpoints import (
    check_loss_faults,
    checkpoint_at,
    checkpoints_in,
    last_checkpoint,
    resume_of,
    settle,
    step_folder,
)
from hetplan.runtime.loop import train
from hetplan.runtime.measured import TrainingReport
from hetplan.runtime.training import CheckpointRequest

pytestmark = pytest.mark.xdist_group("runtime_checkpoints")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def trained(request: CheckpointRequest, *, steps: int) -> TrainingReport:
    request, _ = settle(request, MODEL, JOB, steps=steps)
    report = train(saving(request, steps), 0, CpuBackend())
    assert report is not None
    return report


@pytest.fixture(scope="module")
def saved(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2; tests copy what they change."""
    home = tmp_path_factory.mktemp("saved") / "ckpt"
    trained(CheckpointRequest(save=str(home), save_every=1), steps=2)
    assert checkpoints_in(home) == (step_folder(home, 2), step_folder(home, 1))
    return home


def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "ckpt")


# ---- what a run may go on from


def test_another_job_is_refused_by_what_differs(saved: Path) -> None:
    job = replace(JOB, optimizer=Optimizer.SGD, seed=4)
    with pytest.raises(InputError, match=r"trained\.optimizer: .* give the job the same") as caught:
        resume_of(step_folder(saved, 2), MODEL, job, steps=9)
    assert [fault.field for fault in caught.value.faults] == ["trained.optimizer", "trained.seed"]


def test_other_reasons_not_to_go_on(saved: Path, tmp_path: Path) -> None:
    folder = step_folder(saved, 2)
    with pytest.raises(InputError, match="whose shape is not that of"):
        resume_of(folder, TIED_GPT, JOB, steps=9)
    for steps in (1, 2):
        with pytest.raises(InputError, match=f"2 steps are done and the run is to have {steps} "):
            settle(CheckpointRequest(load=str(saved)), MODEL, JOB, steps=steps)
    with pytest.raises(InputError, match="there is no such folder"):
        checkpoint_at(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no whole checkpoint"):
        checkpoint_at(tmp_path)
    with pytest.raises(InputError, match="needs a folder to save to"):
        CheckpointRequest(save_every=2)
    with pytest.raises(InputError, match="at least 0"):
        CheckpointRequest(save="a", keep=-1)


def test_another_precision_is_said_and_ends_what_can_be_compared(saved: Path) -> None:
    same = resume_of(step_folder(saved, 2), MODEL, JOB, steps=9)
    assert same.notes == (f"goes on from {step_folder(saved, 2)}, after 2 steps",)
    assert (same.trained.begun_from, check_loss_faults(same)) == ("", ())
    job = replace(JOB, precision=Precision.BFLOAT16)
    other = resume_of(step_folder(saved, 2), MODEL, job, steps=9)
    assert "in float32 so far and in bfloat16 from here on" in other.notes[1]
    assert other.states == ("weights", "exp_avg", "exp_avg_sq")
    assert other.trained.begun_from == str(step_folder(saved, 2))
    assert "leave --check-loss out" in check_loss_faults(other)[0].message


# ---- where a run may save


def test_checkpoints_of_another_run_are_never_mixed_or_deleted(saved: Path, tmp_path: Path) -> None:
    before = sorted(saved.rglob("*"))
    with pytest.raises(InputError, match="has checkpoints of another run, the last is step-0000"):
        settle(CheckpointRequest(save=str(saved)), MODEL, JOB, steps=9)
    with pytest.raises(InputError, match="which is later than step-00000001"):
        settle(
            CheckpointRequest(save=str(saved), load=str(step_folder(saved, 1))),
            MODEL,
            JOB,
            steps=9,
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        settle(CheckpointRequest(save=str(tmp_path / "file" / "a")), MODEL, JOB, steps=9)
    assert sorted(saved.rglob("*")) == before


@pytest.mark.parametrize("damage", ["manifest", "metadata", "cut off"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = copied(saved, tmp_path)
    last = step_folder(home, 2)
    data = max(last.glob("*.distcp"), key=lambda each: each.stat().st_size)
    if damage == "manifest":
        (last / "hetplan-checkpoint.json").write_text("{")
    elif damage == "metadata":
        (last / ".metadata").write_bytes((last / ".metadata").read_bytes()[:-20])
    else:
        data.write_bytes(data.read_bytes()[:-100])
    assert last_checkpoint(home) == step_folder(home, 1)
    assert "is damaged and passed over" in caplog.text
    report = trained(CheckpointRequest(save=str(home), load=str(home), save_every=1), steps=3)
    assert [each.step for each in report.steps] == [1, 2]
    names = sorted(each.name for each in home.iterdir())
    assert names == ["step-00000002", "step-00000002.damaged", "step-00000003"]


# ---- full disks


def test_a_full_disk_ends_the_run_and_leaves_earlier_checkpoints(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copied(saved, tmp_path)
    synced, count = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(handle)

    monkeypatch.setattr(os, "fsync", full)
    wanted = rf"{step_folder(home, 3)} could not be saved: No space left on device; earlier"
    with pytest.raises(LaunchError, match=wanted):
        trained(CheckpointRequest(save=str(home), load=str(home), save_every=1), steps=4)
    monkeypatch.undo()
    assert checkpoints_in(home) == (step_folder(home, 2), step_folder(home, 1))
    assert last_checkpoint(home) == step_folder(home, 2)
    assert sorted(each.name for each in home.iterdir()) == ["step-00000001", "step-00000002"]
