"""Plans for FlagScale: random meshes over islands whose hosts have names."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

from emit_cases import JOB, MODEL, TIED, cluster, island, two_regions

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Estimate
from hetplan.emitters.placement import sheet_of
from hetplan.emitters.sheet import LaunchSheet
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, RecomputeGranularity, Schedule, Sharding
from hetplan.search.result import Inputs, SearchResult

A100, H100, MI300 = "nvidia-a100-80gb-sxm", "nvidia-h100-80gb-sxm", "amd-mi300x"
FLAGSCALE_JOB = replace(JOB, target="flagscale")
FULL, NONE = RecomputeGranularity.FULL, RecomputeGranularity.NONE


def machines(*kinds: str, nodes: int = 4) -> Cluster:
    """An island of 8-device hosts for each kind, named a, b, c..."""
    return cluster(*(island("abcdef"[at], nodes=nodes, kind=kind) for at, kind in enumerate(kinds)))


def stage(
    where: str,
    layers: int,
    *,
    tp: int,
    dp: int,
    samples: int = 4,
    recompute: RecomputeGranularity = NONE,
    sequence_parallel: bool | None = None,
) -> tuple[str, int, Shape, RecomputeGranularity]:
    """One stage; `samples` is what a microbatch has over all data-parallel ranks."""
    parallel = tp > 1 if sequence_parallel is None else sequence_parallel
    shape = Shape(tp=tp, dp=dp, microbatch_size=samples // dp, sequence_parallel=parallel)
    return where, layers, shape, recompute


def planned(
    found: Cluster,
    *stages: tuple[str, int, Shape, RecomputeGranularity],
    model: ModelSpec = MODEL,
    sharding: Sharding = Sharding.NONE,
    job: Job = FLAGSCALE_JOB,
) -> Plan:
    shape = stages[0][2]
    count = job.global_batch_size // shape.samples
    pipeline = ChosenPipeline(
        stages=tuple(
            ChosenStage(
                parts=(Part(island=where, shape=each),),
                layers=(layers,),
                recompute=recompute,
                warmup_depth=own_depth("1f1b", at, len(stages), count),
            )
            for at, (where, layers, each, recompute) in enumerate(stages)
        ),
        num_microbatches=count,
        schedule=Schedule(name="1f1b"),
    )
    return plan_of(model, found, job, ChosenPlan(pipelines=(pipeline,), sharding=sharding))


@lru_cache(maxsize=1)
def any_estimate() -> Estimate:
    """What timeouts are made from; nothing else of an emission reads it."""
    return two_regions().estimate


def result(
    found: Cluster, plan: Plan, model: ModelSpec = MODEL, job: Job = FLAGSCALE_JOB
) -> SearchResult:
    return SearchResult(
        schema="hetplan.plan/5",
        hetplan_version="test",
        seed=0,
        inputs=Inputs(model=model, cluster=found, job=job, sha256=()),
        plan=plan,
        estimate=any_estimate(),
        certificate=None,
    )


def legal(
    found: Cluster, plan: Plan, model: ModelSpec = MODEL, job: Job = FLAGSCALE_JOB
) -> tuple[SearchResult, LaunchSheet]:
    faults = check_plan(plan, model, found, job)
    assert not faults, faults
    return result(found, plan, model, job), sheet_of(plan, found)


def random_result(seed: int) -> tuple[SearchResult, LaunchSheet]:
    """A legal plan of one to four runs of alike stages, over kinds that may come again."""
    draw = Random(seed)
    while True:
        made = _random(draw)
        if made is not None:
            return made


def _random(draw: Random) -> tuple[SearchResult, LaunchSheet] | None:
    kinds = [draw.choice((A100, H100, MI300)) for _ in range(draw.randint(1, 4))]
    found = machines(*kinds)
    model = draw.choice((MODEL, MODEL, TIED))
    rows: list[tuple[str, Shape, RecomputeGranularity]] = []
    recomputes = draw.choice((False, False, True))
    for at in range(len(kinds)):
        # Sometimes an island holds two runs, which then may share a host.
        for _ in range(draw.choice((1, 1, 2))):
            tp, dp = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4))
            _, _, shape, _ = stage("abcdef"[at], 1, tp=tp, dp=dp)
            recompute = draw.choice((FULL, NONE)) if recomputes else NONE
            rows += [("abcdef"[at], shape, recompute)] * draw.randint(1, 3)
    if len(rows) > model.num_layers:
        return None
    cuts = sorted(draw.sample(range(1, model.num_layers), len(rows) - 1))
    layers = [
        stop - start for start, stop in zip((0, *cuts), (*cuts, model.num_layers), strict=True)
    ]
    sharding = draw.choice((Sharding.NONE, Sharding.OPTIMIZER))
    stages = [
        (where, count, shape, recompute)
        for (where, shape, recompute), count in zip(rows, layers, strict=True)
    ]
    try:
        plan = planned(found, *stages, model=model, sharding=sharding)
    except InputError:  # it does not fit on the hosts
        return None
    if check_plan(plan, model, found, FLAGSCALE_JOB):
        return None
    return result(found, plan, model), sheet_of(plan, found)
