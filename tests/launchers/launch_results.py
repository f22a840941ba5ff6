"""Search results to launch, put together by hand around the plans of tests/runtime."""

from __future__ import annotations

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Estimate, Interval, MemoryUse, StageEstimate
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.search.result import Certificate, Inputs, SearchResult


def stage_estimate(stage_bytes: float) -> StageEstimate:
    return StageEstimate(
        island="a",
        device="cpu",
        transformer_layers=1,
        forward_seconds=0.001,
        backward_seconds=0.002,
        tensor_parallel_seconds=0.0,
        busy_seconds=0.01,
        wait_seconds=0.0,
        reduction_seconds=0.0,
        optimizer_seconds=0.0,
        memory=MemoryUse(
            parameter_bytes=stage_bytes,
            gradient_bytes=0.0,
            optimizer_bytes=0.0,
            activation_bytes=0.0,
            temporary_bytes=0.0,
            available_bytes=1e12,
        ),
    )


def result_of(
    model: ModelSpec,
    machines: Cluster,
    task: Job,
    plan: Plan,
    *,
    step_seconds: float = 0.02,
    stage_bytes: float = 1e6,
) -> SearchResult:
    """The plan as `hetplan plan` would write it, with an estimate that was made up."""
    return SearchResult(
        schema="hetplan.plan/2",
        hetplan_version="test",
        seed=0,
        inputs=Inputs(model=model, cluster=machines, job=task, sha256=()),
        plan=plan,
        estimate=Estimate(
            step_seconds=step_seconds,
            interval=Interval(
                p10_seconds=0.9 * step_seconds,
                mean_seconds=step_seconds,
                p90_seconds=1.1 * step_seconds,
            ),
            pipeline_seconds=step_seconds,
            num_microbatches=plan.pipelines[0].num_microbatches,
            tokens_per_second=1.0,
            stages=tuple(
                stage_estimate(stage_bytes) for each in plan.pipelines for _ in each.stages
            ),
            peak_memory_bytes=stage_bytes,
            sources=("measured",),
            warnings=(),
        ),
        certificate=Certificate(
            lower_bound_seconds=step_seconds,
            gap=0.0,
            status="optimal",
            space="one plan",
            candidates=1,
            pruned_by_bound=0,
            searched=1,
            replays=1,
        ),
    )
