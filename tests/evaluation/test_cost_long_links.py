"""Long links: the published city pairs left out in turn, made-up worlds, and wrong samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evaluation.cost.long_links import PAIRS_FILE, city_pairs, left_out_errors, predict
from hetplan.errors import InputError

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
published = pytest.mark.skipif(
    not (REFERENCE / PAIRS_FILE).is_file(), reason=f"no reference data at {REFERENCE / PAIRS_FILE}"
)


@published
def test_city_pairs_are_predicted_from_the_others() -> None:
    pairs = city_pairs(REFERENCE)
    constant, window = (left_out_errors(pairs, window=each) for each in (False, True))
    assert constant["pairs"] == 45
    assert float(constant["mean"]) > 0.4
    assert float(window["mean"]) < 0.1374  # one window for all, as fitted elsewhere: 13.7 %
    assert 0.85 <= float(window["covered"]) <= 1.0


def test_a_world_that_follows_the_law_is_found() -> None:
    rng = np.random.default_rng(1)
    trips = rng.uniform(0.01, 0.3, 40)
    goodput = np.minimum(1.25e8, 1e7 / trips)
    for trip in (0.02, 0.15, 3.0):
        found, _ = predict(np.log(trips), np.log(goodput), np.log(trip), window=True)
        assert np.exp(found) == pytest.approx(min(1.25e8, 1e7 / trip), rel=1e-9)


@pytest.mark.parametrize(
    ("cells", "word"),
    [("from,to\na,b", "rtt_or_delay"), ("rtt_or_delay_ms_as_published\n0", "bandwidth")],
)
def test_wrong_samples_are_refused(tmp_path: Path, cells: str, word: str) -> None:
    with pytest.raises(InputError, match="wan_city_pairs"):
        city_pairs(tmp_path)
    path = tmp_path / PAIRS_FILE
    path.parent.mkdir()
    path.write_text(f"{cells}\n")
    with pytest.raises(InputError, match=word):
        city_pairs(tmp_path)
