"""Enumeration of all plans of several pipelines: prices, bounds, pins, and what is too much."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from random_cases import seeds
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job, Pins
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPlan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.multi_pipeline.assembly import Assembler, keeps_pins
from hetplan.search.multi_pipeline.enumerate import (
    Enumeration,
    _Placed,
    enough,
    least_prices,
    least_step,
)
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.multi_pipeline.stage_options import OptionsMaker
from hetplan.search.solver import Best
from hetplan.search.table_maker import TableMaker

PREDICTOR = FittedPredictor.datasheet_only()


def small() -> tuple[ModelSpec, Cluster, Job]:
    where = cluster(
        island("one", kind="slow", teraflops=60.0, nodes=1, per_node=2),
        island("two", kind="fast", teraflops=150.0, nodes=2),
    )
    return model(5), where, replace(job(4, target="native"), gap=0.0)


def enumeration(asked: ModelSpec, where: Cluster, wanted: Job) -> Enumeration:
    maker = TableMaker(model=asked, cluster=where, job=wanted, predictor=PREDICTOR)
    return Enumeration(
        maker=OptionsMaker(pricer=maker.stage_pricer),
        transfers=maker.transfers,
        assembler=Assembler(maker.evaluator),
    )


def fresh() -> Best:
    return Best(bounds=[0.0])


def test_composed_steps_are_what_the_cost_room_says(monkeypatch: pytest.MonkeyPatch) -> None:
    every = enumeration(*small())
    composed: list[float] = []
    seconds, whole = _Placed.seconds, Assembler.whole
    compared = 0

    def noted(self: _Placed, *cut: object) -> float:
        composed.append(seconds(self, *cut))  # type: ignore[arg-type]
        return composed[-1]

    def priced(self: Assembler, chosen: ChosenPlan) -> None:
        nonlocal compared
        again = whole(self, chosen)
        if again is not None:
            compared += 1
            assert composed[-1] == pytest.approx(again.seconds, rel=1e-9)
        # Never better: every plan is compared until the budget ends.

    monkeypatch.setattr(_Placed, "seconds", noted)
    monkeypatch.setattr(Assembler, "whole", priced)
    monkeypatch.setattr("hetplan.search.multi_pipeline.enumerate._MAX_PRICED", 150)
    every.run(0, fresh())
    assert compared >= 150


PINS = [
    Pins(pipelines=2),
    Pins(pipelines=3, microbatch_size=1),
    Pins(pipelines=2, dp=1),
    Pins(pipelines=2, pp=2),
    Pins(pipelines=2, tp=2),
    Pins(pipelines=2, recompute=True),
    Pins(pipelines=2, depth=2),
    Pins(pipelines=2, same_degrees=True),
    Pins(pipelines=2, embedding_on="one", tp=1),
    Pins(pipelines=2, dp=2, sharded_optimizer=True),
    Pins(pipelines=2, sharded_optimizer=False, virtual_stages=1, cp=1, ep=1),
]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pins_are_kept_and_plans_found_where_there_are(pin: Pins) -> None:
    asked, where, wanted = small()
    if pin.embedding_on is not None:
        where = cluster(*(replace(each, nodes=2) for each in where.islands))
        pin = replace(pin, head_on="two")
    wanted = replace(wanted, pin=pin)
    best = fresh()
    bound = enumeration(asked, where, wanted).run(0, best)
    two_pipelines_of_tp_2 = pin.tp == 2  # one node has two devices: one stage of tp 2
    two_embeddings = pin.embedding_on is not None
    deeper = bool(pin.depth)  # the sends of several pipelines wait
    if two_pipelines_of_tp_2 or deeper:
        assert best.chosen is None
        assert bound == math.inf
        return
    assert best.chosen is not None or two_embeddings
    if best.chosen is not None:
        assert keeps_pins(best.chosen, where, wanted)
        assert len(best.chosen.pipelines) == pin.pipelines
        assert bound == pytest.approx(best.seconds, rel=1e-8)
        maker = TableMaker(model=asked, cluster=where, job=wanted, predictor=PREDICTOR)
        order_free = MultiPipelineSolver(0, maker).order_free.bound_seconds
        assert 0.0 < order_free <= best.seconds


def test_too_many_rows_prove_nothing() -> None:
    asked, _, wanted = small()
    where = cluster(*(island(f"i{k}", kind=f"k{k}", nodes=8, per_node=4) for k in range(3)))
    best = fresh()
    best.seconds = 1e-9
    assert enumeration(asked, where, wanted).run(0, best) in (0.0, best.target)


@pytest.mark.parametrize("seed", seeds(20))
def test_prices_bound_what_rows_do_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    needs = rng.integers(0, 3, (12, 2))
    needs[needs.sum(axis=1) == 0] = 1
    samples, devices = rng.integers(1, 6, 12), rng.integers(1, 5, 2)
    prices = least_prices(needs, samples, devices)
    assert (needs @ prices >= samples * (1 - 1e-9)).all()
    # Rows put together one after the other, as long as there is room.
    most = 0
    for _ in range(200):
        room, done = devices.copy(), 0
        for r in rng.permutation(12):
            while (needs[r] <= room).all():
                room -= needs[r]
                done += int(samples[r])
        most = max(most, done)
    assert most <= float(devices @ prices) * (1 + 1e-9)
    assert enough(needs, samples, devices, most)
    seconds = rng.uniform(1, 2, 12).tolist()
    least = least_step(seconds, needs, samples, devices, most)
    assert least in seconds
    below = [r for r in range(12) if seconds[r] < least]
    assert not enough(needs[below], samples[below], devices, most)
