"""Plans of several pipelines: bound, shares and what is found."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from random_cases import seeds
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job, Pins
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPlan
from hetplan.predict.fit import fit_populations
from hetplan.search.multi_pipeline.assembly import Assembler, Share, balanced
from hetplan.search.multi_pipeline.bound import busy_bound, raised_bound
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.solver import Best
from hetplan.search.space.plan_evaluator import PlanEvaluator
from hetplan.search.table_maker import TableMaker

PREDICTOR = fit_populations(())


def solver(asked: ModelSpec, where: Cluster, wanted: Job) -> MultiPipelineSolver:
    maker = TableMaker(model=asked, cluster=where, job=wanted, predictor=PREDICTOR)
    return MultiPipelineSolver(0, maker)


def fresh(bound: float) -> Best:
    return Best(bounds=[bound], effort=1)


@pytest.mark.parametrize("seed", seeds(30))
def test_shares_are_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, batch = int(rng.integers(1, 4)), int(rng.integers(4, 25))
    samples = [int(rng.integers(1, 5)) for _ in range(count)]
    least = [int(rng.integers(1, 3)) for _ in range(count)]
    fill, turn = rng.uniform(0, 3, count), rng.uniform(0.2, 2, count)

    def seconds(p: int, m: int) -> float:
        return float(fill[p] + turn[p] * m)

    shares = [
        Share(sequences=samples[p], least=least[p], seconds=partial(seconds, p))
        for p in range(count)
    ]
    every = [
        numbers
        for numbers in itertools.product(*(range(low, batch + 1) for low in least))
        if sum(m * sequences for m, sequences in zip(numbers, samples, strict=True)) == batch
    ]
    found = balanced(shares, batch)
    if not every:
        assert found is None
        return
    assert found in every

    def longest(numbers: tuple[int, ...]) -> float:
        return max(seconds(p, m) for p, m in enumerate(numbers))

    assert longest(found) == pytest.approx(min(map(longest, every)), rel=1e-8)


def two_kinds() -> Cluster:
    return cluster(
        island("one", kind="slow", teraflops=60.0, gigabytes=16.0, nodes=4),
        island("two", kind="fast", teraflops=150.0, gigabytes=16.0, nodes=4),
        gigabytes_per_second=20.0,
    )


def test_what_is_found_is_legal_and_takes_what_is_said() -> None:
    asked, where, wanted = model(8), two_kinds(), job(48, target="native")
    found = solver(asked, where, wanted)
    best = fresh(found.order_free.bound_seconds)
    found.improve(best)
    assert best.chosen is not None
    priced = Assembler(PlanEvaluator(asked, where, wanted, PREDICTOR))
    again = priced.whole(best.chosen)
    assert again is not None
    assert again.seconds == best.seconds
    # Two unlike kinds are worth more than the faster one alone.
    alone = cluster(where.islands[1])
    other = solver(asked, alone, wanted)
    single = fresh(other.order_free.bound_seconds)
    other.improve(single)
    assert best.seconds < single.seconds
    found.prove(best)
    assert best.bounds[0] <= best.seconds
    assert best.bounds[0] > 0.5 * best.seconds
    # What a search has that is ended before this proof.
    assert 0.4 * best.seconds < found.order_free.bound_seconds <= best.seconds


def test_a_kind_that_is_used_only_beside_another_has_a_price() -> None:
    """With three replicas the islands of one and two devices are stages together, not alone."""
    where = cluster(
        island("a", kind="a", nodes=1),
        island("b", kind="b", teraflops=60.0, nodes=2),
        island("c", kind="c", teraflops=150.0, nodes=6),
    )
    wanted = replace(job(12, target="native"), pin=Pins(dp=3))
    found = solver(model(6), where, wanted)
    best = fresh(0.0)
    bound = found._coarse(best)
    assert bound.seconds > 0.0
    assert min(bound.prices) > 0.0
    found.improve(best)
    assert best.chosen is not None
    assert bound.seconds <= best.seconds


def test_no_offer_has_a_microbatch_that_does_not_divide_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flows of 5 and 4 would be a good fit for islands of 5 and 4 devices."""
    where = cluster(island("one", nodes=5), island("two", nodes=4))
    pin = Pins(pipelines=2, pp=1, tp=1, microbatch_size=1)
    found = solver(model(6), where, replace(job(27, target="native"), pin=pin))
    offered: list[ChosenPlan] = []

    def noted(_: Best, index: int, chosen: ChosenPlan, seconds: float) -> None:
        offered.append(chosen)

    monkeypatch.setattr(Best, "offer", noted)
    found.improve(fresh(0.0))
    shapes = [
        [part.shape for part in pipeline.stages[0].parts]
        for chosen in offered
        for pipeline in chosen.pipelines
    ]
    assert shapes
    assert all(27 % sum(s.dp * s.microbatch_size for s in each) == 0 for each in shapes)


@pytest.mark.parametrize("more", [1.001, 1.01, 1.03])
def test_a_bound_that_is_raised_to_its_limit_reaches_it(more: float) -> None:
    pricer = solver(model(8), two_kinds(), job(48, target="native"))._pricer
    assert pricer is not None
    busy = busy_bound(pricer, 48)
    limit = busy.seconds * more
    found = raised_bound(pricer, 48, busy, limit, lambda seconds: None)
    assert found.seconds >= limit  # below it the search would take the plans for not excluded
    assert found.seconds <= limit * (1 + 1e-8)


@pytest.mark.parametrize(
    ("where", "pin"), [(two_kinds(), Pins(depth=2)), (cluster(island("one", nodes=1)), Pins())]
)
def test_deeper_pipelines_and_one_device_have_no_plan(where: Cluster, pin: Pins) -> None:
    found = solver(model(4), where, replace(job(8, target="native"), pin=pin))
    assert found.order_free.bound_seconds == math.inf
    best = fresh(0.0)
    found.improve(best)
    found.prove(best)
    assert best.chosen is None
