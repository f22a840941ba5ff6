"""The start-up law is the fit of what it says it is fitted on."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from evaluation.startup import FILE, fitted_startup, startup_answer, startup_rows
from hetplan.cost.goodput.startup import MLPERF
from hetplan.errors import InputError

REFERENCE = Path(
    os.environ.get("HETPLAN_REFERENCE", Path(__file__).resolve().parents[3] / "shared/reference")
)
measured = pytest.mark.skipif(not (REFERENCE / FILE).is_file(), reason=f"no {FILE} at {REFERENCE}")


@measured
def test_the_shipped_law_is_the_fit_and_meets_systems_it_did_not_see() -> None:
    law, errors, _ = fitted_startup(startup_rows(REFERENCE))
    for each in fields(law):
        assert getattr(MLPERF, each.name) == pytest.approx(getattr(law, each.name), rel=1e-3)
    assert len(errors) == 47
    assert sum(map(abs, errors)) / len(errors) < 0.17


@measured
def test_the_answer_names_the_errors() -> None:
    lines = startup_answer(REFERENCE).lines
    assert lines[0].startswith("47 results of 17 systems, each left out in turn: mean error 15.")


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--reference"):
        startup_rows(tmp_path)
