"""What a link between two devices carries: its figures, what limits them, who shares them.

Which link two devices have is the cluster's to say (`hetplan.cluster.spec`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from hetplan.cluster.goodput import (
    ETHERNET_SEGMENT_BYTES,
    LossRecovery,
    goodput_bytes_per_second,
)
from hetplan.errors import InputError


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

    bandwidth_bytes_per_second: float
    """One device's share: what it can count on while the others send too."""
    latency_seconds: float
    """From the first byte sent to the first byte received; half a round trip."""
    transport: Transport
    samples: str | None = None
    """Name of measured link samples in the profile store that replace the figures."""
    shared_bandwidth_bytes_per_second: float | None = None
    """Capacity that all devices which send over the link at one time share (`among`); None: no
    limit beyond each device's own share."""
    oversubscription: float = 1.0
    """How many times what may be sent exceeds what the path carries; bandwidths are divided."""
    streams: int | None = None
    """Connections that one device's transfer uses at the same time; None: not limited by them."""
    window_bytes: float | None = None
    """Most bytes of one stream that are under way."""
    loss: float | None = None
    """Fraction of packets that are lost."""
    segment_bytes: float = ETHERNET_SEGMENT_BYTES
    """Payload of one packet."""
    loss_recovery: LossRecovery = LossRecovery.RENO
    """What senders do about lost packets."""
    price_usd_per_byte: float | None = None
    """What a byte that crosses the link costs."""
    compute_share: float = 0.0
    """Part of a device's compute units that a transfer over the link takes while it runs; 0 for
    transports that copy without them."""
    equal_cost_paths: int | None = None
    """Parallel paths to which flows are assigned by hash, so that some collide; None: none do."""
    measured: bool = False
    """Whether bandwidth and latency are what collectives or sends over the link reached, so that
    time = steps * (latency + bytes / bandwidth); otherwise they are the hardware's figures, of
    which a device-direct transfer reaches a part."""

    def __post_init__(self) -> None:
        for field in (
            "bandwidth_bytes_per_second",
            "shared_bandwidth_bytes_per_second",
            "window_bytes",
            "segment_bytes",
        ):
            figure = getattr(self, field)
            if figure is not None and not 0 < figure < math.inf:
                raise InputError(f"{field} is {figure}; it must be above 0 and finite")
        for field in ("latency_seconds", "price_usd_per_byte"):
            figure = getattr(self, field)
            if figure is not None and not 0 <= figure < math.inf:
                raise InputError(f"{field} is {figure}; it must be at least 0 and finite")
        if not 1 <= self.oversubscription < math.inf:
            raise InputError(
                f"oversubscription is {self.oversubscription}; it must be at least 1 and finite"
            )
        if self.streams is not None and self.streams < 1:
            raise InputError(f"streams is {self.streams}; it must be at least 1")
        if self.loss is not None and not 0 <= self.loss < 1:
            raise InputError(f"loss is {self.loss}; it must be at least 0 and below 1")
        if not 0 <= self.compute_share < 1:
            raise InputError(
                f"compute_share is {self.compute_share}; it must be at least 0 and below 1"
            )
        if self.equal_cost_paths is not None and self.equal_cost_paths < 1:
            raise InputError(f"equal_cost_paths is {self.equal_cost_paths}; it must be at least 1")

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

    def among(self, senders: int) -> Link:
        """The link as each of so many devices that send at the same time finds it."""
        shared = self.shared_bandwidth_bytes_per_second
        if shared is None or self.bandwidth_bytes_per_second * senders <= shared:
            return self
        return replace(self, bandwidth_bytes_per_second=shared / senders)
