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
)
from hetplan.cluster.spec import Link, Transport

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


@given(senders=st.integers(1, 10_000))
@steady
def test_senders_share_a_capacity_and_nothing_else(senders):
    link = LONG.among(senders)
    assert link.bandwidth_bytes_per_second == min(10 * GBIT, 40 * GBIT / senders)
    total = senders * link.bandwidth_bytes_per_second
    assert total <= 40 * GBIT * (1 + 1e-12)
    assert LONG.among(senders + 1).goodput_bytes_per_second <= link.goodput_bytes_per_second


def test_without_loss_nothing_is_resent_however_much_is_under_way() -> None:
    assert go_back_n_efficiency(0.0, math.inf) == 1.0
    figure = goodput_bytes_per_second(
        1e12, round_trip_seconds=1e300, loss_recovery=LossRecovery.GO_BACK_N
    )
    assert figure == 1e12
