"""Ranks and groups of random plans, and plans that the trainer does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import CPUS, GPT, cluster, gpt, island, job, plan_of

from hetplan.errors import InputError
from hetplan.plans.plan import Plan, expand
from hetplan.runtime.placement import place_ranks, vocabulary_faults

SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    counts = {name: draw(st.integers(1, 3)) for name in "ab"[: draw(st.integers(1, 2))]}
    machines = cluster(
        *(island(name, f"kind-{name}", tp * dp * count) for name, count in counts.items())
    )
    order = draw(st.permutations(list(counts)))
    stages = "".join(name * draw(st.integers(1, counts[name])) for name in order)
    layers = tuple(draw(st.integers(1, 3)) for _ in stages)
    tied = draw(st.booleans())
    model = gpt(num_layers=sum(layers), tied_embeddings=tied)
    batch = dp * (len(layers) + draw(st.integers(0, 2)))
    return plan_of(model, job(batch), layers, machines, stages, tp=tp, dp=dp)


@SETTINGS
@given(plans())
def test_groups_of_every_rank_agree(plan: Plan) -> None:
    places = place_ranks(plan)
    stages = plan.pipelines[0].stages
    assert [place.rank for place in places] == list(range(len(places)))
    assert [place.device for place in places] == [
        device for stage in stages for device in expand(stage.replicas[0].devices)
    ]
    for place in places:
        replica = stages[place.stage].replicas[0]
        sizes = {"tp_ranks": replica.tp, "dp_ranks": replica.dp, "pp_ranks": len(stages)}
        for name, size in sizes.items():
            members = getattr(place, name)
            assert place.rank in members
            assert len(members) == size
            assert list(members) == sorted(set(members))
            # Every member names the same group, so each rank is in exactly one of each kind.
            assert all(getattr(places[member], name) == members for member in members)
        assert [places[r].stage for r in place.pp_ranks] == list(range(len(stages)))
        assert {(places[r].dp_index, places[r].tp_index) for r in place.pp_ranks} == {
            (place.dp_index, place.tp_index)
        }
        assert [places[r].tp_index for r in place.tp_ranks] == list(range(replica.tp))
        assert [places[r].dp_index for r in place.dp_ranks] == list(range(replica.dp))
        assert {places[r].layers for r in (*place.tp_ranks, *place.dp_ranks)} == {place.layers}


@SETTINGS
@given(plans())
def test_tied_ranks_are_the_ends_of_a_chain(plan: Plan) -> None:
    last = len(plan.pipelines[0].stages) - 1
    for place in place_ranks(plan):
        ends = place.stage in (0, last) and bool(plan.tied_embedding_devices)
        assert place.tied_ranks == ((place.pp_ranks[0], place.pp_ranks[-1]) if ends else ())


def test_dp_and_tp_groups_of_a_known_plan() -> None:
    machines = cluster(island("a", "cpu", 8))
    places = place_ranks(plan_of(GPT, job(8), (1, 3), machines, tp=2, dp=2))
    place = places[6]
    assert (place.stage, place.dp_index, place.tp_index) == (1, 1, 0)
    assert (place.tp_ranks, place.dp_ranks, place.pp_ranks) == ((6, 7), (4, 6), (2, 6))


def _broken(plan: Plan, rule: str) -> Plan:
    pipeline = plan.pipelines[0]
    first = pipeline.stages[0]
    replica = first.replicas[0]
    if rule == "pipelines":
        return replace(plan, pipelines=(pipeline, pipeline))
    if rule == "shards":
        return replace(plan, optimizer_shards=2)
    if rule == "depth":
        first = replace(first, warmup_depth=3)
    elif rule == "chunks":
        first = replace(first, chunks=first.chunks * 2)
    elif rule == "replicas":
        first = replace(first, replicas=(replica, replica))
    elif rule == "sequence":
        first = replace(first, replicas=(replace(replica, sequence_parallel=True),))
    elif rule == "degrees":
        first = replace(first, replicas=(replace(replica, microbatch_size=2),))
    elif rule == "schedule":
        pipeline = replace(pipeline, schedule=replace(pipeline.schedule, virtual_stages=2))
    elif rule == "microbatches":
        pipeline = replace(pipeline, num_microbatches=1)
    elif rule == "boundary":
        boundary = replace(pipeline.boundaries[0], precision="bfloat16")
        pipeline = replace(pipeline, boundaries=(boundary,))
    stages = (first, *pipeline.stages[1:])
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("pipelines", "2 pipelines; the trainer runs one"),
        ("shards", "does not shard the optimizer"),
        ("depth", "3; the trainer's 1F1B has 2"),
        ("chunks", "2 layer ranges"),
        ("replicas", "2 replicas"),
        ("sequence", "no context, expert or sequence parallelism"),
        ("degrees", "stages differ in"),
        ("schedule", "1f1b with 2 virtual stages"),
        ("microbatches", "1 for 2 stages"),
        ("boundary", "the trainer sends what it computes, float32"),
    ],
)
def test_plans_that_the_trainer_does_not_run_are_refused(rule: str, words: str) -> None:
    plan = plan_of(GPT, job(8), (2, 2), CPUS)
    assert len(place_ranks(plan)) == 2
    with pytest.raises(InputError, match=words):
        place_ranks(_broken(plan, rule))


def test_another_padding_of_the_vocabulary_is_refused() -> None:
    plan = plan_of(GPT, job(8), (2, 2), CPUS)
    assert not list(vocabulary_faults(plan, GPT))
    (fault,) = vocabulary_faults(replace(plan, padded_vocab_size=128), GPT)
    assert "pads 64 to 64" in fault.message
