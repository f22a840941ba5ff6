"""Laws of other kinds: truth that is known comes back, intervals say how far it can be off."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
from predict_kinds import KINDS, NEW, device, laws, operators, samples, seconds
from predict_samples import query

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.predict import datasheet
from hetplan.predict.kinds.operators import (
    SAME_CHIP_LOG_HALFWIDTH,
    same_chip,
)
from hetplan.predict.kinds.related import Related
from hetplan.predict.laws import FittedLaws
from hetplan.predict.operator.values import OperatorLaw
from hetplan.predict.predictor import Prediction


@lru_cache(maxsize=16)
def known(*kinds: DeviceKind, slower: tuple[float, ...] = ()) -> FittedLaws:
    factors = slower or (1.0,) * len(kinds)
    pairs = zip(kinds, factors, strict=True)
    return laws([row for kind, by in pairs for row in samples(kind, slower=by)])


def ask(found: FittedLaws, kind: DeviceKind, *others: DeviceKind) -> Prediction:
    answer = Related(found, (*KINDS, *others)).layer(kind, query(4096))
    assert answer is not None
    return answer


def lent_laws(related: Related, kind: DeviceKind, precision: Precision) -> tuple[OperatorLaw, ...]:
    lent = related.lent(kind, precision)
    return () if lent is None else lent.laws


def law_of(lent: tuple[OperatorLaw, ...], operator: str, phase: str = "forward") -> OperatorLaw:
    return next(law for law in lent if (law.operator, law.phase) == (operator, phase))


def test_kinds_that_reach_the_same_shares_tell_what_a_new_one_takes() -> None:
    lent = lent_laws(Related(known(*KINDS), KINDS), NEW, Precision.BFLOAT16)
    for op, phase in operators():
        if op.m < 4096:
            continue  # small ones are launches
        mine = law_of(lent, op.operator.value, phase).seconds(op)
        assert mine == pytest.approx(seconds(NEW, op, phase, "bfloat16"), rel=0.03), (op, phase)


def test_kinds_that_differ_more_give_a_wider_interval() -> None:
    alike = ask(known(*KINDS), NEW).log_halfwidth
    differing = ask(known(*KINDS, slower=(1.0, 2.0, 0.6, 1.6)), NEW).log_halfwidth
    assert differing > alike + 0.1


def test_another_vendors_laws_are_no_better_than_a_datasheet() -> None:
    foreign = replace(NEW, vendor="elsewhere")
    assert ask(known(*KINDS), foreign).log_halfwidth > ask(known(*KINDS), NEW).log_halfwidth
    lent = lent_laws(Related(known(*KINDS), KINDS), foreign, Precision.BFLOAT16)
    product = law_of(lent, "matrix_product")
    assert product.log_halfwidth >= datasheet.MATRIX_LOG_HALFWIDTH


def test_the_same_chip_lends_its_laws_by_bandwidth() -> None:
    board = device("three-larger", tflops=989, gigabytes=4800)
    source = KINDS[2]
    assert same_chip(source, board)
    related = Related(known(*KINDS), (*KINDS, board))
    lent = lent_laws(related, board, Precision.BFLOAT16)
    own = {(law.operator, law.phase): law for law in known(source).operators}
    for op, phase in operators():
        if op.m < 4096:
            continue
        mine = law_of(lent, op.operator.value, phase).seconds(op)
        assert mine == pytest.approx(seconds(board, op, phase, "bfloat16"), rel=0.03)
    for law in lent:
        here = own[law.operator, law.phase].log_halfwidth
        assert law.log_halfwidth == pytest.approx(math.hypot(here, SAME_CHIP_LOG_HALFWIDTH))
    carried, measured = law_of(lent, "matrix_product"), own["matrix_product", "forward"]
    assert [each.seconds for each in carried.shapes] == pytest.approx(
        [each.seconds for each in measured.shapes]
    )
    assert "three (same chip)" in ask(known(*KINDS), board, board).extrapolating[0]
