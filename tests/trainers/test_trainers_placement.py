"""The agents of a sheet put every rank on the device that the plan has for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_models import MODEL
from trainer_plans import JOB, chosen, cluster, island, two_regions

from hetplan.cluster.launch_domains import LaunchDomain
from hetplan.errors import InputError
from hetplan.plans.build import plan_of
from hetplan.plans.plan import DeviceRange
from hetplan.plans.ranks import rank_rows
from hetplan.schedulers.rank_layout import RankLayout, rank_layout


def device_of_ranks(sheet: RankLayout) -> list[tuple[str, int]]:
    """(host, local device) of every rank as torchrun would number them: agent by agent."""
    return [(agent.host.name, local) for agent in sheet.agents for local in agent.local_devices]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_placements_are_realised_by_both_numberings(data: st.DataObject) -> None:
    """Devices of a stage in any order: rank (t, d, p) is where the plan's row says."""
    tp = data.draw(st.sampled_from([1, 2, 4]))
    dp = data.draw(st.sampled_from([1, 2, 4]))
    pp = data.draw(st.sampled_from([1, 2, 3]))
    machines = cluster(island("a", nodes=4, devices_per_node=8), island("b", "there", nodes=4))
    plan = plan_of(
        MODEL, machines, JOB, chosen(*[("a", 12 // pp)] * (pp - 1), ("b", 12 // pp), tp=tp, dp=dp)
    )
    devices = data.draw(st.permutations(range(machines.num_devices)))[: tp * dp * pp]
    (pipeline,) = plan.pipelines
    stages = tuple(
        replace(
            stage,
            replicas=(
                replace(
                    stage.replicas[0],
                    devices=tuple(
                        DeviceRange(start=each, count=1)
                        for each in devices[s * tp * dp : (s + 1) * tp * dp]
                    ),
                ),
            ),
        )
        for s, stage in enumerate(pipeline.stages)
    )
    plan = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    where = {
        (row.tp, row.dp, row.stage): (row.node_name, row.local) for row in rank_rows(plan, machines)
    }
    for allowed in (False, True):
        sheet = rank_layout(plan, machines, data_outermost=allowed)
        ranks = device_of_ranks(sheet)
        for t in range(tp):
            for d in range(dp):
                for p in range(pp):
                    # facts of Megatron-LM's two orders: parallel_state.py, RankGenerator.
                    rank = t + tp * ((p + pp * d) if sheet.data_outermost else (d + dp * p))
                    assert ranks[rank] == where[t, d, p]
        for left, right in zip(sheet.agents, sheet.agents[1:], strict=False):
            assert left.host != right.host
            assert right.first_rank == left.first_rank + left.num_ranks


def test_visible_devices_of_ascend_are_ascending() -> None:
    machines = cluster(island("n", nodes=1, kind="huawei-ascend-910b2-64gb"))
    plan = plan_of(MODEL, machines, JOB, chosen(("n", 12), tp=4))
    replica = plan.pipelines[0].stages[0].replicas[0]
    turned = replace(
        replica, devices=(DeviceRange(start=4, count=2), DeviceRange(start=0, count=2))
    )
    (pipeline,) = plan.pipelines
    stage = replace(pipeline.stages[0], replicas=(turned,))
    plan = replace(plan, pipelines=(replace(pipeline, stages=(stage,)),))
    sheet = rank_layout(plan, machines)
    assert [agent.local_devices for agent in sheet.agents] == [(4, 5), (0, 1)]
    nvidia = cluster(island("n", nodes=1))
    assert [agent.local_devices for agent in rank_layout(plan, nvidia).agents] == [(4, 5, 0, 1)]


def test_two_hosts_of_one_name_or_address_are_refused() -> None:
    result = two_regions()
    north, south = result.inputs.cluster.islands
    machines = replace(
        result.inputs.cluster, islands=(north, replace(south, node_names=north.node_names))
    )
    with pytest.raises(InputError, match="north0000 is a node of island north as well"):
        rank_layout(result.plan, machines)
    domain = LaunchDomain(name="d", islands=("north",), addresses=(("north0001", "south0000"),))
    machines = replace(result.inputs.cluster, launch_domains=(domain,))
    with pytest.raises(InputError, match="south0000 has the address of north0001"):
        rank_layout(result.plan, machines)
