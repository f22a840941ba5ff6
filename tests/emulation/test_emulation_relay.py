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


def sent(line: Line, gaps: list[tuple[float, int]]) -> list[tuple[float, float, int]]:
    """(came, goes out, bytes) of what was accepted."""
    now, found = 0.0, []
    for gap, size in gaps:
        now += gap
        if line.accept(now, size, 7, bytes(size)):
            found.append((now, line.held[-1][0], size))
    return found


def a_line() -> Line:
    return Line(rate_bytes_per_second=RATE, delay_seconds=DELAY, buffer_bytes=BUFFER)


@given(arrivals)
def test_no_frame_is_early_and_order_holds(gaps: list[tuple[float, int]]) -> None:
    found = sent(a_line(), gaps)
    for came, out, size in found:
        assert out >= came + size / RATE + DELAY - 1e-12
    assert [out for _, out, _ in found] == sorted(out for _, out, _ in found)


@given(arrivals)
def test_between_any_two_frames_the_rate_is_never_exceeded(gaps: list[tuple[float, int]]) -> None:
    found = sent(a_line(), gaps)
    for first in range(len(found)):
        carried = 0
        for _, out, size in found[first + 1 :]:
            carried += size
            assert carried <= RATE * (out - found[first][1]) * (1 + 1e-9) + 1e-6


@given(arrivals)
def test_the_line_is_never_idle_while_something_waits(gaps: list[tuple[float, int]]) -> None:
    free = 0.0
    for came, out, size in sent(a_line(), gaps):
        assert out == pytest.approx(max(came, free) + size / RATE + DELAY, rel=1e-12)
        free = out - DELAY


@given(arrivals)
def test_a_frame_is_dropped_exactly_when_it_finds_the_buffer_full(
    gaps: list[tuple[float, int]],
) -> None:
    line, now = a_line(), 0.0
    for gap, size in gaps:
        now += gap
        waiting = max(0.0, line.free_at - now) * RATE
        assert line.accept(now, size, 0, bytes(size)) == (waiting + size <= BUFFER)


@given(arrivals)
def test_what_goes_in_comes_out_once_and_memory_is_given_back(
    gaps: list[tuple[float, int]],
) -> None:
    line = a_line()
    found = sent(line, gaps)
    sizes = []
    while (at := line.next_at) is not None:
        assert line.due(at - 1e-9) is None
        out = line.due(at)
        assert out is not None
        assert out[0] == 7
        sizes.append(len(out[1]))
    assert sizes == [size for _, _, size in found]
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
