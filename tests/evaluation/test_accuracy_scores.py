"""The judge's figures, against other ways to compute them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, spearmanr

from evaluation.accuracy.scores import Judged, binomial_band, errors_of, rank_correlation


def judged(predicted: float, measured: float, spread: float = 1.1, **more: bool) -> Judged:
    return Judged(
        name=f"{predicted}",
        predicted=predicted,
        measured=measured,
        lower=predicted / spread,
        upper=predicted * spread,
        **more,
    )


def test_figures_of_three_rows_by_hand() -> None:
    errors = errors_of([judged(1.1, 1.0, 1.2), judged(1.9, 2.0, 1.2), judged(2.0, 4.0, 1.2)])
    assert errors is not None
    assert errors.mape == pytest.approx((0.1 + 0.05 + 0.5) / 3)
    assert errors.median == pytest.approx(0.1)
    assert errors.bias == pytest.approx((0.1 - 0.05 - 0.5) / 3)
    assert errors.worst == pytest.approx(-0.5)
    assert errors.worst_row == "2.0"
    assert errors.spearman == pytest.approx(1.0)
    assert (errors.inside, errors.rows, errors.coverage) == (2, 3, pytest.approx(2 / 3))
    assert errors.median_width == pytest.approx(1.2 - 1 / 1.2)


def test_the_interval_score_punishes_width_and_misses() -> None:
    inside = judged(10.0, 10.0, 1.1)
    assert inside.score == pytest.approx((11.0 - 10 / 1.1) / 10.0)
    # 2 / 0.1 for every unit that is missed (Gneiting and Raftery 2007, eq. 43).
    above = judged(10.0, 12.0, 1.1)
    assert above.score == pytest.approx((11.0 - 10 / 1.1 + 20 * 1.0) / 12.0)
    below = judged(10.0, 5.0, 1.25)
    assert below.score == pytest.approx((12.5 - 8.0 + 20 * 3.0) / 5.0)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 57, 73, 400, 3000])
def test_the_band_is_the_binomial_one(rows: int) -> None:
    least, most = binomial_band(rows)
    assert least == binom.ppf(0.025, rows, 0.9)
    assert most == binom.ppf(0.975, rows, 0.9)
    assert 0 <= least <= most <= rows


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    left, right = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = rank_correlation(left, right)
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(left, right).statistic)
