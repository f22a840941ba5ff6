"""How passes, transfers and the end of the step become a step: every schedule and every form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cost_fakes import LinearPredictor, job, link
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

from hetplan.cluster.devices import HostInterface
from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.cost.replay.step import replay_step
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.spec import Job
from hetplan.model.spec import LayerKind
from hetplan.plans.check import check_plan
from hetplan.plans.plan import OverlapSettings, Plan, Sharding

CLIPPED = job(target="any", gradient_clipping=True)
EVEN = [0, 3, 5, 7]  # 2 layers on each of four stages, with embedding and head
INSIDE, BETWEEN, ACROSS = 100e9, 10e9, 1e9


one_pipeline = partial(plan_of, (4,) * 4, microbatches=8)
"""Four stages of a node each, on eight microbatches."""


def priced(plan: Plan, asked: Job = FREE, cluster: Cluster = CLUSTER) -> Estimate:
    predictor = LinearPredictor(slow=(("slow", 1.5),))
    return estimate(plan, SHAPE, cluster, asked, predictor)


@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [
        ("1f1b", [EVEN]),
        ("gpipe", [EVEN]),
        ("zb-h1", [EVEN]),
        ("interleaved-1f1b", [[0, 2, 3, 4], [5, 6, 7, 8]]),
    ],
)
@pytest.mark.parametrize("clips", [False, True])
def test_components_add_up_and_the_replay_is_the_end(
    schedule: str, cuts: list[list[int]], clips: bool
) -> None:
    asked = replace(FREE, gradient_clipping=clips, data_loading_seconds=0.125)
    plan = one_pipeline(cuts, schedule=schedule, asked=asked)
    assert check_plan(plan, SHAPE, CLUSTER, replace(asked, global_batch_size=32)) == ()
    found = priced(plan, asked)
    assert total_of(found) == pytest.approx(found.step_seconds, rel=1e-12)
    for stage in found.stages:
        assert sum(each.seconds for each in stage.components) == pytest.approx(
            found.step_seconds, rel=1e-12
        )
        assert min(each.seconds for each in stage.components) >= 0
    step = Pricer(SHAPE, CLUSTER, asked, LinearPredictor(slow=(("slow", 1.5),))).step(plan)
    replayed = replay_step([each.times() for each in step.work], rendezvous=True)
    assert found.pipeline_seconds == pytest.approx(replayed.end_seconds, rel=1e-12)
    assert seconds_of(found, Component.DATA_LOADING) == 0.125
    assert seconds_of(found, Component.BUBBLE) > 0
    assert seconds_of(found, Component.PIPELINE) > 0


def test_clipping_is_a_barrier_before_the_update() -> None:
    cuts = [[0, 2, 5, 7]]
    plan = one_pipeline(cuts, asked=CLIPPED)
    free, clipped = priced(one_pipeline(cuts)), priced(plan, CLIPPED)
    step = Pricer(SHAPE, CLUSTER, CLIPPED, LinearPredictor(slow=(("slow", 1.5),))).step(plan)
    (row,) = step.composed.stages
    assert step.step_seconds == pytest.approx(
        max(each.arrives for each in row)
        + step.composed.norm_seconds
        + max(each.leaves for each in row)
    )
    # Four ranks of a stage in a node, four stages in neighbouring nodes: two levels each, twice.
    expected = 2 * 2 * (1e-5 + 4 / INSIDE) + 2 * 2 * (1e-5 + 4 / BETWEEN)
    assert step.composed.norm_seconds == pytest.approx(expected)
    assert clipped.step_seconds > free.step_seconds
    assert seconds_of(free, Component.NORM) == 0
    (why,) = [each.note for each in free.components if each.component is Component.NORM]
    assert why == "the job does not clip gradients"


def test_sharding_levels_move_what_they_should() -> None:
    size, count = 4, 8

    def found(level: Sharding, shards: int = 4) -> Estimate:
        return priced(
            plan_of(
                [size], microbatches=count, sharding=level,
                shards=1 if level is Sharding.NONE else shards,
            )
        )  # fmt: skip

    parameters = SHAPE.parameter_count
    whole, part = parameters * 4, 0.75 / INSIDE
    none, optimizer, gradients, all_ = map(found, Sharding)
    assert seconds_of(none, Component.DATA_PARALLEL) == pytest.approx(2 * whole * part)
    assert seconds_of(none, Component.GATHERING) == 0
    assert seconds_of(optimizer, Component.DATA_PARALLEL) == pytest.approx(whole * part)
    assert seconds_of(optimizer, Component.GATHERING) == pytest.approx(whole * part)
    assert seconds_of(gradients, Component.DATA_PARALLEL) == pytest.approx(count * whole * part)
    assert seconds_of(gradients, Component.GATHERING) == pytest.approx(whole * part)
    assert seconds_of(all_, Component.DATA_PARALLEL) == pytest.approx(count * whole * part)
    assert seconds_of(all_, Component.GATHERING) == pytest.approx(2 * count * whole * part)
    for each in (optimizer, gradients, all_):
        assert seconds_of(each, Component.OPTIMIZER) == pytest.approx(parameters / 4 * 1e-9)
    assert seconds_of(none, Component.OPTIMIZER) == pytest.approx(parameters * 1e-9)
    # MiCS-style groups of two: scattered in pairs, the halves summed across, gathered in pairs.
    pairs = found(Sharding.OPTIMIZER, shards=2)
    assert seconds_of(pairs, Component.DATA_PARALLEL) == pytest.approx(
        whole * 0.5 / INSIDE + 2 * 0.5 * whole / 2 / INSIDE
    )
    assert seconds_of(pairs, Component.GATHERING) == pytest.approx(whole * 0.5 / INSIDE)
    assert seconds_of(pairs, Component.OPTIMIZER) == pytest.approx(parameters / 2 * 1e-9)


def test_offloaded_state_is_updated_by_the_host() -> None:
    islands = tuple(
        replace(
            each,
            device=replace(each.device, host=HostInterface(pcie_generation=4, lanes=16)),
        )
        for each in CLUSTER.islands
    )
    hosted = replace(CLUSTER, islands=islands)
    found = [
        priced(one_pipeline([EVEN], offload=part, cluster=hosted), cluster=hosted)
        for part in (0, 0.5, 1)
    ]
    assert [seconds_of(each, Component.OFFLOAD) > 0 for each in found] == [False, True, True]
    kept = [seconds_of(each, Component.OPTIMIZER) for each in found]
    assert kept[1] == pytest.approx(kept[0] / 2)
    assert kept[2] == 0
    assert found[2].stages[0].memory.optimizer_bytes == 0


def several(counts: tuple[int, int] = (4, 4), *, asked: Job = FREE) -> Plan:
    """Two pipelines of two stages, one on each island, cut in different places."""
    first = stages_of([[0, 5]], [2, 2], len(SHAPE.layers), num_microbatches=counts[0])
    second = stages_of(
        [[0, 4]], [2, 2], len(SHAPE.layers), num_microbatches=counts[1], first_device=32
    )
    pairs = ((first, counts[0]), (second, counts[1]))
    return plan_with(SHAPE, CLUSTER, asked, pairs)


def test_pipelines_meet_where_their_layers_are_reduced() -> None:
    plan = several((6, 3))
    assert check_plan(plan, SHAPE, CLUSTER, replace(FREE, global_batch_size=18)) == ()
    assert [(each.layers.start, each.layers.stop) for each in plan.reduction_groups] == [
        (0, 4), (4, 5), (5, 10),
    ]  # fmt: skip
    predictor = LinearPredictor(slow=(("slow", 1.5),))
    step = Pricer(SHAPE, CLUSTER, FREE, predictor).step(plan)
    ends = [each.tolist() for each in step.ends]
    # Two ranks of each of two pipelines hold a piece; the long link is crossed by both pairs.
    layer = SHAPE.parameters(LayerKind.TRANSFORMER)
    counts = [
        SHAPE.parameters(LayerKind.EMBEDDING) + 3 * layer,
        layer,
        4 * layer + SHAPE.parameters(LayerKind.HEAD),
    ]
    pricer_groups = Pricer(SHAPE, CLUSTER, FREE, predictor).costs(plan).reductions(plan, step.work)
    took = [
        group.end.seconds(max(count for *_, count in group.members)).reduction
        for group in reversed(pricer_groups)
    ]
    assert [max(count for *_, count in group.members) for group in reversed(pricer_groups)] == (
        pytest.approx(counts)
    )
    # Last layers first: stages 1 reduce layers 5 to 10, then stage 0 of the first pipeline and
    # stage 1 of the second layer 4, then stages 0 the rest.
    last = max(ends[0][1], ends[1][1]) + took[2]
    middle = max(ends[0][0], last) + took[1]
    first = max(middle, ends[1][0]) + took[0]
    arrives = [[middle_first, last_first] for middle_first, last_first in (
        (first, last), (first, middle),
    )]  # fmt: skip
    for p in (0, 1):
        for s in (0, 1):
            assert step.composed.stages[p][s].arrives == pytest.approx(arrives[p][s])
    found = priced(plan)
    assert total_of(found) == pytest.approx(found.step_seconds)
    for stage in found.stages:
        assert sum(each.seconds for each in stage.components) == pytest.approx(found.step_seconds)
    assert [stage.pipeline for stage in found.stages] == [0, 0, 1, 1]


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


def test_pipelines_of_unlike_slices_are_priced_by_the_coarsest() -> None:
    first = stages_of([[0, 5]], [4, 4], len(SHAPE.layers), num_microbatches=4, tp=4)
    second = stages_of([[0, 5]], [1, 1], len(SHAPE.layers), num_microbatches=4, first_device=32)
    plan = plan_with(SHAPE, CLUSTER, FREE, [(first, 4), (second, 4)])
    found = priced(plan)
    assert found.step_seconds > 0
    # The rank that is not cut takes part with all it holds, over the long link.
    layer = SHAPE.parameters(LayerKind.TRANSFORMER)
    whole = SHAPE.parameters(LayerKind.EMBEDDING) + 4 * layer
    assert found.stages[2].reduction_seconds == pytest.approx(whole * 4 / ACROSS)


def test_stages_of_unlike_degrees_send_more_from_fewer() -> None:
    left = stages_of([[0]], [4], 5, num_microbatches=4)[0]
    right = replace(
        stages_of([[5]], [2], len(SHAPE.layers), num_microbatches=4, first_device=4)[0],
        warmup_depth=1,
    )
    left = replace(left, warmup_depth=2)
    right = replace(right, replicas=(replace(right.replicas[0], microbatch_size=2),))
    plan = plan_with(SHAPE, CLUSTER, FREE, [((left, right), 4)])
    assert check_plan(plan, SHAPE, CLUSTER, replace(FREE, global_batch_size=16)) == ()
    step = Pricer(SHAPE, CLUSTER, FREE, LinearPredictor()).step(plan)
    (hop,) = step.work[0].hops.hops
    one = 128 * 256 * 4
    # Forward two messages of two sequences to two ranks: half of one from each of four, but every
    # receiver takes two sequences in. Back: four of one sequence from two.
    assert hop.senders == 2
    assert hop.forward_bytes == 2 * one
    assert hop.backward_bytes == 2 * one


def test_several_replica_entries_wait_for_the_slowest() -> None:
    stage = stages_of([[0]], [2], len(SHAPE.layers), num_microbatches=4)[0]
    slower = replace(stage.replicas[0], devices=stages_of(
        [[0]], [1], 10, num_microbatches=4, first_device=2)[0].replicas[0].devices,
        microbatch_size=2)  # fmt: skip
    both = replace(stage, replicas=(stage.replicas[0], slower))
    plan = plan_with(SHAPE, CLUSTER, FREE, [((both,), 4)])
    assert check_plan(plan, SHAPE, CLUSTER, replace(FREE, global_batch_size=16)) == ()
    found = priced(plan)
    assert found.stages[0].forward_seconds == pytest.approx(2 * (8 * 0.01 + 0.005))
    assert seconds_of(found, Component.DATA_PARALLEL) == pytest.approx(
        2 * 2 / 3 * SHAPE.parameter_count * 4 / INSIDE
    )


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


def test_a_boundary_of_another_number_format_sends_as_many_bytes_as_that_has() -> None:
    plan = plan_of(microbatches=8)
    (pipeline,) = plan.pipelines
    half = replace(pipeline.boundaries[0], precision="bfloat16")
    short = replace(plan, pipelines=(replace(pipeline, boundaries=(half,)),))
    pricer = Pricer(SHAPE, CLUSTER, FREE, LinearPredictor())
    whole, less = (pricer.step(each).work[0].hops.hops[0] for each in (plan, short))
    assert less.forward_bytes == whole.forward_bytes / 2
    assert less.backward_bytes == whole.backward_bytes / 2


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
