"""Kinds whose products sustain another part of their rate than most: table and consequences."""

from __future__ import annotations

import pytest
from predict_samples import gpt, query

from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.predict import datasheet
from hetplan.predict.datasheet import MATRIX_EFFICIENCY, matrix_efficiency
from hetplan.predict.kinds.operators import rates
from hetplan.predict.sustained import sustained_rate, sustained_table, typical_halfwidth


def test_lines_have_sources_and_each_can_answer() -> None:
    lines = sustained_table().typical
    assert all(line.source for line in lines)
    named = [beginning for line in lines for beginning in line.kinds]
    for at, beginning in enumerate(named):
        # A line behind a shorter beginning of its own would never answer.
        assert not any(beginning.startswith(earlier) for earlier in named[:at])


@pytest.mark.parametrize(
    ("kind", "share"),
    [("amd-mi300x", 0.47), ("amd-mi210", 0.68), ("biren-br104-32gb", 0.62), ("mine", 0.70)],
)
def test_the_most_special_line_answers(kind: str, share: float) -> None:
    assert matrix_efficiency(kind) == share


def test_kinds_compare_by_what_they_sustain() -> None:
    kinds = datasheet.known_kinds()
    asked = query(
        gpt(8192), LayerKind.TRANSFORMER, microbatch=4, tp=1, precision=Precision.BFLOAT16
    )
    mi300x, h100 = (
        datasheet.layer(kinds[name], asked) for name in ("amd-mi300x", "nvidia-h100-80gb-sxm")
    )
    assert 0.8 < h100.seconds / mi300x.seconds < 1.1  # printed rates: 1.32
    t4 = rates(kinds["nvidia-t4-16gb-pcie"], "float16")
    assert t4 is not None
    assert t4.flops_per_second * MATRIX_EFFICIENCY == pytest.approx(24e12, rel=0.01)
    wide = rates(kinds["nvidia-t4-16gb-pcie"], "float32")
    assert wide is not None
    assert wide.flops_per_second == pytest.approx(8.1e12)
    assert typical_halfwidth("nvidia-t4-16gb-pcie") > 0


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("nvidia-a100-80gb-sxm", 0.65),  # the best published step: 57 % with attention in half
        ("huawei-ascend-910b2-64gb", 0.65),
        ("nvidia-h100-80gb-sxm", 0.63),
        ("amd-mi300x", 0.54),  # sustained products, taken whole
    ],
)
def test_no_interval_begins_at_the_rate_of_bare_products_in_a_burst(kind: str, most: float) -> None:
    device = datasheet.known_kinds()[kind]
    rate = sustained_rate(device, "bfloat16")
    assert rate is not None
    assert rate <= most * dict(device.peak_flops_per_second)["bfloat16"]
