"""Ranks and groups of random plans, and plans that the trainer does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import (
    CPUS,
    GPT,
    cluster,
    gpt,
    island,
    job,
    pipeline_of,
    plan_of,
    unlike_plan,
)

from hetplan.errors import InputError
from hetplan.plans.plan import Plan, expand
from hetplan.runtime.placement import first_samples, place_ranks, vocabulary_faults

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
        for name, size in {"tp_ranks": replica.tp, "dp_ranks": replica.dp}.items():
            members = getattr(place, name)
            assert place.rank in members
            assert len(members) == size
            assert list(members) == sorted(set(members))
            # Every member names the same group, so each rank is in exactly one of each kind.
            assert all(getattr(places[member], name) == members for member in members)
        assert [places[r].tp_index for r in place.tp_ranks] == list(range(replica.tp))
        assert [places[r].dp_index for r in place.dp_ranks] == list(range(replica.dp))
        assert {places[r].layers for r in (*place.tp_ranks, *place.dp_ranks)} == {place.layers}


def test_ranks_of_several_pipelines_and_replicas() -> None:
    plan = unlike_plan(
        GPT,
        job(10),
        pipeline_of(2, ("a 2 1 1 + b 1 2 1", 3), ("b 1 1 3", 1)),
        pipeline_of(2, ("a 1 2 1", 4)),
    )
    places = place_ranks(plan)
    assert [(p.pipeline, p.stage, p.position, p.dp_index, p.tp_index) for p in places] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 2, 0),
        (0, 1, 1, 0, 0),
        (1, 2, 0, 0, 0),
        (1, 2, 0, 1, 0),
    ]
    assert [(p.first_sample, p.microbatch_size) for p in places] == [
        (0, 1),
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 3),
        (0, 1),
        (1, 1),
    ]
    assert [p.tp_ranks for p in places[:3]] == [(0, 1), (0, 1), (2,)]
    assert first_samples(plan) == (0, 6)


def test_plans_that_the_trainer_does_not_run_are_refused() -> None:
    """The rules have tests of their own (tests/plans)."""
    plan = plan_of(GPT, job(8), (2, 2), CPUS)
    pipeline = replace(plan.pipelines[0], num_microbatches=1)
    with pytest.raises(InputError, match="1 for 2 stages"):
        place_ranks(replace(plan, pipelines=(pipeline,)))


def test_a_rank_of_an_interleaved_stage_has_no_single_range_of_layers() -> None:
    plan = unlike_plan(GPT, job(8), pipeline_of(4, ("a 1 1 2", (1, 1)), ("b 1 1 2", (1, 1))))
    place = place_ranks(plan)[0]
    assert [(each.start, each.stop) for each in place.chunks] == [(0, 2), (3, 4)]
    with pytest.raises(InputError, match="rank 0 holds 2 layer ranges"):
        _ = place.layers


def test_another_padding_of_the_vocabulary_is_refused() -> None:
    plan = plan_of(GPT, job(8), (2, 2), CPUS)
    assert not list(vocabulary_faults(plan, GPT))
    (fault,) = vocabulary_faults(replace(plan, padded_vocab_size=128), GPT)
    assert "pads 64 to 64" in fault.message
