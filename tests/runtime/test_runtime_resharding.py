"""Across a boundary every rank gets its samples once, and gradients meet all of their copies."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import CASES, Case

from hetplan.cost.replay.programs import Receive, Wait
from hetplan.runtime.messages import transfers
from hetplan.runtime.passes import program_of
from hetplan.runtime.placement import RankPlace

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
        dp_ranks=(rank,),
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


def test_early_receives_are_as_many_as_the_depth() -> None:
    case: Case = next(each for each in CASES if each.name == "early sends, deeper")
    for position, stage in enumerate(case.plan.pipelines[0].stages):
        program = program_of(case.plan.pipelines[0], position, sends_wait=False)
        for direction in (0, 1):
            ahead = peak = 0
            for step in program:
                if isinstance(step, Receive) and step.message[0] == direction:
                    ahead += 1
                if isinstance(step, Wait):
                    ahead -= sum(message[0] == direction for message in step.received)
                assert ahead >= 0  # nothing is awaited that was not posted
                peak = max(peak, ahead)
            assert ahead == 0
            assert peak <= stage.warmup_depth
