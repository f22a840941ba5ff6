"""Across a boundary every rank gets its samples once, and gradients meet all of their copies."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import CASES, LLAMA, Case, job, pipeline_of, unlike_plan

from hetplan.cost.replay.programs import Receive, Wait
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.profiling.weights import initial_value, parameter_slices
from hetplan.runtime.gradient_groups import exchanged_parts, exchanges, tied_exchanges
from hetplan.runtime.gradients import counted_parts, counts
from hetplan.runtime.messages import transfers
from hetplan.runtime.passes import program_of
from hetplan.runtime.placement import RankPlace, place_ranks

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)


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


WIDE = unlike_plan(
    LLAMA,
    job(8),
    pipeline_of(4, ("a 4 1 1", 4)),
    pipeline_of(2, ("b 1 1 2", 1), ("b 2 1 2", 3)),
)
"""Copied key-value heads beside whole ones."""


def _all() -> list[tuple[str, ModelSpec, Plan]]:
    cases: list[tuple[str, ModelSpec, Plan]] = [(c.name, c.model, c.plan) for c in CASES]
    return [*cases, ("wide", LLAMA, WIDE)]


def _full(model: ModelSpec, place: RankPlace, position: int) -> dict[str, torch.Tensor]:
    """Which element of which full weight each element of a rank's parameters is (as numbers)."""
    found = {}
    kind = model.layers[position]
    for parameter in parameter_slices(model, kind, tp=place.tp, tp_rank=place.tp_index):
        pieces = []
        for part in parameter.parts:
            size = 1
            for length in part.full_shape:
                size *= length
            numbers = torch.arange(size).reshape(part.full_shape)
            outside = max(0, part.start + part.length - part.full_shape[part.dim])
            pad = list(part.full_shape)
            pad[part.dim] = outside
            numbers = torch.cat([numbers, torch.full(pad, -1)], dim=part.dim)
            code = sum(ord(letter) for letter in part.name) * 1_000_000
            pieces.append(numbers.narrow(part.dim, part.start, part.length) + code)
        found[parameter.name] = torch.cat(pieces)
    return found


@pytest.mark.parametrize(("name", "model", "plan"), _all(), ids=lambda value: str(value)[:40])
def test_what_ranks_sum_is_the_same_part_of_the_same_weight(
    name: str, model: ModelSpec, plan: Plan
) -> None:
    places = place_ranks(plan)
    covered: dict[tuple[int, int, str], torch.Tensor] = {}
    for exchange in (*exchanges(plan, places), *tied_exchanges(plan, places)):
        messages = []
        for rank in exchange.ranks:
            place = places[rank]
            message = []
            for part in exchanged_parts(
                model, exchange, tp=place.tp, tp_index=place.tp_index, holds=place.chunks
            ):
                full = _full(model, place, part.position)[part.name]
                message.append(full.narrow(part.dim, part.start, part.length).reshape(-1))
                if exchange.layers:
                    key = (rank, part.position, part.name)
                    done = covered.setdefault(key, torch.zeros_like(full, dtype=torch.bool))
                    done.narrow(part.dim, part.start, part.length).fill_(True)
            messages.append(torch.cat(message))
        assert all(torch.equal(message, messages[0]) for message in messages)
    # Every weight that has a copy has been summed with it, on every rank and to the last element.
    for place in places:
        for chunk in place.chunks:
            for position in range(chunk.start, chunk.stop):
                copies = sum(
                    other.tp_index == 0 and any(c.start <= position < c.stop for c in other.chunks)
                    for other in places
                )
                for key, full in _full(model, place, position).items():
                    done = covered.get((place.rank, position, key))
                    assert (done is not None) == (copies > 1)
                    assert done is None or (done.shape == full.shape and bool(done.all()))


@pytest.mark.parametrize(("name", "model", "plan"), _all(), ids=lambda value: str(value)[:40])
def test_the_norm_counts_every_weight_once(name: str, model: ModelSpec, plan: Plan) -> None:
    total = 0.0
    for place in place_ranks(plan):
        if not counts(place):
            continue
        for part in counted_parts(model, place):
            kind = model.layers[part.position]
            slices = parameter_slices(model, kind, tp=place.tp, tp_rank=place.tp_index)
            mine = next(each for each in slices if each.name == part.name)
            value = initial_value(mine, seed=1, position=part.position)
            total += float(value.narrow(part.dim, part.start, part.length).double().square().sum())
    expected = 0.0
    for position, kind in enumerate(model.layers):
        for whole in parameter_slices(model, kind, tp=1, tp_rank=0):
            tied_head = model.tied_embeddings and position == len(model.layers) - 1
            if tied_head and whole.name == "weight":
                continue
            expected += float(
                initial_value(whole, seed=1, position=position).double().square().sum()
            )
    assert total == pytest.approx(expected, rel=1e-9)


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
