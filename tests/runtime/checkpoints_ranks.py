"""One rank of the tests: trains and saves under one plan, goes on under another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints_cases import SAVED_STEPS, STEPS, Move
from runtime_cases import CASES_NORM

from hetplan.job.spec import Precision
from hetplan.plans.plan import Plan
from hetplan.profiling.backends import CpuBackend
from hetplan.runtime import gradients
from hetplan.runtime.checkpoints import resume_of, settle, step_folder
from hetplan.runtime.communicator.channels import open_groups
from hetplan.runtime.gradient_groups import reduction_of
from hetplan.runtime.loop import Stop, train
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.trainer import Trainer
from hetplan.runtime.training import NO_CHECKPOINTS, CheckpointRequest, Training

LIMIT = timedelta(seconds=60)


def trained(
    move: Move,
    plan: Plan,
    rank: int,
    request: CheckpointRequest,
    *,
    steps: int,
    stop: Stop | None = None,
) -> list[list[float]] | None:
    """[step, loss] of every step."""
    request, _ = settle(request, move.model, move.job, steps=steps)
    report = train(training_of(move, plan, request, steps=steps), rank, CpuBackend(), stop=stop)
    return None if report is None else [[each.step, each.loss] for each in report.steps]


def training_of(move: Move, plan: Plan, request: CheckpointRequest, *, steps: int) -> Training:
    return Training(
        model=move.model,
        job=move.job,
        plan=plan,
        device_kinds=("cpu",) * len(place_ranks(plan)),
        backend="cpu",
        pace=None,
        steps=steps,
        warmup_steps=1,
        timeout_seconds=60.0,
        checkpoints=request,
    )


def saved_again(move: Move, plan: Plan, rank: int, source: Path, target: Path) -> None:
    """Load under this plan and save at once."""
    places, reduction = place_ranks(plan), reduction_of(plan, place_ranks(plan))
    groups = open_groups(
        places, rank, collectives="gloo", timeout=LIMIT, reduction_groups=reduction.groups()
    )
    if groups is None:
        return
    training = training_of(move, plan, NO_CHECKPOINTS, steps=STEPS)
    trainer = Trainer(training, places, rank, groups, CpuBackend())
    resume = resume_of(source, move.model, move.job, steps=STEPS)
    trainer.state.load(source, resume.states)
    trainer.state.save(
        target, step=resume.manifest.step, trained=resume.trained, group=groups.control
    )


def main(moves: Sequence[Move], rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    gradients.MAX_NORM = CASES_NORM
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    found: dict[str, dict[str, object]] = {}
    for move in moves:
        home = folder / move.name
        first = CheckpointRequest(save=str(home))
        # The training is a longer one, which is stopped.
        before = trained(
            move,
            move.before,
            rank,
            first,
            steps=STEPS,
            stop=lambda done: done == SAVED_STEPS,
        )
        dist.barrier()
        source = step_folder(home, SAVED_STEPS)
        for name, plan in (("same", move.before), ("other", move.after)):
            saved_again(move, plan, rank, source, folder / name / move.name)
        later = str(folder / "later" / move.name)
        second = CheckpointRequest(save=later, load=str(home), save_every=1, keep=1)
        after = trained(move, move.after, rank, second, steps=STEPS)
        found[move.name] = {"before": before, "after": after}
        if move.job.precision is not Precision.FLOAT32:
            # Only this plan itself rounds as it does.
            alone = trained(move, move.after, rank, NO_CHECKPOINTS, steps=STEPS)
            found[move.name] |= {"undisturbed": alone}
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
