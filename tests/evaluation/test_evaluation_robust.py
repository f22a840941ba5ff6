"""Sets of measured pairs of regions, and a robust plan on one of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evaluation.robust import PAIRS, pair_sets, robust_row
from evaluation.search.sailor import NETWORK
from hetplan.errors import InputError
from hetplan.files.shipped import default_stores
from hetplan.predict.fit import fit_stores, with_shipped

REFERENCE = Path(
    os.environ.get("HETPLAN_REFERENCE", Path(__file__).resolve().parents[3] / "shared/reference")
)
measured = pytest.mark.skipif(
    not all((REFERENCE / each).is_file() for each in (PAIRS, NETWORK)),
    reason=f"no {PAIRS} and {NETWORK} at {REFERENCE}",
)


@measured
def test_the_sets_hold_every_pair() -> None:
    sets = pair_sets(REFERENCE)
    assert [len(each.gbit_per_second) for each in sets] == [10, 16, 19, 24, 16]
    assert sum(len(each.gbit_per_second) for each in sets[:3]) == 45


@measured
@pytest.mark.slow
def test_a_robust_plan_avoids_what_it_cannot_rely_on() -> None:
    row, nominal = robust_row(
        pair_sets(REFERENCE)[1], with_shipped(fit_stores(*default_stores())[0])
    )
    assert (row.nominal_regions, row.robust_regions) == (2, 1)
    assert row.robust_worst_seconds < 0.9 * row.nominal_worst_seconds
    assert row.nominal_median_seconds < row.robust_median_seconds
    assert row.nominal_median_seconds == pytest.approx(nominal.estimate.step_seconds, rel=0.01)


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--reference"):
        pair_sets(tmp_path)
