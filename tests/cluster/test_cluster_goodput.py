import csv
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.links import (
    LossRecovery,
    go_back_n_efficiency,
    goodput_bytes_per_second,
    loss_limit,
    window_limit,
)
from hetplan.cluster.spec import Link, Transport
from hetplan.errors import InputError
from hetplan.predict.link import prior
from hetplan.profiling.samples import LinkOperation

REFERENCE = Path(
    os.environ.get("HETPLAN_REFERENCE", Path(__file__).resolve().parents[3] / "shared/reference")
)
PAIRS = REFERENCE / "unit" / "wan_city_pairs.csv"

steady = settings(derandomize=True, deadline=None, max_examples=200)

GBIT = 1e9 / 8


@pytest.mark.skipif(not PAIRS.is_file(), reason=f"no reference data at {PAIRS}")
def test_the_window_law_fits_45_city_pairs():
    with PAIRS.open() as file:
        rows = [
            (float(row["rtt_or_delay_ms_as_published"]) / 1e3, float(row["bandwidth_gbit_per_s"]))
            for row in csv.DictReader(file)
        ]
    assert len(rows) == 45

    def mean_error(window_bytes: float | None) -> float:
        errors = []
        for round_trip, gbit in rows:
            found = goodput_bytes_per_second(
                1.05 * GBIT, round_trip_seconds=round_trip, window_bytes=window_bytes
            )
            errors.append(abs(found / GBIT / gbit - 1))
        return math.fsum(errors) / len(errors)

    assert mean_error(77e6 / 8) == pytest.approx(0.133, abs=0.002)
    assert mean_error(None) > 0.6  # a line without windows would carry 1.05 Gbit/s everywhere


def test_each_limit_by_hand():
    # 100 Mbit under way per 100 ms is 1 Gbit/s.
    assert window_limit(100e6 / 8, 0.1) == pytest.approx(GBIT)
    # 1460 B * 1.22 / (0.1 s * sqrt(1e-4)).
    assert loss_limit(1e-4, 0.1, 1460.0) == pytest.approx(1_781_200.0)
    figures = {"round_trip_seconds": 0.1, "window_bytes": 100e6 / 8, "loss": 1e-4}
    assert goodput_bytes_per_second(10 * GBIT, **figures) == pytest.approx(1_781_200.0)
    assert goodput_bytes_per_second(10 * GBIT, streams=10, **figures) == pytest.approx(17_812_000.0)
    assert goodput_bytes_per_second(10 * GBIT, round_trip_seconds=0.1) == 10 * GBIT
    assert goodput_bytes_per_second(
        10 * GBIT, round_trip_seconds=0.1, oversubscription=32
    ) == pytest.approx(10 * GBIT / 32)


FIGURES = st.fixed_dictionaries(
    {
        "round_trip_seconds": st.floats(0, 1),
        "oversubscription": st.floats(1, 100),
        "streams": st.none() | st.integers(1, 1000),
        "window_bytes": st.none() | st.floats(1e3, 1e9),
        "loss": st.none() | st.floats(0, 0.5),
        "segment_bytes": st.floats(100, 9000),
        "loss_recovery": st.sampled_from(LossRecovery),
    }
)


@given(share=st.floats(1e3, 1e12), figures=FIGURES, factor=st.floats(1, 100))
@steady
def test_a_better_link_is_never_slower(share, figures, factor):
    before = goodput_bytes_per_second(share, **figures)
    assert 0 < before <= share
    for change in (
        {"round_trip_seconds": figures["round_trip_seconds"] / factor},
        {"streams": int((figures["streams"] or 1) * factor)},
        {"oversubscription": max(1.0, figures["oversubscription"] / factor)},
        {"window_bytes": None},
        {"loss": None},
        {"segment_bytes": figures["segment_bytes"] * factor},
        {"window_bytes": figures["window_bytes"] and figures["window_bytes"] * factor},
        {"loss": figures["loss"] and figures["loss"] / factor},
    ):
        after = goodput_bytes_per_second(share, **(figures | change))
        assert after >= before * (1 - 1e-12), change
    assert goodput_bytes_per_second(share * factor, **figures) >= before


def test_go_back_n_by_hand():
    # 50 GB/s over 0.25 ms (50 km there and back) with packets of 4 KiB: 3,052 under way. One loss
    # in 10,000 costs 0.9999 / (1 + 1e-4 * 3051) of it; one in 100 million next to nothing.
    figures = {
        "round_trip_seconds": 0.25e-3,
        "segment_bytes": 4096.0,
        "loss_recovery": LossRecovery.GO_BACK_N,
    }
    under_way = 50e9 * 0.25e-3 / 4096
    expected = 50e9 * (1 - 1e-4) / (1 + 1e-4 * (under_way - 1))
    assert goodput_bytes_per_second(50e9, loss=1e-4, **figures) == pytest.approx(expected)
    assert expected / 50e9 == pytest.approx(0.766, abs=0.001)
    assert goodput_bytes_per_second(50e9, loss=1e-8, **figures) > 0.9999 * 50e9
    # Each of many streams has fewer packets to resend.
    many = goodput_bytes_per_second(50e9, loss=1e-4, streams=64, **figures)
    assert many / 50e9 == pytest.approx(go_back_n_efficiency(1e-4, under_way / 64))
    figures["loss_recovery"] = LossRecovery.SELECTIVE
    assert goodput_bytes_per_second(50e9, loss=1e-4, **figures) == pytest.approx(50e9 * (1 - 1e-4))


def sent_with_go_back_n(loss: float, window: int, packets: int, rng: random.Random) -> int:
    """Packets that a sender with a full window sends until so many have arrived in order."""
    sent = arrived = 0
    while arrived < packets:
        if rng.random() < loss:
            sent += window  # the lost one and all that follow it before its sender knows
        else:
            sent += 1
            arrived += 1
    return sent


@pytest.mark.parametrize("loss", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("window", [1, 8, 100])
def test_go_back_n_is_what_a_sender_that_starts_again_gets(loss, window):
    rng = random.Random(f"{loss} {window}")
    packets = 100_000
    found = packets / sent_with_go_back_n(loss, window, packets, rng)
    assert found == pytest.approx(go_back_n_efficiency(loss, window), rel=0.04)


LONG = Link(
    bandwidth_bytes_per_second=10 * GBIT,
    latency_seconds=0.015,
    transport=Transport.HOST_STAGED,
    shared_bandwidth_bytes_per_second=40 * GBIT,
    streams=4,
    window_bytes=16 * 2**20,
    loss=1e-7,
)


def test_predictions_from_figures_use_the_goodput():
    goodput = LONG.goodput_bytes_per_second
    # Four windows of 16 MiB in 30 ms; the loss allows 4 * 1460 * 1.22 / (.03 * sqrt(1e-7)).
    assert goodput == pytest.approx(min(4 * 16 * 2**20 / 0.03, 7124.8 / (0.03 * 1e-7**0.5)))
    assert prior.send(LONG).seconds_per_byte == 1 / goodput
    told = prior.collective(LONG, LinkOperation.ALL_REDUCE.value, 2, 1e9)
    assert told.seconds == pytest.approx(2 * (0.015 + 0.5e9 / goodput))


@given(senders=st.integers(1, 10_000))
@steady
def test_senders_share_a_capacity_and_nothing_else(senders):
    link = LONG.among(senders)
    assert link.bandwidth_bytes_per_second == min(10 * GBIT, 40 * GBIT / senders)
    total = senders * link.bandwidth_bytes_per_second
    assert total <= 40 * GBIT * (1 + 1e-12)
    assert LONG.among(senders + 1).goodput_bytes_per_second <= link.goodput_bytes_per_second


def test_a_link_refuses_impossible_figures():
    for field, wrong in (
        ("shared_bandwidth_bytes_per_second", 0.0),
        ("window_bytes", math.inf),
        ("segment_bytes", -1.0),
        ("price_usd_per_byte", -1.0),
        ("oversubscription", 0.5),
        ("streams", 0),
        ("loss", 1.0),
    ):
        with pytest.raises(InputError, match=field):
            Link(
                bandwidth_bytes_per_second=1.0,
                latency_seconds=0.0,
                transport=Transport.HOST_STAGED,
                **{field: wrong},
            )


def test_without_loss_nothing_is_resent_however_much_is_under_way() -> None:
    assert go_back_n_efficiency(0.0, math.inf) == 1.0
    figure = goodput_bytes_per_second(
        1e12, round_trip_seconds=1e300, loss_recovery=LossRecovery.GO_BACK_N
    )
    assert figure == 1e12
