"""Trainings that are saved under one plan and go on under another, on at most four ranks."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_cases import (
    CLIPPED,
    LLAMA,
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
        "bfloat16, sharded to whole",
        LLAMA,
        unlike_plan(LLAMA, BFLOAT16, pipeline_of(4, ("a 1 2 1", 4)), sharded=True),
        plan_of(LLAMA, BFLOAT16, (4,), dp=2),
        BFLOAT16,
    ),
)
