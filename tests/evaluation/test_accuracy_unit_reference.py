"""The published unit data: how much of it is used, and that its traps are where they were seen."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from evaluation.accuracy.left_out import UnitData, read_unit
from hetplan.profiling.samples import LayerSample

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(
    not (REFERENCE / "unit").is_dir(), reason="published measurements are not here"
)
A100, GH200 = "nvidia-a100-40gb-sxm", "nvidia-gh200-96gb"


@pytest.fixture(scope="module")
def data() -> UnitData:
    return read_unit(REFERENCE)


def test_as_many_rows_are_counted_out_as_the_readme_names(data: UnitData) -> None:
    notes = "\n".join(data.notes)
    assert "90 rows not used: layer_times.csv, single passes: 1e7 us" in notes
    assert "2368 rows not used: collectives.csv: 1e12 us" in notes
    assert "106 rows not used: collectives.csv: 1e9 us" in notes
    assert "layer_profiles: OPT-30 on A100-40 is not read: float32 itself" in notes


def test_what_remains_of_sliced_layers_is_their_slice(data: UnitData) -> None:
    rows: dict[tuple[str, int, str, int, int], LayerSample] = {
        (each.device, each.hidden_size, each.phase, each.microbatch_size, each.tp): each
        for population in data.populations
        for each in population.layers
        if each.layer == "transformer"
    }
    shares = [
        each.median_seconds * tp / rows[device, hidden, phase, size, 1].median_seconds
        for (device, hidden, phase, size, tp), each in rows.items()
        if device in (A100, GH200) and tp in (2, 4) and size >= 8 and phase != "optimizer:adamw"
        if (device, hidden, phase, size, 1) in rows
    ]
    assert len(shares) > 20
    assert median(shares) == pytest.approx(1.05, abs=0.05)
    assert all(0.9 < share < 1.3 for share in shares)
