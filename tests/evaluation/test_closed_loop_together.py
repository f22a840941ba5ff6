"""HETHUB's figure: plans keep to the limit on microbatches, bounds bound, ratios by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evaluation.closed_loop.plans import PoolSpace, draw_pool, price_pool
from evaluation.closed_loop.together import (
    ANY_FORM,
    ONE_PIPELINE,
    Candidate,
    bound_seconds,
    measured,
    tokens,
)
from evaluation.closed_loop.values import (
    CLUSTER_FILE,
    JOB_FILE,
    MODEL_FILE,
    TOGETHER_JOB_FILE,
    LoopPlan,
    TrainedPlan,
    Verdict,
)
from hetplan.cluster.load import load_cluster
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.predict.fit import fit_stores

SHIPPED, MODEL, JOB = load_cluster(CLUSTER_FILE), load_model(MODEL_FILE), load_job(JOB_FILE)
# As on a datasheet: what is not measured needs it.
CLUSTER = replace(
    SHIPPED,
    islands=tuple(
        replace(each, device=replace(each.device, memory_bandwidth_bytes_per_second=10e9))
        for each in SHIPPED.islands
    ),
)
TOGETHER = load_job(TOGETHER_JOB_FILE)
KINDS = [island.device.kind for island in CLUSTER.islands]


@pytest.fixture(scope="module")
def priced() -> tuple[Pricer, tuple[LoopPlan, ...]]:
    """A pool of plans; datasheet figures will do to price it."""
    predictor, _ = fit_stores()
    pricer = Pricer(MODEL, CLUSTER, JOB, predictor)
    speeds = {"fast": 1.0, "medium": 2 / 3, "slow": 1 / 3}
    space = PoolSpace(model=MODEL, cluster=CLUSTER, job=JOB, speeds=speeds)
    return pricer, price_pool(pricer, draw_pool(space, seed=1, size=40))


def test_no_plan_is_predicted_to_beat_its_bound(
    priced: tuple[Pricer, tuple[LoopPlan, ...]],
) -> None:
    pricer, plans = priced
    assert len(plans) > 20
    for each in plans:
        assert 0 < bound_seconds(pricer, each.plan) <= each.predicted_seconds * (1 + 1e-9)


def trained(seconds: float, overruns: int = 0) -> TrainedPlan:
    return TrainedPlan(
        name="a plan",
        predicted_seconds=seconds,
        measured_seconds=seconds,
        step_seconds=(seconds, seconds),
        losses=(6.2,),
        paced_passes=100,
        overruns=overruns,
        counted_long_bytes=0.0,
        ledger_long_bytes=0.0,
        carried_long_bytes=0,
        all_steps=3,
        load_average=1.0,
        steal=0.0,
    )


def test_the_figure_by_hand(priced: tuple[Pricer, tuple[LoopPlan, ...]]) -> None:
    # Each kind alone with a third of the batch, then all together, each bound 9.95 s.
    third = replace(TOGETHER, global_batch_size=TOGETHER.global_batch_size // 3)
    candidates = [
        Candidate(what=what, plan=priced[1][0], job=job, bound_seconds=9.95)
        for job, names in ((third, KINDS), (TOGETHER, (ANY_FORM, ONE_PIPELINE, "another")))
        for what in names
    ]
    seconds = (10.0, 10.0, 10.0, 10.2, 10.04, 12.5)
    found = measured(set(KINDS), candidates, [trained(each) for each in seconds])
    assert found.alone_tokens_per_second == pytest.approx(tokens(TOGETHER) / 10.0)
    assert [row["ratio"] for row in found.alone] == [None] * 3
    assert [row["ratio"] for row in found.together] == pytest.approx([10 / 10.2, 10 / 10.04, 0.8])
    assert found.together[1]["bound_ratio"] == pytest.approx(9.95 / 10.04)
    assert (found.verdict, found.reasons) == (Verdict.REACHED, ())
