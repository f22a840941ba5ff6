"""Clusters of many islands: bounded more coarsely, in a time that does not double with each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_jobs import cluster, island, job, model
from synthetic_plans import every_row, step_of
from synthetic_spaces import Wanted, small_space

from hetplan.plans.check_job import MAX_SEARCHED_ISLANDS, check_job_against
from hetplan.predict.fit import fit_populations
from hetplan.search.interleaved import island_bound
from hetplan.search.one_f_one_b import order_numbers
from hetplan.search.one_f_one_b.bound import prove
from hetplan.search.one_f_one_b.order_program import OrderProgram
from hetplan.search.search import search

PREDICTOR = fit_populations(())


def test_without_orders_the_bound_of_all_orders_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_numbers, "_MOST_STATES", 1)
    seen = 0
    for seed in range(20):
        wanted = Wanted(islands=3, layers=5, norm=seed % 2 == 0, unions=seed % 3 == 0)
        space = small_space(np.random.default_rng([9, seed]), wanted)
        best = min((step_of(space, row) for row in every_row(space)), default=0.0)
        program = OrderProgram(space)
        assert not program.has_orders
        for target in (0.9 * best, 2.0 * best, 1e30):
            proof = prove(program, target)
            assert not best or proof.bound_seconds <= max(best, target) * (1 + 1e-9)
            seen += 0 < proof.bound_seconds < best
    assert seen > 20


def test_sixteen_islands_are_searched_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact bound of fewer islands is no lower than the coarse one."""
    many = cluster(*[island(f"i{k}", kind=f"k{k % 2}", nodes=1) for k in range(16)])
    asked = replace(job(16), time_limit_seconds=1.5)
    found = search(model(12), many, asked, PREDICTOR)
    assert found.certificate is not None
    assert 0.0 < found.certificate.lower_bound_seconds <= found.estimate.step_seconds
    few = replace(many, islands=many.islands[:4])
    exact = search(model(6), few, asked, PREDICTOR)
    monkeypatch.setattr(island_bound, "_MOST_ISLANDS", 1)
    monkeypatch.setattr(order_numbers, "_MOST_STATES", 1)
    coarse = search(model(6), few, asked, PREDICTOR)
    assert exact.certificate is not None
    assert coarse.certificate is not None
    assert coarse.certificate.lower_bound_seconds <= exact.estimate.step_seconds * (1 + 1e-9)


def test_more_islands_than_are_searched_are_refused_by_name_and_number() -> None:
    many = cluster(*[island(f"i{k}") for k in range(MAX_SEARCHED_ISLANDS + 1)])
    (fault,) = check_job_against(job(), model(), many)
    assert fault.field == "forbid.islands"
    assert f"leave {MAX_SEARCHED_ISLANDS + 1} islands" in fault.message
    for forbid in ({"islands": ("i0",)}, {"nodes": ("i0/0", "i0/1")}):
        fewer = replace(job(), forbid=replace(job().forbid, **forbid))
        assert check_job_against(fewer, model(), many) == ()


@pytest.mark.parametrize("target", ["megatron", "native"])
def test_the_last_of_more_islands_are_searched_as_if_they_were_alone(target: str) -> None:
    many = cluster(*[island(f"i{k}", kind=f"k{k % 2}") for k in range(70)])
    out = replace(job().forbid, islands=tuple(f"i{k}" for k in range(68)))
    some = search(model(4), many, replace(job(target=target, gap=0.1), forbid=out), PREDICTOR)
    few = replace(many, islands=many.islands[68:])
    alone = search(model(4), few, job(target=target, gap=0.1), PREDICTOR)
    assert some.estimate.step_seconds == alone.estimate.step_seconds
