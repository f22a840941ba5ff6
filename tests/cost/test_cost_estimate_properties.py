"""Laws of every estimate: monotone links, scaling, symmetry; the fast path says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, job
from estimate_plans import expert_model, plan_with, stages_of, unlike_kinds, wide_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.spec import Cluster, Link
from hetplan.cost.estimate import estimate, estimate_with
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.spec import Job
from hetplan.plans.plan import (
    OverlapSettings,
    Plan,
    Recompute,
    RecomputeGranularity,
    Sharding,
)
from hetplan.predict.fit import FittedPredictor

SHAPE = expert_model()
CLUSTER = wide_cluster()
PREDICTOR = FittedPredictor.datasheet_only()
UNLIKE = unlike_kinds()
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b")


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Job]:
    """One or two pipelines of any schedule and degrees, cut anywhere."""
    schedule = draw(st.sampled_from(SCHEDULES))
    virtual = 2 if schedule == "interleaved-1f1b" else 1
    asked = job(
        target="any",
        gradient_clipping=draw(st.booleans()),
        expert_load_factor=draw(st.sampled_from([1.0, 1.5])),
    )
    tp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([1, 2, 4]))
    # Room for cp x tp ranks and, counted anew, for every expert; at most two nodes.
    size = 8 if draw(st.booleans()) else 4
    if size % (tp * cp):
        size = 8
    recompute = Recompute(
        granularity=draw(st.sampled_from([RecomputeGranularity.NONE, RecomputeGranularity.FULL])),
        layers=None,
    )
    pipelines = []
    at = 0
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(2, 3))
        inner = draw(st.lists(st.integers(2, 8), min_size=count * virtual - 1,
                              max_size=count * virtual - 1, unique=True))  # fmt: skip
        starts = [0, *sorted(inner)]
        cuts = [starts[k * count : (k + 1) * count] for k in range(virtual)]
        microbatches = draw(st.integers(1, 6))
        stages = stages_of(
            cuts, [size] * count, len(SHAPE.layers), first_device=at,
            num_microbatches=microbatches, schedule=schedule, recompute=recompute,
            tp=tp, cp=cp, ep=ep, etp=1 if ep > 1 else tp,
            sequence_parallel=tp > 1 and draw(st.booleans()),
        )  # fmt: skip
        at += size * count
        pipelines.append((stages, microbatches))
    sharding = draw(st.sampled_from(list(Sharding)))
    plan = plan_with(
        SHAPE, CLUSTER, asked, pipelines, schedule=schedule, sharding=sharding,
        shards=1 if sharding is Sharding.NONE else 2,
        overlap=OverlapSettings(
            reduction=draw(st.booleans()), gathering=draw(st.booleans()),
            context_parallel=draw(st.booleans()), send=draw(st.booleans()),
        ),
    )  # fmt: skip
    return plan, asked


def step_of(plan: Plan, asked: Job, cluster: Cluster = CLUSTER) -> float:
    return Pricer(SHAPE, cluster, asked, PREDICTOR).step(plan).step_seconds


def with_links(cluster: Cluster, bandwidth: float, latency: float) -> Cluster:
    """Every link this many times as wide, with this part of its latency."""

    def better(one: Link) -> Link:
        return replace(
            one,
            bandwidth_bytes_per_second=one.bandwidth_bytes_per_second * bandwidth,
            latency_seconds=one.latency_seconds * latency,
        )

    return replace(
        cluster,
        islands=tuple(
            replace(each, intra_node=better(each.intra_node), inter_node=better(each.inter_node))
            for each in cluster.islands
        ),
        links=tuple(replace(each, link=better(each.link)) for each in cluster.links),
    )


@settings(max_examples=20, deadline=None)
@given(plans())
def test_components_add_up_for_every_plan(case: tuple[Plan, Job]) -> None:
    plan, asked = case
    found = estimate(plan, SHAPE, CLUSTER, asked, PREDICTOR)
    assert sum(each.seconds for each in found.components) == pytest.approx(found.step_seconds)
    for stage in found.stages:
        assert sum(each.seconds for each in stage.components) == pytest.approx(found.step_seconds)
        assert min(each.seconds for each in stage.components) >= 0
    assert found.interval.p10_seconds <= found.interval.p90_seconds
    assert found.interval.p10_seconds > 0


@settings(max_examples=10, deadline=None)
@given(plans(), st.sampled_from([1.5, 4.0]), st.sampled_from([0.0, 0.5]))
def test_better_links_are_never_slower(
    case: tuple[Plan, Job], bandwidth: float, latency: float
) -> None:
    plan, asked = case
    now = step_of(plan, asked)
    for better in (
        with_links(CLUSTER, bandwidth, 1.0),
        with_links(CLUSTER, 1.0, latency),
        with_links(CLUSTER, bandwidth, latency),
    ):
        # Repeated hops of virtual stages share their wire, and shared wires have anomalies.
        worse = 1.02 if plan.pipelines[0].schedule.virtual_stages > 1 else 1 + 1e-9
        assert step_of(plan, asked, better) <= now * worse


@settings(max_examples=15, deadline=None)
@given(plans(), st.sampled_from([2.0, 7.0]))
def test_scaling_all_times_scales_the_step(case: tuple[Plan, Job], factor: float) -> None:
    plan, asked = case
    asked = replace(asked, gradient_clipping=False)
    slower = with_links(CLUSTER, 1 / factor, factor)
    times = LinearPredictor().layer_seconds
    base = Pricer(SHAPE, CLUSTER, asked, LinearPredictor()).step(plan).step_seconds
    scaled = LinearPredictor(
        layer_seconds=tuple((kind, value * factor) for kind, value in times),
        update_seconds=LinearPredictor().update_seconds * factor,
    )
    found = Pricer(SHAPE, slower, asked, scaled).step(plan).step_seconds
    assert found == pytest.approx(base * factor, rel=1e-9)


@settings(max_examples=5, deadline=None)
@given(st.lists(plans(), min_size=2, max_size=3))
def test_a_warm_pricer_says_what_a_cold_one_says(cases: list[tuple[Plan, Job]]) -> None:
    asked = cases[0][1]
    warm = Pricer(SHAPE, CLUSTER, asked, PREDICTOR)
    for plan, _ in cases:
        warm.step(plan)
    for plan, _ in cases:
        step, cold = warm.step(plan), Pricer(SHAPE, CLUSTER, asked, PREDICTOR).step(plan)
        found = estimate_with(warm, plan)
        assert step.step_seconds == cold.step_seconds == found.step_seconds
        flat = [use for row in step.memory for use in row]
        assert flat == [use for row in cold.memory for use in row]
        assert flat == [stage.memory for stage in found.stages]
        ends = [end.leaves for row in step.composed.stages for end in row]
        assert ends == [stage.optimizer_seconds for stage in found.stages]


@settings(max_examples=30, deadline=None)
@given(plans())
def test_a_step_lies_within_its_interval(case: tuple[Plan, Job]) -> None:
    """Stages of unlike kinds err apart: most draws are above the step that is as predicted."""
    plan, asked = case
    found = estimate(plan, SHAPE, UNLIKE, asked, PREDICTOR)
    span, low, high = found.interval, found.p5_seconds, found.p95_seconds
    assert low is not None
    assert high is not None
    assert low <= span.p10_seconds <= found.step_seconds <= span.p90_seconds <= high
