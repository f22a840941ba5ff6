"""Rivals of the best plan."""

from __future__ import annotations

from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.search import search
from hetplan.search.space.forwarding_predictor import (
    ShiftedPredictor,
)
from hetplan.whatif.near_best import rivals

PREDICTOR = FittedPredictor.datasheet_only()


def mixed() -> Cluster:
    return cluster(
        island("slow", kind="old", teraflops=40.0, nodes=1, per_node=4),
        island("quick", kind="new", teraflops=120.0, nodes=1, per_node=4),
    )


def test_rivals_are_legal_other_plans_and_one_wins_when_a_kind_is_slow() -> None:
    given, on, asked = model(6), mixed(), job(8)
    best = search(given, on, asked, PREDICTOR)
    found = rivals(best.plan, best.inputs, PREDICTOR, seconds=20.0)
    assert len(found) == len(set(found)) >= 3
    assert best.plan not in found
    assert all(not check_plan(each, given, on, asked) for each in found)
    # In the world where the quick kind is slow the best of them beats the best plan of today's.
    world = ShiftedPredictor(PREDICTOR, "new", 1.0)
    there = [estimate(each, given, on, asked, world).step_seconds for each in found]
    assert min(there) < 0.98 * estimate(best.plan, given, on, asked, world).step_seconds
    assert rivals(best.plan, best.inputs, PREDICTOR, seconds=0.0) == ()
