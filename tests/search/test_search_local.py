"""Rows of slots: their price, the local search and the listing of all plans, on invented spaces."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_plans import every_row, step_of
from synthetic_spaces import Wanted, small_space

from hetplan import kernels
from hetplan.search.interleaved.heuristic import legal
from hetplan.search.one_f_one_b.enumerate import Row, cheapest, few_plans, kept_cuts
from hetplan.search.one_f_one_b.heuristic import (
    expand,
    kept_rows,
    neighbour,
    polish,
    search_rows,
    violations,
)
from hetplan.search.one_f_one_b.rows import Slots, _trim, cut, estimate, step_seconds
from hetplan.search.space.row import NEVER
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


def _every_plan(space: StageTable) -> list[tuple[float, Slots]]:
    """(step, slots) of every plan that fits, priced apart."""
    found = []
    for row in every_row(space):
        arrays = (np.array(each) for each in (row.meshes, row.variants, row.units, row.extra))
        found.append((min(NEVER, step_of(space, row)), Slots(*arrays)))
    return found


def _slots(runs: Row) -> Slots:
    return expand(np.array(runs), len(runs))


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
        for step, slots in every:
            priced = step_seconds(space, slots)
            assert priced == pytest.approx(step, rel=1e-9)
            if priced < NEVER:
                assert estimate(space, slots, True) <= priced * (1 + 1e-9)
        best = min((plan[0] for plan in every), default=NEVER)
        listed = few_plans(space, 10**6)
        assert listed is not None
        least = NEVER
        for row in map(_slots, listed):
            for most in (1, 5):
                kept = kept_cuts(most, len(row.mesh))
                count = cheapest(space, row, least, 10**9, kept, spent)
                own = sorted(
                    step
                    for step, slots in every
                    if np.array_equal(slots.mesh, row.mesh)
                    and np.array_equal(slots.extra, row.extra)
                )
                own = [step for step in own if step < least * (1 - 1e-9)][:most]
                assert sorted(kept.steps[:count]) == pytest.approx(own, rel=1e-9)
            least = min([least, *kept.steps[:count]])
        assert least == pytest.approx(best, rel=1e-9)
        found_some += best < NEVER
    assert found_some


def test_both_solvers_have_the_same_rows() -> None:
    """Islands once, room, ends, regions in one piece; a mesh over several regions anywhere."""
    rng, seen = np.random.default_rng(11), set[bool]()
    for case in range(40):
        space = small_space(
            rng, Wanted(islands=3, regions=2, unions=True, pinned_ends=case % 2 == 0)
        )._replace(regions_apart=True, stages=0)
        # A region in two pieces needs three islands of its own meshes; some of several regions.
        meshes = len(space.max_stages)
        space = space._replace(region=rng.integers(-1, 2, meshes))
        for _ in range(50):
            count = int(rng.integers(1, 4))
            runs = tuple(
                (int(mesh), int(rng.integers(1, 4))) for mesh in rng.integers(0, meshes, count)
            )
            arrays = np.array([(*run, 0) for run in runs])
            allowed = violations(space, 100, arrays, count) == 0
            assert legal(space, runs) == allowed
            seen.add(allowed)
    assert seen == {False, True}


def test_where_regions_are_apart_every_neighbour_has_them_so() -> None:
    """From runs that stand by region no move leaves a region in two pieces, and some would have."""
    rng, moved = np.random.default_rng(3), 0
    for _ in range(20):
        space = small_space(rng, Wanted(islands=4, regions=2))._replace(
            regions_apart=True, stages=0
        )
        meshes = len(space.max_stages)
        space = space._replace(region=np.arange(meshes) % 2)
        order = [*range(0, meshes, 2), *range(1, meshes, 2)]
        runs = np.array([(mesh, 1, 0) for mesh in order])
        for a in range(meshes):
            for b in range(meshes):
                found = runs.copy()
                neighbour(space, 100, runs, meshes, (2, a, b, 1), found)
                regions = space.region[found[:, 0]]
                assert np.count_nonzero(np.diff(regions)) == 1
                assert sorted(found[:, 0]) == list(range(meshes))
                moved += regions[0] != space.region[order[0]]
    assert moved


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
        for row in map(_slots, listed):
            spent, kept = np.zeros(3, dtype=np.int64), kept_cuts(3, len(row.mesh))
            count = cheapest(space, row, NEVER, 10**9, kept, spent, lambda: _looked(after, seen))
            answers.append((count, *(each.tolist() for each in (*kept, spent))))
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


def test_much_surplus_is_taken_in_large_pieces_from_the_slowest() -> None:
    """With one microbatch every slot has room for all layers, as many times as there are slots."""
    space = small_space(np.random.default_rng(7), Wanted(islands=2, layers=400))
    slots = 200
    space = space._replace(num_microbatches=1)
    row = expand(np.array([[0, slots // 2, 0], [1, slots // 2, 0]]), 2)
    most = np.full((slots, space.forward.shape[0]), 400)
    row.units[:], row.variant[:] = 400, 0
    kernels._counter.left = 1_000_000  # one unit at a time takes 16 million loops
    assert _trim.interpreted(space, row, most, 400 * (slots - 1))
    first, second = row.units[: slots // 2], row.units[slots // 2 :]
    assert row.units.sum() == 400
    slow, quick = sorted((first, second), key=lambda each: each.sum())
    assert slow.max() <= 1 + 400 // slots
    assert slow.sum() < quick.sum()


def test_no_row_is_found_where_every_one_takes_for_ever() -> None:
    space = small_space(np.random.default_rng(3), Wanted(islands=2, tight=False))
    slow = space._replace(after=np.full_like(space.after, 1e300))
    kept = kept_rows(6, 4)
    search_rows(slow, most_stages(slow), 0, 12, 10**6, kept)
    assert min(kept.scores) >= NEVER
    assert not kept.counts.any()


def _found(space: StageTable) -> float:
    kept, best = kept_rows(6, 4), NEVER
    search_rows(space, most_stages(space), 0, 12, 10**6, kept)
    for k in range(6):
        if kept.scores[k] >= 1e24:
            continue
        row = expand(kept.runs[k], int(kept.counts[k]))
        for slack in (0.0, 0.01, 0.03):
            if cut(space, row, slack, NEVER):
                spent = np.zeros(2, dtype=np.int64)
                step = polish(space, row, 10**8, spent)
                assert step == step_seconds(space, row)
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
