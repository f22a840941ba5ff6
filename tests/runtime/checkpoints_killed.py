"""A training that is killed again and again while it saves; arguments: folder, and the numbers of
the steps that change the disk before which a run is killed.

Each run is a fork, which kills itself (SIGKILL) before one of its steps that change the disk; the
next one goes on from the last checkpoint. Prints [step, loss] of all finished steps and at last how
the runs ended.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime_cases import gpt, job, plan_of

from hetplan.profiling.backends import CpuBackend
from hetplan.runtime.checkpoints import last_checkpoint, settle
from hetplan.runtime.loop import train
from hetplan.runtime.single import reference_losses
from hetplan.runtime.training import CheckpointRequest, Training

MODEL = gpt(num_layers=1)
JOB = job(2)
STEPS = 6
KILLS = (1, 6, 17, 24, 29, 31, 33, 35, 37, 39, 41, 48)
"""Which step that changes the disk each run does not live to see: the first save of a run has
some 35, the last of which name it and delete the one before."""


def killed_at(number: int) -> None:
    """Patch what changes the disk: SIGKILL before call `number`; 0: never."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **settings: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **settings)

        return call

    for owner, name in (
        *((os, name) for name in ("fsync", "replace", "rmdir", "unlink")),
        *((Path, name) for name in ("rename", "mkdir")),
        (shutil, "rmtree"),
    ):
        setattr(owner, name, counted(getattr(owner, name)))


def training_of(request: CheckpointRequest) -> Training:
    return Training(
        model=MODEL,
        job=JOB,
        plan=plan_of(MODEL, JOB, (1,)),
        device_kinds=("cpu",),
        backend="cpu",
        pace=None,
        steps=STEPS,
        warmup_steps=0,
        timeout_seconds=60.0,
        checkpoints=request,
    )


def run(folder: Path, number: int) -> None:
    """Train from the last checkpoint on, and tell every finished step."""
    store = dist.FileStore(str(folder / f"store-{number}"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    home = folder / "home"
    found = last_checkpoint(home)
    request, _ = settle(
        CheckpointRequest(
            save=str(home), save_every=1, keep=1, load="" if found is None else str(home)
        ),
        MODEL,
        JOB,
        steps=STEPS,
    )
    killed_at(number)
    train(
        training_of(request),
        0,
        CpuBackend(),
        on_step=lambda each: print([each.step, each.loss], flush=True),
    )


def main(folder: Path, kills: list[int]) -> None:
    torch.set_num_threads(1)
    # What torch imports at the first update is imported once, not by every fork.
    reference_losses(MODEL, JOB, steps=1, microbatch_size=2)
    codes = []
    for number in (*kills, 0):
        child = os.fork()
        if child == 0:
            run(folder, number)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(codes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
