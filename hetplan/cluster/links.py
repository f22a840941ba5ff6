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

What a link between two devices carries: its figures, what limits them, who shares them.

Which link two devices have is the cluster's to say (`hetplan.cluster.spec`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from hetplan.files.quantities import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    check_limits,
)

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


class Transport(StrEnum):
    """How bytes cross a link.

    device-direct: the accelerator's own library (nccl, rccl, hccl, ...) moves device memory.
    host-staged: copied to host memory, sent by gloo, copied back; works between any two kinds.
    """

    DEVICE_DIRECT = "device-direct"
    HOST_STAGED = "host-staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path between two devices, one direction."""

    bandwidth_bytes_per_second: Positive
    """One device's: what it can count on while the others send too, but for what they share with it
    (`shared_bandwidth_bytes_per_second`, `by_senders_bytes_per_second`)."""
    latency_seconds: NonNegative
    """From the first byte sent to the first byte received; half a round trip."""
    transport: Transport
    samples: str | None = None
    """Name of measured link samples in the profile store that replace the figures."""
    shared_bandwidth_bytes_per_second: Positive | None = None
    """Capacity that all devices which send over the link at one time share (`among`); None: no
    limit beyond each device's own share."""
    by_senders_bytes_per_second: tuple[Positive, ...] = ()
    """What the NICs of a node leave each of one, two, ... of its devices that send at one time,
    which fill it in order; empty: no limit beyond each device's own."""
    one_peer_bytes_per_second: Positive | None = None
    """Of one device to one other, where it has a link of its own to each (a full mesh, as xGMI and
    HCCS): its bandwidth is that of all of them together; None: all of it to any."""
    oversubscription: Annotated[float, Field(ge=1, lt=math.inf)] = 1.0
    """How many times what may be sent exceeds what the path carries; bandwidths are divided."""
    streams: Count | None = None
    """Connections of one device's transfer; None: not limited by them."""
    window_bytes: Positive | None = None
    """Most bytes of one stream that are under way."""
    loss: Fraction | None = None
    """Fraction of packets that are lost."""
    segment_bytes: Positive = ETHERNET_SEGMENT_BYTES
    """Payload of one packet."""
    loss_recovery: LossRecovery = LossRecovery.RENO
    """What senders do about lost packets."""
    price_usd_per_byte: NonNegative | None = None
    """What a byte that crosses the link costs."""
    compute_share: Fraction = 0.0
    """Part of a device's compute units that a transfer over the link takes while it runs; 0 for
    transports that copy without them."""
    equal_cost_paths: Count | None = None
    """Parallel paths to which flows are hashed. Some collide; None: none do."""
    measured: bool = False
    """Whether bandwidth and latency are what collectives or sends over the link reached, so that
    time = steps * (latency + bytes / bandwidth); otherwise they are the hardware's figures, of
    which a device-direct transfer reaches a part."""

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def round_trip_seconds(self) -> float:
        """There and back."""
        return 2.0 * self.latency_seconds

    @property
    def goodput_bytes_per_second(self) -> float:
        """What one device's long messages reach: its share, windows and losses considered."""
        return goodput_bytes_per_second(
            self.bandwidth_bytes_per_second,
            round_trip_seconds=self.round_trip_seconds,
            oversubscription=self.oversubscription,
            streams=self.streams,
            window_bytes=self.window_bytes,
            loss=self.loss,
            segment_bytes=self.segment_bytes,
            loss_recovery=self.loss_recovery,
        )

    def to_peers(self, count: int) -> Link:
        """The link as a device finds it that sends to so many others at the same time."""
        pair = self.one_peer_bytes_per_second
        if pair is None or pair * count >= self.bandwidth_bytes_per_second:
            return self
        return replace(self, bandwidth_bytes_per_second=pair * count)

    def among(self, senders: int) -> Link:
        """The link as each of so many devices that send at the same time finds it."""
        shared, ports = self.shared_bandwidth_bytes_per_second, self.by_senders_bytes_per_second
        own = self.bandwidth_bytes_per_second
        left = own if shared is None else min(own, shared / senders)
        if ports:
            left = min(left, ports[min(senders, len(ports)) - 1])
        return self if left >= own else replace(self, bandwidth_bytes_per_second=left)
