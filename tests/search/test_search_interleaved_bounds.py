"""Bounds of interleaved families against every plan: rows, boundaries, sets of islands."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from interleaved_cases import Case, cuts, every_plan, every_row, random_case
from random_cases import seeds
from synthetic_spaces import Scale, family_of, large_space

from hetplan.cost.replay import programs as orders
from hetplan.cost.replay.programs import Message, Receive, programs
from hetplan.cost.replay.times import Exchange
from hetplan.plans.v_schedules import Pass
from hetplan.search.interleaved.bound import borders_of, capacity_bound, least_bound
from hetplan.search.interleaved.chains import in_flight
from hetplan.search.interleaved.enumerate import list_cuts, stage_counts
from hetplan.search.interleaved.heuristic import polish
from hetplan.search.interleaved.island_bound import island_program, least_open
from hetplan.search.interleaved.rows import Row, row_of
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.solver import Best
from hetplan.search.space.row import NEVER


@pytest.mark.parametrize("seed", seeds(120))
def test_row_bounds_are_below_the_best_cut(seed: int) -> None:
    case = random_case(seed)
    numbers, layers, chunks = (
        case.space,
        case.space.num_layers,
        case.family.virtual_stages,
    )
    for at, mesh in enumerate(list(every_row(case))[:3]):
        most = case.most_units(mesh)
        eager = at == 1 and seed % 2 == 0
        row = row_of(numbers._replace(rendezvous=not eager), mesh, most, chunks, case.exchange)
        steps = {
            (variant, units): row.seconds(np.array(variant), np.array(units))
            for units in cuts(layers, len(mesh), chunks)
            for variant in product(range(case.room.shape[0]), repeat=len(mesh))
        }
        best = min(steps.values())
        assert capacity_bound(row.arrays) <= best * (1 + 1e-12)
        bound = least_bound(row.arrays, NEVER)
        assert bound.seconds <= best * (1 + 1e-12)
        if best >= NEVER:
            assert bound.seconds >= NEVER
            continue
        assert row.seconds(bound.variant, bound.units) < NEVER
        for limit in (1.05 * best, 1.5 * best):
            assert row.least_seconds(limit) <= best * (1 + 1e-12)
        assert row.least_seconds(0.5 * bound.seconds) >= 0.5 * bound.seconds
        limit = best * 1.05
        bound = least_bound(row.arrays, limit)
        listed, count, whole = list_cuts(row.arrays, bound, limit, 5000, 1_000_000)
        assert whole
        found = {(tuple(cut[0].tolist()), tuple(cut[1].tolist())) for cut in listed[:count]}
        assert len(found) == count
        assert {cut for cut, step in steps.items() if step < limit} <= found


def _row(exchange: Exchange, head: float, hop: float, microbatches: int) -> Row:
    """8 equal slots of three chunks, a unit of 1 + 2 seconds; a head on the last slot, one long hop
    between slots 3 and 4.
    """
    space = large_space(5, Scale(islands=2, stages=8, layers=48, microbatches=microbatches))
    links = np.zeros_like(space.links)
    links[:, 0, 1] = links[:, 1, 0] = hop
    extra = np.zeros_like(space.extra_forward)
    extra[2:] = head
    space = space._replace(
        forward=np.ones_like(space.forward)[:1],
        backward=np.full_like(space.backward, 2.0)[:1],
        links=links,
        node_links=np.zeros_like(space.node_links),
        extra_forward=extra[:, :1],
        extra_backward=extra[:, :1],
        rendezvous=True,
    )
    mesh = (0,) * 4 + (1,) * 4
    most = np.full((8, 1), 48)
    return row_of(space, mesh, most, 3, exchange)


@pytest.mark.parametrize(
    ("exchange", "head", "hop", "microbatches", "close"),
    [
        (Exchange.TORCH, 12.0, 0.0, 32, 0.96),
        (Exchange.MEGATRON, 12.0, 0.0, 32, 0.96),
        (Exchange.TORCH, 3.0, 0.0, 8, 0.99),
        (Exchange.MEGATRON, 3.0, 0.0, 8, 0.99),
        (Exchange.MEGATRON, 0.0, 1.0, 8, 0.8),
        (Exchange.TORCH, 0.0, 4.0, 32, 0.8),
    ],
)
def test_heads_and_long_hops_are_in_the_bound(
    exchange: Exchange, head: float, hop: float, microbatches: int, close: float
) -> None:
    """Chains that know neither have 0.77 to 0.86 of the step, and 0.37 of the last one."""
    row = _row(exchange, head, hop, microbatches)
    found = least_bound(row.arrays, NEVER)
    step, *_ = polish(row, found.variant, found.units, 300)
    assert close * step <= found.seconds <= step


@pytest.mark.parametrize(("stages", "chunks"), [(3, 2), (3, 4), (4, 3), (5, 2), (6, 3)])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_receives_are_posted_behind_the_pass_before(stages: int, chunks: int, groups: int) -> None:
    """What `early_receives_of` counts: nothing hides these receives."""
    m = stages * groups
    total = m * chunks
    for exchange in Exchange.TORCH, Exchange.MEGATRON:
        every = programs("interleaved-1f1b", stages, m, chunks, None, True, exchange)
        line = orders.Row("interleaved-1f1b", stages, chunks)
        for s, steps in enumerate(every):
            ahead = in_flight(stages, s, chunks, total)
            posted: dict[Message, dict[str, int]] = {}
            done = {"F": 0, "B": 0}
            for step in steps:
                if isinstance(step, Receive):
                    posted[step.message] = dict(done)
                if not isinstance(step, Pass):
                    continue
                source, number = line.needed(step, s), done[step.kind]
                warm = step.kind == "F" and 0 < number < ahead and s > 0
                back = step.kind == "B" and number > 0 and s < stages - 1
                if warm or back:
                    assert source is not None
                    assert posted[source][step.kind] == number
                done[step.kind] += 1


@pytest.mark.parametrize("seed", seeds(60))
def test_no_plan_is_faster_than_its_boundaries(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    chunks = case.family.virtual_stages
    borders = {
        stages: borders_of(case.space, chunks, case.exchange, stages)
        for stages in stage_counts(case.space, case.family)
    }
    for row, _, _, step in every_plan(case):
        beside, above = borders[len(row)], step * (1 + 1e-12)
        assert beside.around[row[-1], row[0]] <= above
        for one, two in pairwise(row):
            assert beside.between[one, two] <= above
            assert not beside.blocked(above)[one, two]
        assert beside.rings(above)[row[-1], row[0]]


@pytest.mark.parametrize("seed", seeds(60))
def test_no_plan_is_denied(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    least: dict[int, tuple[float, tuple[int, ...]]] = {}
    for row, _, _, step in every_plan(case):
        if step < least.get(len(row), (math.inf, ()))[0]:
            least[len(row)] = step, row
    for stages in stage_counts(case.space, case.family):
        program = island_program(case.space, case.family, case.most_units, case.exchange, stages)
        if stages not in least:
            continue
        step, row = least[stages]
        above = step * (1 + 1e-6)
        assert not program.below(above).none
        rows = program.rows(above, 10_000)
        assert rows is not None
        assert row in rows
        assert len(rows) == len(set(rows))
        bound, _ = least_open(program, 0.0, 4.0 * step, 12)
        assert bound <= step * (1 + 1e-9)


def _large(islands: int) -> Case:
    space = large_space(5, Scale(islands=islands, stages=32, layers=64, microbatches=128))
    space = space._replace(max_stages=np.maximum(space.max_stages, 2))
    fits = space.most_layers[:, 0, :, 1:]
    room = np.repeat(fits[..., -1:], 65, axis=2)
    room[..., : fits.shape[2]] = fits
    return Case(
        space=space,
        family=family_of(space, virtual_stages=2),
        room=room,
        exchange=Exchange.MEGATRON,
    )


@pytest.mark.parametrize("islands", [4, 8])
def test_families_of_many_islands_get_a_plan_and_a_bound(islands: int) -> None:
    case = _large(islands)
    best = Best(gap=0.01, bounds=[0.0], deadline=math.inf, progress=None, started=0.0)
    solver = InterleavedSolver(0, case.family, case)
    solver.improve(best)
    assert best.chosen is not None
    solver.prove(best)
    assert best.lower_bound >= 0.85 * best.seconds
    assert best.lower_bound <= best.seconds
