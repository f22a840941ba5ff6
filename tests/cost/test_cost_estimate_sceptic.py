"""Defects that an independent computation of steps found, each by a law that it broke."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, model
from estimate_plans import (
    CLUSTER,
    FREE,
    SHAPE,
    expert_model,
    plan_of,
    plan_with,
    seconds_of,
    stages_of,
    wide_cluster,
)

from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.plan import OverlapSettings, Sharding, Stage


def test_a_slow_clock_is_a_slow_device_for_sharded_parameters_too() -> None:
    """Half the clock is twice the compute, beside overlapped gathering as well."""
    times = LinearPredictor().layer_seconds
    slow = LinearPredictor(layer_seconds=tuple((kind, 2 * value) for kind, value in times))
    steps = []
    for cluster, predictor in (
        (wide_cluster(clock_ratio=0.5), LinearPredictor()),
        (wide_cluster(), slow),
    ):
        plan = plan_of(
            microbatches=8, cluster=cluster, sharding=Sharding.PARAMETERS, shards=4,
            overlap=OverlapSettings(reduction=True, gathering=True),
        )  # fmt: skip
        found = estimate(plan, SHAPE, cluster, FREE, predictor)
        assert seconds_of(found, Component.SLOWED) > 0
        steps.append(found.step_seconds)
    assert steps[0] == pytest.approx(steps[1])


def test_overlap_of_tp_hides_nothing_of_cut_experts_without_tp() -> None:
    """With tp 1 there is no product beside which the experts' sums could run."""
    shape = expert_model()
    found = []
    for overlapped in (False, True):
        overlap = OverlapSettings(tensor_parallel=overlapped)
        plan = plan_of(microbatches=8, shape=shape, overlap=overlap, etp=2)
        found.append(estimate(plan, shape, CLUSTER, FREE, LinearPredictor()))
    assert seconds_of(found[0], Component.TENSOR_PARALLEL) > 0
    assert found[1].step_seconds == pytest.approx(found[0].step_seconds)


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4)])
def test_a_tied_matrix_is_summed_whole_by_a_rank_that_holds_it_whole(
    degrees: tuple[int, int],
) -> None:
    """Whichever of the two stages cuts it."""
    shape, cluster, asked = model(tied_embeddings=True), CLUSTER, FREE
    stages: list[Stage] = []
    for stage, tp in zip(
        stages_of([[0, 5]], [4, 4], len(shape.layers), num_microbatches=8), degrees, strict=True
    ):
        replica = replace(stage.replicas[0], tp=tp, microbatch_size=4 // (4 // tp))
        stages.append(replace(stage, replicas=(replica,)))
    plan = plan_with(shape, cluster, asked, [(stages, 8)])
    found = estimate(plan, shape, cluster, asked, LinearPredictor())
    matrix = shape.hidden_size * plan.padded_vocab_size * asked.precision.bytes_per_element
    across_nodes = cluster.islands[0].inter_node.bandwidth_bytes_per_second
    summed = [
        each.seconds
        for row in (found.stages[0].components, found.stages[1].components)
        for each in row
        if each.component is Component.EMBEDDING
    ]
    assert summed == pytest.approx([matrix / across_nodes] * 2)


def test_experts_cut_like_the_rest_reduce_with_those_cut_otherwise() -> None:
    """Once, in the experts' own group, whatever the pipelines' degrees are."""
    shape, cluster, asked = expert_model(), CLUSTER, FREE
    pipelines = [
        (
            stages_of([[0]], [4], len(shape.layers), first_device=at, num_microbatches=4, **ranks),
            4,
        )
        for at, ranks in ((0, {"tp": 2, "etp": 2}), (4, {"tp": 2, "ep": 2}))
    ]  # fmt: skip
    plan = plan_with(shape, cluster, asked, pipelines)
    pricer = Pricer(shape, cluster, asked, LinearPredictor())
    found = pricer.costs(plan).reductions(plan.reduction_groups, pricer.step(plan).work)
    experts = [group for group in found if group.expert]
    rest = [group for group in found if not group.expert]
    assert len(experts) == len(rest) == 1
    assert len({count for _, _, count in rest[0].members}) == 1
    routed = shape.num_layers * 8 * (3 * shape.hidden_size * 256) / 2
    assert [count for _, _, count in experts[0].members] == [routed, routed]


def test_parameters_and_gradients_beside_one_pass_share_the_link() -> None:
    """However much is hidden, the link carries all of it before the step ends."""
    times = LinearPredictor().layer_seconds
    quick = LinearPredictor(layer_seconds=tuple((kind, value / 1000) for kind, value in times))
    alone, beside = (
        estimate(
            plan_of(
                (4,), microbatches=8, sharding=Sharding.PARAMETERS, shards=4,
                overlap=OverlapSettings(reduction=overlapped, gathering=overlapped),
            ),
            SHAPE, CLUSTER, FREE, quick,
        )
        for overlapped in (False, True)
    )  # fmt: skip
    moved = alone.step_seconds - seconds_of(alone, Component.COMPUTE)
    assert moved > seconds_of(alone, Component.COMPUTE)
    assert moved <= beside.step_seconds < alone.step_seconds
