"""Across a boundary every rank gets its samples once; places that plans have no single one of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import (
    CPUS,
    GPT,
    job,
    pipeline_of,
    plan_of,
    unlike_plan,
)

from hetplan.errors import InputError
from hetplan.profiling.weights import ALL_EXPERTS
from hetplan.runtime.messages import transfers
from hetplan.runtime.placement import RankPlace, place_ranks, vocabulary_faults

SETTINGS = settings(derandomize=True, deadline=None, max_examples=100)


def held(rank: int, start: int, stop: int, tp: int, tp_index: int) -> RankPlace:
    """A rank of a stage with these samples; the rest does not matter."""
    return RankPlace(
        rank=rank,
        device=rank,
        pipeline=0,
        stage=0,
        position=0,
        dp_index=0,
        tp_index=tp_index,
        chunks=(),
        first_sample=start,
        microbatch_size=stop - start,
        tp_ranks=tuple(range(tp)),
        experts=ALL_EXPERTS,
        expert_shares=(ALL_EXPERTS,),
        expert_ranks=(rank,),
        expert_copy=0,
    )


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[RankPlace], list[RankPlace]]:
    """Two stages that share as many samples between their ranks, however unequally."""
    total = draw(st.integers(1, 12))
    found = []
    rank = 0
    for _ in range(2):
        cuts = draw(st.sets(st.integers(1, max(1, total - 1)), max_size=4)) if total > 1 else set()
        edges = [0, *sorted(cuts), total]
        holders = []
        for start, stop in pairwise(edges):
            tp = draw(st.sampled_from([1, 2, 3, 4]))
            for at in range(tp):
                holders.append(held(rank, start, stop, tp, at))
                rank += 1
        found.append(holders)
    return found[0], found[1]


@SETTINGS
@given(sides())
def test_every_sample_arrives_once_at_every_rank_that_needs_it(
    both: tuple[list[RankPlace], list[RankPlace]],
) -> None:
    senders, receivers = both
    samples_of = {
        each.rank: range(each.first_sample, each.last_sample) for each in (*senders, *receivers)
    }
    arrived: Counter[tuple[int, int]] = Counter()
    for each in transfers(senders, receivers):
        samples = range(each.start, each.stop)
        assert samples
        assert set(samples) <= set(samples_of[each.source])  # nobody sends what it has not
        arrived.update((each.target, sample) for sample in samples)
    # Once, everywhere, and nothing else.
    assert arrived == Counter((r.rank, sample) for r in receivers for sample in samples_of[r.rank])


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
