"""Trainings that are saved under one plan and go on under another, on at most four ranks."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_cases import (
    CLIPPED,
    GPT,
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

from hetplan.job.spec import Job, Optimizer, Precision
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


SGD = job(optimizer=Optimizer.SGD)
ADAMW_CLIPPED = job(gradient_clipping=True)
BFLOAT16 = job(precision=Precision.BFLOAT16)
MOVES = (
    _move(
        "another cut",
        GPT,
        plan_of(GPT, job(), (3, 1), microbatch_size=2),
        plan_of(GPT, job(), (1, 1, 2)),
    ),
    _move(
        "another tp, copied kv heads, fewer ranks, clipped",
        ODD_LLAMA,
        plan_of(ODD_LLAMA, ADAMW_CLIPPED, (4,), tp=4, microbatch_size=8),
        plan_of(ODD_LLAMA, ADAMW_CLIPPED, (2, 2), microbatch_size=2),
        ADAMW_CLIPPED,
    ),
    _move(
        "fewer ranks to more, another dp, sgd",
        LLAMA,
        plan_of(LLAMA, SGD, (4,), dp=2),
        plan_of(LLAMA, SGD, (4,), dp=2, tp=2, microbatch_size=2),
        SGD,
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
        "one pipeline to two, unlike tp",
        GPT,
        plan_of(GPT, job(), (2, 2), dp=2),
        unlike_plan(
            GPT,
            job(),
            pipeline_of(2, ("a 2 1 3", 4)),
            pipeline_of(2, ("b 1 1 1", 2), ("b 1 1 1", 2)),
        ),
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
        "sharded over 2 of 4 to sharded with tp",
        LLAMA,
        unlike_plan(LLAMA, job(), pipeline_of(2, ("a 1 4 1", 4)), shards=2),
        unlike_plan(LLAMA, job(), pipeline_of(2, ("a 2 2 2", 4)), sharded=True),
    ),
    _move(
        "to interleaved, unlike degrees",
        TIED_GPT,
        plan_of(TIED_GPT, job(), (4,), microbatch_size=8),
        unlike_plan(TIED_GPT, job(), pipeline_of(4, ("a 1 2 1", (1, 1)), ("b 2 1 2", (1, 1)))),
    ),
    _move(
        "bfloat16, sharded to whole",
        LLAMA,
        unlike_plan(LLAMA, BFLOAT16, pipeline_of(4, ("a 1 2 1", 4)), sharded=True),
        plan_of(LLAMA, BFLOAT16, (4,), dp=2),
        BFLOAT16,
    ),
)
SLOW = (
    "another cut",
    "fewer ranks to more, another dp, sgd",
    "one pipeline to two, unlike tp",
    "sharded over 2 of 4 to sharded with tp",
    "to interleaved, unlike degrees",
)
"""Moves whose parts the others have too; a process group of their own trains them."""


def moves_of(group: str) -> tuple[Move, ...]:
    """The moves of group `slow`, or of any other name."""
    return tuple(move for move in MOVES if (move.name in SLOW) == (group == "slow"))
