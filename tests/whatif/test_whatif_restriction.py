"""What a target costs: the same question asked of a trainer that can run more plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.job.spec import TrainerOptions
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.whatif.baselines import WIDER, restriction

PREDICTOR = FittedPredictor.datasheet_only()


def _find(trainer: str, options: TrainerOptions | None = None) -> SearchResult:
    where = cluster(
        island("slow", kind="old", teraflops=40.0, nodes=1, per_node=2),
        island("quick", kind="new", teraflops=120.0, nodes=1, per_node=2),
    )
    asked = replace(job(8, gap=0.05), target=trainer, trainer=options or TrainerOptions())
    return search(model(6), where, asked, PREDICTOR)


@pytest.mark.parametrize("trainer", ["flagscale", "megatron", "torchtitan"])
def test_more_plans_are_never_slower(trainer: str) -> None:
    result = _find(trainer)
    # Without time the plan itself is the wider one, where that target can run it as it is.
    for seconds in (None, 0.0) if trainer == "flagscale" else (None,):
        found = restriction(result, PREDICTOR, time_limit_seconds=seconds)
        assert found is not None
        assert found.target == WIDER
        # The plan itself is known to the wider search from the beginning.
        assert found.lower_bound_seconds <= found.step_seconds
        assert found.step_seconds <= result.estimate.step_seconds * (1.0 + 1e-9)
        assert seconds is None or found.lower_bound_seconds == 0.0


def test_nothing_is_compared_where_the_wider_trainer_lacks_what_the_job_asks_for() -> None:
    result = _find("megatron", TrainerOptions(overlap_grad_reduce=True))
    assert restriction(result, PREDICTOR) is None
