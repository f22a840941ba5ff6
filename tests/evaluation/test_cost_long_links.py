"""Long links: the published city pairs left out in turn, made-up worlds, and wrong samples."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.cost.long_links import (
    PAIRS_FILE,
    LongLinkModel,
    Pair,
    city_pairs,
    fit_long_links,
    left_out_errors,
    long_link_errors,
)
from hetplan.errors import InputError

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
published = pytest.mark.skipif(
    not (REFERENCE / PAIRS_FILE).is_file(), reason=f"no reference data at {REFERENCE / PAIRS_FILE}"
)


@published
def test_city_pairs_are_predicted_from_the_others() -> None:
    constant, one, per_endpoint = long_link_errors(REFERENCE)
    assert [each.model for each in (constant, one, per_endpoint)] == list(LongLinkModel)
    assert constant.pairs == 45
    assert constant.mean > 0.4
    assert one.mean < 0.1374  # one window for all, as fitted elsewhere: 13.7 %
    assert per_endpoint.mean < 0.055
    for each in (one, per_endpoint):
        assert 0.85 <= each.covered <= 1.0


@published
def test_a_pair_that_is_left_out_is_not_in_its_fit() -> None:
    pairs = city_pairs(REFERENCE)[:20]
    before, _ = fit_long_links(pairs[1:]).predict(
        pairs[0].left, pairs[0].right, pairs[0].round_trip_seconds
    )
    wild = (replace(pairs[0], goodput_bytes_per_second=1.0), *pairs[1:])
    errors = left_out_errors(wild, LongLinkModel.PER_ENDPOINT)
    assert errors.largest == pytest.approx(before / 1.0 - 1)


def world(
    rng: random.Random, endpoints: int, noise: float = 0.0, streams: int = 1
) -> tuple[list[Pair], dict[str, float], float]:
    """Pairs of a world that follows the law: (pairs, window of each endpoint, capacity)."""
    names = [f"city-{number}" for number in range(endpoints)]
    windows = {name: 1e7 * math.exp(rng.uniform(-0.7, 0.7)) for name in names}
    capacity = 1.25e8
    pairs = []
    for number, left in enumerate(names):
        for right in names[number + 1 :]:
            trip = streams * rng.uniform(0.01, 0.3)
            goodput = min(capacity, streams * math.sqrt(windows[left] * windows[right]) / trip)
            pairs.append(
                Pair(
                    left=left,
                    right=right,
                    round_trip_seconds=trip,
                    goodput_bytes_per_second=goodput * math.exp(rng.gauss(0, noise)),
                    streams=streams,
                )
            )
    return pairs, windows, capacity


@pytest.mark.parametrize("streams", [1, 4])
def test_a_world_that_follows_the_law_is_found(streams: int) -> None:
    pairs, windows, capacity = world(random.Random(1), 8, streams=streams)
    law = fit_long_links(pairs, unknown_endpoints=False)
    assert law.capacity_bytes_per_second == pytest.approx(capacity, rel=0.02)
    for name, window in law.windows.items():
        assert window == pytest.approx(windows[name], rel=0.05)
    found, _ = law.predict("city-0", "city-1", 3.0, streams=2 * streams)
    exact = 2 * streams * math.sqrt(windows["city-0"] * windows["city-1"]) / 3.0
    assert found == pytest.approx(min(capacity, exact), rel=0.03)


def test_a_window_per_endpoint_helps_where_endpoints_differ() -> None:
    pairs, _, _ = world(random.Random(0), 6, noise=0.05)
    one = left_out_errors(pairs, LongLinkModel.ONE_WINDOW)
    assert left_out_errors(pairs, LongLinkModel.PER_ENDPOINT).mean < one.mean


def test_an_endpoint_without_samples_is_less_certain() -> None:
    pairs, _, _ = world(random.Random(2), 8, noise=0.05)
    law = fit_long_links(pairs)
    assert 0 < law.predict("city-0", "city-1", 0.2)[1] < law.predict("city-0", "elsewhere", 0.2)[1]


def test_units_names_and_order_do_not_matter() -> None:
    rng = random.Random(5)
    pairs, _, _ = world(rng, 5, noise=0.05)
    before, _ = fit_long_links(pairs, unknown_endpoints=False).predict("city-0", "city-1", 0.15)
    other = [
        replace(
            pair,
            left=pair.right,
            right=pair.left,
            goodput_bytes_per_second=7.0 * pair.goodput_bytes_per_second,
        )
        for pair in pairs
    ]
    rng.shuffle(other)
    after, _ = fit_long_links(other, unknown_endpoints=False).predict("city-1", "city-0", 0.15)
    assert after == pytest.approx(7.0 * before, rel=1e-6)


def test_wrong_samples_are_refused(tmp_path: Path) -> None:
    good = Pair(left="a", right="b", round_trip_seconds=0.1, goodput_bytes_per_second=1e7)
    with pytest.raises(InputError, match="at least 3"):
        fit_long_links([good, good])
    for changes in (
        {"right": "a"},
        {"round_trip_seconds": 0.0},
        {"goodput_bytes_per_second": math.nan},
        {"streams": 0},
    ):
        with pytest.raises(InputError):
            replace(good, **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="wan_city_pairs"):
        city_pairs(tmp_path)
    path = tmp_path / PAIRS_FILE
    path.parent.mkdir()
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["from", "to"], ["a", "b"]])
    with pytest.raises(InputError, match="rtt_or_delay"):
        city_pairs(tmp_path)
