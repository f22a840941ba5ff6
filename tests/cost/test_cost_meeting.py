"""Groups of different stages that share NICs, PCIe switches and links slow each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, link
from estimate_plans import (
    FREE,
    SHAPE,
    plan_of,
    plan_with,
    stages_of,
    wide_cluster,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from network_clusters import clusters

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, IslandLink
from hetplan.cost.step_model.groups import (
    ALL_KEPT,
    Party,
    copies_of,
    group_among,
    groups_of,
    kept_by_stages,
)
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.plans.plan import OverlapSettings, Plan, Replica, Stage, compress

PREDICTOR = LinearPredictor()
CUTS = [[0, 5]]


def with_nics(bandwidth: float, per_node: int = 1) -> Cluster:
    """Four devices to a node, of 10 GB/s each, behind so many NICs; instant inside the node."""
    nics = Nics(per_node=per_node, bandwidth_bytes_per_second=bandwidth)
    return wide_cluster(nics=nics, intra_node=link(1e30, 0.0), inter_node=link(10e9, 0.0))


def two_stages(cluster: Cluster, size: int = 6, **changes: object) -> Plan:
    """Stages of six devices each: both have two on the second node."""
    return plan_of([size] * 2, CUTS, cluster=cluster, overlap=OverlapSettings(), **changes)  # type: ignore[arg-type]


def priced(plan: Plan, cluster: Cluster) -> StepCost:
    return Pricer(SHAPE, cluster, FREE, PREDICTOR).step(plan)


def test_reductions_of_stages_behind_one_nic_take_turns_on_it() -> None:
    # Two lanes of each stage leave the second node: four times 10 GB/s through 20.
    narrow, wide = with_nics(20e9), with_nics(40e9)
    slow, fast = (priced(two_stages(each), each) for each in (narrow, wide))
    assert not fast.work[0].shares
    assert all(stage.unit.kept == ALL_KEPT for stage in fast.work[0].stages)
    assert slow.work[0].shares
    for one, other, ends in zip(
        slow.work[0].stages, fast.work[0].stages, zip(*_ends(slow, fast), strict=True), strict=True
    ):
        assert one.unit.kept.dense == (0.5, 1.0, 0.5)
        assert one.forward == other.forward
        assert one.backward == other.backward
        narrowed, widened = (end.reduction for end in ends)
        assert narrowed.exposed_seconds + narrowed.hidden_seconds == pytest.approx(
            2 * (widened.exposed_seconds + widened.hidden_seconds)
        )
    assert slow.step_seconds > fast.step_seconds


def _ends(*steps: StepCost) -> list[list[object]]:
    return [list(step.composed.stages[0]) for step in steps]


def over_two_islands(cluster: Cluster, stages: int) -> Plan:
    """Every stage has two devices in each island."""
    found: list[Stage] = []
    for stage in stages_of([CUTS[0][:stages]], [2] * stages, len(SHAPE.layers), num_microbatches=4):
        at = stage.replicas[0].devices[0].start
        replicas = tuple(
            replace(stage.replicas[0], devices=compress(range(first, first + 2)))
            for first in (at, 32 + at)
        )
        found.append(replace(stage, replicas=replicas))
    return plan_with(SHAPE, cluster, FREE, [(found, 4)], overlap=OverlapSettings())


def test_reductions_over_one_uplink_share_it() -> None:
    line = replace(link(1e9, 5e-3, staged=True), shared_bandwidth_bytes_per_second=1e9)
    narrow = replace(wide_cluster(), links=(IslandLink(between=("a", "b"), link=line),))
    wider = replace(line, shared_bandwidth_bytes_per_second=4e9)
    wide = replace(narrow, links=(IslandLink(between=("a", "b"), link=wider),))
    for cluster, kept in ((narrow, 0.5), (wide, 1.0)):
        plan = over_two_islands(cluster, 2)
        pricer = Pricer(SHAPE, cluster, FREE, PREDICTOR)
        work = pricer.step(plan).work
        ends = [
            each.end.dense.whole
            for each in pricer.costs(plan).reductions(plan.reduction_groups, work)
        ]
        assert [each.share for each in ends] == [kept] * len(ends)
        assert len(ends) == 2
    alone = Pricer(SHAPE, narrow, FREE, PREDICTOR)
    plan = over_two_islands(narrow, 1)
    (only,) = alone.costs(plan).reductions(plan.reduction_groups, alone.step(plan).work)
    assert only.end.dense.whole.share == 1.0


def parties(cluster: Cluster, replicas: list[Replica]) -> list[Party]:
    return [
        Party(
            replica=each,
            groups=groups_of(cluster, each),
            dense=copies_of(cluster, [(_devices(each), each.tp)], 1),
            experts=None,
        )
        for each in replicas
    ]


def _devices(replica: Replica) -> list[int]:
    return [at for span in replica.devices for at in range(span.start, span.start + span.count)]


@settings(max_examples=60, deadline=None)
@given(cluster=clusters(), tp=st.sampled_from([1, 2]), dp=st.integers(1, 3))
def test_what_is_kept_is_a_part_and_order_does_not_matter(
    cluster: Cluster, tp: int, dp: int
) -> None:
    size = tp * dp
    replicas = [
        Replica(devices=compress(range(at, at + size)), tp=tp, microbatch_size=1)
        for at in range(0, cluster.num_devices - size + 1, size)
    ]
    found = kept_by_stages(cluster, parties(cluster, replicas), 1)
    turned = kept_by_stages(cluster, parties(cluster, replicas[::-1]), 1)
    assert len(found) == len(replicas)
    for one, two in zip(found, turned[::-1], strict=True):
        parts = (*one.passes, *one.dense, *one.experts)
        assert all(0 < each <= 1 for each in parts)
        assert one.passes == pytest.approx(two.passes)
        assert one.dense == pytest.approx(two.dense)


def test_collisions_of_every_island_of_a_group_count() -> None:
    plain = link(1e9, 5e-3, staged=True)
    hashed = replace(plain, equal_cost_paths=2)
    base = wide_cluster()
    third = replace(base.islands[0], name="c")
    cluster = Cluster(
        name="three",
        islands=(*base.islands, third),
        links=(
            IslandLink(between=("a", "b"), link=hashed),
            IslandLink(between=("b", "c"), link=plain),
            IslandLink(between=("a", "c"), link=plain),
        ),
    )
    # From a over b to c: first and last island have a link without equal-cost paths.
    assert group_among(cluster, [(0, 32, 64)]).share < 1
    assert group_among(cluster, [(0, 64)]).share == 1
