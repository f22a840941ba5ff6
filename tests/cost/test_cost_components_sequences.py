from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetplan.cost.components.layers import length_factors
from hetplan.job.spec import Job, LengthShare, Optimizer, Precision
from hetplan.model.work import attended


def job(row: int, shares: dict[int, float], packing: bool = True) -> Job:
    return Job(
        name="j",
        global_batch_size=8,
        sequence_length=row,
        precision=Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target="megatron",
        sequence_lengths=tuple(
            LengthShare(length=length, share=share) for length, share in shares.items()
        ),
        packing=packing,
    )


@st.composite
def histograms(draw):
    row = draw(st.integers(2, 64))
    counts = draw(st.dictionaries(st.integers(1, row), st.integers(1, 30), min_size=1, max_size=6))
    return row, counts


def first_fit_decreasing(row: int, lengths: list[int]) -> list[list[int]]:
    """The textbook's form: longest first, each into the first row with room."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for held in rows:
            if sum(held) + length <= row:
                held.append(length)
                break
        else:
            rows.append([length])
    return rows


@settings(max_examples=30, deadline=None)
@given(histogram=histograms(), window=st.none() | st.integers(1, 64))
def test_packing_is_first_fit_decreasing_of_many_sequences(histogram, window):
    row, counts = histogram
    times = 40  # enough sequences that broken-off patterns hardly count
    lengths = [length for length, count in counts.items() for _ in range(count * times)]
    assume(len(lengths) <= 2400)
    rows = first_fit_decreasing(row, lengths)
    total = sum(counts.values())
    found = length_factors(job(row, {n: c / total for n, c in counts.items()}), window)
    edge = (len(counts) + 1) / len(rows)
    assert found.tokens == pytest.approx(sum(lengths) / (len(rows) * row), rel=edge)
    assert found.sequences_per_row == pytest.approx(len(lengths) / len(rows), rel=edge)
    cores = [sum(attended(each, window) for each in held) / attended(row, window) for held in rows]
    mean = math.fsum(cores) / len(cores)
    assert found.core == pytest.approx(mean, rel=edge)


@settings(max_examples=150, deadline=None)
@given(histogram=histograms(), core_share=st.floats(0, 0.9))
def test_laws(histogram, core_share):
    row, counts = histogram
    total = sum(counts.values())
    shares = {n: c / total for n, c in counts.items()}
    packed = length_factors(job(row, shares))
    padded = length_factors(job(row, shares, packing=False))
    mean = math.fsum(n * share for n, share in shares.items())
    assert padded.tokens == pytest.approx(mean / row)
    assert (padded.linear, padded.core) == (1.0, 1.0)
    # Packing never wastes more, and short sequences attend less.
    assert padded.tokens - 1e-12 <= packed.tokens <= 1.0
    assert 0 < packed.core <= packed.tokens + 1e-12
    assert packed.sequences_per_row >= 1 - 1e-12
    assert packed.tokens * row == pytest.approx(packed.sequences_per_row * mean)
    # Without a window pairs grow with the square.
    square = math.fsum(n * n * share for n, share in shares.items())
    assert packed.core == pytest.approx(packed.sequences_per_row * square / row**2)
    assert packed.layer_factor(core_share) <= padded.layer_factor(core_share) + 1e-12
    assert packed.layer_factor(0.0) == 1.0


def test_full_rows_cost_what_they_cost():
    one = length_factors(job(4096, {4096: 1.0}))
    assert (one.tokens, one.linear, one.core) == (1.0, 1.0, 1.0)
    none = length_factors(job(4096, {}, packing=False))
    assert (none.tokens, none.core, none.layer_factor(0.3)) == (1.0, 1.0, 1.0)
    assert none.note == "all sequences have sequence_length"


def test_halves_halve_the_core():
    found = length_factors(job(4096, {2048: 1.0}))
    assert (found.tokens, found.core, found.sequences_per_row) == (1.0, 0.5, 2.0)
    # A fifth of the layer is attention, so a tenth of its time is saved.
    assert found.layer_factor(0.2) == pytest.approx(0.9)
    # Inside a window of 512 a half attends to nearly as much per token as the whole.
    assert length_factors(job(4096, {2048: 1.0}), 512).core == pytest.approx(0.9333, abs=1e-3)


def test_what_does_not_fit_together_stays_apart():
    # Two of 60 % do not fit into one row.
    found = length_factors(job(100, {60: 1.0}))
    assert (found.tokens, found.sequences_per_row) == (pytest.approx(0.6), 1.0)
    mixed = length_factors(job(100, {60: 0.5, 40: 0.5}))
    assert (mixed.tokens, mixed.sequences_per_row) == (pytest.approx(1.0), 2.0)
    assert mixed.core == pytest.approx(0.52)
