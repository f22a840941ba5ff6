"""Storage of sites in the days of a run: rates, shared NICs, and tokens that come too late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import island, job, model

from hetplan.cluster.spec import Cluster, Site, Storage
from hetplan.cost.goodput.parts import used_islands
from hetplan.cost.goodput.storage import BYTES_PER_HOST_SECOND, data_seconds, storage_of
from hetplan.job.run import Run
from hetplan.plans.layout import Layout, plan_of_layout


def at_site(storage: Storage | None, run: Run) -> tuple[Storage, float]:
    one = island("a", nodes=8)
    site = Site(name="A", regions=(one.region,), storage=storage)
    cluster = Cluster(name="wide", islands=(one,), sites=(site,))
    of = replace(job(target="megatron"), run=run)
    plan = plan_of_layout(Layout(tp=2, pp=2, dp=8), model(), cluster, of)
    return storage_of(used_islands(plan, cluster), cluster, of)


def test_the_jobs_storage_comes_first_then_the_sites_then_the_default() -> None:
    own = Storage(read_bytes_per_second=4e9, write_bytes_per_second=2e9)
    assert at_site(own, Run())[0] == own
    given, kept = at_site(own, Run(storage_bytes_per_second=1e8))
    assert (given.read_bytes_per_second, given.write_bytes_per_second, kept) == (1e8, 1e8, 1.0)
    usual = at_site(None, Run())[0].read_bytes_per_second
    assert usual % BYTES_PER_HOST_SECOND == 0.0


def test_a_checkpoint_beside_training_gets_half_of_shared_nics_at_most() -> None:
    fast = Storage(read_bytes_per_second=1e15, write_bytes_per_second=1e15, shares_uplink=True)
    alone, kept = at_site(fast, Run())
    assert kept == 1.0
    beside, kept = at_site(fast, Run(asynchronous_saving=True))
    assert beside.write_bytes_per_second == pytest.approx(alone.write_bytes_per_second / 2)
    assert kept == 0.5
    slow = replace(fast, write_bytes_per_second=1e6)
    assert at_site(slow, Run(asynchronous_saving=True))[1] == pytest.approx(1.0, abs=1e-3)


def test_few_readers_cannot_send_faster_than_their_nics() -> None:
    cluster = Cluster(name="wide", islands=(island("a", nodes=8),))
    of = job(target="megatron")
    plan = plan_of_layout(Layout(tp=2, pp=2, dp=8), model(), cluster, of)
    used = used_islands(plan, cluster)
    own = data_seconds(used, 1e9, plan, model(), of)
    once = data_seconds(used, 1e9, plan, model(), replace(of, run=Run(data_readers=8)))
    assert own == pytest.approx(2 * once)  # the first and the last stage read
    one = data_seconds(used, 1e15, plan, model(), replace(of, run=Run(data_readers=1)))
    two = data_seconds(used, 1e15, plan, model(), replace(of, run=Run(data_readers=2)))
    assert one == pytest.approx(2 * two)
