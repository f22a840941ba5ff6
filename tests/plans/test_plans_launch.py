"""What the trainer does not run yet is said before anything starts, with the pins that avoid it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans_mutations import with_pipeline, with_replica, with_stage
from plans_of_many import Case, plain_case, summed_as, two_pipelines
from runtime_cases import FOURS, MOE, job, pipeline_of, unlike_plan

from hetplan.errors import InputError
from hetplan.plans.build import chosen_of
from hetplan.plans.check import check_plan
from hetplan.plans.plan import OverlapSettings, Plan, Schedule, Sharding
from hetplan.plans.ranks import launch_faults, limits_of, pins_line


def unlike(case: Case, what: str) -> Plan:
    plan, pipeline = case.plan, case.plan.pipelines[0]
    first = pipeline.stages[0]
    if what == "early sends":
        return replace(plan, overlap=OverlapSettings(send=True))
    if what == "deeper":
        deeper = with_stage(plan, 0, 0, replace(first, warmup_depth=4))
        return replace(deeper, overlap=OverlapSettings(send=True))
    if what == "sharded":
        return replace(plan, sharding=Sharding.OPTIMIZER, optimizer_shards=2)
    if what == "unlike":
        return with_replica(plan, 0, 0, microbatch_size=2)
    assert what == "union"
    return with_stage(plan, 0, 0, replace(first, replicas=first.replicas * 2))


@pytest.mark.parametrize("what", ["deeper", "early sends", "unlike", "union", "sharded"])
def test_unlike_stages_and_depths_are_launched(what: str) -> None:
    assert not list(limits_of(unlike(plain_case("native"), what)))


def test_several_pipelines_are_launched() -> None:
    case = two_pipelines()
    assert not list(limits_of(summed_as(case.plan, replace(case.job, target="native"))))


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
    if what == "sharded pipelines":
        return replace(sharded, pipelines=(pipeline, pipeline))
    if what == "sharded union":
        other = replace(first.replicas[0], tp=2 * first.replicas[0].tp)
        union = replace(first, replicas=(first.replicas[0], other))
        return with_stage(sharded, 0, 0, union)
    assert what == "sharded and tied"
    unlike_ends = with_replica(sharded, 0, 0, tp=2 * first.replicas[0].tp)
    return replace(unlike_ends, tied_embedding_devices=first.replicas[0].devices)


@pytest.mark.parametrize(
    ("what", "says", "pin"),
    [
        ("tied", "over pipelines that are alike in this", "pipelines: 1"),
        ("deeper", "those of neighbours may differ by one", "depth: 0"),
        ("sharded parameters", "the optimizer's state alone", "sharded_optimizer: false"),
        ("sharded pipelines", "2 with 2 pipelines", "sharded_optimizer: false"),
        ("sharded union", "one tp per stage", "sharded_optimizer: false"),
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


def test_an_order_that_the_trainer_lacks_is_not_launched() -> None:
    case = plain_case("native")
    pipeline = case.plan.pipelines[0]
    (limit,) = limits_of(
        with_pipeline(case.plan, 0, replace(pipeline, schedule=Schedule(name="gpipe")))
    )
    assert limit.message == "gpipe; the trainer runs 1f1b and interleaved-1f1b"
    assert pins_line([limit]) == ()


def test_choices_of_plans_that_no_search_makes_are_refused() -> None:
    case = plain_case("any")
    beside = replace(case.plan.overlap, reduction=not case.plan.overlap.reduction)
    plan = replace(case.plan, overlap=beside)
    with pytest.raises(InputError, match="let the job say the same"):
        chosen_of(plan, case.cluster, case.job)


def test_experts_are_cut_like_the_other_weights_and_sharded_alike_in_a_stage() -> None:
    plan = unlike_plan(MOE, job(), pipeline_of(4, ("a 2 2 1 2", 4)))
    assert not list(limits_of(plan))
    (fault,) = check_plan(with_replica(plan, 0, 0, etp=1, ep=4), MOE, FOURS, job())[:1]
    assert "native cuts experts like the other weights" in fault.message
    both = pipeline_of(2, ("a 1 2 1 2 + b 1 2 1 1", 4))
    (limit,) = limits_of(unlike_plan(MOE, job(), both, sharded=True))
    assert "ep [1, 2] with a sharded optimizer" in limit.message
