"""Replicas that lie alike on other nodes of an island are priced once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor
from estimate_plans import FREE, SHAPE, plan_of, wide_cluster
from hypothesis import given
from hypothesis import strategies as st
from network_clusters import clusters

from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model import plan as step_plan
from hetplan.cost.step_model.groups import copies_of, groups_of, holders_of
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.step_model.units import make_unit, on_first_nodes
from hetplan.plans.plan import Replica, compress


def on_nodes(cluster: Cluster, place: int, nodes: list[int], locals_: list[int]) -> list[int]:
    island = cluster.islands[place]
    first = cluster.first_device(island.name)
    return [first + node * island.devices_per_node + at for node in nodes for at in locals_]


@given(st.data(), clusters())
def test_nodes_of_an_island_are_alike(data: st.DataObject, cluster: Cluster) -> None:
    longer = replace(
        cluster, islands=tuple(replace(each, nodes=9, node_names=()) for each in cluster.islands)
    )
    place = data.draw(st.integers(0, len(longer.islands) - 1))
    island = longer.islands[place]
    nodes = sorted(data.draw(st.sets(st.integers(0, 8), min_size=1, max_size=4)))
    count = data.draw(st.integers(1, island.devices_per_node))
    tp = data.draw(st.sampled_from([each for each in (1, 2, 4) if len(nodes) * count % each == 0]))
    devices = on_nodes(longer, place, nodes, list(range(count)))
    replica = Replica(devices=compress(devices), tp=tp, microbatch_size=1)
    first = on_first_nodes(longer, replica)
    moved = on_nodes(longer, place, list(range(len(nodes))), list(range(count)))
    if all(part.stride == 1 for part in replica.devices):
        assert [at for part in first.devices for at in part.devices()] == moved
    assert replace(first, devices=replica.devices) == replica
    assert groups_of(longer, replica) == groups_of(longer, first)
    one, other = (
        copies_of(longer, holders_of((each,), expert=False), 2) for each in (replica, first)
    )
    assert one == other


def test_stages_that_lie_alike_have_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(settings: object, replica: Replica, *args: object, **kept: object) -> object:
        made.append(replica)
        return make_unit(settings, replica, *args, **kept)  # type: ignore[arg-type]

    monkeypatch.setattr(step_plan, "make_unit", counted)
    cluster = wide_cluster()
    plan = plan_of([4] * 4, cluster=cluster)
    Pricer(SHAPE, cluster, FREE, LinearPredictor()).step(plan)
    assert len(made) == 1
