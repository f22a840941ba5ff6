"""What a target costs against a trainer that can run more, in words."""

from __future__ import annotations

import pytest

from hetplan.reports.plans import restriction_line
from hetplan.search.result import Restriction


@pytest.mark.parametrize(
    ("step", "lower", "words"),
    [
        (0.9, 0.8, "native would be 10.0% faster (at most 20.0%)"),
        (1.0, 0.95, "native has no faster plan as far as was searched (at most 5.0% faster)"),
        (1.2, 1.1, "native cannot be faster"),
        (0.9, 0.0, "native would be 10.0% faster (no bound was found)"),
        (1.1, 0.0, "native has no faster plan as far as was searched (no bound was found)"),
    ],
)
def test_the_restriction_says_how_much_and_at_most(step: float, lower: float, words: str) -> None:
    found = Restriction(target="native", step_seconds=step, lower_bound_seconds=lower)
    assert words in restriction_line(found, 1.0)
