"""Across a boundary every rank gets its samples once, and gradients meet all of their copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_cases import CASES, FOURS, GPT, LLAMA, Case, job, pipeline_of, unlike_plan

from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.replay.programs import Receive, Wait
from hetplan.cost.traffic import ledger, links_between
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import Places
from hetplan.plans.plan import Plan
from hetplan.profiling.weights import initial_value, parameter_slices
from hetplan.runtime.communicator.levels import phases
from hetplan.runtime.gradient_groups import exchanged_parts, exchanges, sums_of, tied_exchanges
from hetplan.runtime.gradients import counted_parts, counts
from hetplan.runtime.messages import Holder, holder_of, transfers
from hetplan.runtime.passes import program_of
from hetplan.runtime.placement import RankPlace, place_ranks

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Holder], list[Holder]]:
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
                holders.append(
                    Holder(rank=rank, first=start, count=stop - start, tp=tp, tp_index=at)
                )
                rank += 1
        found.append(holders)
    return found[0], found[1]


@SETTINGS
@given(sides())
def test_every_sample_arrives_once_at_every_rank_that_needs_it(
    both: tuple[list[Holder], list[Holder]],
) -> None:
    senders, receivers = both
    held = {each.rank: range(each.first, each.first + each.count) for each in senders + receivers}
    arrived: Counter[tuple[int, int]] = Counter()
    for each in transfers(senders, receivers):
        samples = range(each.start, each.stop)
        assert samples
        assert set(samples) <= set(held[each.source])  # nobody sends what it has not
        arrived.update((each.target, sample) for sample in samples)
    # Once, everywhere, and nothing else.
    assert arrived == Counter((r.rank, sample) for r in receivers for sample in held[r.rank])


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


@st.composite
def alike_plans(draw: st.DrawFn) -> tuple[ModelSpec, Job, Plan]:
    """One or two pipelines of equal tp, with their own cuts, dp and shares."""
    tp = draw(st.sampled_from([1, 2]))
    pipelines, samples = [], 0
    for island in "ab"[: draw(st.integers(1, 2))]:
        dp = draw(st.sampled_from([1, 2])) if tp == 1 else 1
        cut = draw(st.integers(1, 3))
        count, size = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2]))
        text = f"{island} {tp} {dp} {size}"
        pipelines.append(pipeline_of(count, (text, cut), (text, 4 - cut)))
        samples += count * dp * size
    model = replace(GPT, tied_embeddings=draw(st.booleans()))
    task = job(samples)
    return model, task, unlike_plan(model, task, *pipelines)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(alike_plans())
def test_messages_and_sums_are_the_bytes_that_the_cost_model_counts(
    drawn: tuple[ModelSpec, Job, Plan],
) -> None:
    model, task, plan = drawn
    places, where = place_ranks(plan), Places(cluster=FOURS)
    found = Counter[tuple[str, str]]()

    def add(source: int, target: int, traffic: TrafficClass, size: float) -> None:
        ends = (np.array([places[rank].device]) for rank in (source, target))
        ((link, _),) = links_between(where, *ends)
        found[str(link), traffic.value] += size

    by_levels = {each.ranks: each.levels for each in sums_of(plan, FOURS)}
    sample = task.sequence_length * model.hidden_size * 4
    for p, pipeline in enumerate(plan.pipelines):
        mine = [place for place in places if place.pipeline == p]
        left, right = ([holder_of(e) for e in mine if e.position == at] for at in (0, 1))
        for each in (*transfers(left, right), *transfers(right, left)):
            size = (each.stop - each.start) * sample * pipeline.num_microbatches
            add(each.source, each.target, TrafficClass.PIPELINE, size)
    for traffic, sums in (
        (TrafficClass.DATA_PARALLEL, exchanges(plan, places)),
        (TrafficClass.EMBEDDING, tied_exchanges(plan, places)),
    ):
        for exchange in sums:
            n = len(exchange.ranks)
            place = places[exchange.ranks[0]]
            parts = exchanged_parts(
                model, exchange, tp=place.tp, tp_index=place.tp_index, holds=place.chunks
            )
            elements = sum(
                _full(model, place, part.position)[part.name]
                .narrow(part.dim, part.start, part.length)
                .numel()
                for part in parts
            )
            levels = by_levels.get(exchange.ranks)
            if levels is None:
                for at, rank in enumerate(exchange.ranks):
                    after = exchange.ranks[(at + 1) % n]
                    add(rank, after, traffic, 4 * elements * 2 * (n - 1) / n)
                continue
            for phase in phases(levels, n, elements):
                for move in phase:
                    ends = exchange.ranks[move.source], exchange.ranks[move.target]
                    add(*ends, traffic, 4 * (move.stop - move.start))
    counted = {TrafficClass.PIPELINE, TrafficClass.DATA_PARALLEL, TrafficClass.EMBEDDING}
    assert found == pytest.approx(
        {
            (str(each.link), each.traffic.value): each.bytes_per_step
            for each in ledger(plan, model, FOURS, task).entries
            if each.traffic in counted
        }
    )


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
