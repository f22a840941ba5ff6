"""What is written for Sailor, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evaluation.sailor_plan_file import sailor_text
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import Architecture, plain_model
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import Plan, RecomputeGranularity, Schedule, Sharding

MODEL = plain_model(
    name="six layers",
    architecture=Architecture.GPT,
    num_layers=6,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=4,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=1024,
    max_sequence_length=128,
)
JOB = Job(
    name="test",
    global_batch_size=32,
    sequence_length=128,
    precision=Precision.FLOAT32,
    optimizer=Optimizer.ADAMW,
    target="any",
)


def island(name: str, region: str, kind: str) -> Island:
    link = Link(
        bandwidth_bytes_per_second=1e9, latency_seconds=0.0, transport=Transport.DEVICE_DIRECT
    )
    device = next(each for each in load_catalogue() if each.kind == kind)
    return Island(
        name=name,
        region=region,
        device=device,
        nodes=2,
        devices_per_node=4,
        intra_node=link,
        inter_node=link,
        memory_bytes=16e9,
    )


LEFT = island("left", "zone-a", "nvidia-v100-16gb-sxm")
RIGHT = island("right", "zone-b", "nvidia-a100-40gb-sxm")
CLUSTER = Cluster(
    name="two",
    islands=(LEFT, RIGHT),
    links=(IslandLink(between=("left", "right"), link=LEFT.inter_node),),
)


def stage(island: str, layers: int, depth: int, **shape: int) -> ChosenStage:
    whole = Shape(**{"tp": 1, "dp": 4, "microbatch_size": 2, **shape})
    return ChosenStage(
        parts=(Part(island=island, shape=whole),), layers=(layers,), warmup_depth=depth
    )


STAGES = (stage("left", 2, 2), stage("right", 4, 1, tp=2))


def plan(*stages: ChosenStage, sharding: Sharding = Sharding.NONE) -> Plan:
    pipeline = ChosenPipeline(stages=stages, num_microbatches=4, schedule=Schedule(name="1f1b"))
    return plan_of(MODEL, CLUSTER, JOB, ChosenPlan(pipelines=(pipeline,), sharding=sharding))


def test_the_plan_stands_in_sailors_form() -> None:
    document = json.loads(sailor_text(plan(*STAGES), CLUSTER, JOB))
    (pipeline,) = document["pipeline_list"]
    assert pipeline["num_stages"] == 2
    assert pipeline["layers_per_stage"] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert pipeline["dp"] == [4, 4]
    assert pipeline["tmp_per_stage"] == [
        [[[["V100-16", 4, "zone-a"]], 1]] * 4,
        [[[["A100-40", 4, "zone-b"]], 2]] * 4,
    ]
    assert (document["mbs"], document["gbs"], document["zone"]) == (2, 32, "zone-a")
    assert document["N"] == 3
    assert document["used_gpus"] == {"A100-40": 8, "V100-16": 4}


def test_a_stage_in_two_zones_lists_both() -> None:
    parts = (*STAGES[0].parts, Part(island="right", shape=STAGES[1].parts[0].shape))
    both = replace(STAGES[0], parts=parts, layers=(6,), warmup_depth=1)
    document = json.loads(sailor_text(plan(both), CLUSTER, JOB))
    (rows,) = document["pipeline_list"][0]["tmp_per_stage"]
    assert [(row[0][0][2], row[1]) for row in rows] == [("zone-a", 1)] * 4 + [("zone-b", 2)] * 4


@pytest.mark.parametrize(
    ("stages", "sharding", "word"),
    [
        (STAGES, Sharding.OPTIMIZER, "sharded_optimizer: false"),
        ((STAGES[0], stage("right", 4, 1, dp=8, microbatch_size=1)), Sharding.NONE, "one for all"),
        ((STAGES[0], stage("right", 4, 1, dp=8, microbatch_size=1)), Sharding.NONE, "dp 4, 8"),
        ((replace(STAGES[0], warmup_depth=3), STAGES[1]), Sharding.NONE, "pin depth: 0"),
        (
            (replace(STAGES[0], recompute=RecomputeGranularity.FULL), STAGES[1]),
            Sharding.NONE,
            "pin recompute: false",
        ),
        ((STAGES[0], stage("right", 4, 1, cp=2)), Sharding.NONE, "pin cp: 1"),
    ],
)
def test_what_sailor_cannot_say_is_refused(
    stages: tuple[ChosenStage, ...], sharding: Sharding, word: str
) -> None:
    with pytest.raises(InputError, match=word):
        sailor_text(plan(*stages, sharding=sharding), CLUSTER, JOB)


def test_several_pipelines_and_interleaving_are_refused() -> None:
    one = plan(*STAGES)
    with pytest.raises(InputError, match="pin pipelines: 1"):
        sailor_text(replace(one, pipelines=one.pipelines * 2), CLUSTER, JOB)
    pipeline = replace(one.pipelines[0], schedule=Schedule(name="interleaved-1f1b"))
    with pytest.raises(InputError, match="pin virtual_stages: 1"):
        sailor_text(replace(one, pipelines=(pipeline,)), CLUSTER, JOB)


def test_an_unknown_kind_is_refused() -> None:
    other = Cluster(
        name="two",
        islands=(LEFT, island("right", "zone-b", "nvidia-h100-80gb-sxm")),
        links=CLUSTER.links,
    )
    with pytest.raises(InputError, match="nvidia-h100-80gb-sxm; Sailor knows"):
        sailor_text(plan(*STAGES), other, JOB)
