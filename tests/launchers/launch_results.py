"""Search results to launch, put together by hand around the plans of tests/runtime."""

from __future__ import annotations

from dataclasses import replace

import trainer_plans

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.search.result import SearchResult


def result_of(
    model: ModelSpec, machines: Cluster, task: Job, plan: Plan, *, stage_bytes: float = 1e6
) -> SearchResult:
    """The plan as `hetplan plan` would write it, with an estimate that was made up."""
    some = trainer_plans.any_estimate()
    stage = replace(
        some.stages[0],
        forward_seconds=0.001,
        backward_seconds=0.002,
        wait_seconds=0.0,
        reduction_seconds=0.0,
        optimizer_seconds=0.0,
        components=(),
        memory=replace(
            some.stages[0].memory,
            parameter_bytes=stage_bytes,
            gradient_bytes=0.0,
            optimizer_bytes=0.0,
            activation_bytes=0.0,
            temporary_bytes=0.0,
            buffer_bytes=0.0,
            reserve_factor=1.0,
            runtime_bytes=0.0,
        ),
    )
    count = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    priced = replace(
        some,
        kinds=(),
        components=(),
        num_microbatches=plan.pipelines[0].num_microbatches,
        tokens_per_second=task.global_batch_size * task.sequence_length / some.step_seconds,
        stages=(stage,) * count,
    )
    return trainer_plans.result_of(machines, plan, model, task, priced=priced)
