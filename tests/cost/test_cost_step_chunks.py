"""What hides reduction and gathering of stages with several chunks."""

from __future__ import annotations

import pytest
from cost_fakes import LinearPredictor, job, model
from estimate_plans import plan_with, stages_of, wide_cluster

from hetplan.cost.components.overlap import beside, slowdowns
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.plans.plan import OverlapSettings, Sharding

CLUSTER = wide_cluster()
SHAPE = model()
FREE = job(target="any", gradient_clipping=False)
CHUNKS = [[0, 2, 3, 4], [5, 6, 7, 8]]


def step(microbatches: int, sharding: Sharding = Sharding.NONE, slow: float = 1.0) -> StepCost:
    stages = stages_of(
        CHUNKS, [8] * 4, len(SHAPE.layers), num_microbatches=microbatches,
        schedule="interleaved-1f1b", tp=1, microbatch_size=1,
    )  # fmt: skip
    plan = plan_with(
        SHAPE, CLUSTER, FREE, [(stages, microbatches)], schedule="interleaved-1f1b",
        sharding=sharding, shards=8 if sharding is Sharding.OPTIMIZER else 1,
        overlap=OverlapSettings(reduction=True, gathering=True),
    )  # fmt: skip
    return Pricer(SHAPE, CLUSTER, FREE, LinearPredictor(slow=(("slow", slow),))).step(plan)


@pytest.mark.parametrize(("microbatches", "last_group"), [(8, 4), (6, 2), (5, 1), (3, 3)])
def test_the_last_chunk_is_reduced_beside_the_whole_group_of_the_first(
    microbatches: int, last_group: int
) -> None:
    found = step(microbatches)
    for stage, end in zip(found.work[0].stages, found.composed.stages[0], strict=True):
        first, second = (sum(stage.unit.held((each,))) for each in stage.ranges)
        whole = end.reduction.exposed_seconds + end.reduction.hidden_seconds
        # One bucket each: the first chunk's has nothing left to hide behind.
        expected = beside(
            whole * second / (first + second),
            last_group * stage.backward[0],
            slowdowns(stage.unit.island.device),
        )
        assert end.reduction.hidden_seconds == pytest.approx(expected.hidden_seconds)
        assert 0 < end.reduction.hidden_seconds < whole


def test_parameters_of_the_second_chunk_come_beside_the_first_groups_passes() -> None:
    found = step(8, Sharding.OPTIMIZER)
    for stage, end in zip(found.work[0].stages, found.composed.stages[0], strict=True):
        first, second = (sum(stage.unit.held((each,))) for each in stage.ranges)
        whole = end.gathering.exposed_seconds + end.gathering.hidden_seconds
        expected = beside(
            whole * second / (first + second),
            4 * stage.forward[0],
            slowdowns(stage.unit.island.device),
        )
        assert end.gathering.hidden_seconds == pytest.approx(expected.hidden_seconds)
        assert 0 < end.gathering.hidden_seconds < whole
