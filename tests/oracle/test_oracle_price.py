"""The oracle's step and memory are those of the product, over random plans of every target.

Both are written apart, so this checks both: placement, replay, end of step, memory, legality.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle_instances import PRICED, Listed, listed
from oracle_optimum import Enumeration, Found, chosen_plan
from oracle_price import Prices
from oracle_space import Row, SmallSpace

from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.predict.fit import FittedPredictor

PLANS_EACH = 6


def _own() -> list[Listed]:
    """Instances that the oracle prices itself."""
    return [row for row in listed() if not set(row.wanted) & set(PRICED)]


def _some(space: SmallSpace, prices: Prices, rng: np.random.Generator) -> list[Found]:
    """Random plans, whether they fit or not."""
    rows: list[tuple[Row, ...]] = []
    rows += [(row,) for row in space.rows()] if space.job.pin.pipelines != 2 else []
    if space.trainer.several_pipelines and space.job.pin.pipelines != 1:
        several = Enumeration(space, prices).sequences(space.job.pin.pipelines)
        rows += several
    found = []
    for _ in range(PLANS_EACH if rows else 0):
        chosen = rows[int(rng.integers(len(rows)))]
        placed = space.placed(chosen)
        if placed is None or not all(space.cuts(row) for row in chosen):
            continue
        pipelines = []
        for row, replicas in zip(chosen, placed, strict=True):
            cuts, choices = space.cuts(row), space.recomputes(row, several=len(chosen) > 1)
            cut, choice = cuts[rng.integers(len(cuts))], choices[rng.integers(len(choices))]
            pipelines.append(space.pipeline(row, replicas, cut, choice))
        ranks = [sum(one.dp * one.cp for one in each) for row in placed for each in row]
        for state in space.states(chosen, ranks):
            found.append(Found(0.0, tuple(pipelines), chosen, state))
    return found


def _compare(one: Listed) -> int:
    made = one.instance()
    predictor = FittedPredictor.datasheet_only()
    space = SmallSpace(made.model, made.cluster, made.job)
    prices = Prices(made.model, made.cluster, made.job, predictor)
    pricer = Pricer(made.model, made.cluster, made.job, predictor)
    plans = _some(space, prices, np.random.default_rng(one.seed))
    for found in plans:
        chosen = chosen_plan(space, found.pipelines, found.rows, found.state)
        own = prices.plan(found.pipelines, found.state)
        plan = plan_of(made.model, made.cluster, made.job, chosen)
        assert [[stage.replicas for stage in each.stages] for each in plan.pipelines] == [
            [stage.replicas for stage in each.stages] for each in found.pipelines
        ]
        assert chosen_of(plan, made.cluster, made.job, made.model) == chosen
        if math.isinf(own.seconds):
            with pytest.raises(InputError, match="wait for itself"):
                pricer.step(plan)
            continue
        step = pricer.step(plan)
        assert own.seconds == pytest.approx(step.step_seconds, rel=1e-9), chosen
        assert own.fits == all(use.fits for row in step.memory for use in row), chosen
        costs = prices.of_plan(found.pipelines, found.state)
        for each, row in zip(found.pipelines, step.memory, strict=True):
            for s, (stage, use) in enumerate(zip(each.stages, row, strict=True)):
                # Of a stage on unlike islands the product tells the device with the least to spare.
                held = [(prices.peak(costs, each, s, r), prices.room(r)) for r in stage.replicas]
                tightest = max(held, key=lambda pair: pair[0] - pair[1])
                assert use.total_bytes == pytest.approx(tightest[0], rel=1e-9), chosen
        assert not check_plan(plan, made.model, made.cluster, made.job), chosen
    return len(plans)


def test_the_oracle_prices_as_the_product() -> None:
    rows = _own()
    assert sum(_compare(one) for one in rows[:: len(rows) // 24]) > 60


@pytest.mark.slow
def test_the_oracle_prices_as_the_product_everywhere() -> None:
    assert sum(_compare(one) for one in _own()) > 5000
