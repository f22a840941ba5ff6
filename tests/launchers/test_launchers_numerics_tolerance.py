"""The tolerance of a check holds for arithmetic that rounds as it should, and for no other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.job.spec import Precision
from hetplan.launchers.numerics_tolerance import (
    CHECKED,
    UNIT_ROUNDOFFS,
    Roundings,
    allowed,
    backward_roundings,
    forward_roundings,
    rotary_error,
    token_sum,
)
from hetplan.model.operators import Operator, OperatorClass

FORMATS = {Precision.FLOAT32: np.float32, Precision.FLOAT16: np.float16}


def sums(count: int, length: int, seed: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Running sums of products of this format, one rounding per operation, and the exact ones."""
    draw = np.random.default_rng(seed)
    x, y = (draw.standard_normal((length, count)).astype(dtype) for _ in range(2))
    total = np.zeros(count, dtype=dtype)
    for row in range(length):
        total = (total + (x[row] * y[row]).astype(dtype)).astype(dtype)
    return total.astype(np.float64), (x.astype(np.float64) * y.astype(np.float64)).sum(axis=0)


def share(found: np.ndarray, exact: np.ndarray, precision: Precision, roundings: Roundings):
    rms = math.sqrt(float(np.square(exact).mean()))
    bound = allowed(
        roundings,
        precision,
        elements=exact.size,
        peak=float(np.abs(exact).max()) / rms,
        rms=rms,
    )
    difference = np.abs(found - exact) / rms
    return math.sqrt(float(np.square(difference).mean())) / bound.rms, difference.max() / (
        bound.largest
    )


@settings(max_examples=25)
@given(length=st.integers(2, 400), seed=st.integers(0, 2**32))
def test_sums_in_float32_stay_within_the_bound(length: int, seed: int) -> None:
    found, exact = sums(200, length, seed, np.float32)
    assert max(share(found, exact, Precision.FLOAT32, Roundings(inner=1.0, length=length))) < 1


@settings(max_examples=25)
@given(length=st.integers(2, 400), seed=st.integers(0, 2**32))
def test_one_rounding_to_the_format_stays_within_the_bound(length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    exact = draw.standard_normal(length)
    for precision, dtype in FORMATS.items():
        found = exact.astype(dtype).astype(np.float64)
        assert max(share(found, exact, precision, Roundings(stored=1.0))) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_sums_kept_in_half_precision_are_beyond_the_bound_of_sums_in_float32(seed: int) -> None:
    found, exact = sums(200, 1024, seed, np.float16)
    rms, _ = share(found, exact, Precision.FLOAT16, Roundings(stored=1.0, length=1024))
    assert rms > 1


@pytest.mark.parametrize("seed", range(5))
def test_a_sum_over_tokens_may_be_kept_in_the_format(seed: int) -> None:
    found, exact = sums(200, 512, seed, np.float16)
    # The products are rounded as well.
    roundings = token_sum(512) + Roundings(stored=1.0)
    assert max(share(found, exact, Precision.FLOAT16, roundings)) < 1


def test_unit_roundoffs_are_half_the_distance_above_one() -> None:
    for precision, dtype in FORMATS.items():
        assert np.finfo(dtype).eps / 2 == UNIT_ROUNDOFFS[precision]
    # bfloat16 has float32's exponents and 16 bits fewer.
    assert UNIT_ROUNDOFFS[Precision.BFLOAT16] == UNIT_ROUNDOFFS[Precision.FLOAT32] * 2**16


@pytest.mark.parametrize("kind", sorted(CHECKED))
def test_longer_operators_are_allowed_no_less(kind: OperatorClass) -> None:
    short = Operator(operator=kind, what="it", batch=2, m=64, n=32, k=16)
    longer = Operator(operator=kind, what="it", batch=2, m=128, n=64, k=32)
    for of in (forward_roundings, backward_roundings):
        small, large = (
            allowed(of(op), Precision.BFLOAT16, elements=1000, peak=4.0, rms=1.0)
            for op in (short, longer)
        )
        assert 0 < small.rms <= large.rms
        assert small.rms <= small.largest <= large.largest


@settings(max_examples=20)
@given(length=st.integers(8, 4096), seed=st.integers(0, 2**32))
def test_tables_of_angles_in_float32_are_as_wrong_as_is_said(length: int, seed: int) -> None:
    half, base = 64, 10000.0
    # Powers wrong by up to 2 units in the last place, as an accelerator's may be.
    wrong = 1.0 + np.random.default_rng(seed).uniform(-4, 4, half) * 2.0**-24
    places = np.arange(length, dtype=np.float64)
    exact = np.outer(places, base ** -(np.arange(half) / half))
    found = (places.astype(np.float32)[:, None] * (exact[1] * wrong).astype(np.float32)).astype(
        np.float64
    )
    rms = math.sqrt(float(np.square(np.sin(found) - np.sin(exact)).mean()))
    assert rms <= rotary_error(length, base).inner * 2.0**-24
