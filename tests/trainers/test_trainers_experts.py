"""What Megatron-LM is told of experts' tokens, and what is read of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainer_models import with_experts
from trainer_plans import JOB, cluster, island, launched, one_pipeline, result_of, stage

from hetplan.job.spec import ExpertDispatcher, TrainerOptions
from hetplan.plans.build import plan_of
from hetplan.plans.plan import OverlapSettings
from hetplan.search.result import SearchResult

MODEL = with_experts(8)


def emitted(overlap: bool = False, **options: object) -> SearchResult:
    job = replace(JOB, trainer=TrainerOptions(**options))  # type: ignore[arg-type]
    machines = cluster(island("north", "n"))
    shape = {"tp": 2, "dp": 2, "ep": 4, "microbatch_size": 1, "sequence_parallel": True}
    stages = [stage("north", 2, 2, **shape) for _ in range(2)]
    plan = plan_of(MODEL, machines, job, one_pipeline(*stages, microbatches=16))
    plan = replace(plan, overlap=replace(plan.overlap, expert_parallel=overlap))
    return result_of(machines, plan, MODEL, job)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ["alltoall"]),
        ({"expert_dispatcher": ExpertDispatcher.ALLGATHER}, ["allgather"]),
        ({"expert_dispatcher": ExpertDispatcher.DEEPEP}, ["flex", "deepep"]),
    ],
)
def test_the_dispatcher_is_told(options: dict[str, object], said: list[str]) -> None:
    words = {entry[0]: entry[1:] for entry in launched(emitted(**options)).arguments}
    found = [*words["--moe-token-dispatcher-type"]]
    assert [*found, *words.get("--moe-flex-dispatcher-backend", ())] == said
    assert "--moe-shared-expert-overlap" not in words


def test_what_runs_beside_exchanges_is_told() -> None:
    words = [entry[0] for entry in launched(emitted(shared_expert_overlap=True)).arguments]
    assert "--moe-shared-expert-overlap" in words
    launch = launched(emitted(overlap=True))
    assert ("--overlap-moe-expert-parallel-comm",) in launch.arguments
    # Exchanges need more than one connection, tensor parallelism alone wants exactly one.
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in dict(each) for each in launch.agent_environment)
    plain = launched(emitted()).agent_environment
    assert all(("CUDA_DEVICE_MAX_CONNECTIONS", "1") in each for each in plain)
    assert OverlapSettings().expert_parallel is False
