"""Measured layers: repaired to rise with work, read between sizes, used only where better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_samples import DEVICE, gpt, layer_sample, provenance, query

from hetplan.predict.fit import fit
from hetplan.predict.layer.laws import fit_layer_laws
from hetplan.predict.layer.tables import layer_tables, repaired
from hetplan.profiling.samples import LayerSample, ProfileSet

SIZES = (1, 2, 4, 8, 16)


def at(seconds: float, microbatch: int, tp: int = 1, hidden: int = 2048) -> LayerSample:
    return layer_sample(gpt(hidden), seconds, microbatch=microbatch, tp=tp)


def times(samples: tuple[LayerSample, ...]) -> dict[tuple[int, int], float]:
    return {(each.tp, each.microbatch_size): each.median_seconds for each in samples}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=5), st.integers(1, 3))
def test_repaired_times_rise_with_the_microbatch_and_only_fall(
    seconds: list[float], tps: int
) -> None:
    degrees = (1, 2, 4)[:tps]
    samples = tuple(
        at(value * (2 + at_tp) / (1 + at_tp), b, tp)
        for at_tp, tp in enumerate(degrees)
        for b, value in zip(SIZES, seconds, strict=False)
    )
    after = times(repaired(samples))
    before = times(samples)
    assert all(after[key] <= before[key] for key in before)
    for table in layer_tables(repaired(samples)):
        assert list(table.seconds) == sorted(table.seconds)
    # tp 1 is never repaired by another degree.
    alone = times(repaired(tuple(each for each in samples if each.tp == 1)))
    assert all(after[key] == value for key, value in alone.items())


def scattered(seconds: float, microbatch: int, tp: int = 1) -> LayerSample:
    """A time whose 10 % and 90 % points lie 5 % away."""
    return replace(
        at(seconds, microbatch, tp), p10_seconds=0.95 * seconds, p90_seconds=1.05 * seconds
    )


def test_what_scatter_explains_is_left_as_measured() -> None:
    close = (scattered(1.04, 1), scattered(1.0, 2), scattered(2.0, 4))
    assert repaired(close) == close
    far = (scattered(1.2, 1), scattered(1.0, 2), scattered(2.0, 4))
    assert times(repaired(far)) == {(1, 1): 1.0, (1, 2): 1.0, (1, 4): 2.0}
    # A table still rises: neighbours that fall by chance are both their mean.
    (table,) = layer_tables(repaired(close))
    assert table.seconds == pytest.approx((1.02, 1.02, 2.0))
    # Across tp too.
    across = (scattered(1.0, 1, 2), scattered(1.1, 2, 2), scattered(1.06, 1, 4))
    across = (*across, scattered(1.2, 2, 4))
    assert repaired(across) == across


def test_between_sizes_is_linear_and_beyond_goes_by_the_columns() -> None:
    def law(samples):
        (found,) = fit_layer_laws(samples)
        return found

    # A step that no sum of columns has: from 4 on a slower kernel.
    def bent(b: int, h: int) -> float:
        return 1e-3 * (h / 1024) ** 2 * (0.5 + b + (3 * (b - 3) if b > 3 else 0))

    samples = tuple(
        at(bent(b, h), b, hidden=h) for h in (1024, 2048, 4096, 8192) for b in (1, 2, 3, 5, 8, 12)
    )
    found = law(samples)
    assert found.tables
    assert any("from its own table" in note for note in found.notes)
    predictor = fit(ProfileSet(layers=samples, links=(), operators=(), provenance=(provenance(),)))

    def ask(b: int, hidden: int = 2048, tp: int = 1):
        return predictor.layer(DEVICE, query(hidden, microbatch=b, tp=tp))

    assert ask(3).seconds == pytest.approx(bent(3, 2048))
    assert ask(10).seconds == pytest.approx((bent(8, 2048) + bent(12, 2048)) / 2)
    assert ask(10).log_halfwidth == pytest.approx(found.table_log_halfwidth)
    assert ask(24).seconds > 1.5 * ask(12).seconds
    assert any("microbatch 24 > 12 measured" in note for note in ask(24).extrapolating)
    assert ask(4, hidden=3072).seconds > ask(4).seconds  # no table: by columns
