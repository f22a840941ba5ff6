"""One law of whole layers of all kinds: known truth comes back, whatever kernels are asked for."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
from predict_kinds import KINDS, NEW, device, laws
from predict_samples import gpt, layer_sample, query

from hetplan.cluster.devices import DeviceKind
from hetplan.model.operators import Kernels
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedLaws
from hetplan.predict.kinds.layers import (
    FEW_CHIPS_LOG_HALFWIDTH,
    KindRows,
    pooled_layers,
    values,
)
from hetplan.predict.kinds.operators import Rates, rates
from hetplan.predict.kinds.related import Related
from hetplan.predict.layer.laws import sample_query
from hetplan.predict.predictor import LayerQuery, Prediction
from hetplan.profiling.samples import LayerSample

SIZES = tuple((hidden, microbatch) for hidden in (1024, 4096) for microbatch in (1, 2, 4, 8, 16))
# Launches, launches of tp, products, tiles, scores, split bytes, bytes of every rank.
TRUTH = (4e-4, 1e-4, 1.2, 0.0, 6.0, 3.0, 2.0)


def rates_of(kind: DeviceKind) -> Rates:
    found = rates(kind, "bfloat16")
    assert found is not None
    return found


def seconds(kind: DeviceKind, asked: LayerQuery) -> float:
    found = values(rates_of(kind), asked)
    assert found is not None
    return sum(share * value for share, value in zip(TRUTH, found, strict=True))


def samples(kind: DeviceKind, *, slower: float = 1.0) -> list[LayerSample]:
    return [
        layer_sample(
            gpt(hidden),
            slower * seconds(kind, query(hidden, microbatch=microbatch, tp=tp)),
            microbatch=microbatch,
            tp=tp,
            device=kind.kind,
        )
        for hidden, microbatch in SIZES
        for tp in (1, 2)
    ]


@lru_cache(maxsize=8)
def known(*slower: float) -> FittedLaws:
    pairs = zip(KINDS, slower or (1.0,) * len(KINDS), strict=True)
    return laws(layers=[row for kind, by in pairs for row in samples(kind, slower=by)])


def ask(
    found: FittedLaws,
    kind: DeviceKind,
    *,
    hidden: int = 2048,
    microbatch: int = 4,
    tp: int = 1,
    kernels: Kernels | None = None,
) -> Prediction:
    asked = query(hidden, microbatch=microbatch, tp=tp, kernels=kernels or Kernels())
    answer = Related(found.layers, found.operators, (*KINDS, kind)).layer(kind, asked)
    assert answer is not None
    return answer


@pytest.mark.parametrize(("hidden", "microbatch", "tp"), [(1024, 2, 1), (2048, 4, 2), (4096, 8, 1)])
def test_layers_of_other_kinds_tell_what_a_new_one_takes(
    hidden: int, microbatch: int, tp: int
) -> None:
    answer = ask(known(), NEW, hidden=hidden, microbatch=microbatch, tp=tp)
    true = seconds(NEW, query(hidden, microbatch=microbatch, tp=tp))
    assert answer.seconds == pytest.approx(true, rel=0.06)
    assert "law of 4 other kinds" in answer.extrapolating[0]


def test_a_kind_beyond_the_measured_ones_is_less_sure() -> None:
    beyond = device("beyond", tflops=4000, gigabytes=9000)
    answer = ask(known(), beyond)
    assert answer.log_halfwidth > 1.3 * ask(known(), NEW).log_halfwidth
    assert "TFLOP/s 4000 > 989 measured" in answer.extrapolating
    assert "GB/s 9000 > 3350 measured" in answer.extrapolating


def test_another_board_of_the_chip_answers_first() -> None:
    board = device("three-larger", tflops=989, gigabytes=4800)
    answer = ask(known(1.0, 1.0, 1.5, 1.0), board, hidden=4096, microbatch=4)
    here = 1.5 * seconds(KINDS[2], query(4096, microbatch=4))
    assert answer.extrapolating[0].endswith("as three, the same chip")
    assert 3350 / 4800 * here < answer.seconds < here


def rows_of(
    kind: DeviceKind, slower: float = 1.0, *, one_size: bool = False, rounding: float = 0.0
) -> KindRows:
    """`one_size`: of hidden 1024 and tp 1, on which both kinds of bytes grow alike."""
    rows, times = [], []
    for sample in samples(kind, slower=slower):
        if one_size and (sample.hidden_size > 1024 or sample.tp > 1):
            continue
        row = values(rates_of(kind), sample_query(sample))
        assert row is not None
        sign = rounding * (-1) ** sample.microbatch_size
        rows.append(tuple(value * (1.0 + sign * (-1) ** at) for at, value in enumerate(row)))
        times.append(sample.median_seconds)
    return KindRows(rates=rates_of(kind), rows=tuple(rows), seconds=tuple(times))


def test_two_chips_are_too_few_to_leave_one_out() -> None:
    # A second board makes no third chip.
    board = device("two-slot", tflops=312, gigabytes=1935)
    for kinds in (KINDS[:1], KINDS[:2], (*KINDS[:2], board)):
        law = pooled_layers(list(map(rows_of, kinds)), rates_of(NEW), LayerKind.TRANSFORMER)
        assert law is not None
        assert law.log_halfwidth == FEW_CHIPS_LOG_HALFWIDTH
        asked = query(4096, microbatch=4)
        assert law.seconds(rates_of(NEW), asked) == pytest.approx(seconds(NEW, asked), rel=0.3)
    assert pooled_layers([], rates_of(NEW), LayerKind.TRANSFORMER) is None


def test_left_out_errors_are_those_of_a_chip_nobody_measured() -> None:
    kinds = [rows_of(kind) for kind in KINDS]
    exact = pooled_layers(kinds, rates_of(NEW), LayerKind.TRANSFORMER)
    kinds[1] = rows_of(KINDS[1], slower=2.0)
    odd = pooled_layers(kinds, rates_of(NEW), LayerKind.TRANSFORMER)
    assert exact is not None
    assert odd is not None
    # One of four chips is log 2 off, and may pull the others along.
    assert odd.log_halfwidth > exact.log_halfwidth + math.log(2.0) / 4


def test_what_rows_leave_open_does_not_hang_on_rounding() -> None:
    """Either of two columns that are one on all rows fits them; the answer must not be a draw."""
    found = []
    for rounding in (0.0, 1e-15, -1e-15, 1e-13, -1e-13):
        rows = [rows_of(kind, one_size=True, rounding=rounding) for kind in KINDS]
        law = pooled_layers(rows, rates_of(NEW), LayerKind.TRANSFORMER)
        assert law is not None
        found.append(law.coefficients)
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-4, abs=1e-9)
    launches, split, *_, alone_split, alone = found[0]
    assert split == 0.0  # no row has it
    assert launches > 0.0
    # Both are passes over memory: neither takes all.
    assert min(alone_split, alone) > 0.2 * max(alone_split, alone)
