"""Several pipelines: their bound and the list of all of their plans, against trying every plan."""

from __future__ import annotations

import math

import pytest
from oracle_several import Spread, jobs, lines, spread, wrong
from random_cases import seeds

_SAMPLE = [*jobs(18)]


@pytest.mark.parametrize("at", seeds(len(_SAMPLE)))
def test_bound_and_listing_agree_with_every_plan(at: int) -> None:
    found = spread(_SAMPLE[at])
    assert not wrong(found), lines([found])


def test_some_of_the_sample_have_plans() -> None:
    assert len(_SAMPLE) >= 20
    assert {one.target for one in _SAMPLE} == {"any", "native"}


def test_a_bound_above_the_optimum_is_wrong() -> None:
    assert wrong(Spread(0, "native", 1.0, 1.1, 1.0))
    assert wrong(Spread(0, "native", 1.0, 0.9, 0.95))
    assert wrong(Spread(0, "native", math.inf, 0.9, 0.95))
    assert not wrong(Spread(0, "native", 1.0, 0.9, 1.0))
