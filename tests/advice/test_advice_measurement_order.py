"""What to measure next: laws of the interval, closed forms of the regret, and brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.advice.measurement_order import (
    Leaves,
    Measurement,
    Part,
    PlanParts,
    near_best,
    order,
    standing,
)

NORMAL = NormalDist()
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


def part(asked: str, seconds: float, halfwidth: float, source: str = "") -> Part:
    return Part(asked=asked, source=(source or asked, ""), seconds=seconds, log_halfwidth=halfwidth)


def plan(name: str, *parts: Part, fixed: float = 0.0) -> PlanParts:
    step = math.fsum(each.seconds for each in parts) + fixed
    return PlanParts(name=name, step_seconds=step, parts=parts)


def measurement(name: str, *asked: str, seconds: float = 1.0, least: float = 0.02) -> Measurement:
    return Measurement(
        name=name,
        seconds=seconds,
        leaves=tuple(Leaves(asked=each, least_log_halfwidth=least) for each in asked),
    )


ASKED = ("a", "b", "c", "d", "e")
PARTS = st.lists(
    st.tuples(
        st.sampled_from(ASKED),
        st.floats(0.01, 10.0),
        st.floats(0.0, 0.8),
        st.sampled_from(("one", "two", "three")),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda each: each[0],
)
PLANS = st.lists(PARTS, min_size=1, max_size=3).map(
    lambda lists: tuple(
        plan(str(number), *(part(*each) for each in parts)) for number, parts in enumerate(lists)
    )
)


@given(PLANS, st.sampled_from(ASKED))
@EXAMPLES
def test_halving_a_half_width_never_widens_an_interval(plans, asked) -> None:
    for each in plans:
        narrower = replace(
            each,
            parts=tuple(
                replace(p, log_halfwidth=p.log_halfwidth / 2) if p.asked == asked else p
                for p in each.parts
            ),
        )
        assert standing([narrower]).log_halfwidth <= standing([each]).log_halfwidth + 1e-12


@given(PLANS, st.floats(1.0, 6.0))
@EXAMPLES
def test_orders_keep_to_the_budget_and_to_what_is_asked(plans, budget) -> None:
    asked = {p.asked for each in plans for p in each.parts}
    offered = [measurement(each, each, seconds=1.5) for each in ASKED]
    offered.append(measurement("nobody's", "nothing that is asked for", seconds=0.001))
    chosen = order(plans, offered, budget_seconds=budget)
    names = [each.measurement.name for each in chosen]
    assert len(set(names)) == len(names)
    assert set(names) <= asked
    assert sum(each.measurement.seconds for each in chosen) <= budget
    widths = [standing(plans).log_halfwidth, *(each.log_halfwidth for each in chosen)]
    assert all(after <= before + 1e-12 for before, after in pairwise(widths))
    assert all(each.gain > 0 for each in chosen)


def test_a_plan_that_is_told_apart_asks_for_nothing() -> None:
    best = plan("best", part("a", 1.0, 0.1))
    far = plan("far", part("z", 3.0, 0.1))
    offered = [measurement("a", "a"), measurement("z", "z", seconds=0.01)]
    near = near_best([far, best], most=5)
    assert [each.name for each in near] == ["best"]
    assert [each.measurement.name for each in order(near, offered)] == ["a"]


def regret_of_two(slower: float, halfwidth: float) -> float:
    """E max(0, d) of a normal d = log step_b - log step_p: closed form."""
    sigma = halfwidth / 1.6448536
    away = slower / sigma
    return sigma * NORMAL.pdf(away) - slower * NORMAL.cdf(-away)


@pytest.mark.parametrize(("slower", "halfwidth"), [(0.02, 0.1), (0.1, 0.3), (0.3, 0.6)])
def test_the_regret_is_that_of_two_normal_plans(slower: float, halfwidth: float) -> None:
    plans = [plan("best", part("a", 1.0, halfwidth)), plan("rival", fixed=math.exp(slower))]
    found = standing(plans)
    assert found.regret == pytest.approx(regret_of_two(slower, halfwidth), rel=0.02)
    chance = NORMAL.cdf(-slower * 1.6448536 / halfwidth)
    assert found.chances["rival"] == pytest.approx(chance, abs=0.005)
    # A measurement leaves what stays unknown.
    after = halfwidth / 2
    (choice,) = order(plans, [measurement("a", "a", least=after)])
    known = math.sqrt(halfwidth**2 - after**2)
    left = regret_of_two(slower, halfwidth) - regret_of_two(slower, known)
    assert choice.regret == pytest.approx(left, rel=0.05)
    assert choice.log_halfwidth == pytest.approx(after)


@given(PLANS, st.lists(st.floats(0.2, 3.0), min_size=5, max_size=5), st.floats(1.0, 6.0))
@EXAMPLES
def test_greedy_is_at_least_half_of_the_best_choice(plans, seconds, budget) -> None:
    offered = [
        measurement(name, name, seconds=each) for name, each in zip(ASKED, seconds, strict=True)
    ]
    chosen = order(plans, offered, budget_seconds=budget)
    gained = sum(each.gain for each in chosen)
    best = 0.0
    for size in range(1, len(offered) + 1):
        for subset in combinations(offered, size):
            if sum(each.seconds for each in subset) <= budget:
                together = Measurement(
                    name="all",
                    seconds=1.0,
                    leaves=tuple(leaves for each in subset for leaves in each.leaves),
                )
                best = max(best, sum(each.gain for each in order(plans, [together])))
    assert gained >= 0.5 * best - 1e-12
