"""The program over sets of islands denies no plan there is, and its rows miss none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from interleaved_cases import Case, every_plan, random_case
from random_cases import seeds
from synthetic_spaces import Scale, family_of, large_space

from hetplan.cost.replay.times import Exchange
from hetplan.search.interleaved.enumerate import stage_counts
from hetplan.search.interleaved.island_bound import island_program, least_open
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.solver import Best


@pytest.mark.parametrize("seed", seeds(60))
def test_no_plan_is_denied(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    least: dict[int, tuple[float, tuple[int, ...]]] = {}
    for row, _, _, step in every_plan(case):
        if step < least.get(len(row), (math.inf, ()))[0]:
            least[len(row)] = step, row
    for stages in stage_counts(case.space, case.family):
        program = island_program(case.space, case.family, case, case.exchange, stages)
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
