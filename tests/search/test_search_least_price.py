"""No plan pays less for its devices than the bound, whatever they cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from oracle_instances import axes_of, listed
from reference_search import Problem, outlines
from search_jobs import cluster, island, job, model

from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.pieces import used_devices
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.least_price import least_prices
from hetplan.search.result import Question
from hetplan.search.search import search
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.table_maker import TableMaker

_PREDICTOR = FittedPredictor.datasheet_only()


def paid(found, prices: dict[str, float]) -> float:
    devices = {
        each.name: int(mine.sum()) for each, mine in used_devices(found.plan, found.inputs.cluster)
    }
    return found.estimate.step_seconds * sum(prices[n] * count for n, count in devices.items())


@pytest.mark.parametrize("target", ["megatron", "native"])
def test_no_plan_of_any_part_of_the_cluster_pays_less(target: str) -> None:
    draw = random.Random(5)
    for _ in range(3):
        of = cluster(
            island("a", teraflops=draw.choice((30, 60)), nodes=2),
            island("b", kind="other", teraflops=draw.choice((80, 160)), nodes=2),
        )
        asked = replace(job(draw.choice((4, 8)), gap=0.2), target=target)
        question = Question(model=model(4), cluster=of, job=asked)
        parts = [question, question.without_islands("a"), question.without_islands("b")]
        found = [search(model(4), of, each.job, _PREDICTOR) for each in parts]
        lists = {
            str(at): {"a": draw.uniform(0.1, 3.0), "b": draw.uniform(0.1, 3.0)} for at in range(4)
        }
        bounds = least_prices(TableMaker.of(question, _PREDICTOR), lists)
        for name, prices in lists.items():
            assert 0.0 < bounds[name] <= min(paid(each, prices) for each in found)


def test_one_device_alone_pays_little_more_than_the_bound() -> None:
    of = cluster(island("a", gigabytes=64.0, nodes=1))
    asked = job(4)
    found = search(model(6), of, asked, _PREDICTOR)
    question = Question(model=model(6), cluster=of, job=asked)
    bound = least_prices(TableMaker.of(question, _PREDICTOR), {"usd": {"a": 2.0}})["usd"]
    assert 0.5 * paid(found, {"a": 2.0}) < bound <= paid(found, {"a": 2.0})


REACH = {"islands", "stages", "layers", "dp", "tp", "microbatch", "recompute", "sharding", "shapes",
         "tight", "regions", "limits", "tied"}  # fmt: skip
"""Axes of the oracle's jobs of which the reference planner knows every plan."""
BLOCKS, FAST_BLOCKS = 12, 2


def every_plan(problem: Problem) -> Iterator[tuple[Plan, float]]:
    """(plan, step) of all that are legal and fit, one after the other."""
    pricer = problem.pricer
    for outline in outlines(problem):
        stages = len(outline.parts)
        for cuts in combinations(range(1, problem.num_layers), stages - 1):
            edges = (0, *cuts, problem.num_layers)
            layers = tuple(stop - start for start, stop in pairwise(edges))
            for recompute in product(problem.recomputation, repeat=stages):
                try:
                    chosen = outline.chosen(layers, recompute)
                    plan = plan_of(pricer.model, pricer.cluster, pricer.job, chosen)
                except InputError:
                    continue
                if check_plan(plan, pricer.model, pricer.cluster, pricer.job):
                    continue
                cost = pricer.step(plan)
                if all(use.fits for stage in cost.memory for use in stage):
                    yield plan, cost.step_seconds


@pytest.mark.parametrize(
    "block",
    [
        block if block < FAST_BLOCKS else pytest.param(block, marks=pytest.mark.slow)
        for block in range(BLOCKS)
    ],
)
def test_no_plan_of_all_that_there_are_pays_less(block: int) -> None:
    draw, tightest = random.Random(block), 0.0
    rows = [row for row in listed() if row.plans <= 400 and {*row.wanted} <= REACH][block::BLOCKS]
    made = [each for each in (row.instance() for row in rows) if axes_of(each) <= REACH]
    assert made
    for each in made:
        of = allowed_cluster(each.cluster, each.job)
        problem = Problem(Pricer(each.model, of, each.job, _PREDICTOR))
        names = [one.name for one in each.cluster.islands]
        lists = {str(at): {name: draw.uniform(0.1, 3.0) for name in names} for at in range(4)}
        question = Question(model=each.model, cluster=each.cluster, job=each.job)
        bounds = least_prices(TableMaker.of(question, _PREDICTOR), lists)
        for plan, step in every_plan(problem):
            devices = {n.name: int(mine.sum()) for n, mine in used_devices(plan, of)}
            for name, prices in lists.items():
                pays = step * sum(prices[n] * count for n, count in devices.items())
                assert bounds[name] <= pays, (each.job, plan)
                tightest = max(tightest, bounds[name] / pays)
    assert tightest > 0.5
