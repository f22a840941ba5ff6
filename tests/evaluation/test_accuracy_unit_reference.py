"""The published unit data: how much of it is used, and that its traps are where they were seen."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import median

import pytest

from evaluation.accuracy.left_out import UnitData, read_unit
from hetplan.profiling.samples import LayerSample, OperatorSample

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(
    not (REFERENCE / "unit").is_dir(), reason="published measurements are not here"
)
A100, GH200 = "nvidia-a100-40gb-sxm", "nvidia-gh200-96gb"


@lru_cache(maxsize=1)
def data() -> UnitData:
    return read_unit(REFERENCE)


def operators(device: str, operator: str, phase: str) -> list[OperatorSample]:
    return [
        each
        for population in data().populations
        for each in population.operators
        if (each.device, each.operator, each.phase) == (device, operator, phase)
    ]


def rate(sample: OperatorSample) -> float:
    return 2 * sample.batch * sample.m * sample.n * sample.k / sample.median_seconds


def test_as_many_rows_are_counted_out_as_the_readme_names() -> None:
    notes = "\n".join(data().notes)
    assert "90 rows not used: layer_times.csv, single passes: 1e7 us" in notes
    assert "2368 rows not used: collectives.csv: 1e12 us" in notes
    assert "106 rows not used: collectives.csv: 1e9 us" in notes
    assert "55 rows not used: layer_profiles: OPT-30 on A100-40: float32 itself" in notes


def test_products_of_every_table_stay_below_the_peak() -> None:
    for device, peak in (("nvidia-b200-180gb-sxm", 2250e12), ("nvidia-a100-80gb-pcie", 312e12)):
        for phase in ("forward", "input_gradient", "weight_gradient"):
            found = operators(device, "matrix_product", phase)
            assert found
            assert max(map(rate, found)) < peak
        assert {each.output_precision for each in found} <= {"float32", "bfloat16"}


def test_what_remains_of_sliced_layers_is_their_slice() -> None:
    rows: dict[tuple[str, int, str, int, int], LayerSample] = {
        (each.device, each.hidden_size, each.phase, each.microbatch_size, each.tp): each
        for population in data().populations
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
