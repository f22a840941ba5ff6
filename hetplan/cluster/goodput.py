"""How fast a long transfer over a link goes: the least of its share, its window and its losses.

    goodput = min(share / oversubscription,
                  streams * window / round trip,
                  streams * segment * 1.22 / (round trip * sqrt(loss)))

The window law is the bandwidth-delay product: a stream has at most its window under way in one
round trip. Over 45 pairs of cities (round trips of 11 to 265 ms, published with DT-FM, NeurIPS
2022) min(1.05 Gbit/s, 77 Mbit / round trip) has a mean error of 13 %, a constant 48 %. The loss law
above is that of Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion
Avoidance Algorithm (1997): it holds for Reno-like congestion control.

RoCE NICs that resend everything after a lost packet (go-back-N) have another law. Each of
the streams has N packets under way, and a packet of loss p costs them all once more:

    goodput = rate without loss * (1 - p) / (1 + p * (N - 1)),    N = rate * round trip / segment

which halves the rate where p * N is about 1 (throughput of go-back-N: Bertsekas and Gallager, Data
Networks, 2nd edition, section 2.4). Senders that do not slow down for losses (BBR, or selective
repeat) lose only what they send twice, 1 - p.
"""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from functools import lru_cache

MATHIS_CONSTANT = 1.22
"""sqrt(3 / 2) for periodic loss and an acknowledgement per segment, as the paper rounds it."""

ETHERNET_SEGMENT_BYTES = 1460.0
"""Payload of a TCP segment in an Ethernet frame: 1500 bytes less 20 of IPv4 and 20 of TCP."""


class LossRecovery(StrEnum):
    """What a sender does about lost packets."""

    RENO = "reno"
    """Slows down: TCP with Reno-like congestion control."""
    GO_BACK_N = "go-back-n"
    """Sends everything after the lost packet again: RoCE NICs."""
    SELECTIVE = "selective"
    """Sends the lost packet again and goes on as fast as before: BBR, newer RDMA NICs."""


@lru_cache(maxsize=16384)
def goodput_bytes_per_second(
    share_bytes_per_second: float,
    *,
    round_trip_seconds: float,
    oversubscription: float = 1.0,
    streams: int | None = None,
    window_bytes: float | None = None,
    loss: float | None = None,
    segment_bytes: float = ETHERNET_SEGMENT_BYTES,
    loss_recovery: LossRecovery = LossRecovery.RENO,
) -> float:
    """Bytes per second that one sender of long messages gets.

    `share_bytes_per_second` is its part of the capacity, `loss` the fraction of packets that are
    lost. What is None limits nothing; without streams of its own a sender has one.
    """
    count = streams or 1
    least = min(
        share_bytes_per_second / oversubscription,
        count * window_limit(window_bytes, round_trip_seconds),
    )
    if loss_recovery is LossRecovery.RENO:
        least = min(least, count * loss_limit(loss, round_trip_seconds, segment_bytes))
    elif loss_recovery is LossRecovery.GO_BACK_N:
        under_way = least / count * round_trip_seconds / segment_bytes
        least *= go_back_n_efficiency(loss or 0.0, under_way)
    else:
        least *= 1.0 - (loss or 0.0)
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


def go_back_n_efficiency(loss: float, packets_under_way: float) -> float:
    """Part of the rate without losses that a sender keeps which resends all that is under way."""
    if loss == 0:
        return 1.0  # also where infinitely many are under way
    return (1.0 - loss) / (1.0 + loss * (max(packets_under_way, 1.0) - 1.0))
