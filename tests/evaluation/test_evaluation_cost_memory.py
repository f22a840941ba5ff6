"""Memory against runs that other people measured, and what a damaged file does."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.cost.memory import SIMUMAX_FILE, memory_errors, memory_rows
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
    rows = memory_rows(REFERENCE)
    assert len(rows) == 22 + 18
    assert rows["suspect"].sum() == 1
    groups = memory_errors(rows).set_index("group")
    assert list(groups.index) == list(MAX_COUNT)
    for name, (count, most) in MAX_COUNT.items():
        assert groups["rows"][name] == count
        assert groups["mean_error"][name] <= most
        # Nothing is fitted to the B200 runs.
        assert (groups["constant_bytes"][name] == 0) == name.startswith("B200")


def test_wrong_reference_data_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"simumax_b200\.csv is not there"):
        memory_rows(tmp_path)
    path = tmp_path / SIMUMAX_FILE
    path.parent.mkdir()
    path.write_text("model,step_time_s,peak_mem_gib\nx,1,much\n")
    with pytest.raises(InputError, match=r"simumax_b200\.csv, line 2: peak_mem_gib is 'much'"):
        memory_rows(tmp_path)
