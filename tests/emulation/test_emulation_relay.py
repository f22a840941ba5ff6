"""A line keeps order, rate, delay and bounds, whatever comes when."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.emulation.relay import (
    FRAME_OVERHEAD_BYTES,
    MAX_HELD_BYTES,
    Line,
    wire_bytes,
)

RATE, DELAY, BUFFER = 1e6, 0.01, 20_000

arrivals = st.lists(st.tuples(st.floats(0.0, 0.01), st.integers(60, 9000)), min_size=1, max_size=60)


def a_line() -> Line:
    return Line(rate_bytes_per_second=RATE, delay_seconds=DELAY, buffer_bytes=BUFFER)


@given(arrivals)
def test_a_frame_waits_for_those_before_it_and_is_dropped_when_the_buffer_is_full(
    gaps: list[tuple[float, int]],
) -> None:
    """So none is early, order holds, and the rate is reached and never exceeded."""
    line, now, free = a_line(), 0.0, 0.0
    for gap, size in gaps:
        now += gap
        begins = max(now, free)
        fits = (begins - now) * RATE + size <= BUFFER
        assert line.accept(now, size, 7, bytes(size)) == fits
        if fits:
            free = begins + size / RATE
            assert line.held[-1][0] == pytest.approx(free + DELAY, rel=1e-12)


@given(arrivals)
def test_what_goes_in_comes_out_once_and_memory_is_given_back(
    gaps: list[tuple[float, int]],
) -> None:
    line, now, accepted, sizes = a_line(), 0.0, [], []
    for gap, size in gaps:
        now += gap
        if line.accept(now, size, 7, bytes(size)):
            accepted.append(size)
    while (at := line.next_at) is not None:
        assert line.due(at - 1e-9) is None
        out = line.due(at)
        assert out is not None
        assert out[0] == 7
        sizes.append(len(out[1]))
    assert sizes == accepted
    assert line.held_bytes == 0


def test_memory_is_bounded_whatever_the_file_asks_for() -> None:
    line = Line(rate_bytes_per_second=1e12, delay_seconds=1000.0, buffer_bytes=1e18)
    frame = bytes(1 << 20)
    accepted = sum(line.accept(0.0, len(frame), 0, frame) for _ in range(400))
    assert accepted == MAX_HELD_BYTES // ((1 << 20) + FRAME_OVERHEAD_BYTES)


@pytest.mark.parametrize(
    ("payload", "segment", "frames"),
    [(1448, 0, 1), (1448, 1448, 1), (1449, 1448, 2), (64000, 1448, 45)],
)
def test_a_super_packet_counts_as_the_frames_that_a_port_would_send(
    payload: int, segment: int, frames: int
) -> None:
    headers = 66
    header = struct.pack("=BBHHHH", 1, 1, headers, segment, 34, 16)
    assert wire_bytes(header + bytes(headers + payload), 10) == payload + frames * headers
