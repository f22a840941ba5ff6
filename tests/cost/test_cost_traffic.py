"""The ledger counts what a rank-by-rank counting counts, and its special cases are closed forms."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cost_fakes import LinearPredictor
from counted_steps import steps_of
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "plans"))

from one_pipeline import StageChoice, build_plan
from plans_of_many import (
    Case,
    legal_cases,
    small_cluster,
    small_island,
    small_job,
    small_model,
    two_pipelines,
)
from traffic_rank_by_rank import Counting

from hetplan.cluster.spec import Link
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component
from hetplan.cost.network.segments import LinkScope, TrafficClass
from hetplan.cost.traffic import Ledger, ledger
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    OverlapSettings,
    Sharding,
)
from hetplan.predict.link.shapes import lane_bytes
from hetplan.predict.predictor import Prediction
from hetplan.profiling.samples import LinkOperation

STORED = (TrafficClass.DATA, TrafficClass.CHECKPOINT)


def ledger_of(case: Case, **changes: object) -> Ledger:
    return ledger(case.plan, case.model, case.cluster, replace(case.job, **changes))  # type: ignore[arg-type]


def agrees(case: Case) -> Counting:
    model = replace(case.model, vocab_size=case.plan.padded_vocab_size)
    counting = Counting(case.plan, model, case.cluster, case.job)
    counted = counting.by_link()
    found = {
        (entry.link, entry.traffic.value): entry.bytes_per_step
        for entry in ledger_of(case).entries
        if entry.traffic not in STORED
    }
    assert found.keys() == counted.keys()
    for key, size in counted.items():
        assert found[key] == pytest.approx(size, rel=1e-9), key
    return counting


@settings(derandomize=True, deadline=None, max_examples=60)
@given(legal_cases(most_pipelines=2))
def test_the_ledger_counts_what_every_rank_sends(case: Case) -> None:
    counting = agrees(case)
    sent, received = Counter[str](), Counter[str]()
    for (_, _, traffic), size in counting.sent.items():
        sent[traffic] += size  # type: ignore[assignment]
    for rank in range(case.cluster.num_devices):
        for (_, target, traffic), size in counting.sent.items():
            received[traffic] += size if target == rank else 0  # type: ignore[assignment]
    assert received == pytest.approx(sent, rel=1e-9)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("level", list(Sharding))
def test_every_level_of_sharding_agrees(experts: bool, level: Sharding) -> None:
    case = two_pipelines(experts=experts, tied=True)
    shards = 1 if level is Sharding.NONE else 2
    agrees(replace(case, plan=replace(case.plan, sharding=level, optimizer_shards=shards)))


def test_storage_is_a_class_of_its_own() -> None:
    case = two_pipelines(tied=True)
    storage = LinkScope.STORAGE
    tokens = case.job.global_batch_size * 32
    plain = ledger_of(case)
    # Both ends of a pipeline read the step's tokens, of 2 bytes each.
    assert plain.of_class(TrafficClass.DATA) == 2 * tokens * 2
    assert plain.of_class(TrafficClass.CHECKPOINT) == 0
    saved = ledger_of(case, checkpoint_interval_steps=10)
    padded = replace(case.model, vocab_size=case.plan.padded_vocab_size)
    assert saved.of_class(TrafficClass.CHECKPOINT) == pytest.approx(
        padded.parameter_count * (2 + 4 + 8) / 10
    )
    assert {each.link.scope for each in saved.entries if each.traffic in STORED} == {storage}
    plain_sgd = ledger_of(
        case,
        checkpoint_interval_steps=1,
        optimizer=Optimizer.SGD,
        precision=Precision.FLOAT32,
    )
    assert plain_sgd.of_class(TrafficClass.CHECKPOINT) == pytest.approx(4 * padded.parameter_count)
    model = replace(case.model, vocab_size=70_000)
    plan = replace(case.plan, padded_vocab_size=70_000)
    assert ledger(plan, model, case.cluster, case.job).of_class(TrafficClass.DATA) == 8 * tokens


def test_a_run_is_as_many_steps_as_its_tokens_fill() -> None:
    case = two_pipelines()
    assert ledger_of(case).steps is None
    assert ledger_of(case, total_tokens=64_000).steps == 64_000 / (20 * 32)
    found = ledger(case.plan, case.model, case.cluster, case.job, total_tokens=640)
    assert (found.steps, found.total_tokens) == (1.0, 640)
    with pytest.raises(InputError, match="at least 1"):
        ledger(case.plan, case.model, case.cluster, case.job, total_tokens=0)


def ledger_of_devices(nodes: int) -> Ledger:
    """That of two islands of so many nodes of 8, every device in a plan of 64 stages."""
    model = small_model(64)
    cluster = small_cluster(small_island("a", nodes, 8), small_island("b", nodes, 8))
    job = small_job(nodes, "megatron")
    choices = [StageChoice(island=name, transformer_layers=1) for name in "ab" for _ in range(32)]
    degrees = Shape(tp=8, dp=nodes // 32, microbatch_size=1)
    return ledger(build_plan(model, cluster, job, choices, degrees), model, cluster, job)


def test_the_steps_of_counting_grow_no_faster_than_the_devices() -> None:
    found = ledger_of_devices(2048)  # 32,768 devices
    hidden = 32 * 64 * 2
    assert found.of_class(TrafficClass.PIPELINE) == 63 * 2 * 32 * 512 * hidden
    assert steps_of(lambda: ledger_of_devices(512)) < 2.1 * steps_of(lambda: ledger_of_devices(256))


class SecondsAsBytes(LinearPredictor):
    """A collective takes as many seconds as a rank of it sends bytes."""

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        rounds = 2 if operation == LinkOperation.ALL_REDUCE else 1
        lane = lane_bytes(operation, group_size, nodes, message_bytes)
        sent = rounds * (group_size - 1) / group_size * lane
        return Prediction(seconds=sent, log_halfwidth=0.0, source="measured", extrapolating=())


PRICED = {
    TrafficClass.TENSOR_PARALLEL: (Component.TENSOR_PARALLEL, Component.COPIED_HEADS),
    TrafficClass.CONTEXT_PARALLEL: (Component.CONTEXT_PARALLEL,),
    TrafficClass.EXPERT_PARALLEL: (Component.EXPERT_PARALLEL,),
    TrafficClass.DATA_PARALLEL: (Component.DATA_PARALLEL, Component.GATHERING),
}


def in_one_node(case: Case) -> bool:
    return all(
        replica.num_devices <= case.cluster.islands[0].devices_per_node and replica.num_devices <= 4
        for pipeline in case.plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
    )


@settings(derandomize=True, deadline=None, max_examples=40)
@given(legal_cases(most_pipelines=1).filter(in_one_node))
def test_the_estimate_prices_the_same_bytes(case: Case) -> None:
    plan = replace(case.plan, overlap=OverlapSettings(context_parallel=False))
    found = ledger(plan, case.model, case.cluster, case.job)
    priced = estimate(plan, case.model, case.cluster, case.job, SecondsAsBytes())
    stages = plan.pipelines[0].stages
    for traffic, components in PRICED.items():
        sent = sum(
            part.seconds * sum(replica.num_devices for replica in stage.replicas)
            for stage, cost in zip(stages, priced.stages, strict=True)
            for part in cost.components
            if part.component in components
        )
        assert found.of_class(traffic) == pytest.approx(sent, rel=1e-9), traffic
