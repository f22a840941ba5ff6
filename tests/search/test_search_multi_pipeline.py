"""Plans of several pipelines: bound, shares and what is found, against plans drawn at random."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from multi_pipeline_plans import random_several
from random_cases import seeds
from search_jobs import cluster, island, job, model, random_case

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job, Pins
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPlan
from hetplan.predict.fit import fit_populations
from hetplan.search.multi_pipeline.assembly import Assembler, Share, balanced
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


@pytest.mark.parametrize("seed", seeds(24))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    asked, where, wanted = random_case(seed)
    wanted = replace(wanted, target="native", global_batch_size=3 + seed % 6)
    rng = random.Random(seed)
    found = solver(asked, where, wanted)
    best = fresh(found.order_free.bound_seconds)
    priced = Assembler(PlanEvaluator(asked, where, wanted, PREDICTOR), 1)
    draws = (random_several(rng, asked, where, wanted) for _ in range(120))
    plans = [priced.whole(each) for each in draws if each is not None]
    steps = [each.seconds for each in plans if each is not None]
    found.prove(best)
    assert best.bounds[0] <= min(steps, default=float("inf")) * (1 + 1e-9)
    # A bound that is told a good plan may only speak of better ones.
    if steps:
        told = fresh(0.0)
        told.seconds = min(steps)
        found.prove(told)
        assert min(told.bounds[0], told.seconds) <= min(steps) * (1 + 1e-9)


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
    priced = Assembler(PlanEvaluator(asked, where, wanted, PREDICTOR), 1)
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


@pytest.mark.parametrize(
    "pin",
    [
        pytest.param(Pins(tp=1, dp=1), marks=pytest.mark.slow),
        Pins(pp=2),
        Pins(pipelines=2),
        Pins(depth=0),
        Pins(embedding_on="one"),
    ],
)
def test_pins_are_kept(pin: Pins) -> None:
    wanted = replace(job(8, target="native"), pin=pin)
    found = solver(model(4), two_kinds(), wanted)
    best = fresh(found.order_free.bound_seconds)
    found.improve(best)
    if best.chosen is None:
        return
    for pipeline in best.chosen.pipelines:
        stages = pipeline.stages
        assert pin.pp in (None, len(stages))
        assert {s.parts[0].shape.dp for s in stages} == {1} or pin.dp is None
        assert pin.embedding_on in (None, stages[0].parts[0].island)
    assert pin.pipelines in (None, len(best.chosen.pipelines))
    assert pin.depth is None or not best.chosen.early_sends


def test_the_same_question_has_the_same_answer() -> None:
    answers = []
    for _ in range(2):
        found = solver(model(6), two_kinds(), job(24, target="native"))
        best = fresh(found.order_free.bound_seconds)
        found.improve(best)
        found.prove(best)
        answers.append((best.chosen, best.seconds, tuple(best.bounds)))
    assert answers[0] == answers[1]


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
    bound = found._bound(best, math.inf, 3e-3, 4)
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


def test_one_device_has_no_several_pipelines() -> None:
    found = solver(model(4), cluster(island("one", nodes=1)), job(4, target="native"))
    assert found.order_free.bound_seconds == float("inf")
    best = fresh(0.0)
    found.improve(best)
    assert best.chosen is None


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_the_bound_of_prices_is_below_the_best_of_all_plans(batch: int) -> None:
    where = cluster(
        island("one", kind="slow", teraflops=60.0, nodes=1, per_node=2),
        island("two", kind="fast", teraflops=150.0, nodes=2),
    )
    wanted = replace(job(batch, target="native"), gap=0.0)
    found = solver(model(5), where, wanted)
    best = fresh(0.0)
    best.effort = 0
    found.prove(best)
    assert best.listed == 1
    known = fresh(0.0)
    bound = found._bound(known, math.inf, 3e-3, 4).seconds
    assert 0.1 * best.seconds < bound <= best.seconds * (1 + 1e-9)
    # What was told on the way is a bound, too.
    assert known.bounds[0] <= bound


def test_no_plan_of_several_pipelines_is_deeper() -> None:
    wanted = replace(job(8, target="native"), pin=Pins(depth=2))
    found = solver(model(4), two_kinds(), wanted)
    assert found.order_free.bound_seconds == math.inf
    best = fresh(0.0)
    found.improve(best)
    found.prove(best)
    assert best.chosen is None


def test_a_pipeline_has_no_more_devices_than_there_are() -> None:
    """Surcharges make the paths, and so the bound, those of pipelines that have room."""
    where = cluster(
        island("one", kind="slow", teraflops=60.0, nodes=1),
        island("two", kind="fast", teraflops=150.0, nodes=6),
    )
    wanted = job(24, target="native")
    found = solver(model(12), where, wanted)
    prices = np.array([0.1, 4.0])
    rose = False
    for pricer in found._pricers:
        turn = float(pricer.layer.min()) * 12
        low, high = 0.3 * turn, 0.5 * turn
        every = np.ones((1, len(pricer.options.forward)), dtype=np.bool_)
        weight, path = pricer.least(prices, every, (low, high), (1, pricer.options.most_stages))
        if path is not None and any(path.surcharge):
            rose = True
            use = np.array(path.use) * pricer.options.samples
            charged = np.array(path.surcharge) > 0
            assert weight > 0
            # Between a path with too many devices of that class and one with fewer.
            assert (use[charged] <= 2 * pricer.options.devices[charged]).all()
    assert rose
