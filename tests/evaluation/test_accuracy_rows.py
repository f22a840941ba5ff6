"""Rows of runs: what is read, what is wrong with them, and that nothing ends the reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_tables import GPT, write_runs
from hypothesis import given
from hypothesis import strategies as st

from evaluation.accuracy.calibration import run_of
from evaluation.accuracy.rows import SLOW_ROWS, RunRow, read_runs
from hetplan.errors import InputError
from hetplan.plans.plan import Sharding


def test_a_row_is_read(tmp_path: Path) -> None:
    (row,) = read_runs(write_runs(tmp_path, {"other": "layers_per_stage=3/3; b=2"}))[0]
    assert (row.file, row.line, row.model, row.tp, row.seq_parallel) == (
        "runs.csv", 2, "gpt-small", 2, False,
    )  # fmt: skip
    assert row.step_seconds == 0.5
    assert row.peak_memory_gib is None
    assert row.settings == {"layers_per_stage": "3/3", "b": "2"}
    assert row.faults == ()
    assert row.data_set == "made-up"


@pytest.mark.parametrize(
    ("cell", "text", "word"),
    [
        ("layers", "1 of 5", "not a whole number"),
        ("tp", "2.5", "not a whole number"),
        ("gpus", "inf", "not a whole number"),
        ("dp", "-1", "not a whole number"),
        ("step_time_s", "nan", "not a number above 0"),
        ("step_time_s", "-3", "not a number above 0"),
        ("peak_mem_gib", "much", "not a number above 0"),
        ("dist_opt", "maybe", "or empty"),
    ],
)
def test_wrong_cells_are_faults_with_a_line(
    tmp_path: Path, cell: str, text: str, word: str
) -> None:
    found = read_runs(write_runs(tmp_path, {}, {cell: text}))
    (fault,) = found[1]
    assert (fault.file, fault.line) == ("runs.csv", 3)
    assert fault.message.startswith(f"{cell} is")
    assert word in fault.message
    assert len(found[0]) == 2


def test_derived_times_and_experts_are_data_sets_of_their_own(tmp_path: Path) -> None:
    rows = read_runs(
        write_runs(
            tmp_path,
            {"step_time_kind": "derived from MFU"},
            {"num_experts": "8"},
            {"source": ""},
        )
    )[0]
    assert [row.data_set for row in rows] == ["made-up, derived", "made-up, experts", "runs"]
    assert [row.derived for row in rows] == [True, False, False]


def test_suspect_rows_say_why() -> None:
    row = RunRow(file="a.csv", line=2, other="x=1; SUSPECT: a copy; y=2")
    assert row.suspect == "SUSPECT: a copy"
    source, model, tp, pp, size = SLOW_ROWS[0]
    slow = RunRow(file="a.csv", line=2, source=source, model=model, tp=tp, pp=pp, micro_batch=size)
    assert slow.suspect
    assert not replace(slow, micro_batch=1).suspect
    assert len(set(SLOW_ROWS)) == 16


@given(st.dictionaries(st.sampled_from(sorted(GPT)), st.text(max_size=12), max_size=6))
def test_no_cell_ends_the_reading(tmp_path_factory: pytest.TempPathFactory, row: dict) -> None:  # type: ignore[type-arg]
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder, {key: text.replace("\0", "") for key, text in row.items()})
    found = read_runs(folder)
    assert len(found[0]) <= 1
    for each in found[0]:
        assert each.layout


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("", None),
        ("0", Sharding.NONE),
        ("1", Sharding.OPTIMIZER),
        ("stage1", Sharding.OPTIMIZER),
        ("stage2", Sharding.GRADIENTS),
        ("ZeRO3", Sharding.PARAMETERS),
        ("FSDP2", Sharding.PARAMETERS),
        ("HSDP", Sharding.PARAMETERS),
    ],
)
def test_dist_opt_names_what_is_sharded(
    tmp_path: Path, text: str, sharding: Sharding | None
) -> None:
    (row,), faults = read_runs(write_runs(tmp_path, {"dist_opt": text}))
    assert (row.dist_opt, faults) == (sharding, [])
    assert row.within_node == (text == "HSDP")


def test_a_row_with_a_wrong_cell_is_not_predicted(tmp_path: Path) -> None:
    (row,), _ = read_runs(write_runs(tmp_path, {"peak_mem_gib": "much"}))
    with pytest.raises(InputError, match="peak_mem_gib is 'much'"):
        run_of(row, (), ())
