"""What is said about plans and runs."""

from __future__ import annotations

import pytest

from hetplan.launchers.local_loop import even_split
from hetplan.reports.comparison import sparkline
from hetplan.reports.plans import grouped, homogeneous_lines
from hetplan.search.result import HomogeneousSum, KindAlone


def test_notes_of_one_text_share_a_line() -> None:
    notes = ["a: nothing was measured", "b: update: 5 > 4 measured", "c: nothing was measured"]
    assert list(grouped(notes)) == [
        "nothing was measured: a; c",
        "b: update: 5 > 4 measured",
    ]
    assert list(grouped(["a note without a subject"])) == ["a note without a subject"]


def test_sparkline_spans_low_to_high() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_a_ratio_that_is_unknown_is_not_invented() -> None:
    alone = KindAlone(
        device="cpu",
        devices=2,
        tokens_per_second=10.0,
        roofline_tokens_per_second=None,
        gap=0.01,
        reason="",
    )
    lines = list(
        homogeneous_lines(
            HomogeneousSum(kinds=(alone,), homogeneous_sum_ratio=0.5, roofline_ratio=None)
        )
    )
    assert "no peak rate known" in lines[0]
    assert lines[1].startswith("homogeneous-sum ratio 50.00%")
    assert lines[1].endswith("roofline ratio unknown")


@pytest.mark.parametrize(("layers", "stages"), [(12, 4), (13, 4), (3, 3), (96, 7)])
def test_the_even_split_is_even(layers: int, stages: int) -> None:
    split = even_split(layers, stages)
    assert sum(split) == layers
    assert len(split) == stages
    assert max(split) - min(split) <= 1
