"""The judge's figures, against other ways to compute them."""

from __future__ import annotations

import math

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from evaluation.accuracy.scores import errors_of, judged, rank_correlation


def frame(*rows: tuple[float, float, float]) -> pandas.DataFrame:
    """(predicted, measured, upper end of the interval over predicted)."""
    return pandas.DataFrame(
        {
            "name": f"{predicted}",
            "predicted_seconds": predicted,
            "measured_seconds": measured,
            "log_halfwidth": math.log(spread),
        }
        for predicted, measured, spread in rows
    )


def test_figures_of_three_rows_by_hand() -> None:
    errors = errors_of(frame((1.1, 1.0, 1.2), (1.9, 2.0, 1.2), (2.0, 4.0, 1.2)))
    assert errors["mape"] == pytest.approx((0.1 + 0.05 + 0.5) / 3)
    assert errors["median"] == pytest.approx(0.1)
    assert errors["bias"] == pytest.approx((0.1 - 0.05 - 0.5) / 3)
    assert errors["worst"] == pytest.approx(-0.5)
    assert errors["worst_row"] == "2.0"
    assert errors["spearman"] == pytest.approx(1.0)
    assert (errors["inside"], errors["rows"]) == (2, 3)
    assert errors["median_width"] == pytest.approx(1.2 - 1 / 1.2)
    # With probability 0.9 each, three of three are inside in 73 %, one of three in 3 %.
    assert (errors["least_inside"], errors["most_inside"]) == (1, 3)


def test_the_interval_score_punishes_width_and_misses() -> None:
    inside, above, below = judged(frame((10.0, 10.0, 1.1), (10.0, 12.0, 1.1), (10.0, 5.0, 1.25)))[
        "score"
    ]
    assert inside == pytest.approx((11.0 - 10 / 1.1) / 10.0)
    # 2 / 0.1 for every unit that is missed (Gneiting and Raftery 2007, eq. 43).
    assert above == pytest.approx((11.0 - 10 / 1.1 + 20 * 1.0) / 12.0)
    assert below == pytest.approx((12.5 - 8.0 + 20 * 3.0) / 5.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    left, right = (pandas.Series(side, dtype=float) for side in zip(*pairs, strict=True))
    found = rank_correlation(left, right)
    if left.nunique() == 1 or right.nunique() == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(left, right).statistic)
