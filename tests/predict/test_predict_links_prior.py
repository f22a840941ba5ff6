"""Laws of links that nobody measured: learned again from the published times, and their shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.accuracy.unit_links import FILE, published
from evaluation.cost.collectives import (
    between_nodes,
    bus_rings,
    coefficients,
    exchanges,
    inside_nodes,
    left_out_rows,
    on_buses,
    rings,
    sends,
)
from hetplan.cluster.spec import Link, Transport
from hetplan.lint.rows import CollectiveRow
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.link import prior

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
needs_table = pytest.mark.skipif(
    not (REFERENCE / FILE).is_file(), reason="published measurements are not here"
)
ON_PAPER = FittedPredictor.datasheet_only()
NVLINK = Link(
    bandwidth_bytes_per_second=300e9, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
NIC = replace(NVLINK, bandwidth_bytes_per_second=25e9, latency_seconds=5e-6)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
REPEATABLE = settings(derandomize=True, deadline=None, max_examples=100)


@pytest.fixture(scope="module")
def rows() -> tuple[CollectiveRow, ...]:
    return published(REFERENCE)


@needs_table
def test_the_constants_are_what_the_published_times_say(rows: tuple[CollectiveRow, ...]) -> None:
    found = coefficients(rings, [*inside_nodes(rows, "all_reduce"), *between_nodes(rows)])
    assert found == pytest.approx(
        (
            prior.NODE.base_seconds,
            prior.NETWORK.base_seconds,
            prior.NODE.step_seconds,
            prior.NETWORK.crossing_seconds,
            prior.NODE.bytes,
            prior.NODE.bytes_over_ranks,
            prior.NETWORK.bytes,
        ),
        rel=5e-3,
    )
    of_a100 = [each for each in inside_nodes(rows, "send_recv") if "A100" in each.source]
    of_pcie3 = [each for each in on_buses(rows, "send_recv") if "3090" not in each.source]
    for form, points, law in (
        (exchanges, inside_nodes(rows, "all_to_all"), prior.NODE_EXCHANGE),
        (bus_rings, on_buses(rows, "all_reduce"), prior.BUS),
        (exchanges, on_buses(rows, "all_to_all"), prior.BUS_EXCHANGE),
    ):
        constants = law.base_seconds, law.step_seconds, law.bytes, law.bytes_over_ranks
        assert coefficients(form, points) == pytest.approx(constants, rel=5e-3)
    for points, send in ((of_a100, prior.NODE_SEND), (of_pcie3, prior.BUS_SEND)):
        assert coefficients(sends, points) == pytest.approx(
            (send.base_seconds, send.bytes), rel=5e-3
        )


@needs_table
def test_half_widths_are_those_of_what_was_left_out(rows: tuple[CollectiveRow, ...]) -> None:
    every = left_out_rows(rows)
    found = every[every["left_out"] == "each in turn"].set_index("law")
    said = {
        "all_reduce inside a node": prior.NODE,
        "all_reduce between nodes": prior.NETWORK,
        "all_to_all inside a node": prior.NODE_EXCHANGE,
        "send_recv inside a node": prior.NODE_SEND,
        "all_reduce on a bus": prior.BUS,
        "all_to_all on a bus": prior.BUS_EXCHANGE,
    }
    assert set(found.index) == set(said)
    for name, law in said.items():
        assert found["log_halfwidth"][name] == pytest.approx(law.log_halfwidth, abs=0.01)
    # Measured: 15.6 and 8.6 % mean, 10.0 and 4.9 % median.
    assert found["mean_error"]["all_reduce inside a node"] < 0.17
    assert found["median_error"]["all_reduce inside a node"] < 0.11
    assert found["mean_error"]["all_reduce between nodes"] < 0.10


@REPEATABLE
@given(
    st.sampled_from(OPERATIONS),
    st.integers(1, 64),
    st.integers(1, 16),
    st.floats(0, 1e11),
    st.floats(1, 100),
    st.floats(0, 0.1),
)
def test_more_bytes_slower_links_and_more_latency_never_take_less(
    operation: str, nodes: int, each: int, size: float, larger: float, latency: float
) -> None:
    ranks = nodes * each
    if ranks < 2:
        return

    def seconds(link: Link, message: float) -> float:
        return ON_PAPER.collective(link, operation, ranks, message, nodes=nodes).seconds

    base = seconds(NIC, size)
    # No message is faster than the call.
    assert base >= min(prior.NODE.base_seconds, prior.NODE_EXCHANGE.base_seconds)
    assert seconds(NIC, size * larger) >= base
    slower = replace(NIC, bandwidth_bytes_per_second=25e9 / larger)
    assert seconds(slower, size) >= base
    assert seconds(replace(NIC, latency_seconds=5e-6 + latency), size) >= base
