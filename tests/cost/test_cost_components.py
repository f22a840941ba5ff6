from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import island, job
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import MIN_VOLTAGE, STATIC_POWER, HostInterface, capped_clock_ratio
from hetplan.cost.components.step import (
    HOST_INTERFACE_EFFICIENCY,
    HOST_UPDATE_BYTES_PER_SECOND,
    ComponentCost,
    clips_gradients,
    clock,
    clock_factor,
    data_loading,
    gradient_norm,
    host_optimizer,
    host_update_seconds,
    nothing,
    of_terms,
    offloaded_update,
    optimizer,
)
from hetplan.cost.estimate_values import Component
from hetplan.cost.terms import Term, seconds_of
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.predict.datasheet import ELEMENTWISE_EFFICIENCY_BACKWARD, optimizer_update
from hetplan.predict.predictor import Prediction

PLACE = island("a")
HOSTED = replace(PLACE.device, host=HostInterface(pcie_generation=4, lanes=16))


def term(seconds: float, halfwidth: float = 0.2, cause: str = "fast") -> Term:
    prediction = Prediction(seconds=seconds, log_halfwidth=halfwidth, source="measured")
    return Term(what="work", cause=cause, count=1, prediction=prediction)


def test_zero_only_with_a_reason():
    with pytest.raises(InputError, match="data loading is zero and does not say why"):
        ComponentCost(component=Component.DATA_LOADING, seconds=0.0)
    assert nothing(Component.NORM, "because").note == "because"
    assert of_terms(Component.NORM, ()).note
    assert of_terms(Component.NORM, (term(0.0),)).note == "predicted to take no time"


def test_data_loading_is_what_the_job_says():
    assert data_loading(job(data_loading_seconds=0.25)).seconds == 0.25
    free = data_loading(job())
    assert free.seconds == 0
    assert "prefetched" in free.note


# ---- optimizer in host memory


def test_transfers_and_update_by_hand():
    down, update, up = host_update_seconds(
        HOSTED,
        Optimizer.ADAMW,
        Precision.BFLOAT16,
        1e9,
        devices_per_host=8,
        gradient_bytes=4,
        parameter_bytes=2,
    )
    rate = 16 * 16e9 * 128 / 130 / 8 * HOST_INTERFACE_EFFICIENCY  # PCIe 4.0 x16
    assert down == pytest.approx(4e9 / rate)
    assert up == pytest.approx(2e9 / rate)
    assert update == pytest.approx(8 * 30e9 / HOST_UPDATE_BYTES_PER_SECOND)


sizes = st.floats(1e3, 1e11)


@settings(max_examples=100, deadline=None)
@given(parameters=sizes, devices=st.integers(1, 16), pieces=st.integers(1, 100))
def test_pieces_work_at_the_same_time(parameters, devices, pieces):
    def cost(count: int) -> ComponentCost:
        return host_optimizer(
            HOSTED,
            job(),
            parameters,
            devices_per_host=devices,
            gradient_bytes=4,
            parameter_bytes=4,
            pieces=count,
        )

    parts = host_update_seconds(
        HOSTED,
        Optimizer.ADAMW,
        Precision.FLOAT32,
        parameters,
        devices_per_host=devices,
        gradient_bytes=4,
        parameter_bytes=4,
    )
    found = cost(pieces)
    assert max(parts) <= found.seconds * (1 + 1e-12)
    assert found.seconds <= sum(parts) * (1 + 1e-12)
    assert found.seconds + found.hidden_seconds == pytest.approx(sum(parts))
    assert cost(1).hidden_seconds == 0
    assert cost(pieces + 1).seconds <= found.seconds * (1 + 1e-12)
    assert seconds_of(found.terms) == pytest.approx(found.seconds)
    # The line of three stations, piece by piece.
    ends = [0.0, 0.0, 0.0]
    for _ in range(pieces):
        for at, part in enumerate(parts):
            ends[at] = max(ends[at], ends[at - 1] if at else 0.0) + part / pieces
    assert found.seconds == pytest.approx(ends[-1])


def test_an_offloaded_part_leaves_the_device_the_rest():
    place = replace(PLACE, device=HOSTED)
    whole = term(1.0)
    kept, host = offloaded_update(place, job(), 1e9, 0.25, whole)
    assert (kept.component, kept.seconds) == (Component.OPTIMIZER, 0.75)
    assert host.component is Component.OFFLOAD
    all_kept, all_host = offloaded_update(place, job(), 1e9, 1.0, whole)
    assert all_kept.seconds == 0
    assert "host memory" in all_kept.note
    assert all_host.seconds == pytest.approx(4 * host.seconds)
    none = offloaded_update(place, job(), 1e9, 0.0, whole)
    assert [cost.seconds for cost in none] == [1.0, 0.0]
    assert optimizer(whole).seconds == 1.0
    with pytest.raises(InputError, match="has no host interface"):
        offloaded_update(PLACE, job(), 1e9, 0.5, whole)


# ---- gradient norm


def test_who_clips():
    assert not clips_gradients(job())
    assert clips_gradients(job(target="megatron"))
    assert not clips_gradients(job(target="megatron", gradient_clipping=False))
    assert clips_gradients(job(gradient_clipping=True))


def test_the_norm_is_passes_over_memory_and_a_sum():
    sums = (term(2e-4, cause="link"),)
    asked = job(target="megatron", precision=Precision.BFLOAT16)
    update = Prediction(seconds=1.0, log_halfwidth=0.1, source="measured")
    found = gradient_norm(PLACE.device, asked, 1e9, 4, update, sums)
    local = 12e9 / (1e12 * ELEMENTWISE_EFFICIENCY_BACKWARD)
    assert found.seconds == pytest.approx(local + 2e-4)
    assert [each.cause for each in found.terms] == ["fast", "link"]
    # A datasheet's update in 16 bit has the reading pass in its bytes.
    prior = optimizer_update(PLACE.device, Optimizer.ADAMW, 1e9, Precision.BFLOAT16)
    counted = gradient_norm(PLACE.device, asked, 1e9, 4, prior, sums)
    assert counted.seconds == pytest.approx(local * 2 / 3 + 2e-4)
    assert "optimizer's bytes" in counted.note
    # Loss scaling sums a second scalar.
    half = replace(asked, precision=Precision.FLOAT16)
    assert gradient_norm(PLACE.device, half, 1e9, 4, update, sums).seconds == pytest.approx(
        local + 4e-4
    )
    for why in (job(), replace(asked, gradient_clipping=False)):
        none = gradient_norm(PLACE.device, why, 1e9, 4, update, sums)
        assert none.seconds == 0
        assert "not clip" in none.note


def test_without_a_bandwidth_the_update_says_how_fast_memory_is():
    core = replace(PLACE.device, memory_bandwidth_bytes_per_second=0.0)
    asked = job(gradient_clipping=True)
    update = Prediction(seconds=28.0, log_halfwidth=0.1, source="measured")
    found = gradient_norm(core, asked, 1e9, 4, update, ())
    assert found.seconds == pytest.approx(12.0)
    assert found.terms[0].prediction.log_halfwidth > 0.1
    empty = gradient_norm(core, asked, 0.0, 4, replace(update, seconds=0.0), (term(1e-3),))
    assert empty.seconds == 1e-3


# ---- clocks


@settings(max_examples=200, deadline=None)
@given(power=st.floats(STATIC_POWER + 0.01, 1.0))
def test_the_clock_under_a_cap_draws_the_cap(power):
    ratio = capped_clock_ratio(power)
    assert 0 < ratio <= 1
    drawn = STATIC_POWER + (1 - STATIC_POWER) * ratio * max(ratio, MIN_VOLTAGE) ** 2
    assert drawn == pytest.approx(power)
    assert capped_clock_ratio(min(1.0, power * 1.01)) >= ratio
    if power >= 0.5:
        # A cap costs less of the clock than it takes of the power.
        assert ratio >= power - 1e-12


def test_clocks_of_islands():
    boarded = replace(PLACE.device, max_power_watts=400.0)
    plain = replace(PLACE, device=boarded)
    assert clock(plain) == clock(replace(plain, power_cap_watts=400.0))
    assert clock_factor(plain) == 1.0
    assert clock(plain).notes == ()
    slow = replace(plain, clock_ratio=0.8)
    assert clock_factor(slow) == pytest.approx(1.25)
    assert clock_factor(slow, compute_share=0.4) == pytest.approx(1.1)
    capped = replace(slow, power_cap_watts=300.0)
    assert clock(capped).ratio == pytest.approx(0.8 * capped_clock_ratio(0.75))
    assert len(clock(capped).notes) == 2
    with pytest.raises(InputError, match="without computing"):
        clock(replace(plain, power_cap_watts=30.0))
    unknown = replace(PLACE, power_cap_watts=300.0)
    assert clock_factor(unknown) == 1.0
    assert "not priced" in clock(unknown).notes[0]
