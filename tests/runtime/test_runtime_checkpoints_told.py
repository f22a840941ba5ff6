"""What a rank says of its checkpoints: to its launcher, and where an old one cannot be deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runtime_cases import gpt, job, plan_of

from hetplan.profiling.backends import CpuBackend
from hetplan.runtime.activity import Activity, ActivityKind
from hetplan.runtime.checkpoints import checkpoints_in, delete_old, step_folder
from hetplan.runtime.loop import train
from hetplan.runtime.training import NO_CHECKPOINTS, CheckpointRequest, Training

MODEL, JOB = gpt(num_layers=1), job(2)
SAVE, LOAD = "save of a checkpoint", "load of a checkpoint"


class Told(Activity):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []

    def begin(
        self, operation: str, peers: tuple[int, ...] = (), *, kind: ActivityKind | None = None
    ) -> None:
        super().begin(operation, peers, kind=kind)
        if kind is ActivityKind.SAVING:
            self.files.append(operation)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def told(request: CheckpointRequest, *, steps: int) -> Told:
    activity = Told()
    training = Training(
        model=MODEL,
        job=JOB,
        plan=plan_of(MODEL, JOB, (1,)),
        device_kinds=("cpu",),
        backend="cpu",
        pace=None,
        steps=steps,
        warmup_steps=0,
        timeout_seconds=60.0,
        checkpoints=request,
    )
    assert train(training, 0, CpuBackend(), activity=activity) is not None
    return activity


def test_a_checkpoint_is_told_where_there_is_one(alone: None, tmp_path: Path) -> None:
    """A rank that ends between two steps is not said to have been saving where nothing is saved."""
    home = tmp_path / "ckpt"
    assert told(NO_CHECKPOINTS, steps=2).files == []
    assert told(CheckpointRequest(save=str(home), save_every=2), steps=3).files == [SAVE, SAVE]
    again = CheckpointRequest(save=str(home), load=str(step_folder(home, 3)))
    last = told(again, steps=5)
    assert last.files == [LOAD, SAVE]
    assert last.beat().operation != SAVE


def test_a_checkpoint_that_cannot_be_deleted_stays_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [step_folder(tmp_path, step) for step in (1, 2, 3)]
    for folder in folders:
        folder.mkdir()
    rename = Path.rename

    def stuck(self: Path, target: Path) -> Path:
        if self == folders[0]:
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stuck)
    delete_old(tmp_path, 1)
    assert checkpoints_in(tmp_path) == (folders[2], folders[0])
    assert f"{folders[0]} could not be deleted: Permission denied" in caplog.text
