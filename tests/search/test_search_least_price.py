"""No plan pays less for its devices than the bound, whatever they cost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.plans.pieces import used_devices
from hetplan.predict.fit import FittedPredictor
from hetplan.search.least_price import least_prices
from hetplan.search.result import Question
from hetplan.search.search import search
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
