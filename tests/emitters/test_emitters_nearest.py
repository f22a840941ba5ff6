"""The nearest plan is one that the trainer can run, found by search under named pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from emit_cases import MODEL, PLAIN, cluster, island

from hetplan.cluster.spec import Cluster
from hetplan.emitters.emission import refusals
from hetplan.emitters.nearest import nearest_plan, plan_differences
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, Trainer
from hetplan.emitters.vendors import libraries
from hetplan.errors import Fault, InfeasibleError
from hetplan.job.spec import Job, Optimizer, Pins, Precision, TrainerOptions
from hetplan.plans.build import chosen_of
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search

PREDICTOR = FittedPredictor.datasheet_only()
TWO = cluster(island("a", nodes=1, devices_per_node=4), island("b", nodes=1, devices_per_node=4))
MIXED = cluster(
    island("a", nodes=1, devices_per_node=4),
    island("m", nodes=1, devices_per_node=4, kind="amd-mi300x"),
)
JOB = Job(
    name="test",
    global_batch_size=16,
    sequence_length=1024,
    precision=Precision.BFLOAT16,
    optimizer=Optimizer.ADAMW,
    target="any",
    gap=0.2,
    pin=Pins(cp=1, pipelines=1, depth=0),
)


@cache
def planned(machines: Cluster = TWO, job: Job = JOB) -> SearchResult:
    return search(MODEL, machines, job, PREDICTOR)


def refusing(
    faults: Callable[[SearchResult, LaunchSheet], list[Fault]], plan_target: str = "megatron"
) -> Trainer:
    def found(result: SearchResult, sheet: LaunchSheet, options: EmitOptions) -> tuple[Fault, ...]:
        return tuple(faults(result, sheet))

    return replace(PLAIN, plan_target=plan_target, faults=found)


def test_a_plan_for_any_becomes_one_of_the_target() -> None:
    refused = planned()
    found = nearest_plan(refused, PLAIN, EmitOptions(), PREDICTOR, digest="d")
    assert found.result.plan.target == "megatron"
    assert found.result.inputs.job.target == "megatron"
    assert refusals(found.result, PLAIN, EmitOptions()) == ()
    assert dict(found.result.inputs.sha256)["predictor"] == "d"
    assert found.changes == ()
    # By the same predictor: a target that can run more is no slower, within the gap of the job.
    assert found.refused_seconds <= found.result.estimate.step_seconds * (1 + JOB.gap)


def test_pins_that_faults_name_are_pinned_until_none_is_left() -> None:
    def faults(result: SearchResult, sheet: LaunchSheet) -> list[Fault]:
        plan = result.plan
        if any(replica.tp != 2 for replica in plan.replicas):
            return [Fault(field="plan.pipelines", message="tp; pin tp: 2, or pin dp: 3")]
        if plan.pipelines[0].stages[0].recompute.granularity is RecomputeGranularity.NONE:
            return [Fault(field="plan.pipelines", message="none; pin recompute: true")]
        return []

    trainer = refusing(faults)
    found = nearest_plan(planned(), trainer, EmitOptions(), PREDICTOR)
    assert found.changes == ("pinned tp: 2", "pinned recompute: true")
    assert {replica.tp for replica in found.result.plan.replicas} == {2}
    assert refusals(found.result, trainer, EmitOptions()) == ()


def test_pins_of_the_job_that_only_its_target_has_are_dropped_and_said() -> None:
    job = replace(JOB, pin=Pins(cp=1, depth=0, pipelines=2))
    refused = planned(TWO, job)
    found = nearest_plan(refused, PLAIN, EmitOptions(), PREDICTOR)
    (change,) = found.changes
    assert change.startswith("without pin pipelines: ")
    assert found.result.inputs.job.pin == Pins(cp=1, depth=0)


def test_trainer_options_that_faults_name_are_left_out() -> None:
    job = replace(JOB, target="megatron", trainer=TrainerOptions(scattered_sends=True))

    def faults(result: SearchResult, sheet: LaunchSheet) -> list[Fault]:
        if result.inputs.job.trainer.scattered_sends:
            field = "inputs.job.trainer.scattered_sends"
            return [Fault(field=field, message="on; leave it out")]
        return []

    found = nearest_plan(planned(TWO, job), refusing(faults), EmitOptions(), PREDICTOR)
    assert found.changes == ("without trainer.scattered_sends",)


def test_devices_of_one_vendor_alone_where_a_launch_has_one_library() -> None:
    def faults(result: SearchResult, sheet: LaunchSheet) -> list[Fault]:
        several = len(libraries(sheet.agents)) > 1
        return [Fault(field="plan.pipelines[0].stages", message="two vendors")] if several else []

    trainer = refusing(faults)
    refused = planned(MIXED)
    used = {stage.island for stage in refused.estimate.stages}
    assert used == {"a", "m"}
    found = nearest_plan(refused, trainer, EmitOptions(), PREDICTOR)
    # Peak rates: the MI300X is the faster one.
    assert {stage.island for stage in found.result.estimate.stages} == {"m"}
    assert found.changes == ("forbade islands: a",)
    lines = plan_differences(refused.plan, found.result.plan, MIXED)
    assert any(line.startswith("islands: ") and line.endswith("-> m") for line in lines)
    assert "target: any -> megatron" in lines


def test_layers_are_cut_as_a_trainer_cuts_them_that_takes_no_list() -> None:
    """Unlike islands: no plan that is searched has stages of six layers each."""

    def cut(result: SearchResult) -> tuple[int, ...]:
        stages = len(result.plan.pipelines[0].stages)
        return tuple(12 // stages + (s < 12 % stages) for s in range(stages))

    def faults(result: SearchResult, sheet: LaunchSheet) -> list[Fault]:
        (pipeline,) = result.plan.pipelines
        held = tuple(
            layers
            for stage in chosen_of(result.plan, MIXED).pipelines[0].stages
            for layers in stage.layers
        )
        uneven = len(pipeline.stages) < 2 or held != cut(result)
        return [Fault(field="plan.pipelines[0].stages", message="uneven")] if uneven else []

    vendors = tuple(
        replace(each, device=replace(each.device, vendor="nvidia")) for each in MIXED.islands
    )
    machines = replace(MIXED, islands=vendors)
    job = replace(JOB, pin=Pins(cp=1, pipelines=1, depth=0, tp=4, virtual_stages=1))
    refused = planned(machines, job)
    with pytest.raises(InfeasibleError, match="no plan was found"):
        nearest_plan(refused, refusing(faults), EmitOptions(), PREDICTOR)
    trainer = replace(refusing(faults), own_cut=cut)
    found = nearest_plan(refused, trainer, EmitOptions(), PREDICTOR)
    assert found.changes == ("layers of the stages as plain cuts them",)
    assert [stage.num_layers for stage in found.result.plan.pipelines[0].stages] == [7, 7]
    assert found.result.certificate is None
    assert refusals(found.result, trainer, EmitOptions()) == ()


def test_options_of_the_emission_are_no_reason_to_search_on() -> None:
    def faults(result: SearchResult, sheet: LaunchSheet) -> list[Fault]:
        return [Fault(field="--tokenizer", message="is missing")]

    assert nearest_plan(planned(), refusing(faults), EmitOptions(), PREDICTOR).changes == ()


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("there is no way", "cannot be: .*there is no way"),
        ("pin tp: 3", "tp is 3|does not divide|3 "),
        ("pin nothing: 3", "cannot be: .*pin nothing: 3"),
    ],
)
def test_where_there_is_none_the_reason_is_said(message: str, word: str) -> None:
    def faults(result: SearchResult, sheet: LaunchSheet) -> list[Fault]:
        return [Fault(field="plan.pipelines", message=message)]

    with pytest.raises(InfeasibleError, match=rf"no plan was found(?s:.)*({word})"):
        nearest_plan(planned(), refusing(faults), EmitOptions(), PREDICTOR)


def test_a_job_that_no_plan_of_the_target_has_is_told() -> None:
    job = replace(JOB, sequence_length=1023)
    refused = replace(planned(), inputs=replace(planned().inputs, job=job))
    machines = replace(refused.inputs.model, max_sequence_length=512)
    refused = replace(refused, inputs=replace(refused.inputs, model=machines))
    with pytest.raises(InfeasibleError, match="no plan of this job for target plain"):
        nearest_plan(refused, PLAIN, EmitOptions(), PREDICTOR)


@pytest.mark.parametrize(("target", "shards"), [("megatron", False), ("flagscale", False)])
def test_sgd_is_not_sharded_where_the_trainer_shards_adam_alone(target: str, shards: bool) -> None:
    pin = Pins(cp=1, dp=4, tp=1)
    adam = planned(TWO, replace(JOB, target=target, pin=pin))
    assert adam.plan.sharding is Sharding.OPTIMIZER
    job = replace(JOB, target=target, pin=pin, optimizer=Optimizer.SGD)
    assert (planned(TWO, job).plan.sharding is Sharding.OPTIMIZER) == shards
