"""Trainings whose sites are averaged, and what each rank of them does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from runtime_cases import (
    CASES_NORM,
    GPT,
    LLAMA,
    MOE,
    ODD_GPT,
    REGIONS,
    TIED_GPT,
    job,
    pipeline_of,
    unlike_plan,
)

from hetplan.job.spec import Job, Optimizer, Precision, Synchronisation
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline
from hetplan.plans.local_steps import local_steps_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.backends import CpuBackend
from hetplan.runtime import gradients
from hetplan.runtime.checkpoints import settle
from hetplan.runtime.gradient_groups import sums_of
from hetplan.runtime.loop import train
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.training import NO_CHECKPOINTS, CheckpointRequest, Training

PLAIN = {"extra_tokens": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}
"""The outer step takes the mean as it is."""
EVERY_STEP = Synchronisation(sync_steps=1, **PLAIN)
STREAMED = Synchronisation(
    sync_steps=6,
    num_fragments=2,
    fragment_sync_delay=1,
    fragment_update_alpha=0.5,
    extra_tokens=0.1,
)
STEPS, STOPPED = 12, (3, 5, 8)
"""Saved between two averagings, while a mean is under way, and beyond the first round."""


@dataclass(frozen=True)
class LocalCase:
    name: str
    model: ModelSpec
    job: Job
    plan: Plan
    steps: int = 4
    stopped: tuple[int, ...] = ()
    """Steps after which it is stopped and goes on."""


def local_case(
    name: str,
    model: ModelSpec,
    wanted: Synchronisation,
    *sites: tuple[ChosenPipeline, ...],
    steps: int = 4,
    stopped: tuple[int, ...] = (),
    sharded: bool = False,
    **changes: object,
) -> LocalCase:
    plans: list[Plan] = []
    batches = []
    for site in sites:
        batch = sum(
            each.num_microbatches
            * sum(p.shape.dp * p.shape.microbatch_size for p in each.stages[0].parts)
            for each in site
        )
        batches.append(batch)
        own = job(batch, **changes)
        plans.append(unlike_plan(model, own, *site, machines=REGIONS, sharded=sharded))
    task = job(sum(batches), synchronisation=wanted, **changes)
    plan = local_steps_plan(model, REGIONS, task, plans, plans[0])
    assert check_plan(plan, model, REGIONS, task) == ()
    assert (plan.optimizer_shards > 1) == sharded
    return LocalCase(name, model, task, plan, steps, stopped)


A, B = (pipeline_of(5, ("a 1 1 1", 4)),), (pipeline_of(3, ("b 1 1 1", 4)),)
TWO_A, TWO_B = (pipeline_of(3, ("a 1 2 1", 4)),), (pipeline_of(2, ("b 1 2 1", 4)),)
SGD = {"optimizer": Optimizer.SGD}
EQUAL = (
    local_case("one rank each, 5 and 3 samples", GPT, EVERY_STEP, A, B, **SGD),
    local_case(
        "unlike tp, stages and cuts, odd vocabulary",
        ODD_GPT,
        EVERY_STEP,
        (pipeline_of(2, ("a 2 1 1", 4)),),
        (pipeline_of(3, ("b 1 1 1", 1), ("b 1 1 1", 3)),),
        **SGD,
    ),
    local_case(
        "two copies in a site",
        GPT,
        EVERY_STEP,
        (pipeline_of(2, ("a 1 2 1", 4)),),
        (pipeline_of(2, ("b 1 1 1", 2), ("b 1 1 1", 2)),),
        **SGD,
    ),
    local_case(
        "tied",
        TIED_GPT,
        EVERY_STEP,
        (pipeline_of(5, ("a 1 1 1", 3), ("a 1 1 1", 1)),),
        (pipeline_of(3, ("b 1 1 1", 1), ("b 1 1 1", 3)),),
        **SGD,
    ),
    local_case(
        "experts, two pipelines in a site",
        MOE,
        EVERY_STEP,
        (pipeline_of(1, ("a 1 2 1 2", 4)),),
        (pipeline_of(2, ("b 1 1 1 1", 4)), pipeline_of(1, ("b 1 1 1 1", 4))),
        **SGD,
    ),
    local_case("sharded, odd vocabulary", ODD_GPT, EVERY_STEP, TWO_A, TWO_B, sharded=True, **SGD),
    local_case(
        "sharded, experts",
        MOE,
        EVERY_STEP,
        (pipeline_of(1, ("a 1 2 1 2", 4)),),
        (pipeline_of(2, ("b 1 2 1 1", 4)),),
        sharded=True,
        **SGD,
    ),
)
DRIFTING = (
    local_case("streamed", GPT, STREAMED, A, B, steps=STEPS, stopped=STOPPED),
    local_case("streamed again", GPT, STREAMED, A, B, steps=STEPS),
    local_case(
        "streamed in 16 bit, clipped",
        LLAMA,
        replace(STREAMED, precision=Precision.BFLOAT16),
        (pipeline_of(2, ("a 1 2 1", 4)),),
        (pipeline_of(3, ("b 1 1 1", 1), ("b 1 1 1", 3)),),
        steps=STEPS,
        stopped=STOPPED,
        precision=Precision.BFLOAT16,
        gradient_clipping=True,
    ),
    *(
        local_case(
            name,
            LLAMA,
            STREAMED,
            TWO_A,
            TWO_B,
            steps=STEPS,
            stopped=STOPPED,
            sharded=name == "sharded",
            precision=Precision.BFLOAT16,
            gradient_clipping=True,
        )
        for name in ("sharded", "unsharded")
    ),
    local_case(
        "averaged every other step",
        GPT,
        Synchronisation(sync_steps=2, extra_tokens=0.0),
        A,
        B,
        steps=40,
    ),
)


def trained(case: LocalCase, rank: int, request: CheckpointRequest, until: int) -> list[float]:
    """Losses of the steps up to `until`; of one that saves, stopped there."""
    places = place_ranks(case.plan)
    request, _ = settle(request, case.model, case.job, steps=case.steps)
    training = Training(
        model=case.model,
        job=case.job,
        plan=case.plan,
        device_kinds=("cpu",) * len(places),
        backend="cpu",
        pace=None,
        steps=case.steps,
        warmup_steps=0,
        timeout_seconds=60.0,
        sums=sums_of(case.plan, REGIONS),
        checkpoints=request,
    )
    report = train(training, rank, CpuBackend(), stop=lambda done: done == until)
    return [] if report is None else [step.loss for step in report.steps]


def main(cases: Sequence[LocalCase], rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    gradients.MAX_NORM = CASES_NORM
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    found, gathered, gather = {}, Counter[str](), gradients.Shard.gather_exact
    for case in cases:

        def counted(shard: gradients.Shard, name: str = case.name) -> None:
            gathered[name] += 1
            gather(shard)

        gradients.Shard.gather_exact = counted
        whole = trained(case, rank, NO_CHECKPOINTS, case.steps)
        gradients.Shard.gather_exact = gather
        pieces: list[float] = []
        home = str(folder / case.name)
        load = ""
        for until in (*case.stopped, case.steps) if case.stopped else ():
            request = CheckpointRequest(save=home, load=load)
            dist.barrier()
            pieces += trained(case, rank, request, until)
            dist.barrier()
            load = home
        found[case.name] = {"whole": whole, "pieces": pieces, "gathered": [gathered[case.name]]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
