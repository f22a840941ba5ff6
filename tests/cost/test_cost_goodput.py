"""The days of a run: what every cause adds, what the job's settings change, what is assumed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from cost_fakes import LinearPredictor, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.cost.goodput.parts import YEAR_SECONDS, failing, survives_a_host, used_islands
from hetplan.cost.goodput.renewal import Renewal
from hetplan.cost.goodput.run import goodput
from hetplan.cost.goodput.startup import (
    LARGEST_RANKS_TIMES_STAGES,
    MLPERF,
    SCALABLE_GROUPED_SECONDS,
)
from hetplan.cost.goodput.values import Cause, Goodput
from hetplan.errors import InputError
from hetplan.job.run import KindFailures, Run
from hetplan.job.spec import Job
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.plans.plan import Plan
from hetplan.reports.days import days_line, days_lines
from hetplan.units import format_brief

TOKENS = 10**12
OFTEN = Run(device_failures=0.99, detection_seconds=60.0, storage_bytes_per_second=1e8)
"""Often enough that every cause has its part."""


@cache
def wide() -> Cluster:
    return Cluster(name="wide", islands=(island("a", nodes=8),))


def asked(run: Run = OFTEN, **changes: object) -> Job:
    found = replace(job(target="megatron"), total_tokens=TOKENS, run=run)
    return replace(found, **changes)  # type: ignore[arg-type]


@cache
def plan(**layout: object) -> Plan:
    shape = Layout(**{"tp": 2, "pp": 2, "dp": 8, **layout})  # type: ignore[arg-type]
    return plan_of_layout(shape, model(), wide(), asked())


@cache
def found(run: Run = OFTEN, interval: int | None = None, **layout: object) -> Goodput:
    of = asked(run, checkpoint_interval_steps=interval)
    what = plan(**layout)
    cost = estimate(what, model(), wide(), of, LinearPredictor(halfwidth=0.1))
    return goodput(what, cost, model(), wide(), of)


def test_work_and_what_is_lost_add_up_to_the_run() -> None:
    run = found(replace(OFTEN, failover=True, nic_failures=0.9))
    assert {each.cause for each in run.lost} == {*Cause} - {Cause.DATA}
    assert all(each.seconds > 0.0 for each in run.lost)
    whole = run.work_seconds + sum(each.seconds for each in run.lost)
    assert whole == pytest.approx(run.seconds, rel=1e-12)
    assert run.tokens_per_day == pytest.approx(TOKENS / (run.seconds / 86400))
    assert run.low_seconds < run.seconds < run.high_seconds


def test_the_run_is_the_closed_form_of_its_parts() -> None:
    run = found()
    rate = sum(each.failures_per_second for each in run.parts)
    renewal = Renewal(
        failures_per_second=rate,
        save_seconds=run.checkpoint.save_seconds,
        delay_seconds=0.0,
        recovery_seconds=run.recovery_seconds,
    )
    steps = TOKENS / (32 * 128)  # of 32 sequences of 128 tokens
    work = run.interval_steps * run.work_seconds / steps
    expected = steps / run.interval_steps * renewal.segment_seconds(work)
    assert run.seconds - run.start_up.seconds == pytest.approx(expected, rel=1e-9)


def test_no_other_interval_is_shorter_and_a_given_one_is_kept() -> None:
    best = found()
    assert best.interval_steps == best.best_interval_steps
    assert [each.interval_steps for each in best.others] == [
        best.interval_steps // 2,
        2 * best.interval_steps,
    ]
    assert all(each.seconds > best.seconds for each in best.others)
    given = found(interval=4 * best.interval_steps)
    assert given.interval_steps == 4 * best.interval_steps
    assert given.best_interval_steps == best.best_interval_steps
    assert given.seconds > best.others[1].seconds


def test_an_interval_beside_the_best_one_can_be_had() -> None:
    rare = Run(device_failures=1e-12, host_failures=0.0, nic_failures=0.0, link_failures=0.0)
    once = found(rare)
    steps = round(TOKENS / (32 * 128))  # of 32 sequences of 128 tokens
    assert once.best_interval_steps == steps
    assert [each.interval_steps for each in once.others] == [steps // 2]
    slow = found(replace(OFTEN, storage_bytes_per_second=1e5, asynchronous_saving=True))
    assert [each.interval_steps for each in slow.others] == [2 * slow.best_interval_steps]
    assert all(each.seconds > run.seconds for run in (once, slow) for each in run.others)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"device_failures": 0.999}),
        ({"storage_bytes_per_second": 1e10}, {}),
        ({"asynchronous_saving": True}, {}),
        ({"one_reader": True}, {}),
        ({"start_up_seconds": 1.0}, {}),
        ({}, {"compiles": True}),
        ({}, {"restart_seconds": 600.0}),
        ({"detection_seconds": 0.0}, {}),
        ({"failover": True, "link_failures": 0.9}, {"link_failures": 0.9}),
        (
            {"failover": True, "link_failures": 0.9, "kept_bandwidth": 0.9},
            {"failover": True, "link_failures": 0.9, "kept_bandwidth": 0.1},
        ),
    ],
)
def test_what_is_better_makes_the_run_shorter(
    better: dict[str, object], worse: dict[str, object]
) -> None:
    short, long = (
        found(replace(OFTEN, **each))  # type: ignore[arg-type]
        for each in (better, worse)
    )
    assert short.seconds < long.seconds


def test_failover_is_compared_with_restarts_both_ways() -> None:
    without = found(replace(OFTEN, link_failures=0.9))
    having = found(replace(OFTEN, link_failures=0.9, failover=True))
    assert without.other_failover_seconds == having.seconds
    assert having.other_failover_seconds == without.seconds
    assert [each.part for each in having.parts if each.falls_back] == ["NIC", "link"]
    assert "without backup paths the run takes" in "\n".join(days_lines(having))


def test_a_checkpoint_holds_every_weight_and_its_state_once() -> None:
    run, one = found(), found(replace(OFTEN, one_reader=True))
    parameters = sum(map(model().parameters_at, range(len(model().layers))))
    assert run.checkpoint.saved_bytes == parameters * (4 + 8)  # float32 and AdamW's moments
    # Eight copies of the weights are read, and the sharded state once.
    assert run.checkpoint.read_bytes == pytest.approx(parameters * (8 * 4 + 8), rel=0.01)
    assert one.checkpoint.read_bytes == run.checkpoint.saved_bytes
    assert run.checkpoint.save_seconds == run.checkpoint.saved_bytes / 1e8


def test_shard_groups_smaller_than_the_replicas_lose_a_step_instead_of_an_interval() -> None:
    run = replace(OFTEN, peer_recovery=True)
    whole, groups = found(run, shards=8), found(run, shards=4)
    assert not whole.from_peers
    assert any("peer_recovery is left out" in note for note in whole.notes)
    assert groups.from_peers
    assert groups.lost_to(Cause.LOST_WORK) < 0.1 * whole.lost_to(Cause.LOST_WORK)
    assert groups.seconds < whole.seconds


def test_copies_on_one_host_do_not_survive_it() -> None:
    # Two ranks of tp 2 in a host of four: groups of two shards share it, groups of four do not.
    assert not survives_a_host(plan(dp=2, shards=1), wide())
    assert survives_a_host(plan(dp=4, shards=2), wide())
    assert survives_a_host(plan(dp=8, sharding="none"), wide())


def test_default_rates_are_those_of_llama_3_and_marked() -> None:
    big = Cluster(name="big", islands=(island("a", nodes=2048, devices_per_node=8),))
    shape = Layout(tp=8, pp=2, dp=1024)
    used = used_islands(
        plan_of_layout(shape, model(), big, job(target="megatron", global_batch_size=2048)), big
    )
    parts = failing(used, Run(), 0.0, 0.0)
    assert all(each.assumed for each in parts.parts)
    assert 54 * 86400.0 * parts.restarts_per_second == pytest.approx(419)


def test_rates_are_of_the_kind_then_of_all_devices() -> None:
    run = Run(
        device_failures=0.5,
        kind_failures=(KindFailures(kind="fast", probability=0.2),),
        host_failures=0.0,
    )
    parts = {each.part: each for each in found(run).parts}
    assert parts["fast"].failures_per_second == pytest.approx(32 * -math.log(0.8) / YEAR_SECONDS)
    assert parts["host"].failures_per_second == 0.0
    assert (parts["fast"].assumed, parts["NIC"].assumed) == (False, True)
    other = found(replace(run, kind_failures=(KindFailures(kind="slow", probability=0.2),)))
    assert {each.part: each for each in other.parts}["fast"].failures_per_second == pytest.approx(
        32 * math.log(2.0) / YEAR_SECONDS
    )


def test_a_run_that_never_ends_says_so() -> None:
    run = found(replace(OFTEN, restart_seconds=300 * 86400.0))
    assert math.isinf(run.seconds)
    assert run.tokens_per_day == 0.0
    assert "the run never ends" in days_line(run)
    assert len([*days_lines(run)]) == 2


def test_a_run_that_may_never_end_says_so() -> None:
    run = replace(found(OFTEN), high_seconds=math.inf, other_failover_seconds=math.inf)
    assert " to never)" in days_line(run)
    assert "inf" not in days_line(run)
    assert any(line.endswith("the run never ends") for line in days_lines(run))


def test_a_run_without_failures_is_its_steps_and_one_start() -> None:
    none = Run(device_failures=0.0, host_failures=0.0, nic_failures=0.0, link_failures=0.0)
    run = found(none)
    assert run.seconds == pytest.approx(
        run.work_seconds + run.start_up.seconds + run.checkpoint.save_seconds, rel=1e-9
    )
    assert run.others == ()
    assert "failures: none" in [*days_lines(run)]


def test_a_job_without_tokens_has_no_days() -> None:
    of = replace(asked(), total_tokens=None)
    cost = estimate(plan(), model(), wide(), of, LinearPredictor())
    with pytest.raises(InputError, match="total_tokens: is not given"):
        goodput(plan(), cost, model(), wide(), of)


def test_saves_come_no_faster_than_storage_takes_them() -> None:
    run = replace(OFTEN, asynchronous_saving=True, storage_bytes_per_second=1e6)
    fast = found(run, interval=1)
    step = fast.work_seconds / (TOKENS / (32 * 128))
    wait = fast.checkpoint.delay_seconds - fast.checkpoint.save_seconds
    assert fast.interval_steps > 1
    assert fast.interval_steps * step == pytest.approx(wait, abs=step)


def test_lines_between_regions_fall_back_only_where_it_is_said_on_what() -> None:
    far = replace(island("b", nodes=8), region="there")
    of = replace(wide(), islands=(*wide().islands, far), across_regions=far.inter_node)
    shape = Layout(tp=2, pp=2, dp=16, islands=("a", "b"))
    job_of = asked(replace(OFTEN, failover=True, line_failures=0.5))
    across = plan_of_layout(shape, model(), of, job_of)
    cost = estimate(across, model(), of, job_of, LinearPredictor())

    def line(kept: float | None) -> tuple[bool, Goodput]:
        asked_of = replace(job_of, run=replace(job_of.run, kept_bandwidth=kept))
        run = goodput(across, cost, model(), of, asked_of)
        (part,) = [each for each in run.parts if each.part == "line between regions"]
        assert part.count == 1
        return part.falls_back, run

    falls, ended = line(None)
    assert not falls
    assert "a line that fails ends the run, as kept_bandwidth is not given" in ended.notes
    falls, slowed = line(0.25)
    assert falls
    assert slowed.restarts < ended.restarts


def test_a_start_beyond_what_was_measured_widens_the_days_and_is_said() -> None:
    run = found()
    assert "extrapolated" not in days_line(run)
    assert run.start_up.least == run.start_up
    large = MLPERF.start_up(LARGEST_RANKS_TIMES_STAGES + 1, 7e10, compiles=False)
    assert large.extrapolates
    assert large.least.grouped_seconds == SCALABLE_GROUPED_SECONDS < large.grouped_seconds
    line = days_line(replace(run, start_up=large))
    assert line.endswith(f"; a start of {format_brief(large.seconds)} is extrapolated")
    endless = replace(run, start_up=large, seconds=math.inf, high_seconds=math.inf)
    assert days_line(endless).endswith(f": {format_brief(run.low_seconds)} with a fast one")


def test_a_lost_nic_makes_no_transfer_longer_over_the_line_that_regions_share() -> None:
    far = replace(island("b", nodes=8), region="there")
    line = replace(far.inter_node, shared_bandwidth_bytes_per_second=1e6)
    of = replace(wide(), islands=(*wide().islands, far), across_regions=line)
    shape = Layout(tp=2, pp=2, dp=16, islands=("a", "b"))
    job_of = asked(replace(OFTEN, failover=True, link_failures=0.99, nic_failures=0.99))
    across = plan_of_layout(shape, model(), of, job_of)
    cost = estimate(across, model(), of, job_of, LinearPredictor())
    run = goodput(across, cost, model(), of, job_of)
    assert max(each.seconds for each in cost.causes) > 0.9 * cost.step_seconds  # over that line
    assert run.lost_to(Cause.FAILOVER) < 0.02 * run.work_seconds
