"""What the trainer does not run yet is said before anything starts, with the pins that avoid it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans_mutations import with_pipeline, with_replica, with_stage
from plans_of_many import Case, plain_case, two_pipelines

from hetplan.errors import InputError
from hetplan.plans.choices import chosen_of
from hetplan.plans.launch import launch_faults, limits_of, pins_line
from hetplan.plans.plan import OverlapSettings, Plan, Schedule, Sharding


def broken(case: Case, what: str) -> Plan:
    plan, pipeline = case.plan, case.plan.pipelines[0]
    first = pipeline.stages[0]
    if what == "early sends":
        return replace(plan, overlap=OverlapSettings(send=True))
    if what == "deeper":
        return with_stage(plan, 0, 0, replace(first, warmup_depth=4))
    if what == "unlike":
        return with_replica(plan, 0, 0, microbatch_size=2)
    if what == "union":
        return with_stage(plan, 0, 0, replace(first, replicas=first.replicas * 2))
    if what == "interleaved":
        order = Schedule(name="interleaved-1f1b", virtual_stages=2)
        return with_pipeline(plan, 0, replace(pipeline, schedule=order))
    assert what == "sharded"
    return replace(plan, sharding=Sharding.OPTIMIZER, optimizer_shards=2)


@pytest.mark.parametrize(
    ("what", "says", "pin"),
    [
        ("deeper", "4; the trainer's 1F1B has 2", "depth: 0"),
        ("early sends", "sends wait for their receivers", "depth: 0"),
        ("unlike", "stages differ in (tp, dp, microbatch size)", "same_degrees: true"),
        ("union", "2 replicas; the trainer runs one", "same_degrees: true"),
        ("interleaved", "interleaved-1f1b with 2 virtual stages", "virtual_stages: 1"),
        ("sharded", "2; the trainer does not shard the optimizer", "sharded_optimizer: false"),
    ],
)
def test_a_plan_that_is_not_launched_names_why_and_the_pin(what: str, says: str, pin: str) -> None:
    case = plain_case("native")
    assert not list(limits_of(case.plan))
    plan = broken(case, what)
    limits = list(limits_of(plan))
    assert says in limits[0].message
    assert pins_line(limits) == (f"plan again with pin: {{{pin}}}",)
    assert pin in next(launch_faults(plan)).message


def test_several_pipelines_are_not_launched() -> None:
    (limit,) = limits_of(two_pipelines().plan)
    assert (limit.field, limit.message) == ("pipelines", "2 pipelines; the trainer runs one")
    assert pins_line([limit]) == ("plan again with pin: {pipelines: 1}",)


def test_choices_of_plans_that_no_search_makes_are_refused() -> None:
    case = plain_case("any")
    plan = replace(case.plan, optimizer_offload=0.5)
    with pytest.raises(InputError, match="keep optimizer state on the device"):
        chosen_of(plan, case.cluster)
