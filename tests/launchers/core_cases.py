"""Plans that the tests of the megatron-core launcher train."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from launch_results import result_of

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from runtime_cases import CPUS, job

from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import OverlapSettings, Recompute, Schedule, Sharding
from hetplan.search.result import SearchResult


def core_result(
    model: ModelSpec,
    layers: tuple[tuple[int, ...], ...],
    *,
    task: Job | None = None,
    sharding: Sharding = Sharding.NONE,
    recompute: Recompute | None = None,
    overlap: OverlapSettings | None = None,
    **shape: object,
) -> SearchResult:
    """A plan for target megatron with these layers per stage and virtual stage, on CPU cores."""
    degrees = Shape(**{"tp": 1, "dp": 1, "microbatch_size": 1, **shape})  # type: ignore[arg-type]
    task = replace(task or job(), target="megatron")
    count = task.global_batch_size // (degrees.microbatch_size * degrees.dp)
    virtual = len(layers[0])
    name = "interleaved-1f1b" if virtual > 1 else "1f1b"
    plan = plan_of(
        model,
        CPUS,
        task,
        ChosenPlan(
            pipelines=(
                ChosenPipeline(
                    stages=tuple(
                        ChosenStage(
                            parts=(Part(island="a", shape=degrees),),
                            layers=each,
                            warmup_depth=own_depth(name, at, len(layers), count, virtual),
                        )
                        for at, each in enumerate(layers)
                    ),
                    num_microbatches=count,
                    schedule=Schedule(name=name, virtual_stages=virtual),
                ),
            ),
            sharding=sharding,
        ),
    )
    if recompute is not None:
        (pipeline,) = plan.pipelines
        stages = tuple(replace(stage, recompute=recompute) for stage in pipeline.stages)
        plan = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    plan = replace(plan, overlap=overlap or plan.overlap)
    assert check_plan(plan, model, CPUS, task) == ()
    return result_of(model, CPUS, task, plan)
