"""The solver of interleaved families against every plan, listed and replayed apart."""

from __future__ import annotations

import math

import pytest
from interleaved_cases import Case, every_plan, random_case, step_of
from random_cases import seeds

from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.solver import Best


def solved(case: Case, gap: float) -> Best:
    """The family searched and proven."""
    best = Best(gap=gap, bounds=[0.0], deadline=math.inf, progress=None, started=0.0)
    solver = InterleavedSolver(0, case.family, case)
    solver.improve(best)
    solver.prove(best)
    return best


@pytest.mark.parametrize("seed", seeds(90))
def test_solver_finds_the_best_plan_and_proves_it(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    steps = [step for *_, step in every_plan(case)]
    best = solved(case, 0.0)
    if not steps:
        assert best.chosen is None
        assert best.bounds == [math.inf]
        return
    least = min(steps)
    assert best.seconds == pytest.approx(least, rel=1e-9)
    assert best.lower_bound == pytest.approx(least, rel=3e-9)
    assert best.lower_bound <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_bound_holds_and_meets_the_gap(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    steps = [step for *_, step in every_plan(case)]
    if not steps:
        return
    best = solved(case, 0.05)
    assert best.lower_bound <= min(steps) * (1 + 1e-9)
    assert best.lower_bound >= best.seconds * 0.95 * (1 - 1e-9)


@pytest.mark.parametrize("seed", seeds(30))
def test_chosen_plan_is_the_one_that_was_replayed(seed: int) -> None:
    case = random_case(seed, most_layers=9)
    best = solved(case, 0.0)
    if best.chosen is None:
        return
    (pipeline,) = best.chosen.pipelines
    shapes = [mesh.shapes for mesh in case.family.meshes]
    row = [shapes.index(tuple(part.shape for part in stage.parts)) for stage in pipeline.stages]
    units = [sum(stage.layers) for stage in pipeline.stages]
    variants = [case.family.recompute.index(stage.recompute) for stage in pipeline.stages]
    assert best.seconds == pytest.approx(step_of(case, row, variants, units), rel=1e-12)
    chunks = case.family.virtual_stages
    assert all(
        list(stage.layers) == [n // chunks + (c < n % chunks) for c in range(chunks)]
        for stage, n in zip(pipeline.stages, units, strict=True)
    )
    assert pipeline.schedule.virtual_stages == chunks


@pytest.mark.parametrize("seed", seeds(10))
def test_same_search_twice_is_the_same(seed: int) -> None:
    case = random_case(seed)
    one, two = solved(case, 0.01), solved(case, 0.01)
    assert (one.seconds, one.chosen, one.bounds) == (two.seconds, two.chosen, two.bounds)


@pytest.mark.parametrize("seed", seeds(40))
def test_families_with_too_many_rows_have_a_plan_and_a_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are not listed, sets of islands bound them all and say where to look."""
    monkeypatch.setattr("hetplan.search.interleaved.solver._MAX_ROWS", 0)
    case = random_case(seed, most_layers=9)
    steps = [step for *_, step in every_plan(case)]
    best = solved(case, 0.0)
    if not steps:
        assert best.chosen is None
        return
    assert best.bounds[0] <= min(steps) * (1 + 1e-9)
    assert best.chosen is not None
    assert best.seconds >= min(steps) * (1 - 1e-9)


def test_climbing_from_row_to_row_finds_good_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetplan.search.interleaved.solver._MAX_ROWS", 0)
    excess = []
    for seed in range(40):
        case = random_case(seed, most_layers=9)
        steps = [step for *_, step in every_plan(case)]
        if steps:
            excess.append(solved(case, 0.0).seconds / min(steps))
    assert len(excess) > 15
    assert sorted(excess)[len(excess) // 2] < 1.001
