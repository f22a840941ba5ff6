"""Trainings that are saved under one plan and go on under another, on at most four ranks, and
what each rank of them does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from runtime_cases import (
    CASES_NORM,
    CLIPPED,
    LLAMA,
    MOE,
    ODD_GPT,
    ODD_LLAMA,
    TIED_GPT,
    TIED_LLAMA,
    job,
    pipeline_of,
    plan_of,
    unlike_plan,
)

from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
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

SAVED_STEPS, STEPS = 3, 5


@dataclass(frozen=True)
class Move:
    """From the plan that saves to the one that goes on."""

    name: str
    model: ModelSpec
    job: Job
    before: Plan
    after: Plan


def _move(name: str, model: ModelSpec, before: Plan, after: Plan, task: Job | None = None) -> Move:
    return Move(name, model, task or job(), before, after)


ADAMW_CLIPPED = job(gradient_clipping=True)
BFLOAT16 = job(precision=Precision.BFLOAT16)
MOVES = (
    _move(
        "another tp, copied kv heads, fewer ranks, clipped",
        ODD_LLAMA,
        plan_of(ODD_LLAMA, ADAMW_CLIPPED, (4,), tp=4, microbatch_size=8),
        plan_of(ODD_LLAMA, ADAMW_CLIPPED, (2, 2), microbatch_size=2),
        ADAMW_CLIPPED,
    ),
    _move(
        "two unlike pipelines to one, tied, clipped",
        TIED_LLAMA,
        unlike_plan(
            TIED_LLAMA,
            CLIPPED,
            pipeline_of(5, ("a 1 1 1", 3), ("b 1 1 1", 1)),
            pipeline_of(3, ("a 1 1 1", 1), ("b 1 1 1", 3)),
        ),
        plan_of(TIED_LLAMA, CLIPPED, (4,), microbatch_size=4),
        CLIPPED,
    ),
    _move(
        "interleaved to sharded, tied",
        TIED_GPT,
        unlike_plan(TIED_GPT, job(), pipeline_of(4, ("a 1 2 1", (1, 1)), ("b 1 2 1", (1, 1)))),
        unlike_plan(TIED_GPT, job(), pipeline_of(4, ("a 1 2 1", 2), ("b 1 2 1", 2)), sharded=True),
    ),
    _move(
        "sharded over 3 to unlike stages, odd vocabulary",
        ODD_GPT,
        unlike_plan(ODD_GPT, job(9), pipeline_of(3, ("a 1 2 1 + b 1 1 1", 4)), sharded=True),
        unlike_plan(ODD_GPT, job(9), pipeline_of(3, ("a 2 1 3", 1), ("b 1 1 3", 3))),
        job(9),
    ),
    _move(
        "experts, sharded ep2 of 4 copies to ep2 x tp2",
        MOE,
        unlike_plan(MOE, job(), pipeline_of(2, ("a 1 4 1 2", 4)), sharded=True),
        unlike_plan(MOE, job(), pipeline_of(4, ("a 2 2 1 2", 4))),
    ),
    _move(
        "bfloat16, sharded to whole",
        LLAMA,
        unlike_plan(LLAMA, BFLOAT16, pipeline_of(4, ("a 1 2 1", 4)), sharded=True),
        plan_of(LLAMA, BFLOAT16, (4,), dp=2),
        BFLOAT16,
    ),
)


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
