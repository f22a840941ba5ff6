"""Several pipelines: their bound and the list of all of their plans, against trying every plan."""

from __future__ import annotations

import pytest
from oracle_several import jobs, lines, spread, wrong
from random_cases import seeds

_SAMPLE = [*jobs(18)]


@pytest.mark.parametrize("at", seeds(len(_SAMPLE)))
def test_bound_and_listing_agree_with_every_plan(at: int) -> None:
    found = spread(_SAMPLE[at])
    assert not wrong(found), lines([found])
