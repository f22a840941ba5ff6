"""The reader of experts' times: passes over memory taken out, the rest divided by operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.accuracy.unit_data import Notes
from evaluation.distil.experts import REACHED, Kind, read_experts
from hetplan.errors import InputError

HEADER = (
    "gpu,dtype,tokens,hidden,inter,topk,experts,tp,ep,distribution,time_us,condition,source,flag"
)
BANDWIDTH = 3.35e12


def written(folder: Path, *rows: str) -> Path:
    (folder / "operators").mkdir()
    (folder / "operators" / "moe.csv").write_text("\n".join((HEADER, *rows)) + "\n")
    return folder


def kinds(**sustained: float) -> dict[str, Kind]:
    return {"H100": Kind(name="h", memory_bandwidth=BANDWIDTH, sustained=sustained)}


def row(time_us: float, dtype: str = "bf16", distribution: str = "balanced", flag: str = "") -> str:
    sizes = "16384,4096,1536,8,128,1,8"
    return f"H100,{dtype},{sizes},{distribution},{time_us},burst,trt,{flag}"


def test_a_row_is_two_products_without_the_passes(tmp_path: Path) -> None:
    up, down = read_experts(written(tmp_path, row(1043.0)), kinds(), Notes())
    assert (up.batch, up.m, up.n, up.k) == (16, 1024, 3072, 4096)
    assert (down.batch, down.m, down.n, down.k) == (16, 1024, 4096, 1536)
    copies = 16384  # of 8 x 16384, an eighth
    moved = copies * (4096 * 6 + 1536 * 6) + 16384 * 4096 * 2
    products = 1043e-6 - moved / (REACHED * BANDWIDTH)
    assert up.median_seconds + down.median_seconds == pytest.approx(products)
    assert up.median_seconds == pytest.approx(2 * down.median_seconds)


def test_no_burst_is_faster_than_what_products_sustain(tmp_path: Path) -> None:
    up, down = read_experts(written(tmp_path, row(900.0)), kinds(bfloat16=600e12), Notes())
    flops = 6.0 * 16384 * 4096 * 1536
    assert up.median_seconds + down.median_seconds == pytest.approx(flops / 600e12)


def test_rows_that_say_little_of_products_are_counted(tmp_path: Path) -> None:
    rows = row(1043, flag="untuned"), row(1043, distribution="power_law_1.2"), row(250)
    notes = Notes()
    assert not read_experts(written(tmp_path, *rows, row(1, dtype="int8")), kinds(), notes)
    assert sum(notes.unused.values()) == 4


def test_a_table_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators" / "moe.csv").write_text("gpu,dtype\nH100,bf16\n")
    with pytest.raises(InputError, match=r"moe\.csv"):
        read_experts(tmp_path, kinds(), Notes())
