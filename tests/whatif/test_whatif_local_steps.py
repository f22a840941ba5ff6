"""Local steps beside the synchronous plan of two small regions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from cost_fakes import LinearPredictor
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import GPT, LONG, cluster, island, job

from hetplan.cluster.spec import IslandLink
from hetplan.job.run import KindFailures, Run
from hetplan.job.spec import Synchronisation
from hetplan.library.verbs import planned
from hetplan.plans.check import check_plan
from hetplan.reports.days import run_of
from hetplan.reports.plans import local_steps_lines
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.whatif.local_steps import LocalSteps, _dealt, beside, kept_out
from hetplan.whatif.smaller_questions import Answers

WANTED = Synchronisation(sync_steps=8, extra_tokens=0.05, num_fragments=2, fragment_sync_delay=1)
PREDICTOR = LinearPredictor()


def together(bandwidth: float, **changes: object) -> SearchResult:
    link = replace(LONG, bandwidth_bytes_per_second=bandwidth)
    sites = cluster(island("a", "cpu", 1, "north"), island("b", "slow", 1, "south"))
    here = replace(sites, links=(IslandLink(between=("a", "b"), link=link),))
    task = job(8, **{"synchronisation": WANTED, "gap": 0.05, "total_tokens": 10**9, **changes})
    return search(GPT, here, task, PREDICTOR)


def found(bandwidth: float, **changes: object) -> LocalSteps | str:
    return beside(together(bandwidth, **changes), PREDICTOR, math.inf)


@pytest.fixture(scope="module")
def narrow() -> LocalSteps:
    local = found(1e5)
    assert isinstance(local, LocalSteps)
    return local


def test_over_a_narrow_link_local_steps_end_the_run_first(narrow):
    result = narrow.result
    inputs = result.inputs
    assert narrow.gain > 0
    assert check_plan(result.plan, inputs.model, inputs.cluster, inputs.job) == ()
    assert result.certificate is None
    assert sum(samples for _, samples in narrow.sites) == inputs.job.global_batch_size
    assert narrow.bound_seconds <= result.estimate.step_seconds


def test_the_crossing_is_where_both_take_as_long(narrow):
    today, even = narrow.bandwidth
    assert today == 1e5
    assert even is not None
    below, above = found(0.7 * even), found(1.5 * even)
    assert below.gain > 0 > above.gain
    assert below.bandwidth[1] == pytest.approx(even, rel=0.1)


def test_it_is_said_in_lines_that_fit(narrow):
    lines = [*local_steps_lines(narrow)]
    assert len(lines) == 3
    assert lines[1].startswith("with 5% extra tokens and lost time their run takes ")
    assert "Gbit/s" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_more_tokens_make_it_slower_and_other_jobs_have_none():
    one, more = (
        found(1e5, total_tokens=None, synchronisation=replace(WANTED, extra_tokens=extra))
        for extra in (0.05, 1.05)
    )
    assert 1 + more.gain == pytest.approx((1 + one.gain) * 1.05 / 2.05)
    assert "with 5% extra tokens their run is" in [*local_steps_lines(one)][1]
    assert [*local_steps_lines(found(1e5, quantile=0.9))][1].endswith(" at the step's p90")
    assert found(1e5, synchronisation=None) == ""
    assert "aims time and days alone" in found(1e5, objective="cost_per_token")


@pytest.mark.parametrize("aim", ["step_time", "days"])
def test_a_run_that_loses_more_than_its_steps_save_does_not_win(aim):
    """Only local steps use island b, whose devices fail; a spare comes after two months."""
    fails = (KindFailures(kind="slow", probability=0.99),)
    run = Run(kind_failures=fails, restart_seconds=60 * 86400.0)
    seldom = replace(WANTED, sync_steps=8000)
    local = found(1e3, objective=aim, run=run, synchronisation=seldom)
    result, alone = local.result, together(1e3)
    assert result.estimate.step_seconds * 1.05 < alone.estimate.step_seconds
    assert local.idle == ("south",)
    assert not local.wins
    assert local.bandwidth[1] is None
    runs = (run_of(replace(each, inputs=result.inputs)).seconds for each in (alone, result))
    assert 1 + local.gain == pytest.approx(next(runs) / next(runs))
    assert "slower than without south" in [*local_steps_lines(local)][1]


@given(st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=80), st.integers(0, 5000))
def test_the_batch_is_dealt_out_whole_and_everybody_has_a_part(speeds, more):
    batch = len(speeds) + more
    parts = _dealt(batch, speeds)
    assert len(parts) == len(speeds)
    assert sum(parts) == batch
    assert min(parts) >= 1


@pytest.mark.parametrize(
    ("batch", "speeds", "parts"),
    [
        (2, (1.0, 9.0), (1, 1)),
        (3, (1.0, 9.0), (1, 2)),
        (1024, (3.0, 1.0), (768, 256)),
        (7, (1.0, 1.0, 5.0), (1, 1, 5)),
    ],
)
def test_parts_follow_the_speeds(batch, speeds, parts):
    assert _dealt(batch, speeds) == parts


def test_more_regions_than_samples_leave_the_slowest_out():
    names = [f"r{at}" for at in range(5)]
    here = cluster(*(island(name, "cpu", 1, name) for name in names))
    pairs = [IslandLink(between=pair, link=LONG) for pair in combinations(names, 2)]
    task = job(4, synchronisation=WANTED, gap=0.05)
    local = beside(
        search(GPT, replace(here, links=tuple(pairs)), task, PREDICTOR), PREDICTOR, math.inf
    )
    assert local is None or sum(samples for _, samples in local.sites) == 4


def test_a_region_that_its_link_keeps_out_is_named_and_no_other():
    assert kept_out(together(1e3, synchronisation=None)) != (0.0, ())
    assert kept_out(together(1e12, synchronisation=None)) == (0.0, ())
    assert kept_out(together(1e3, synchronisation=None, objective="cost")) == (0.0, ())


def test_without_a_certificate_it_is_said_why(narrow):
    assert "local steps" in narrow.result.unproven


def test_the_plan_of_a_job_is_the_one_whose_run_ends_first(monkeypatch, narrow):
    asked = partial(planned, narrow.result.inputs, Answers(PREDICTOR), top=1, front=False)
    chosen, local = asked(end=math.inf)
    assert chosen.plan == local.result.plan == narrow.result.plan

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetplan.library.verbs.beside", interrupt)
    chosen, local = asked(end=math.inf)
    assert (chosen.plan.outer, chosen.certificate.status, local) == (None, "interrupted", "")
