"""Walks over X: whatever their strides and targets, no plan is below the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_plans import every_row, step_of
from synthetic_spaces import Wanted, small_space

from hetplan.search.one_f_one_b import bound
from hetplan.search.one_f_one_b.bound import Met, Walk, together
from hetplan.search.one_f_one_b.order_program import OrderProgram
from hetplan.search.one_f_one_b.order_relaxation import NONE

UNLIKE = Wanted(islands=3, meshes_per_island=2, layers=4)

STRIDES = [
    pytest.param(2e6, 3e7, marks=pytest.mark.slow),
    pytest.param(0.0, 0.0, marks=pytest.mark.slow),
    pytest.param(0.0, 1e18, marks=pytest.mark.slow),
    (1e18, 1e18),
]
"""Operations that make strides wider, and narrower: as they come, ever narrower, equal, wider."""


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(("small", "large"), STRIDES)
def test_strides_do_not_change_what_is_proven(
    small: float, large: float, rendezvous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound, "_TRIED", 0.0)
    monkeypatch.setattr(bound, "_SMALL", small)
    monkeypatch.setattr(bound, "_LARGE", large)
    strides, proven = 0, 0
    for seed in range(4):
        wanted = replace(UNLIKE, rendezvous=rendezvous)
        space = small_space(np.random.default_rng(seed), wanted)
        rows = list(every_row(space))
        best = min((step_of(space, row) for row in rows), default=NONE)
        for part in (0.9, 1.0, 1.3, 2.0):
            target = part * best if best < NONE else 10.0
            monkeypatch.setattr(bound, "_FAR", NONE)
            one = Walk(OrderProgram(space), target).run()
            monkeypatch.setattr(bound, "_FAR", 1.0)
            each = Walk(OrderProgram(space), target)
            proof = each.run()
            strides += each._stride < NONE
            assert proof.finished
            assert proof.bound_seconds <= best * (1 + 1e-9)
            assert proof.bound_seconds == pytest.approx(one.bound_seconds, rel=3e-4)
            proven += proof.proven
    assert strides > 3
    assert proven > 3


def test_a_target_that_falls_on_the_way_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a walk has passed stays passed; its bound is for the last target."""
    monkeypatch.setattr(bound, "_TRIED", 0.0)
    monkeypatch.setattr(bound, "_FAR", 1.0)
    fallen = 0
    for seed in range(10):
        rng = np.random.default_rng(100 + seed)
        space = small_space(
            rng, Wanted(islands=3, meshes_per_island=2, layers=5, rendezvous=seed % 2 == 0)
        )
        steps = [step_of(space, row) for row in every_row(space)]
        best = min(steps, default=NONE)
        if best >= NONE:
            continue
        each = Walk(OrderProgram(space), 1.5 * best)

        def on_met(_: Met, each: Walk = each, rng: np.random.Generator = rng) -> float:
            return float(each.target * rng.uniform(0.9, 1.0))

        each.on_met = on_met
        proof = each.run()
        fallen += each.target < 1.5 * best
        assert proof.bound_seconds <= max(best, each.target) * (1 + 1e-9)
        if proof.proven:
            assert all(step >= each.target * (1 - 1e-9) for step in steps)
        else:
            assert proof.bound_seconds <= best * (1 + 1e-9)
    assert fallen > 3


def test_spaces_within_a_step_are_a_part_of_the_whole() -> None:
    space = small_space(
        np.random.default_rng(3), Wanted(islands=3, meshes_per_island=2, layers=5, rendezvous=True)
    )
    best = min(step_of(space, row) for row in every_row(space))
    part, meshes = together(space, best * 1.01)
    assert len(part.parts[0].table.max_stages) == len(meshes) <= len(space.max_stages)
    proof = Walk(part, best * 1.01).run()
    assert proof.bound_seconds <= best * (1 + 1e-9)
