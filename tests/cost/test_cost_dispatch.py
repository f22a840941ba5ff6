"""Tokens to their experts and back: what each dispatcher sends, and what a trainer hides of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from cost_fakes import LinearPredictor, island, job, link
from estimate_plans import expert_model, hidden_of, plan_of, seconds_of, wide_cluster

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import collective, group_shape
from hetplan.cost.collectives.values import Routing
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.cost.network.segments import LinkScope, TrafficClass, island_link
from hetplan.cost.step_model.layer_calls import Call, LayerCalls
from hetplan.cost.traffic import ledger
from hetplan.job.spec import ExpertDispatcher, TrainerOptions
from hetplan.model.layers import LatentAttention, Mlp, Norm, TransformerLayer
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
)
from hetplan.profiling.samples import LinkOperation

INSIDE, BETWEEN = 450e9, 50e9
EXPERTS = expert_model()
CLUSTER = wide_cluster()


def places_by_counting(experts: int, per_token: int, parts: int) -> float:
    """Every choice of experts, each as likely."""
    held = experts // parts
    chosen = [{each // held for each in pick} for pick in combinations(range(experts), per_token)]
    return sum(map(len, chosen)) / len(chosen)


@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (8, 8), (12, 5), (16, 3)])
def test_a_token_goes_to_as_many_places_as_a_count_of_all_choices_says(experts, per_token) -> None:
    for parts in (each for each in range(1, experts + 1) if experts % each == 0):
        found = Routing(experts=experts, per_token=per_token).places(parts)
        assert found == pytest.approx(places_by_counting(experts, per_token, parts))


def h100s(nodes: int) -> Cluster:
    one = island("west", nodes=nodes, devices_per_node=8)
    fast = replace(one, intra_node=link(INSIDE), inter_node=link(BETWEEN))
    return Cluster(name="h100", islands=(fast,))


@pytest.mark.parametrize(("nodes", "measured"), [(1, 0.96e-3), (4, 3.52e-3)])
def test_deepep_takes_about_what_was_measured_on_h100(nodes: int, measured: float) -> None:
    # AIConfigurator's combine of 4096 tokens of 7168 in 16 bit, 8 of 256 experts.
    cluster = h100s(nodes)
    found = collective(
        cluster,
        group_shape(cluster, range(8 * nodes)),
        LinkOperation.ALL_TO_ALL,
        4096 * 7168 * 2,
        LinearPredictor(),
        routing=Routing(experts=256, per_token=8),
    )
    assert measured / 1.7 < found.seconds < measured * 1.05  # links at their full rate
    sent = {each.link: each.bytes for each in found.traffic}
    if nodes > 1:
        # Three of four nodes, to each of which 0.9 of the tokens go.
        across = sent[island_link("west", LinkScope.ISLAND)]
        assert across == pytest.approx(32 * 4096 * 7168 * 2 * 3 * 0.9, rel=0.02)


def priced(dispatcher: ExpertDispatcher | None = None, **overlap: bool) -> Estimate:
    asked = job(
        target="any",
        gradient_clipping=False,
        trainer=TrainerOptions(expert_dispatcher=dispatcher),
    )
    found = plan_of((8,), shape=EXPERTS, asked=asked, ep=8, overlap=OverlapSettings(**overlap))
    return estimate(found, EXPERTS, CLUSTER, asked, LinearPredictor())


def test_every_dispatcher_has_its_price() -> None:
    by = {each: seconds_of(priced(each), Component.EXPERT_PARALLEL) for each in ExpertDispatcher}
    assert seconds_of(priced(), Component.EXPERT_PARALLEL) == by[ExpertDispatcher.ALLTOALL]
    # Two experts per token on eight ranks: hardly any two in one rank, but all tokens to all ranks.
    assert by[ExpertDispatcher.DEEPEP] <= by[ExpertDispatcher.ALLTOALL]
    assert by[ExpertDispatcher.ALLTOALL] < by[ExpertDispatcher.ALLGATHER]


def test_a_node_gets_a_token_once_and_hands_it_on() -> None:
    plan = plan_of((8,), shape=EXPERTS, asked=job(target="any"), ep=8)
    sent = {}
    for each in (ExpertDispatcher.ALLTOALL, ExpertDispatcher.DEEPEP):
        chosen = job(target="any", trainer=TrainerOptions(expert_dispatcher=each))
        sent[each] = {
            entry.link: entry.bytes_per_step
            for entry in ledger(plan, EXPERTS, CLUSTER, chosen).entries
            if entry.traffic is TrafficClass.EXPERT_PARALLEL
        }
    copies, once = sent.values()
    routing = Routing(experts=8, per_token=2)
    across, inside = (island_link("a", scope) for scope in (LinkScope.ISLAND, LinkScope.NODE))
    # Two nodes of four ranks: of two copies one half crosses, and 3 / 8 stay inside.
    assert once[across] == pytest.approx(copies[across] * routing.places(2) / 2)
    assert once[inside] == pytest.approx(copies[inside] * 2 * routing.places(8) / 2)


def test_exchanges_beside_another_microbatch_cost_what_is_longer_than_its_compute() -> None:
    plain, beside = priced(), priced(expert_parallel=True)
    whole = seconds_of(plain, Component.EXPERT_PARALLEL)
    left, hidden = (of(beside, Component.EXPERT_PARALLEL) for of in (seconds_of, hidden_of))
    assert left + hidden == pytest.approx(whole)
    assert hidden > 0.5 * whole
    assert beside.step_seconds < plain.step_seconds
    # Attention of either pass hides one exchange each, experts of both the other two: more compute
    # in one place does not hide what is in another.
    assert seconds_of(beside, Component.SLOWED) > 0


def test_megatron_overlaps_exchanges_only_where_its_own_checks_let_it() -> None:
    asked = job(target="megatron")
    overlap = OverlapSettings(expert_parallel=True)
    two = plan_of((4, 4), shape=EXPERTS, asked=asked, ep=4, overlap=overlap)
    one = plan_of((8,), shape=EXPERTS, asked=asked, ep=8, overlap=overlap)
    alone = plan_of((8,), shape=EXPERTS, asked=asked, overlap=overlap)

    def faults(plan) -> str:
        found = check_plan(plan, EXPERTS, CLUSTER, asked)
        return " ".join(each.message for each in found if "expert_parallel" in str(each.field))

    assert "only with virtual stages" in faults(two)
    assert "nothing is sent to experts" in faults(alone)
    assert not faults(one)


def calls_of(dispatcher: ExpertDispatcher, **shape: object) -> LayerCalls:
    asked = job(target="any", trainer=TrainerOptions(expert_dispatcher=dispatcher))
    sizes = {"tp": 4, "dp": 1, "microbatch_size": 1, "etp": 4, "sequence_parallel": True} | shape
    return LayerCalls(model=EXPERTS, job=asked, shape=Shape(**sizes))  # type: ignore[arg-type]


def bytes_of(calls: Iterable[Call]) -> dict[LinkOperation, float]:
    found = Counter[LinkOperation]()
    for call in calls:
        found[call.operation] += call.count * call.message_bytes  # type: ignore[assignment]
    return dict(found)


def test_ranks_that_cut_experts_gather_copies_where_their_own_tokens_were_dispatched() -> None:
    layer = EXPERTS.layer_runs[0].layer
    alltoall = calls_of(ExpertDispatcher.ALLTOALL)
    one = alltoall.hidden_bytes
    gather, scatter = LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER
    # Attention's tokens once, and two copies of each for the experts.
    assert bytes_of(alltoall.sums(layer)) == pytest.approx({gather: 3 * one, scatter: 3 * one})
    assert bytes_of(alltoall.gathered_again(layer)) == pytest.approx({gather: one})
    tokens = calls_of(ExpertDispatcher.ALLGATHER)
    assert bytes_of(tokens.sums(layer)) == pytest.approx({gather: 2 * one, scatter: 2 * one})
    assert bytes_of(tokens.gathered_again(layer)) == pytest.approx({gather: 2 * one})
    whole = calls_of(ExpertDispatcher.ALLTOALL, sequence_parallel=False)
    assert bytes_of(whole.sums(layer)) == pytest.approx({LinkOperation.ALL_REDUCE: 2 * one})
    # Recomputed experts gather and sum again.
    recompute = Recompute(
        granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.EXPERTS,)
    )
    again = bytes_of(alltoall.again(layer, recompute))
    assert again == pytest.approx({gather: 2 * one, scatter: 2 * one})


def test_latents_are_gathered_where_they_are_narrower() -> None:
    latent = LatentAttention(
        num_heads=8, query_rank=24, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16
    )
    dense = Mlp(ffn_hidden_size=512, gated=True)
    layer = TransformerLayer(attention=latent, mlp=dense, norm=Norm.RMS_NORM)
    calls = calls_of(ExpertDispatcher.ALLTOALL)
    one, narrow = calls.hidden_bytes, calls.hidden_bytes * (24 + 32 + 8) / EXPERTS.hidden_size
    gather, scatter = LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER
    assert bytes_of(calls.sums(layer)) == pytest.approx({gather: narrow + one, scatter: 2 * one})
    assert bytes_of(calls.gathered_again(layer)) == pytest.approx({gather: narrow + one})
