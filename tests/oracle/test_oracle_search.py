"""The search with gap 0 finds what trying every plan finds, and its bound is never above it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from oracle_instances import (
    MIN_INSTANCES,
    PRICED,
    Listed,
    axes_of,
    every_pair,
    least_of,
    listed,
    pairs_of,
)
from oracle_judge import EQUAL, Verdict, judge
from oracle_optimum import Enumeration
from oracle_price import Prices
from oracle_space import SmallSpace
from random_cases import seeds

from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InfeasibleError, InputError
from hetplan.plans.check_job import SEARCHED_SPLIT
from hetplan.predict.fit import FittedPredictor
from hetplan.search.multi_pipeline.bound import busy_bound, raised_bound
from hetplan.search.multi_pipeline.solver import MultiPipelineSolver
from hetplan.search.search import search
from hetplan.search.solver import Best
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.table_maker import TableMaker

SAMPLE = 60
BLOCKS = 12
SEVERAL = 29
SPLIT = 40


def _checked(numbers: list[int]) -> list[Verdict]:
    rows = listed()
    found = [judge(rows[number]) for number in numbers]
    faults = [f"{each.number}: {each.text}" for each in found if each.outcome == "FAULT"]
    assert not faults, "\n".join(faults)
    return found


@pytest.mark.parametrize("block", seeds(BLOCKS))
def test_search_equals_the_oracle(block: int) -> None:
    rows = listed()
    # Small ones: all of them are for `make oracle`.
    small = [row.number for row in rows if row.plans <= 400]
    chosen = small[:: len(small) // SAMPLE][:SAMPLE][block::BLOCKS]
    outcomes = Counter(each.outcome for each in _checked(chosen))
    assert outcomes["equal"] > 0


@pytest.mark.parametrize("block", seeds(4))
def test_search_equals_the_oracle_where_compute_hides_reductions(block: int) -> None:
    of = ("megatron", "flagscale")
    rows = [row for row in listed() if row.target in of and 40 <= row.plans <= 400]
    rows = [row for row in rows if not set(row.wanted) & set(PRICED)][:: len(rows) // 40][block::4]
    found = [judge(row, overlap_grad_reduce=True, overlap_param_gather=True) for row in rows]
    assert not [f"{each.number}: {each.text}" for each in found if each.outcome == "FAULT"]
    assert sum(each.outcome == "equal" for each in found) > len(found) / 2


@pytest.mark.parametrize("block", seeds(4))
def test_search_equals_the_oracle_where_every_kind_has_a_library_of_its_own(block: int) -> None:
    of = ("megatron", "torchtitan")
    rows = [row for row in listed() if row.target in of and 40 <= row.plans <= 400]
    rows = [row for row in rows if "islands" in axes_of(row.instance())]
    rows = rows[:: len(rows) // 40][block::4]
    found = [judge(row, vendors=True) for row in rows]
    assert not [f"{each.number}: {each.text}" for each in found if each.outcome == "FAULT"]
    assert sum(each.outcome == "equal" for each in found) > len(found) / 2


@pytest.mark.parametrize("block", seeds(4))
@pytest.mark.parametrize("schedule", SEARCHED_SPLIT)
def test_split_schedules_equal_every_plan(schedule: str, block: int) -> None:
    """Every plan of the pinned schedule, listed by the oracle and priced by the product."""
    rows = [row for row in listed() if row.target in ("torchtitan", "any") and row.plans <= 300]
    proven = plans = 0
    for row in rows[block :: len(rows) // SPLIT][: SPLIT // 4]:
        made, predictor = row.instance(), FittedPredictor.datasheet_only()
        free = {"virtual_stages": None, "depth": None, "pipelines": None}
        pin = replace(made.job.pin, schedule=schedule, **free)
        trainer = replace(made.job.trainer, fused_elementwise=None)
        job = replace(made.job, pin=pin, trainer=trainer, gap=0.0)
        space = SmallSpace(made.model, made.cluster, job)
        prices = Prices(made.model, made.cluster, job, predictor)
        every = Enumeration(space, prices, product=Pricer(made.model, made.cluster, job, predictor))
        for arranged in space.rows():
            every._try((arranged,))
        try:
            found = search(made.model, made.cluster, job, predictor)
        except (InfeasibleError, InputError):
            assert every.best is None, (row.number, every.best)
            continue
        assert every.best is not None, row.number
        assert found.certificate is not None
        step, best = found.estimate.step_seconds, every.best.seconds
        assert found.plan.pipelines[0].schedule.name == schedule
        assert found.certificate.lower_bound_seconds <= best * (1 + EQUAL), row.number
        assert best * (1 - EQUAL) <= step, row.number
        assert step * (1 - found.certificate.gap) <= best * (1 + EQUAL), row.number
        plans += 1
        proven += found.certificate.gap <= EQUAL and step <= best * (1 + EQUAL)
    assert proven > plans / 2


def test_every_pair_of_axes_is_on_together() -> None:
    rows = listed()
    assert [row.number for row in rows] == list(range(len(rows)))
    assert len(rows) >= MIN_INSTANCES
    assert len({(row.target, row.wanted, row.seed) for row in rows}) == len(rows)
    together = pairs_of([axes_of(row.instance()) for row in rows])
    few = {pair: together[pair] for pair in every_pair() if together[pair] < least_of(pair)}
    assert not few


def _of_several() -> list[Listed]:
    """Some jobs that may have several pipelines."""
    rows = [row for row in listed() if "pipelines" in row.wanted][:: 540 // SEVERAL]
    return [row for row in rows if "pipelines" in axes_of(row.instance())]


@pytest.mark.parametrize("at", seeds(len(_of_several())))
def test_bound_and_enumeration_of_several_pipelines_agree_with_every_plan(at: int) -> None:
    made, predictor = _of_several()[at].instance(), FittedPredictor.datasheet_only()
    prices = Prices(made.model, made.cluster, made.job, predictor)
    product = Pricer(made.model, made.cluster, made.job, predictor) if made.priced else None
    every = Enumeration(
        SmallSpace(made.model, made.cluster, made.job), prices, product=product
    ).run(only_several=True)
    job = replace(made.job, gap=0.0)
    cluster = allowed_cluster(made.cluster, job)
    solver = MultiPipelineSolver(
        0, TableMaker(model=made.model, cluster=cluster, job=job, predictor=predictor)
    )
    best = Best(bounds=[0.0])
    solver.prove(best)
    if every is None:
        assert best.chosen is None
        assert best.bounds[0] == math.inf
        return
    assert min(best.seconds, best.bounds[0]) == pytest.approx(every.seconds, rel=1e-8)
    # Of the prices alone, no plan known and nothing enumerated.
    pricer, batch = solver._pricer, job.global_batch_size
    assert pricer is not None
    bound = raised_bound(pricer, batch, busy_bound(pricer, batch), math.inf, lambda seconds: None)
    assert bound.seconds + job.data_loading_seconds <= every.seconds * (1 + 1e-9)
