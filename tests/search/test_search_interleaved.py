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
    # The plan is the one that was replayed.
    assert best.chosen is not None
    (pipeline,) = best.chosen.pipelines
    shapes = [mesh.shapes for mesh in case.family.meshes]
    row = [shapes.index(tuple(part.shape for part in stage.parts)) for stage in pipeline.stages]
    units = [sum(stage.layers) for stage in pipeline.stages]
    variants = [case.family.recompute.index(stage.recompute) for stage in pipeline.stages]
    assert best.seconds == pytest.approx(step_of(case, row, variants, units), rel=1e-12)
    chunks = case.family.virtual_stages
    assert pipeline.schedule.virtual_stages == chunks
    for stage, n in zip(pipeline.stages, units, strict=True):
        assert list(stage.layers) == [n // chunks + (c < n % chunks) for c in range(chunks)]


def test_families_with_too_many_rows_have_a_good_plan_and_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rows are not listed, sets of islands bound them all and say where to look."""
    monkeypatch.setattr("hetplan.search.interleaved.solver._MAX_ROWS", 0)
    excess = []
    for seed in range(40):
        case = random_case(seed, most_layers=9)
        steps = [step for *_, step in every_plan(case)]
        best = solved(case, 0.0)
        assert (best.chosen is None) == (not steps)
        if steps:
            assert best.bounds[0] <= min(steps) * (1 + 1e-9)
            excess.append(best.seconds / min(steps))
    assert len(excess) > 15
    assert min(excess) >= 1 - 1e-9
    assert sorted(excess)[len(excess) // 2] < 1.001
