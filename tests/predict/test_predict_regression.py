"""Coefficients, errors on left-out groups and conformal intervals, against known truths."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hetplan.predict.regression import (
    MIN_CALIBRATION_ROWS,
    conformal_halfwidth,
    fit_nonnegative,
    left_out_errors,
    log_ratio,
    predict,
    t_quantile,
)

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=60)


def rows_of(count: int, seed: int) -> list[tuple[float, float, float]]:
    source = random.Random(seed)
    return [(1.0, 10 ** source.uniform(9, 14), 10 ** source.uniform(6, 10)) for _ in range(count)]


@REPEATABLE
@given(
    st.tuples(st.floats(1e-5, 1e-3), st.floats(1e-15, 1e-13), st.floats(1e-12, 1e-10)),
    st.integers(0, 1000),
)
def test_exact_measurements_give_the_true_coefficients(
    coefficients: tuple[float, float, float], seed: int
) -> None:
    rows = rows_of(30, seed)
    seconds = [predict(coefficients, row) for row in rows]
    fitted = fit_nonnegative(rows, seconds)
    assert fitted == pytest.approx(coefficients, rel=1e-6)


def test_a_negative_truth_is_fitted_with_zero() -> None:
    rows = rows_of(30, 1)
    seconds = [1e-2 + 1e-14 * row[1] - 1e-13 * row[2] for row in rows]
    assert min(seconds) > 0
    fitted = fit_nonnegative(rows, seconds)
    assert min(fitted) >= 0
    assert fitted[2] == 0
    assert fitted[1] == pytest.approx(1e-14, rel=0.05)


def test_one_slow_row_in_ten_does_not_move_the_fit() -> None:
    rows = rows_of(40, 2)
    true = (1e-4, 5e-15, 2e-12)
    seconds = [predict(true, row) * (2.0 if i % 10 == 0 else 1.0) for i, row in enumerate(rows)]
    assert fit_nonnegative(rows, seconds) == pytest.approx(true, rel=0.01)


def test_left_out_rows_are_judged_by_fits_that_did_not_see_them() -> None:
    rows = [(1.0, x) for x in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    groups = ["a", "a", "b", "b", "c", "c"]
    seconds = [1.0 + row[1] for row in rows[:4]] + [4.0 * (1.0 + row[1]) for row in rows[4:]]
    errors = left_out_errors(rows, seconds, groups)
    # Without c the other rows are exact, so c's rows show the whole factor of 4.
    assert errors[4:] == pytest.approx([math.log(4.0)] * 2, rel=1e-6)
    for left_out in ("a", "b", "c"):
        kept = [i for i, group in enumerate(groups) if group != left_out]
        coefficients = fit_nonnegative([rows[i] for i in kept], [seconds[i] for i in kept])
        for index, group in enumerate(groups):
            if group == left_out:
                expected = log_ratio(seconds[index], predict(coefficients, rows[index]))
                assert errors[index] == pytest.approx(expected)


def test_conformal_needs_nine_errors_and_takes_the_corrected_quantile() -> None:
    assert conformal_halfwidth([0.1] * (MIN_CALIBRATION_ROWS - 1)) is None
    assert conformal_halfwidth([-0.01 * k for k in range(1, 10)]) == pytest.approx(0.09)
    # n = 19: rank ceil(20 * .9) = 18 of 19.
    assert conformal_halfwidth([0.01 * k for k in range(1, 20)]) == pytest.approx(0.18)


def test_conformal_intervals_cover_nine_of_ten_new_rows() -> None:
    source = random.Random(3)
    held = tried = 0
    for _ in range(400):
        errors = [source.gauss(0, 0.1) for _ in range(25)]
        halfwidth = conformal_halfwidth(errors)
        assert halfwidth is not None
        new = [source.gauss(0, 0.1) for _ in range(20)]
        held += sum(abs(error) <= halfwidth for error in new)
        tried += len(new)
    # Expected ceil(26 * .9) / 26 = 92.3 %; 8000 rows in 400 sets have a deviation of about 0.4 %.
    assert 0.90 <= held / tried <= 0.95


def test_a_centre_decides_what_the_rows_leave_open() -> None:
    """Two columns that grow alike: any split fits; the held one keeps the centre's ratio."""
    rows = [(float(size), 2.0 * size) for size in (1, 2, 4, 8)]
    seconds = [6.0 * row[0] for row in rows]
    held = fit_nonnegative(rows, seconds, centre=(1.0, 2.0), weight=1e-3)
    assert predict(held, (1.0, 2.0)) == pytest.approx(6.0, rel=0.01)
    # What is missing is shared by the columns' squared shares of a time: 1 to 16.
    assert held[0] - 1.0 == pytest.approx((held[1] / 2.0 - 1.0) / 4.0, rel=0.1)


def test_a_weak_centre_gives_way_to_what_was_measured() -> None:
    rows = rows_of(40, 3)
    true = (1e-4, 5e-15, 2e-12)
    seconds = [predict(true, row) for row in rows]
    centre = tuple(2.0 * each for each in true)
    held = fit_nonnegative(rows, seconds, centre=centre, weight=1e-4)
    assert max(abs(predict(held, row) / y - 1) for row, y in zip(rows, seconds, strict=True)) < 0.03
    stiff = fit_nonnegative(rows, seconds, centre=centre, weight=1e6)
    assert stiff == pytest.approx(centre, rel=0.01)


@pytest.mark.parametrize("freedom", [1.0, 4.0, 9.0, 16.0, 40.0])
def test_quantiles_of_students_t_are_those_of_scipy(freedom: float) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.95, freedom), rel=1e-12)
