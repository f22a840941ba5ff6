"""Sums level by level: every rank gets the same bits of the sum, and every byte is counted."""

from __future__ import annotations

import json

import pytest
from forked_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from levels_ranks import CASES, FLOATS, RANKS, LevelCase, main

from hetplan.runtime.communicator.levels import Move, phases

SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Ranks, and the units that they lie in; none, one or two levels of them."""
    ranks = draw(st.integers(1, 8))
    units = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    outer = draw(st.lists(st.integers(0, 1), min_size=4, max_size=4))
    levels = [units, [outer[unit] for unit in units]]
    return ranks, levels[: draw(st.integers(0, 2))]


def run(ranks: int, levels: list[list[int]], count: int) -> tuple[list[list[int]], list[Move]]:
    """Who has which contributions to each element at the end, as bits, and all moves."""
    held = [[1 << rank] * count for rank in range(ranks)]
    made = []
    for phase in phases(levels, ranks, count):
        before = [list(row) for row in held]
        for move in phase:
            made.append(move)
            for at in range(move.start, move.stop):
                kept = held[move.target][at] if move.adds else 0
                # A contribution that came twice would be counted twice.
                assert not kept & before[move.source][at]
                held[move.target][at] = kept | before[move.source][at]
    return held, made


@SETTINGS
@given(placed=placements(), count=st.integers(0, 40))
def test_every_rank_ends_with_every_contribution_once_and_long_links_carry_the_least(
    placed: tuple[int, list[list[int]]], count: int
) -> None:
    ranks, levels = placed
    held, made = run(ranks, levels, count)
    assert held == [[(1 << ranks) - 1] * count] * ranks
    assert all(move.start < move.stop and move.source != move.target for move in made)
    for level in (range(ranks), *levels):
        crossing = sum(
            move.stop - move.start for move in made if level[move.source] != level[move.target]
        )
        assert crossing == 2 * (len(set(level)) - 1) * count


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list]]:
    """By rank and case, what it had after each of two sums."""
    folder = tmp_path_factory.mktemp("levels")
    run_ranks(main, folder, count=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_ranks_have_the_same_sum(case: LevelCase, summed: list[dict[str, list]]) -> None:
    found = [summed[rank][case.name] for rank in case.ranks]
    for step in range(2):
        assert len({each[step]["bits"] for each in found}) == 1
        # Six terms below 1 in any order: their sums differ by a few units in the last place.
        assert found[0][step]["worst"] < (2e-6 if case.dtype == FLOATS else 0.06)
        assert found[0][step]["largest"] > 0
