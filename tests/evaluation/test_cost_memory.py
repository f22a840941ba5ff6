"""Memory against runs that other people measured, and what a damaged file does."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.cost.memory import SAILOR_FILE, SIMUMAX_FILE, memory_accuracy
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


def folder(tmp_path: Path, **files: str) -> Path:
    (tmp_path / "runs").mkdir()
    for path, name in ((SIMUMAX_FILE, "simumax"), (SAILOR_FILE, "sailor")):
        if name in files:
            (tmp_path / path).write_text(files[name])
    return tmp_path


SIMUMAX_HEADER = (
    "model,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq,num_experts,tp,pp,cp,ep,dp,"
    "micro_batch,global_batch,peak_mem_gib\n"
)


SAILOR_HEADER = (
    "gpu,layers,hidden,ffn_hidden,heads,vocab,seq,tp,pp,dp,micro_batch,global_batch,other,"
    "peak_mem_gib\n"
)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "simumax_b200.csv is not there"),
        ({"simumax": "model,layers\nx,1\n"}, "has no column hidden, ffn_hidden"),
        (
            {"simumax": SIMUMAX_HEADER + "llama,2,64,128,4,4,100,16,,1,1,1,1,1,1,4,much\n"},
            "simumax_b200.csv, line 2: could not convert",
        ),
        (
            {"simumax": SIMUMAX_HEADER + "llama,2,64,128,4,4,100,16,,no,1,1,1,1,1,4,1.5\n"},
            "simumax_b200.csv, line 2: invalid literal",
        ),
        ({"simumax": SIMUMAX_HEADER}, "simumax_b200.csv has no rows"),
        (
            {"simumax": SIMUMAX_HEADER + "llama,2,64,128,4,4,100,16,,1,1,1,1,1,1,4,1.5\n"},
            "sailor_end_to_end.csv is not there",
        ),
        (
            {
                "simumax": SIMUMAX_HEADER + "llama,2,64,128,4,4,100,16,,1,1,1,1,1,1,4,1.5\n",
                "sailor": SAILOR_HEADER + "GH-96,2,64,128,4,100,16,1,1,1,1,4,nothing said,1.5\n",
            },
            "sailor_end_to_end.csv, line 2: 'layers_per_stage'",
        ),
    ],
)
def test_wrong_reference_data(tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        memory_accuracy(folder(tmp_path, **files))
