"""Bounds of interleaved families against every plan: rows, boundaries, sets of islands."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from interleaved_cases import Case, cuts, every_plan, every_row, random_case
from random_cases import seeds
from synthetic_spaces import Scale, family_of, large_space

from hetplan.cost.replay.times import Exchange
from hetplan.search.interleaved.bound import borders_of, capacity_bound, least_bound
from hetplan.search.interleaved.enumerate import list_cuts, stage_counts
from hetplan.search.interleaved.island_bound import island_program, least_open
from hetplan.search.interleaved.rows import row_of
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
    for mesh in list(every_row(case))[:3]:
        most = case.most_units(mesh)
        row = row_of(numbers, mesh, most, chunks, case.exchange)
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
        limit = best * 1.05
        bound = least_bound(row.arrays, limit)
        listed, count, whole = list_cuts(row.arrays, bound, limit, 5000, 1_000_000)
        assert whole
        found = {(tuple(cut[0].tolist()), tuple(cut[1].tolist())) for cut in listed[:count]}
        assert len(found) == count
        assert {cut for cut, step in steps.items() if step < limit} <= found


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
