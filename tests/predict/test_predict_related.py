"""Laws of other kinds: truth that is known comes back, intervals say how far it can be off."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
from predict_kinds import KINDS, NEW, device, laws, operators, samples, seconds
from predict_samples import layer_grid, query

from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Optimizer, Precision
from hetplan.predict import datasheet
from hetplan.predict.fit import FittedLaws, FittedPredictor
from hetplan.predict.kinds.operators import (
    SAME_CHIP_LOG_HALFWIDTH,
    asked_format,
    measured_format,
    rates,
    same_chip,
    spread_group,
)
from hetplan.predict.kinds.related import Related
from hetplan.predict.operator.values import OperatorLaw
from hetplan.predict.predictor import Prediction


@lru_cache(maxsize=16)
def known(*kinds: DeviceKind, slower: tuple[float, ...] = ()) -> FittedLaws:
    factors = slower or (1.0,) * len(kinds)
    pairs = zip(kinds, factors, strict=True)
    return laws([row for kind, by in pairs for row in samples(kind, slower=by)])


def ask(found: FittedLaws, kind: DeviceKind, *others: DeviceKind) -> Prediction:
    answer = related_of(found, (*KINDS, *others)).layer(kind, query(4096))
    assert answer is not None
    return answer


def related_of(found: FittedLaws, kinds: tuple[DeviceKind, ...]) -> Related:
    return Related(found.layers, found.operators, kinds)


def lent_laws(related: Related, kind: DeviceKind, precision: Precision) -> tuple[OperatorLaw, ...]:
    lent = related.lent(kind, precision)
    return () if lent is None else lent.laws


def law_of(lent: tuple[OperatorLaw, ...], operator: str, phase: str = "forward") -> OperatorLaw:
    return next(law for law in lent if (law.operator, law.phase) == (operator, phase))


def test_kinds_that_reach_the_same_shares_tell_what_a_new_one_takes() -> None:
    lent = lent_laws(related_of(known(*KINDS), KINDS), NEW, Precision.BFLOAT16)
    for op, phase in operators():
        if op.m < 4096:
            continue  # small ones are launches
        mine = law_of(lent, op.operator.value, phase).seconds(op)
        assert mine == pytest.approx(seconds(NEW, op, phase, "bfloat16"), rel=0.03), (op, phase)


def test_kinds_that_differ_more_give_a_wider_interval() -> None:
    alike = ask(known(*KINDS), NEW).log_halfwidth
    differing = ask(known(*KINDS, slower=(1.0, 2.0, 0.6, 1.6)), NEW).log_halfwidth
    assert differing > alike + 0.1


def test_fewer_than_three_chips_have_the_published_spread() -> None:
    two = ask(known(*KINDS[:2]), NEW).log_halfwidth
    four = ask(known(*KINDS), NEW).log_halfwidth
    assert two > 1.645 * spread_group("norm")[1]
    # Two kinds that happen to agree are no evidence that a third will.
    apart = ask(known(*KINDS[:2], slower=(1.0, 3.0)), NEW).log_halfwidth
    assert apart == pytest.approx(two, rel=0.1)
    assert four < two


def test_another_vendors_laws_are_no_better_than_a_datasheet() -> None:
    foreign = replace(NEW, vendor="elsewhere")
    assert ask(known(*KINDS), foreign).log_halfwidth > ask(known(*KINDS), NEW).log_halfwidth
    lent = lent_laws(related_of(known(*KINDS), KINDS), foreign, Precision.BFLOAT16)
    product = law_of(lent, "matrix_product")
    assert product.log_halfwidth >= datasheet.MATRIX_LOG_HALFWIDTH


def test_the_same_chip_lends_its_laws_by_bandwidth() -> None:
    board = device("three-larger", tflops=989, gigabytes=4800)
    source = KINDS[2]
    assert same_chip(source, board)
    related = related_of(known(*KINDS), (*KINDS, board))
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


def test_a_board_of_less_power_is_less_sure() -> None:
    module = replace(KINDS[2], max_power_watts=700.0)
    kinds = (*KINDS[:2], module)

    def halfwidth(watts: float) -> float:
        board = device("three-slot", tflops=989, gigabytes=3350, watts=watts)
        lent = lent_laws(related_of(known(*KINDS), kinds), board, Precision.BFLOAT16)
        return law_of(lent, "matrix_product").log_halfwidth

    assert halfwidth(350.0) > halfwidth(650.0) > halfwidth(700.0)


def test_float16_laws_answer_bfloat16_and_float32_does_not() -> None:
    rows = [row for kind in KINDS for row in samples(kind, precision="float16")]
    related = related_of(laws(rows), KINDS)
    in_bfloat16 = lent_laws(related, NEW, Precision.BFLOAT16)
    assert in_bfloat16
    assert {law.precision for law in in_bfloat16} == {"bfloat16"}
    wide = replace(NEW, peak_flops_per_second=(("float32", 20e12),))
    assert lent_laws(related, wide, Precision.FLOAT32) == ()


@pytest.mark.parametrize(
    "kind",
    [
        replace(NEW, memory_bandwidth_bytes_per_second=0.0),
        replace(NEW, peak_flops_per_second=(("int8", 1e15),)),
    ],
)
def test_nothing_is_lent_to_a_kind_without_the_figures(kind: DeviceKind) -> None:
    related = related_of(known(*KINDS), KINDS)
    assert lent_laws(related, kind, Precision.BFLOAT16) == ()
    assert related.layer(kind, query(backward=True)) is None


FAST32 = (("float32", 20e12), ("tf32", 156e12))


def test_float32_means_what_it_meant_where_it_was_measured() -> None:
    kind = device("wide", tflops=312, gigabytes=1555, others=FAST32)
    assert measured_format(kind, "float32", [100e12, 130e12, 15e12]) == "tf32"
    assert measured_format(kind, "float32", [19e12, 21e12]) == "float32"
    assert measured_format(kind, "float32", []) == "float32"
    assert measured_format(kind, "bfloat16", [300e12]) == "bfloat16"
    geforce = device("card", tflops=71, gigabytes=936, others=(("float32", 35e12), ("tf32", 35e12)))
    assert measured_format(geforce, "float32", [60e12]) == "float32"
    of_tf32, of_float32 = rates(kind, "tf32"), rates(kind, "float32")
    assert of_tf32 is not None
    assert of_float32 is not None
    other = replace(kind, kind="wide-2")
    assert asked_format(other, "float32", [of_tf32]) == "tf32"
    assert asked_format(other, "float32", [of_float32]) == "float32"
    assert asked_format(other, "float32", []) == "float32"
    assert asked_format(geforce, "float32", [of_tf32]) == "float32"


def test_layers_of_the_same_chip_are_carried_by_the_datasheet_ratio() -> None:
    source = device("two-small", tflops=312, gigabytes=1555)
    board = device("two-large", tflops=312, gigabytes=2039)
    found = laws(layers=layer_grid(device=source.kind))
    predictor = FittedPredictor(found)
    related = related_of(found, (source, board))
    for hidden in (1024, 8192):
        answer = related.layer(board, query(hidden))
        assert answer is not None
        assert answer.extrapolating[0].endswith("as two-small, the same chip")
        own = predictor.layer(source, query(hidden))
        # More bandwidth and the same rate: faster, by less than the bandwidth.
        assert own.seconds * 1555 / 2039 < answer.seconds < own.seconds
        assert answer.log_halfwidth >= SAME_CHIP_LOG_HALFWIDTH


def test_updates_go_by_bandwidth_on_the_same_chip_alone() -> None:
    source = device("two-small", tflops=312, gigabytes=1555)
    board = device("two-large", tflops=312, gigabytes=2039)
    rows = [
        replace(row, phase="optimizer:adamw", median_seconds=1e-4 * row.hidden_size)
        for row in layer_grid(device=source.kind, microbatches=(1,), sequences=(1024,), tps=(1,))
    ]
    found = laws(layers=rows)
    related = related_of(found, (source, board, NEW))

    def update(kind: DeviceKind) -> Prediction | None:
        return related.optimizer_update(kind, Optimizer.ADAMW, 1e8, Precision.BFLOAT16)

    there = update(board)
    assert there is not None
    assert there.source == "related"
    assert update(NEW) is None
    own = FittedPredictor(found).optimizer_update(source, Optimizer.ADAMW, 1e8, Precision.BFLOAT16)
    assert own.seconds * 1555 / 2039 <= there.seconds <= own.seconds
