"""How fast a long transfer over a link goes: the least of its share, its window and its losses.

    goodput = min(share / oversubscription,
                  streams * window / round trip,
                  streams * segment * 1.22 / (round trip * sqrt(loss)))

The window law is the bandwidth-delay product: a stream has at most its window under way in one
round trip. Over 45 pairs of cities (round trips of 11 to 265 ms, published with DT-FM, NeurIPS
2022) min(1.05 Gbit/s, 77 Mbit / round trip) has a mean error of 13 %, a constant 48 %. The loss law
is that of Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion Avoidance
Algorithm (1997): it holds for Reno-like congestion control; senders that tolerate loss (BBR) are
faster, and RoCE with go-back-N is slower from a loss of about 1e-5 on.
"""

from __future__ import annotations

import math
import sys

MATHIS_CONSTANT = 1.22
"""sqrt(3 / 2) for periodic loss and an acknowledgement per segment, as the paper rounds it."""

ETHERNET_SEGMENT_BYTES = 1460.0
"""Payload of a TCP segment in an Ethernet frame: 1500 bytes less 20 of IPv4 and 20 of TCP."""


def goodput_bytes_per_second(
    share_bytes_per_second: float,
    *,
    round_trip_seconds: float,
    oversubscription: float = 1.0,
    streams: int | None = None,
    window_bytes: float | None = None,
    loss: float | None = None,
    segment_bytes: float = ETHERNET_SEGMENT_BYTES,
) -> float:
    """Bytes per second that one sender of long messages gets.

    `share_bytes_per_second` is its part of the capacity, `loss` the fraction of packets that are
    lost. What is None limits nothing; without streams of its own a sender has one.
    """
    count = streams or 1
    least = min(
        share_bytes_per_second / oversubscription,
        count * window_limit(window_bytes, round_trip_seconds),
        count * loss_limit(loss, round_trip_seconds, segment_bytes),
    )
    return max(least, sys.float_info.min)  # callers divide by it


def window_limit(window_bytes: float | None, round_trip_seconds: float) -> float:
    """Bytes per second of one stream that may have this much under way; infinite without one."""
    if window_bytes is None or round_trip_seconds == 0:
        return math.inf
    return window_bytes / round_trip_seconds


def loss_limit(loss: float | None, round_trip_seconds: float, segment_bytes: float) -> float:
    """Bytes per second of one stream that loses this fraction of its packets (Mathis et al.)."""
    if not loss or round_trip_seconds == 0:
        return math.inf
    return segment_bytes * MATHIS_CONSTANT / round_trip_seconds / math.sqrt(loss)
