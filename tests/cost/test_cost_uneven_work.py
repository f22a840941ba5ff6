"""What a step costs beside passes and transfers: updates on the host, norm, clocks, stragglers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cost_fakes import island, job, model
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import MIN_VOLTAGE, STATIC_POWER, HostInterface, capped_clock_ratio
from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.end_of_step import (
    HOST_INTERFACE_EFFICIENCY,
    HOST_UPDATE_BYTES_PER_SECOND,
    host_update_seconds,
    offloaded_update,
)
from hetplan.cost.step_model.layer_compute import copied_heads_share
from hetplan.cost.step_model.uneven_work import clock, expert_load, length_factors, straggler_factor
from hetplan.cost.terms import Term
from hetplan.errors import InputError
from hetplan.job.spec import LengthShare, Precision
from hetplan.model.layers import Attention, Experts, Mlp, TransformerLayer
from hetplan.model.work import attended, transformer_work
from hetplan.predict.predictor import Prediction

PLACE = island("a")
HOSTED = replace(PLACE.device, host=HostInterface(pcie_generation=4, lanes=16))
DENSE = model().common_layer()


def test_an_offloaded_part_leaves_the_device_the_rest() -> None:
    place = replace(PLACE, device=HOSTED, devices_per_node=8)
    asked = job(target="megatron", precision=Precision.BFLOAT16)
    down, update, up = host_update_seconds(place, asked, 1e9)
    rate = 16 * 16e9 * 128 / 130 / 8 * HOST_INTERFACE_EFFICIENCY  # PCIe 4.0 x16
    assert down == pytest.approx(4e9 / rate)
    assert up == pytest.approx(2e9 / rate)
    assert update == pytest.approx(8 * 30e9 / HOST_UPDATE_BYTES_PER_SECOND)
    predicted = Prediction(seconds=1.0, log_halfwidth=0.2, source="measured")
    whole = Term(what="work", cause="fast", count=1, prediction=predicted)
    for part in (0.25, 0.5, 1.0):
        found = offloaded_update(place, asked, 1e9, part, whole)
        seconds = {each.component: each.seconds for each in found}
        assert seconds.pop(Component.OFFLOAD) == pytest.approx(part * (down + update + up))
        assert seconds == ({} if part == 1.0 else {Component.OPTIMIZER: 1.0 - part})
    assert [each.seconds for each in offloaded_update(place, asked, 1e9, 0.0, whole)] == [1.0]
    with pytest.raises(InputError, match="has no host interface"):
        offloaded_update(PLACE, asked, 1e9, 0.5, whole)


# ---- clocks and stragglers


@settings(max_examples=200, deadline=None)
@given(power=st.floats(STATIC_POWER + 0.01, 1.0))
def test_the_clock_under_a_cap_draws_the_cap(power: float) -> None:
    ratio = capped_clock_ratio(power)
    assert 0 < ratio <= 1
    drawn = STATIC_POWER + (1 - STATIC_POWER) * ratio * max(ratio, MIN_VOLTAGE) ** 2
    assert drawn == pytest.approx(power)
    assert capped_clock_ratio(min(1.0, power * 1.01)) >= ratio
    if power >= 0.5:
        # A cap costs less of the clock than it takes of the power.
        assert ratio >= power - 1e-12


def test_clocks_of_islands() -> None:
    plain = replace(PLACE, device=replace(PLACE.device, max_power_watts=400.0))
    assert clock(plain) == clock(replace(plain, power_cap_watts=400.0))
    assert (clock(plain).ratio, clock(plain).notes) == (1.0, ())
    capped = replace(plain, clock_ratio=0.8, power_cap_watts=300.0)
    assert clock(capped).ratio == pytest.approx(0.8 * capped_clock_ratio(0.75))
    assert len(clock(capped).notes) == 2
    with pytest.raises(InputError, match="without computing"):
        clock(replace(plain, power_cap_watts=30.0))
    unknown = clock(replace(PLACE, power_cap_watts=300.0))
    assert unknown.ratio == 1.0
    assert "not priced" in unknown.notes[0]


@pytest.mark.parametrize(("spread", "count"), [(0.03, 64), (0.3, 7), (0.1, 1)])
def test_the_slowest_rank_is_that_of_draws(spread: float, count: int) -> None:
    rng = np.random.default_rng(5)
    largest = np.exp(spread * rng.standard_normal((40_000, count)).max(axis=1))
    error = float(largest.std() / math.sqrt(len(largest)))
    assert straggler_factor(spread, count) == pytest.approx(float(largest.mean()), abs=5 * error)


# ---- key-value heads and experts


@given(tp=st.sampled_from([1, 2, 4, 8, 16, 32]), kv=st.sampled_from([1, 2, 4, 8]))
def test_copied_heads_are_what_a_rank_computes_beyond_an_even_share(tp: int, kv: int) -> None:
    attention = Attention(num_heads=32, num_kv_heads=kv, head_dim=16)
    layer = replace(DENSE, attention=attention, mlp=Mlp(ffn_hidden_size=1024, gated=True))
    beyond = max(0.0, 2 * 512 * 16 - 2 * 512 * 16 * kv / tp)
    work = transformer_work(layer, 512, 1, 128, tp)
    found = copied_heads_share(layer, 512, 128, tp)
    assert found == pytest.approx(2 * 128 * beyond / work.flops)
    assert 0 <= found < 1


def moe(experts: int = 8, per_token: int = 2) -> TransformerLayer:
    mlp = Experts(num_experts=experts, experts_per_token=per_token, expert_ffn_hidden_size=512)
    return replace(DENSE, mlp=mlp)


@given(factor=st.floats(1, 20), ep=st.sampled_from([1, 2, 4, 8, 16]), per_token=st.integers(1, 8))
def test_the_busiest_rank_has_no_more_than_all_tokens(
    factor: float, ep: int, per_token: int
) -> None:
    layer = moe(experts=16, per_token=per_token)
    found = expert_load(layer, job(expert_load_factor=factor), ep).factor
    assert 1 <= found <= max(1.0, factor)
    # Of each token's copies at most one goes to each of its experts.
    mean, most = per_token / ep, min(per_token, 16 // ep)
    assert found * mean <= max(most, mean) * (1 + 1e-12)
    assert ep > 1 or found == 1


# ---- sequences


@st.composite
def histograms(draw: st.DrawFn) -> tuple[int, dict[int, int]]:
    row = draw(st.integers(2, 64))
    counts = st.dictionaries(st.integers(1, row), st.integers(1, 30), min_size=1, max_size=6)
    return row, draw(counts)


def factors(row: int, counts: dict[int, int], *, packing: bool = True, window: int | None = None):
    shares = [LengthShare(length=n, share=c / sum(counts.values())) for n, c in counts.items()]
    asked = job(sequence_length=row, sequence_lengths=tuple(shares), packing=packing)
    return length_factors(asked, window)


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
def test_packing_is_first_fit_decreasing_of_many_sequences(histogram, window) -> None:
    row, counts = histogram
    times = 40  # enough sequences that broken-off patterns hardly count
    lengths = [length for length, count in counts.items() for _ in range(count * times)]
    assume(len(lengths) <= 2400)
    rows = first_fit_decreasing(row, lengths)
    found = factors(row, counts, window=window)
    edge = (len(counts) + 1) / len(rows)
    assert found.tokens == pytest.approx(sum(lengths) / (len(rows) * row), rel=edge)
    cores = [sum(attended(each, window) for each in held) / attended(row, window) for held in rows]
    assert found.core == pytest.approx(math.fsum(cores) / len(cores), rel=edge)
