"""Local steps beside the synchronous plan of two small regions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor
from runtime_cases import GPT, LONG, cluster, island, job

from hetplan.cluster.spec import IslandLink
from hetplan.job.spec import Synchronisation
from hetplan.plans.check import check_plan
from hetplan.reports.plans import local_steps_lines
from hetplan.search.search import search
from hetplan.whatif.local_steps import LocalSteps, _dealt, beside

WANTED = Synchronisation(sync_steps=8, extra_tokens=0.05, num_fragments=2, fragment_sync_delay=1)
PREDICTOR = LinearPredictor()


def found(bandwidth: float, **changes: object) -> LocalSteps | None:
    link = replace(LONG, bandwidth_bytes_per_second=bandwidth)
    sites = cluster(island("a", "cpu", 1, "north"), island("b", "slow", 1, "south"))
    here = replace(sites, links=(IslandLink(between=("a", "b"), link=link),))
    task = job(8, **{"synchronisation": WANTED, "gap": 0.05, "total_tokens": 10**9, **changes})
    together = search(GPT, here, task, PREDICTOR)
    return beside(together, PREDICTOR, math.inf)


@pytest.fixture(scope="module")
def narrow() -> LocalSteps:
    local = found(1e5)
    assert local is not None
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
    assert "Gbit/s" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_more_tokens_make_it_slower_and_other_jobs_have_none(narrow):
    more = found(1e5, synchronisation=replace(WANTED, extra_tokens=1.05))
    assert 1 + more.gain == pytest.approx((1 + narrow.gain) * 1.05 / 2.05)
    assert found(1e5, synchronisation=None) is None


def test_the_batch_is_dealt_out_whole():
    for batch, speeds in ((1024, (3.0, 1.0)), (7, (1.0, 1.0, 5.0)), (96, (1e12, 1e3))):
        parts = _dealt(batch, speeds)
        assert sum(parts) == batch
        assert min(parts) >= 1
