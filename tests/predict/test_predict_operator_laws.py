"""Operator laws: known truths come back, noise earns no columns, wrong rows are refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from predict_operators import (
    BYTES_PER_SECOND,
    FLOOR,
    FLOPS_PER_SECOND,
    LAUNCH,
    operator_grid,
    operator_sample,
    true_seconds,
)

from hetplan.errors import InputError
from hetplan.model.operators import OperatorClass
from hetplan.predict.operator.laws import fit_operator_laws, sustained_rate
from hetplan.predict.regression import COVERAGE
from hetplan.profiling.bursts import BY_OTHERS_LOG_HALFWIDTH


def by_key(samples):
    return {(law.operator, law.phase): law for law in fit_operator_laws(samples)}


def terms(law):
    return {term.column: term.coefficient for term in law.terms}


def test_the_truth_of_every_class_comes_back() -> None:
    laws = by_key(operator_grid())
    assert len(laws) == 2 + 2 * 7
    for (operator, _), law in laws.items():
        found = terms(law)
        assert law.floor_seconds in (0.0, pytest.approx(FLOOR, rel=0.2)), operator
        if operator in ("norm", "addition", "softmax", "activation", "attention_dropout"):
            assert found["bytes"] == pytest.approx(1 / BYTES_PER_SECOND, rel=0.02), operator
            assert found["launches"] == pytest.approx(LAUNCH, rel=0.1), operator
        elif operator == "matrix_product":
            assert found["flops"] == pytest.approx(1 / FLOPS_PER_SECOND, rel=0.05)
        assert law.validation.mean < 0.02, operator


def test_a_floor_is_the_hosts_and_changes_no_rate() -> None:
    small, large = (by_key(operator_grid(floor=floor)) for floor in (FLOOR, 100e-6))
    for key in (("norm", "forward"), ("matrix_product", "forward")):
        assert large[key].floor_seconds == pytest.approx(100e-6, rel=0.2)
        assert large[key].floor_rows > 0
        for column, value in terms(small[key]).items():
            if column != "launches":
                assert terms(large[key])[column] == pytest.approx(value, rel=0.1)


def test_half_widths_hold_new_rows() -> None:
    """Fitted on one draw of noise, judged on another: nine tenths of the rows are inside."""
    laws = by_key(operator_grid(noise=0.2, seed=1))
    inside = total = 0
    for sample in operator_grid(noise=0.2, seed=2):
        law = laws[sample.operator, sample.phase]
        if sample.median_seconds <= 1.3 * FLOOR:
            continue
        truth = true_seconds(sample)
        total += 1
        inside += abs(math.log(sample.median_seconds / truth)) <= law.log_halfwidth
    assert inside / total >= COVERAGE - 0.08


def test_a_residual_is_learned_only_where_sizes_left_out_ask_for_it() -> None:
    grid = operator_grid(noise=0.02, seed=3)
    plain = by_key([sample for sample in grid if sample.operator == "matrix_product"])
    assert plain["matrix_product", "forward"].residual is None
    # A library that picks a bad kernel for wide results, at every size.
    bumpy = []
    rng = random.Random(1)
    for _ in range(160):
        m, n, k = (2 ** rng.uniform(9, 13) for _ in range(3))
        sample = operator_sample(OperatorClass.MATRIX_PRODUCT, m=int(m), n=int(n), k=int(k))
        slow = 2.0 if n > 2048 else 1.0
        bumpy.append(replace(sample, median_seconds=slow * true_seconds(sample, floor=0.0)))
    law = by_key(bumpy)["matrix_product", "forward"]
    assert law.residual is not None
    assert law.residual.error_after < law.residual.error_before


def test_how_far_runs_scatter_does_not_widen_a_law_and_the_error_of_a_figure_does() -> None:
    grid = [each for each in operator_grid() if each.operator == "matrix_product"]
    off = math.exp(BY_OTHERS_LOG_HALFWIDTH)

    def law(repeats: int):
        rows = [
            replace(
                each,
                p10_seconds=each.median_seconds / off,
                p90_seconds=each.median_seconds * off,
                repeats=repeats,
            )
            for each in grid
        ]
        return by_key(rows)["matrix_product", "forward"]

    plain = by_key(grid)["matrix_product", "forward"]
    assert law(20).log_halfwidth == plain.log_halfwidth
    assert law(20).shapes == plain.shapes
    # p10 to p90 is .78 of p5 to p95.
    wide = BY_OTHERS_LOG_HALFWIDTH / 0.779
    assert law(1).log_halfwidth == pytest.approx(math.hypot(plain.log_halfwidth, wide), rel=1e-3)
    assert law(1).terms == plain.terms
    assert not law(1).shapes


def test_large_products_set_the_rate_that_short_benchmarks_exceed() -> None:
    def of(n: int, rate: float):
        flops = 2.0 * 4096 * n * 4096
        return operator_sample(
            OperatorClass.MATRIX_PRODUCT, m=4096, n=n, k=4096, seconds=flops / rate
        )

    large = [of(100_000 + 1000 * i, 1.0e15) for i in range(9)]
    fast = [of(1000 + 100 * i, 1.4e15) for i in range(20)]
    even = [of(1000 + 100 * i, 1.0e15) for i in range(20)]
    assert sustained_rate((*large, *fast)) == pytest.approx(1.0e15)
    assert sustained_rate((*large, *even)) == 0.0
    assert sustained_rate(fast) == 0.0
    (law,) = fit_operator_laws((*large, *fast))
    assert law.sustained_flops_per_second == pytest.approx(1.0e15)
    assert all(
        shape.seconds >= 2.0 * shape.m * shape.n * shape.k / 1.0e15 * (1 - 1e-9)
        for shape in law.shapes
    )
    assert any("never faster" in note for note in law.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operator": "product"}, "operator is 'product'"),
        ({"phase": "sideways"}, "phase is 'sideways'"),
        ({"k": 0}, "k only of products"),
        ({"median_seconds": 0.0}, "a time is more than 0"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_their_number(
    change: dict[str, object], words: str
) -> None:
    good = operator_sample(OperatorClass.MATRIX_PRODUCT, m=8, n=8, k=8)
    bad = replace(good, **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="operator sample 2 of testium-1") as caught:
        fit_operator_laws([good, bad])
    assert words in str(caught.value)
