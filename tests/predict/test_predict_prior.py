"""A few measured points: they scale what is assumed, narrow it, and never widen it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict_kinds import KINDS, NEW, laws, operators, samples, seconds
from predict_samples import DEVICE, fitted, gpt, layer_sample, query

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.operators import OperatorClass
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.kinds.related import SHARED_VARIANCE, OwnOperators, Related, shift
from hetplan.predict.predictor import Prediction
from hetplan.profiling.samples import LayerSample

ratios = st.lists(st.floats(-3, 3), max_size=8)
widths = st.floats(0.01, 2)


@given(ratios, st.floats(-3, 3), widths)
def test_a_further_point_never_widens(known: list[float], more: float, width: float) -> None:
    before, after = shift(known, width), shift([*known, more], width)
    assert after.log_halfwidth <= before.log_halfwidth * (1 + 1e-12)
    assert before.log_halfwidth <= width * (1 + 1e-12)


@given(st.floats(-3, 3), st.integers(1, 50), widths)
def test_points_that_agree_pull_between_the_prior_and_themselves(
    ratio: float, count: int, width: float
) -> None:
    found = shift([ratio] * count, width)
    more = shift([ratio] * (count + 1), width)
    assert abs(found.log_mean) <= abs(more.log_mean) <= abs(ratio) * (1 + 1e-12)
    assert found.log_mean * ratio >= 0


def test_points_are_the_mean_of_a_posterior_on_a_grid() -> None:
    # The same posterior by summing over a grid of shifts, written apart from the formula.
    known, width, share = [0.4, 0.1, 0.3], 0.5, SHARED_VARIANCE
    total = (width / 1.645) ** 2
    grid = [at / 2000 for at in range(-4000, 4001)]
    weight = [
        math.exp(
            -at * at / (2 * share * total)
            - sum((each - at) ** 2 for each in known) / (2 * (1 - share) * total)
        )
        for at in grid
    ]
    mean = sum(w * at for w, at in zip(weight, grid, strict=True)) / sum(weight)
    spread = sum(w * (at - mean) ** 2 for w, at in zip(weight, grid, strict=True)) / sum(weight)
    found = shift(known, width)
    assert found.log_mean == pytest.approx(mean, rel=1e-3)
    assert found.log_halfwidth == pytest.approx(
        1.645 * math.sqrt(spread + (1 - share) * total), rel=1e-3
    )


def forward(
    predictor: FittedPredictor, hidden: int = 4096, kind: DeviceKind = DEVICE
) -> Prediction:
    return predictor.layer(kind, query(hidden))


PAPER = FittedPredictor.datasheet_only()


def slow_points(factor: float, *hidden: int) -> tuple[LayerSample, ...]:
    """Layers that take `factor` times what the datasheet says."""
    return tuple(
        layer_sample(gpt(width), factor * forward(PAPER, width).seconds, microbatch=2)
        for width in hidden
    )


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_measured_point_moves_and_narrows_every_other_size(factor: float) -> None:
    before = forward(PAPER)
    one = forward(fitted(slow_points(factor, 1024)))
    two = forward(fitted(slow_points(factor, 1024, 2048)))
    moved = [math.log(each.seconds / before.seconds) for each in (one, two)]
    assert sorted([0.0, *moved, math.log(factor)], key=abs) == pytest.approx(
        [0.0, *moved, math.log(factor)], abs=0.03
    )
    assert before.log_halfwidth > one.log_halfwidth > two.log_halfwidth
    assert one.source == "datasheet"
    assert "1 point measured" in one.extrapolating[0]
    assert "2 points measured" in two.extrapolating[0]


def test_three_points_give_a_law() -> None:
    answer = forward(fitted(slow_points(2.0, 1024, 2048, 4096)))
    assert answer.source == "measured"
    assert answer.seconds == pytest.approx(2.0 * forward(PAPER).seconds, rel=0.02)


def test_without_a_datasheet_the_point_is_all_there_is() -> None:
    bare = replace(DEVICE, memory_bandwidth_bytes_per_second=0.0)
    with pytest.raises(InputError):
        forward(PAPER, kind=bare)
    answer = forward(fitted(slow_points(2.0, 4096)), kind=bare)
    assert answer.source == "measured"
    assert answer.seconds == pytest.approx(2.0 * forward(PAPER).seconds, rel=0.01)


def test_one_operator_of_a_kind_moves_its_class_and_no_other() -> None:
    slow = [row for row in samples(NEW, slower=1.5) if row.operator == "matrix_product"]
    few = [row for row in slow if row.phase == "forward"][2:3]
    found = laws([*(row for kind in KINDS[:3] for row in samples(kind)), *few])
    related = Related(found.layers, found.operators, (*KINDS, NEW))
    own = OwnOperators(found.operators, related).of(NEW, Precision.BFLOAT16)
    assert own is not None
    lent = related.operators(NEW, Precision.BFLOAT16)
    assert lent is not None
    op = next(op for op, _ in operators() if op.operator is OperatorClass.MATRIX_PRODUCT)
    big = replace(op, m=8192, n=8192, k=8192)
    before, after = (each.launches(big, backward=False, lent=lambda: None) for each in (lent, own))
    assert before is not None
    assert after is not None
    true = 1.5 * seconds(NEW, big, "forward", "bfloat16")
    assert before[0].work_seconds < after[0].work_seconds < true
    assert after[0].work_seconds == pytest.approx(true, rel=0.15)
    assert after[0].log_halfwidth < before[0].log_halfwidth
    assert not own.has("norm", "forward")
