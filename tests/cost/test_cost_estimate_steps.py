"""How passes, transfers and the end of the step become a step: every schedule and every form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cost_fakes import LinearPredictor, link
from estimate_plans import (
    CLUSTER,
    FREE,
    SHAPE,
    plan_of,
    plan_with,
    seconds_of,
    stages_of,
    total_of,
)

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.spec import Job
from hetplan.plans.plan import OverlapSettings, Plan

INSIDE, BETWEEN, ACROSS = 100e9, 10e9, 1e9


one_pipeline = partial(plan_of, (4,) * 4, microbatches=8)
"""Four stages of a node each, on eight microbatches."""


def priced(plan: Plan, asked: Job = FREE, cluster: Cluster = CLUSTER) -> Estimate:
    predictor = LinearPredictor(slow=(("slow", 1.5),))
    return estimate(plan, SHAPE, cluster, asked, predictor)


def several(counts: tuple[int, int] = (4, 4), *, asked: Job = FREE) -> Plan:
    """Two pipelines of two stages, one on each island, cut in different places."""
    first = stages_of([[0, 5]], [2, 2], len(SHAPE.layers), num_microbatches=counts[0])
    second = stages_of(
        [[0, 4]], [2, 2], len(SHAPE.layers), num_microbatches=counts[1], first_device=32
    )
    pairs = ((first, counts[0]), (second, counts[1]))
    return plan_with(SHAPE, CLUSTER, asked, pairs)


def test_the_critical_path_is_that_of_the_stage_that_the_others_wait_for() -> None:
    for counts in ((6, 3), (3, 6), (1, 8)):
        plan = several(counts)
        step = Pricer(SHAPE, CLUSTER, FREE, LinearPredictor()).step(plan)
        stages = [stage for row in step.composed.stages for stage in row]
        done = [stage.arrives + stage.leaves for stage in stages]
        last = [
            stage
            for stage, when in zip(stages, done, strict=True)
            if when == pytest.approx(max(done), rel=1e-12)
        ]
        p, s = step.composed.last_to_arrive
        assert step.composed.stages[p][s] in last
        assert step.composed.stages[p][s].waits == min(stage.waits for stage in last)
        assert any(stage.waits for stage in stages)


def test_boundaries_that_share_a_link_wait_for_each_other() -> None:
    leased = replace(link(1e9, 5e-3), shared_bandwidth_bytes_per_second=2e9)
    shared = replace(CLUSTER, links=(IslandLink(between=("a", "b"), link=leased),))
    first = stages_of([[0, 5]], [2, 2], len(SHAPE.layers), num_microbatches=4)

    def crossing(start: int, other: int) -> list[object]:
        left = stages_of([[0]], [2], 5, num_microbatches=4, first_device=start)[0]
        right = stages_of([[5]], [2], 10, num_microbatches=4, first_device=other)[0]
        return [replace(left, warmup_depth=2), replace(right, warmup_depth=1)]

    alone = plan_with(SHAPE, shared, FREE, [(crossing(0, 32), 4), (first_at(first, 40), 4)])  # type: ignore[arg-type,list-item]
    both = plan_with(SHAPE, shared, FREE, [(crossing(0, 32), 4), (crossing(8, 40), 4)])  # type: ignore[arg-type,list-item]
    pricer = Pricer(SHAPE, shared, FREE, LinearPredictor())
    apart, together = pricer.step(alone), pricer.step(both)
    assert not apart.work[0].hops.shares
    assert together.work[0].hops.shares
    wires = {int(each.hops.link_forward[0]) for each in together.work}
    assert len(wires) == 1
    # Two devices of each pipeline send 131 kB each at once: the link's 2 GB/s carry one pipeline's.
    occupied = together.work[0].hops.shared_forward[0]
    assert occupied == pytest.approx(2 * 128 * 256 * 4 / 2e9)
    assert together.pipeline_seconds > apart.pipeline_seconds


def test_pipelines_that_leave_a_node_by_one_nic_share_it() -> None:
    nics = Nics(per_node=1, bandwidth_bytes_per_second=5e9)
    described = replace(
        CLUSTER, islands=tuple(replace(each, nics=nics) for each in CLUSTER.islands)
    )

    def leaving(first: int) -> list[object]:
        """From a device of node 0 to one of node 1."""
        left = stages_of([[0]], [1], 5, num_microbatches=4, first_device=first)[0]
        right = stages_of([[5]], [1], 10, num_microbatches=4, first_device=first + 4)[0]
        return [replace(left, warmup_depth=2), replace(right, warmup_depth=1)]

    two = plan_with(SHAPE, described, FREE, [(leaving(0), 4), (leaving(1), 4)])  # type: ignore[arg-type,list-item]
    far = plan_with(SHAPE, described, FREE, [(leaving(0), 4), (leaving(8), 4)])  # type: ignore[arg-type,list-item]
    pricer = Pricer(SHAPE, described, FREE, LinearPredictor())
    near, apart = pricer.step(two), pricer.step(far)
    assert [each.hops.shares for each in apart.work] == [False, False]
    assert [each.hops.link_forward.tolist() for each in near.work] == [[0], [0]]
    assert near.work[0].hops.shared_forward[0] == pytest.approx(128 * 256 * 4 / 5e9)
    assert near.pipeline_seconds > apart.pipeline_seconds
    # One pipeline alone: what it sends to both neighbours is not held against it.
    assert not pricer.step(plan_with(SHAPE, described, FREE, [(leaving(0), 4)])).work[0].hops.shares  # type: ignore[arg-type,list-item]


def first_at(stages: list[object], first: int) -> list[object]:
    """The same stages on other devices."""
    return list(
        stages_of([[0, 5]], [2, 2], len(SHAPE.layers), num_microbatches=4, first_device=first)
    )


def test_overlapped_sends_that_take_compute_units_slow_the_passes_beside_them() -> None:
    def with_share(part: float) -> Cluster:
        islands = tuple(
            replace(each, inter_node=replace(each.inter_node, compute_share=part))
            for each in CLUSTER.islands
        )
        return replace(CLUSTER, islands=islands)

    plan = plan_of()
    eager = replace(plan, overlap=OverlapSettings(send=True))
    free, held = (priced(eager, cluster=with_share(part)) for part in (0.0, 0.2))
    waiting = priced(plan, cluster=with_share(0.2))
    assert seconds_of(free, Component.SLOWED) == seconds_of(waiting, Component.SLOWED) == 0
    # A fifth of the units: compute takes 1.25 times as long while a send runs, which itself takes
    # 1.1256 times as long; forward and backward, four microbatches.
    send = 128 * 256 * 4 / BETWEEN
    expected = 2 * 4 * send * 1.1256 * (1 - 1 / 1.25)
    assert seconds_of(held, Component.SLOWED) == pytest.approx(expected)
    assert total_of(held) == pytest.approx(held.step_seconds)
    assert held.step_seconds > free.step_seconds
    assert held.interval.mean_seconds == pytest.approx(held.step_seconds)


def test_repeated_hops_of_virtual_stages_share_their_wire() -> None:
    plan = one_pipeline([[0, 2, 3, 4], [5, 6, 7, 8]], schedule="interleaved-1f1b")
    step = Pricer(SHAPE, CLUSTER, FREE, LinearPredictor()).step(plan)
    wires = step.work[0].hops.link_forward.tolist()
    assert wires[:3] == wires[4:]
    assert wires[3] == -1  # from the last stage back to the first, once
    assert len(set(wires[:3])) == 3
