"""How a link is written in a cluster file.

A bandwidth says whose it is. Inside an island it is what ONE device can count on, in one direction.
Between islands and regions it is either one device's (`bandwidth_per_device`) or what all devices
that send at the same time share (`bandwidth_shared`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from hetplan.cluster.goodput import LossRecovery
from hetplan.cluster.links import Transport
from hetplan.files.quantities import (
    Bandwidth,
    Count,
    Fraction,
    Memory,
    Name,
    Ratio,
    Seconds,
    TrafficPrice,
)

# Descriptions that derived forms share: pydantic reads docstrings only of a class's own fields.
LatencyField: TypeAlias = Annotated[
    Seconds | None,
    Field(
        description=(
            "One way: from the first byte sent to the first byte received. Either this or "
            "round_trip."
        )
    ),
]
RoundTripField: TypeAlias = Annotated[
    Seconds | None,
    Field(
        description=("There and back, as ping shows it: twice the latency. Either this or latency.")
    ),
]
TransportField: TypeAlias = Annotated[
    Transport | None,
    Field(
        description=(
            "device-direct (nccl, rccl, hccl, ...) or host-staged (gloo over host memory). Left "
            "out: device-direct inside an island (host-staged for kind cpu), host-staged "
            "between islands."
        )
    ),
]
SamplesField: TypeAlias = Annotated[
    Name | None,
    Field(
        description=(
            "Name of measured link samples in the profile store. They replace the figures, "
            "which then serve only for operations and sizes that were not measured."
        )
    ),
]
OversubscriptionField: TypeAlias = Annotated[
    Ratio | None,
    Field(
        description=(
            "How many times what may be sent exceeds what the path carries, such as 32 for "
            "32:1; the bandwidth is divided by it. Left out: 1."
        )
    ),
]
StreamsField: TypeAlias = Annotated[
    Count | None,
    Field(
        description=(
            "Connections that one device's transfer uses at the same time; needs window or loss."
        )
    ),
]
WindowField: TypeAlias = Annotated[
    Memory | None,
    Field(
        description=(
            "Most bytes of one stream that are under way; a stream carries window / round trip."
        )
    ),
]
LossField: TypeAlias = Annotated[
    Fraction | None,
    Field(
        description=(
            "Fraction of packets that are lost, such as 0.0001 for 0.01 %; with TCP a stream "
            "carries 1.22 * segment / (round trip * sqrt(loss))."
        )
    ),
]
LossRecoveryField: TypeAlias = Annotated[
    LossRecovery | None,
    Field(
        description=(
            "What a sender does about lost packets: reno (slows down, as TCP does), go-back-n "
            "(sends everything after the lost packet again, as RoCE cards do), selective (sends "
            "only that again: BBR, newer RDMA cards). Left out: reno."
        )
    ),
]
SegmentField: TypeAlias = Annotated[
    Memory | None,
    Field(description=("Payload of one packet, for loss. Left out: 1460 B, TCP over Ethernet.")),
]
PriceField: TypeAlias = Annotated[
    TrafficPrice | None,
    Field(description=("What traffic over the link costs, in US dollars per byte sent.")),
]

ComputeShareField: TypeAlias = Annotated[
    Fraction | None,
    Field(
        description=(
            "Part of a device's compute units that a transfer over the link takes while it runs, "
            "such as 0.15 where 20 of 132 copy. Left out: 0, the transport copies without them."
        )
    ),
]
PathsField: TypeAlias = Annotated[
    Count | None,
    Field(
        description=(
            "Parallel paths to which flows are assigned by hash, so that some collide. Left out: "
            "none do."
        )
    ),
]
MeasuredField: TypeAlias = Annotated[
    bool | None,
    Field(
        description=(
            "true: the figures are what collectives or sends over the link reached, as a draft "
            "takes them out of samples, and count as they are: steps * (latency + bytes / "
            "bandwidth). Left out: they are the hardware's, and device-direct transfers reach the "
            "part of them that such links are known to reach."
        )
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForm:
    """One direction between two devices of one island."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    bandwidth: Bandwidth | None = None
    """What one device can count on while the others send too. Required, except between nodes of an
    island with `nics`: there it is the device's share of them."""
    latency: LatencyField = None
    round_trip: RoundTripField = None
    transport: TransportField = None
    samples: SamplesField = None
    oversubscription: OversubscriptionField = None
    streams: StreamsField = None
    window: WindowField = None
    loss: LossField = None
    segment: SegmentField = None
    loss_recovery: LossRecoveryField = None
    price: PriceField = None
    compute_share: ComputeShareField = None
    equal_cost_paths: PathsField = None
    measured: MeasuredField = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenForm(LinkForm):
    """One direction between two devices of different islands."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # noqa: RUF012

    bandwidth: Annotated[
        Bandwidth | None,
        Field(description=("Only in files of form 1, where it is bandwidth_per_device.")),
    ] = None
    bandwidth_per_device: Annotated[
        Bandwidth | None,
        Field(
            description=(
                "What one device can count on, whatever the others send. This, bandwidth_shared, "
                "or both."
            )
        ),
    ] = None
    bandwidth_shared: Annotated[
        Bandwidth | None,
        Field(
            description=(
                "Capacity that all devices which send at the same time share: of an uplink, a "
                "leased line."
            )
        ),
    ] = None
