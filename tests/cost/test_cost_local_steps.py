"""Local steps: what averaging two sites adds to a step, legal plans, what a job may say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cost_fakes import LinearPredictor
from runtime_cases import GPT, LONG, REGIONS, job, pipeline_of, unlike_plan

from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component
from hetplan.cost.goodput.run import goodput
from hetplan.cost.memory.device import weights_at
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.traffic import ledger
from hetplan.job.spec import Job, Precision, Sharding, Synchronisation
from hetplan.plans.check import check_plan
from hetplan.plans.check_job import check_job_against
from hetplan.plans.local_steps import fragments, local_steps_plan
from hetplan.plans.plan import Plan

WANTED = Synchronisation(sync_steps=8, extra_tokens=0.25)
FLOAT32, BFLOAT16 = Precision.FLOAT32, Precision.BFLOAT16
PARAMETERS = sum(weights_at(GPT, at, 1).total for at in range(len(GPT.layers)))


def site(batch: int, island: str, ranks: int = 1, **changes: object) -> Plan:
    """Ranks with all layers, which share the optimizer."""
    chosen = pipeline_of(batch // ranks, (f"{island} 1 {ranks} 1", 4))
    task, sharded = job(batch, **changes), ranks > 1
    return unlike_plan(GPT, task, chosen, machines=REGIONS, sharded=sharded)


def both(ranks: int = 1, own: Precision = FLOAT32, **changes: object) -> tuple[Plan, Job]:
    """5 samples on island a, 3 on b, by each rank."""
    batches, wanted = (5 * ranks, 3 * ranks), replace(WANTED, **changes)
    task = job(sum(batches), synchronisation=wanted, precision=own)
    named = zip(batches, "ab", strict=True)
    sites = [site(each, name, ranks, precision=own) for each, name in named]
    plan = local_steps_plan(GPT, REGIONS, task, sites, sites[0])
    assert check_plan(plan, GPT, REGIONS, task) == ()
    return plan, task


def priced(plan: Plan, task: Job):
    return estimate(plan, GPT, REGIONS, task, LinearPredictor())


def averaging(found) -> float:
    return sum(each.seconds for each in found.components if each.component is Component.OUTER)


def test_a_step_is_that_of_the_slower_site_and_its_part_of_the_averaging():
    plan, task = both()
    found = priced(plan, task)
    alone = [
        priced(site(batch, island), job(batch)).step_seconds
        for batch, island in ((5, "a"), (3, "b"))
    ]
    bytes_each_way = 2 * 4 * PARAMETERS * (1 - 1 / 2)
    wire = bytes_each_way / LONG.bandwidth_bytes_per_second
    assert wire / 8 <= averaging(found) <= (1.2 * wire + 8 * LONG.latency_seconds) / 8
    assert found.step_seconds == pytest.approx(max(alone) + averaging(found), rel=1e-12)
    assert sum(each.seconds for each in found.components) == pytest.approx(found.step_seconds)


def test_twice_the_steps_halve_it_and_half_the_bits_shorten_it():
    one = averaging(priced(*both()))
    assert averaging(priced(*both(sync_steps=16))) == pytest.approx(one / 2)
    assert 0.4 * one < averaging(priced(*both(precision=BFLOAT16))) < 0.7 * one


def test_what_runs_beside_steps_is_hidden_and_a_delay_never_costs():
    exposed = [
        averaging(priced(*both(sync_steps=64, fragment_sync_delay=d))) for d in range(0, 60, 6)
    ]
    assert exposed[0] > exposed[1]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[-1] == 0


def test_only_averaging_crosses_the_regions():
    plan, task = both()
    crossing = [
        each.bytes_per_step
        for each in ledger(plan, GPT, REGIONS, task, LinearPredictor()).entries
        if each.link.scope is LinkScope.ISLANDS
    ]
    assert sum(crossing) == pytest.approx(2 * 4 * PARAMETERS / 8)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_that_average_over_one_line_share_it(pp: int) -> None:
    """However many stages send beside each other, the line carries all of it."""
    line = replace(LONG, shared_bandwidth_bytes_per_second=LONG.bandwidth_bytes_per_second)
    machines = replace(REGIONS, links=(replace(REGIONS.links[0], link=line),))
    task, cut = job(8, synchronisation=WANTED), 4 // pp
    plans = [
        unlike_plan(
            GPT,
            job(batch),
            pipeline_of(batch, *[(f"{island} 1 1 1", cut)] * pp),
            machines=machines,
        )
        for batch, island in ((4, "a"), (4, "b"))
    ]
    plan = local_steps_plan(GPT, machines, task, plans, plans[0])
    found = estimate(plan, GPT, machines, task, LinearPredictor())
    one_way = 4 * PARAMETERS / line.bandwidth_bytes_per_second
    assert one_way / 8 <= averaging(found)


def bytes_inside(plan: Plan, task: Job) -> float:
    entries = ledger(plan, GPT, REGIONS, task, LinearPredictor()).entries
    return sum(e.bytes_per_step for e in entries if e.link.scope is not LinkScope.ISLANDS)


def gathering_seconds(plan: Plan, task: Job) -> float:
    """By how much averaging is longer than that of whole optimizers."""
    whole = replace(plan, sharding=Sharding.NONE, optimizer_shards=1)
    return averaging(priced(plan, task)) - averaging(priced(whole, task))


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({}, 1),
        ({"num_fragments": 2}, 2),
        ({"fragment_sync_delay": 1}, 2),
        ({"num_fragments": 2, "fragment_sync_delay": 1}, 4),
    ],
)
def test_float32_weights_of_a_sharded_optimizer_are_gathered_in_every_turn(changes, times):
    """By two ranks at each site, once in 8 steps for each fragment; for late means twice."""
    once, more = (both(2, BFLOAT16, **each) for each in ({}, changes))
    added = bytes_inside(*more) - bytes_inside(*once)
    assert added == pytest.approx((times - 1) * 2 * 4 * PARAMETERS / 8)
    assert gathering_seconds(*both(2, FLOAT32, **changes)) == pytest.approx(0, abs=1e-12)
    node, size = REGIONS.islands[1].intra_node, 4 * PARAMETERS
    one = LinearPredictor().collective(node, "all_gather", 2, size).seconds
    if "fragment_sync_delay" not in changes:  # which hides the sums of whole optimizers alike
        assert gathering_seconds(*more) == pytest.approx(times * one / 8)


def test_what_averaging_keeps_lies_in_the_host():
    plan, task = both(num_fragments=4)
    alone = priced(site(5, "a"), job(5)).stages[0].memory
    use = priced(plan, task).stages[0].memory
    assert use.host_bytes == (12 + 4) * PARAMETERS
    assert use.total_bytes == alone.total_bytes


def test_the_run_has_the_tokens_that_its_user_says_it_needs_more():
    def work_seconds(extra: float) -> float:
        plan, task = both(extra_tokens=extra)
        run = replace(task, total_tokens=10**9)
        return goodput(plan, priced(plan, run), GPT, REGIONS, run).work_seconds

    assert work_seconds(0.25) == pytest.approx(1.25 * work_seconds(0.0))


def test_fragments_are_all_layers_once():
    for count in range(1, 5):
        parts = fragments(GPT, count)
        assert [each.start for each in parts[1:]] == [each.stop for each in parts[:-1]]
        assert (parts[0].start, parts[-1].stop, len(parts)) == (0, 6, count)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sites": (2,)}, "outer.sites"),
        ({"settings": replace(WANTED, sync_steps=16)}, "outer.settings"),
        ({"settings": replace(WANTED, precision="float16")}, "outer.reduction_groups[0].precision"),
        ({"reduction_groups": ()}, "outer.reduction_groups"),
    ],
)
def test_a_plan_whose_sites_are_not_averaged_as_the_job_says_is_illegal(changes, field):
    plan, task = both()
    wrong = replace(plan, outer=replace(plan.outer, **changes))
    assert field in {fault.field for fault in check_plan(wrong, GPT, REGIONS, task)}


def test_a_job_that_allows_none_and_a_target_that_has_none_refuse_the_plan():
    plan, task = both()
    (fault,) = check_plan(plan, GPT, REGIONS, replace(task, synchronisation=None))
    assert "allows no local steps" in fault.message
    other = replace(task, target="megatron")
    faults = check_plan(replace(plan, target="megatron"), GPT, REGIONS, other)
    assert "outer" in {fault.field for fault in faults}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_fragments": 5, "sync_steps": 5}, "5 for 4 transformer layers"),
        ({"num_fragments": 3}, "3 does not divide sync_steps 8"),
        ({"num_fragments": 2, "fragment_sync_delay": 4}, "4; a fragment has"),
    ],
)
def test_settings_that_do_not_go_together_are_told(changes, text):
    asked = job(8, synchronisation=replace(WANTED, **changes))
    (fault,) = check_job_against(asked, GPT, REGIONS)
    assert text in fault.message


def test_one_region_and_other_targets_have_no_local_steps():
    check = partial(check_job_against, model=GPT, cluster=REGIONS)
    assert check(job(8, synchronisation=WANTED)) == ()
    (fault,) = check(job(8, synchronisation=WANTED, target="torchtitan"))
    assert "plan for native or any" in fault.message
    alone = replace(REGIONS, islands=REGIONS.islands[:1], links=())
    (fault,) = check_job_against(job(8, synchronisation=WANTED), GPT, alone)
    assert "has one region" in fault.message
