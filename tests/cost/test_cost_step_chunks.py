"""What hides reduction and gathering of stages with several chunks."""

from __future__ import annotations

import pytest
from cost_fakes import LinearPredictor
from estimate_plans import CLUSTER, FREE, SHAPE, plan_of

from hetplan.cost.components.overlap import beside, slowdowns
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.plan import OverlapSettings, Sharding


@pytest.mark.parametrize(("microbatches", "last_group"), [(8, 4), (6, 2), (5, 1), (3, 3)])
def test_other_chunks_hide_a_chunks_reduction_and_gathering(
    microbatches: int, last_group: int
) -> None:
    plan = plan_of(
        [8] * 4, [[0, 2, 3, 4], [5, 6, 7, 8]], microbatches=microbatches,
        schedule="interleaved-1f1b", sharding=Sharding.OPTIMIZER, shards=8,
        overlap=OverlapSettings(reduction=True, gathering=True),
    )  # fmt: skip
    found = Pricer(SHAPE, CLUSTER, FREE, LinearPredictor()).step(plan)
    for stage, end in zip(found.work[0].stages, found.composed.stages[0], strict=True):
        first, second = (sum(stage.unit.held((each,))) for each in stage.ranges)
        slow = slowdowns(stage.unit.island.device)
        for part, group, compute in (
            # One bucket each: the first chunk's reduction has nothing left to hide behind, and
            # its parameters are needed at once.
            (end.reduction, last_group, stage.backward[0]),
            (end.gathering, min(microbatches, 4), stage.forward[0]),
        ):
            whole = part.exposed_seconds + part.hidden_seconds
            expected = beside(whole * second / (first + second), group * compute, slow)
            assert part.hidden_seconds == pytest.approx(expected.hidden_seconds)
            assert 0 < part.hidden_seconds < whole
