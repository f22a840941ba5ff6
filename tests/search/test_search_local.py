"""Rows of slots: their price, the local search and the listing of all plans, on invented spaces."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_plans import every_row, step_of
from synthetic_spaces import Wanted, small_space

from hetplan.cost.arrays import Ints
from hetplan.search.one_f_one_b.cut import cut, estimate
from hetplan.search.one_f_one_b.enumerate import cheapest, few_plans, row_arrays
from hetplan.search.one_f_one_b.heuristic import expand, polish, search_rows
from hetplan.search.one_f_one_b.replay import NEVER, step_seconds
from hetplan.search.space.stage_table import StageTable, most_stages

_CASES = [
    Wanted(),
    Wanted(variants=2, tight=True),
    Wanted(most_extra_depth=2, rendezvous=False),
    Wanted(meshes_per_island=2, unions=True),
    Wanted(norm=True, leaving=True, tied=True),
    Wanted(pinned_stages=2, islands=2),
    Wanted(pinned_ends=True, islands=2),
    Wanted(regions=2, long_links=True, islands=3),
]


def _every_plan(space: StageTable) -> list[tuple[float, Ints, Ints, Ints, Ints]]:
    """(step, mesh, variant, units, extra) of every plan that fits, priced apart."""
    found = []
    for row in every_row(space):
        arrays = (np.array(each) for each in (row.meshes, row.variants, row.units, row.extra))
        found.append((min(NEVER, step_of(space, row)), *arrays))
    return found


@pytest.mark.parametrize(
    "case", [0, *(pytest.param(case, marks=pytest.mark.slow) for case in range(1, len(_CASES)))]
)
def test_listing_finds_what_plain_enumeration_finds(case: int) -> None:
    rng = np.random.default_rng(100 + case)
    found_some = 0
    for _ in range(3 if case else 1):
        space = small_space(rng, _CASES[case])
        every = _every_plan(space)
        spent = np.zeros(3, dtype=np.int64)
        for step, mesh, variant, units, extra in every:
            priced = step_seconds(space, mesh, variant, units, extra)
            assert priced == pytest.approx(step, rel=1e-9)
            if priced < NEVER:
                assert estimate(space, mesh, variant, units, extra, True) <= priced * (1 + 1e-9)
        best = min((plan[0] for plan in every), default=NEVER)
        listed = few_plans(space, 10**6)
        assert listed is not None
        least = NEVER
        for row in listed:
            mesh, extra = row_arrays(row)
            for kept in (1, 5):
                steps = np.zeros(kept)
                slots = [np.zeros((kept, len(mesh)), dtype=np.int64) for _ in range(2)]
                count = cheapest(space, mesh, extra, least, 10**9, steps, *slots, spent)
                own = sorted(
                    plan[0]
                    for plan in every
                    if np.array_equal(plan[1], mesh) and np.array_equal(plan[4], extra)
                )
                own = [step for step in own if step < least * (1 - 1e-9)][:kept]
                assert sorted(steps[:count]) == pytest.approx(own, rel=1e-9)
            least = min([least, *steps[:count]])
        assert least == pytest.approx(best, rel=1e-9)
        found_some += best < NEVER
    assert found_some


class _EnoughError(Exception):
    """Raised by a check."""


def _looked(after: int, seen: list[int]) -> None:
    seen.append(1)
    if len(seen) > after:
        raise _EnoughError


@pytest.mark.parametrize("slice_", [1, 7, 100])
def test_a_listing_in_slices_finds_the_same_and_can_be_ended_at_any(
    slice_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = small_space(np.random.default_rng(5), Wanted(islands=2, layers=8, variants=2))
    listed = few_plans(space, 10**6)
    assert listed is not None

    def found(seen: list[int], after: int) -> list[object]:
        answers: list[object] = []
        for row in listed:
            mesh, extra = row_arrays(row)
            spent, steps = np.zeros(3, dtype=np.int64), np.zeros(3)
            slots = [np.zeros((3, len(mesh)), dtype=np.int64) for _ in range(2)]
            arrays = (steps, *slots, spent)
            count = cheapest(
                *(space, mesh, extra, NEVER, 10**9, *arrays), lambda: _looked(after, seen)
            )
            answers.append((count, *(each.tolist() for each in arrays)))
        return answers

    whole = found([], 0)
    monkeypatch.setattr("hetplan.search.one_f_one_b.enumerate._SLICE", slice_)
    seen: list[int] = []
    assert found(seen, 10**9) == whole
    assert len(seen) > 10
    for after in (0, len(seen) // 2, len(seen) - 1):
        ended: list[int] = []
        with pytest.raises(_EnoughError):
            found(ended, after)
        assert len(ended) == after + 1


def test_no_row_is_found_where_every_one_takes_for_ever() -> None:
    space = small_space(np.random.default_rng(3), Wanted(islands=2, tight=False))
    slow = space._replace(after=np.full_like(space.after, 1e300))
    keep, counts = np.zeros((6, 4, 3), dtype=np.int64), np.zeros(6, dtype=np.int64)
    scores = np.full(6, np.inf)
    search_rows(slow, most_stages(slow), 0, 12, 10**6, keep, counts, scores)
    assert min(scores) >= NEVER
    assert not counts.any()


def _found(space: StageTable) -> float:
    keep, counts = np.zeros((6, 4, 3), dtype=np.int64), np.zeros(6, dtype=np.int64)
    scores, best = np.full(6, np.inf), NEVER
    search_rows(space, most_stages(space), 0, 12, 10**6, keep, counts, scores)
    for k in range(6):
        if scores[k] >= 1e24:
            continue
        mesh, extra = expand(keep[k], int(counts[k]))
        for slack in (0.0, 0.01, 0.03):
            variant, units = np.zeros_like(mesh), np.zeros_like(mesh)
            if cut(space, mesh, extra, slack, NEVER, variant, units):
                spent = np.zeros(2, dtype=np.int64)
                step = polish(space, mesh, variant, units, extra, 1e-9, 10**8, spent)
                assert step == step_seconds(space, mesh, variant, units, extra)
                best = min(best, step)
    return best


@pytest.mark.slow
def test_local_search_is_nearly_always_best_on_small_spaces() -> None:
    rng = np.random.default_rng(7)
    ratios = []
    for case in range(16):
        space = small_space(rng, _CASES[case % len(_CASES)])
        best = min((plan[0] for plan in _every_plan(space)), default=NEVER)
        found = _found(space)
        assert found >= best * (1 - 1e-9)
        assert (found < NEVER) == (best < NEVER)
        if best < NEVER:
            ratios.append(found / best)
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.8
    assert max(ratios) < 1.15
