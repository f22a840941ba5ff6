"""What the trainer does not run yet is said before anything starts, with the pins that avoid it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans_mutations import with_replica, with_stage
from plans_of_many import Case, plain_case

from hetplan.plans.plan import Plan, Sharding
from hetplan.plans.ranks import launch_faults, limits_of, pins_line


def broken(case: Case, what: str) -> Plan:
    plan, pipeline = case.plan, case.plan.pipelines[0]
    if what == "tied":
        alone = replace(pipeline, stages=pipeline.stages[:1], boundaries=())
        devices = pipeline.stages[0].replicas[0].devices
        return replace(plan, pipelines=(pipeline, alone), tied_embedding_devices=devices)
    first = pipeline.stages[0]
    if what == "deeper":
        return with_stage(plan, 0, 0, replace(first, warmup_depth=4))
    sharded = replace(plan, sharding=Sharding.OPTIMIZER, optimizer_shards=2)
    if what == "sharded parameters":
        return replace(sharded, sharding=Sharding.PARAMETERS)
    assert what == "sharded and tied"
    unlike_ends = with_replica(sharded, 0, 0, tp=2 * first.replicas[0].tp)
    return replace(unlike_ends, tied_embedding_devices=first.replicas[0].devices)


@pytest.mark.parametrize(
    ("what", "says", "pin"),
    [
        ("tied", "over pipelines that are alike in this", "pipelines: 1"),
        ("deeper", "those of neighbours may differ by one", "depth: 0"),
        ("sharded parameters", "the optimizer's state alone", "sharded_optimizer: false"),
        ("sharded and tied", "the same for both", "sharded_optimizer: false"),
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
