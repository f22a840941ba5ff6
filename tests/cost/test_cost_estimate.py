"""The estimate of a plan: its composition, interval, warnings and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, job, model, two_islands
from one_pipeline import StageChoice, build_plan
from replay_cases import one_pipeline, plain_times

from hetplan.cost.estimate import estimate, misfits
from hetplan.cost.replay.step import replay_step
from hetplan.errors import InputError
from hetplan.model.spec import LayerKind
from hetplan.plans.build import Degrees
from hetplan.plans.plan import Plan

SHAPE, ASKED, CLUSTER = model(), job(), two_islands()
DEGREES = Degrees(tp=2, dp=2, microbatch_size=2)
CHOICES = [
    StageChoice(island="a", transformer_layers=3),
    StageChoice(island="a", transformer_layers=3),
    StageChoice(island="b", transformer_layers=2),
]


def plan_of(**changes: object) -> Plan:
    return replace(build_plan(SHAPE, CLUSTER, ASKED, CHOICES, DEGREES), **changes)  # type: ignore[arg-type]


def test_composition_by_hand() -> None:
    predictor = LinearPredictor(slow=(("slow", 1.5),))
    found = estimate(plan_of(), SHAPE, CLUSTER, ASKED, predictor)
    hidden = 2 * 128 * 256 * 4
    one = hidden / 100e9  # all_reduce among two: 2 * 1/2 * bytes / rate
    softmax = 2 * 128 * 4 / 100e9
    forward = [
        3 * (0.010 + 2 * one) + 0.001 + one,
        3 * (0.010 + 2 * one),
        2 * (0.015 + 2 * one) + 0.006 + 3 * softmax,
    ]
    backward = [
        3 * (0.020 + 2 * one) + 0.002,
        3 * (0.020 + 2 * one),
        2 * (0.030 + 2 * one) + 0.012 + one,
    ]
    assert [stage.forward_seconds for stage in found.stages] == pytest.approx(forward)
    assert [stage.backward_seconds for stage in found.stages] == pytest.approx(backward)
    layer = SHAPE.parameters(LayerKind.TRANSFORMER, 2)
    parameters = [
        3 * layer + SHAPE.parameters(LayerKind.EMBEDDING, 2),
        3 * layer,
        2 * layer + SHAPE.parameters(LayerKind.HEAD, 2),
    ]
    after = [count * (4 / 100e9 + 1e-9) for count in parameters]
    # Stages of four devices fill a node, so 0 | 1 lies between nodes; 1 | 2 crosses to island b.
    sends, latencies = [hidden / 10e9, hidden / 1e9], [1e-5, 5e-3]
    rows = (forward, backward, sends, sends, latencies, latencies)
    times = one_pipeline(plain_times(*rows, warmup=[3, 2, 1], microbatches=8))
    step = replay_step((times,), rendezvous=True).pipelines[0]
    seconds = max(own.end_seconds + more for own, more in zip(step.stages, after, strict=True))
    assert found.step_seconds == pytest.approx(seconds)
    assert found.pipeline_seconds == pytest.approx(step.end_seconds)
    assert found.num_microbatches == 8
    assert found.tokens_per_second == pytest.approx(32 * 128 / seconds)
    for stage, own, more in zip(found.stages, step.stages, after, strict=True):
        busy = sum(one.end_seconds - one.start_seconds for one in own.operations)
        assert stage.busy_seconds == pytest.approx(busy)
        assert stage.wait_seconds == pytest.approx(step.end_seconds - busy)
        assert stage.reduction_seconds + stage.optimizer_seconds == pytest.approx(more)
    assert [(stage.island, stage.device, stage.transformer_layers) for stage in found.stages] == [
        ("a", "fast", 3),
        ("a", "fast", 3),
        ("b", "slow", 2),
    ]
    assert found.fits
    assert misfits(found) == ()
    assert found.peak_memory_bytes == max(stage.memory.total_bytes for stage in found.stages)


def test_warnings_once_each_and_in_order() -> None:
    predictor = LinearPredictor(source="datasheet", extrapolating=("hidden 256 > 128 measured",))
    found = estimate(plan_of(), SHAPE, CLUSTER, ASKED, predictor)
    assert found.sources == ("datasheet",)
    assert len(set(found.warnings)) == len(found.warnings)
    assert found.warnings[:2] == (
        "fast: embedding forward: extrapolating: hidden 256 > 128 measured",
        "fast: predicted from datasheet figures, nothing was measured",
    )
    assert found.warnings[-1] == (
        "a to b: 4 senders at once, each priced at the link's full bandwidth; it must be one "
        "sender's share"
    )
    assert any("host-staged link of 1 GB/s" in warning for warning in found.warnings)


def test_tied_matrix_is_reduced_by_first_and_last_stage() -> None:
    tied = model(tied_embeddings=True)
    plan = build_plan(tied, CLUSTER, ASKED, CHOICES, DEGREES)
    found = estimate(plan, tied, CLUSTER, ASKED, LinearPredictor())
    plain = estimate(plan_of(), SHAPE, CLUSTER, ASKED, LinearPredictor())
    # Both send half the vocabulary to each other at the same time: one way over the link.
    (between,) = CLUSTER.links
    extra = between.link.latency_seconds + 500 * 256 * 4 / 1e9
    more = [
        with_tie.reduction_seconds - without.reduction_seconds
        for with_tie, without in zip(found.stages, plain.stages, strict=True)
    ]
    assert more == pytest.approx([extra, 0, extra])


def test_a_layout_that_does_not_fit_is_priced_and_named() -> None:
    small = replace(
        CLUSTER,
        islands=(CLUSTER.islands[0], replace(CLUSTER.islands[1], memory_bytes=2.0**20)),
    )
    found = estimate(plan_of(), SHAPE, small, ASKED, LinearPredictor())
    assert not found.fits
    assert found.step_seconds > 0
    (line,) = misfits(found)
    assert line.startswith("stage 2 needs ")
    assert "slow of island b, which leaves a job 921.6 KiB" in line


def deep_plan() -> Plan:
    plan = plan_of()
    pipeline = plan.pipelines[0]
    first = replace(pipeline.stages[0], warmup_depth=6)
    return replace(plan, pipelines=(replace(pipeline, stages=(first, *pipeline.stages[1:])),))


def test_warm_up_depths_that_wait_for_themselves_are_refused() -> None:
    with pytest.raises(InputError, match="wait"):
        estimate(deep_plan(), SHAPE, CLUSTER, ASKED, LinearPredictor())


def test_a_plan_without_pipelines_is_refused() -> None:
    with pytest.raises(InputError, match="at least one pipeline"):
        estimate(plan_of(pipelines=()), SHAPE, CLUSTER, ASKED, LinearPredictor())
