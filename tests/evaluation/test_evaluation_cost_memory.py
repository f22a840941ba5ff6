"""Memory against runs that other people measured, and what a damaged file does."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.cost.memory import SIMUMAX_FILE, memory_accuracy
from hetplan.errors import InputError

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not there")

MAX_COUNT = {
    # (rows, most that the mean of the absolute errors may be). Sailor's own model has 6 to 7 % on
    # GH200 and 88 % on the mixed cards.
    "B200, dense": (16, 0.0045),
    "B200, experts": (6, 0.01),
    "GH200": (15, 0.04),
    "RTX": (2, 0.10),
}


@needs_reference
def test_memory_of_measured_runs() -> None:
    found = memory_accuracy(REFERENCE)
    assert len(found.rows) == 22 + 18
    groups = {each.group: each for each in found.groups}
    assert groups.keys() == MAX_COUNT.keys()
    for name, (rows, most) in MAX_COUNT.items():
        assert groups[name].rows == rows
        assert groups[name].mean_error <= most
        mine = [abs(row.error) for row in found.rows if row.group == name and not row.suspect]
        assert sum(mine) / rows == pytest.approx(groups[name].mean_error)
        assert max(mine) == groups[name].worst_error
        # Nothing is fitted to the B200 runs.
        assert (groups[name].constant_bytes == 0) == name.startswith("B200")
    assert [row.layout for row in found.rows if row.suspect] == [
        "OPT-350M on RTX-2080+RTX-3090+Titan-RTX, tp 8, layers 8/9/9, dp 1, microbatch 2, batch 144"
    ]


def test_wrong_reference_data_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"simumax_b200\.csv is not there"):
        memory_accuracy(tmp_path)
    path = tmp_path / SIMUMAX_FILE
    path.parent.mkdir()
    path.write_text("model,step_time_s,peak_mem_gib\nx,1,much\n")
    with pytest.raises(InputError, match=r"simumax_b200\.csv, line 2: peak_mem_gib is 'much'"):
        memory_accuracy(tmp_path)
