"""What does a link cost that nobody measured? Its figures, by the laws of measured links.

A device-direct link follows the law of its class (`ClassLaw`), in the form of `link.shapes`, with
its own bandwidth for bytes:

    per byte = BYTES / bandwidth,   per byte and rank / n = BYTES_OVER_RANKS / bandwidth

Latencies are those of the class as far as the link's figure is one that such links usually have;
the excess (a link of many kilometres) is added to every step that crosses it. Host-staged links and
links whose own figures were measured (`Link.measured`) are priced by latency and goodput instead:
each step of a ring takes latency + bytes / goodput.

The data: all_reduce inside nodes of A100-80 (vTrain's nccl-tests, 2 to 8 ranks), A100-40 and GH200
(Aceso's profiler, published with Sailor) and A100 (Galvatron), 1 MiB to 1 GiB, one row per
doubling; rings over 2 to 128 nodes of 8 as ratios to a NIC's rate (SimAI), for which 50
GB/s per device is taken (Alibaba HPN, Qian et al., SIGCOMM 2024). Every group of every source
weighs the same. The constants are the coefficients of least squares of relative errors, none
below 0, rounded to three digits.

Half-widths are the 90 % (conformal rank) of |log(measured / predicted)| with one source at a time
left out of the fit; between nodes one number of nodes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.cluster.links import Link, Transport
from hetplan.predict.link.shapes import ShapeLaw, lane_bytes, ring_shape
from hetplan.predict.predictor import DATASHEET, Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation

# Measured rate over the figure: .65 to .78 on NVLink (A100 ring over 8 devices: 191 to 234 of 300
# GB/s), .85 to .9 on InfiniBand, about 1 with gloo over Ethernet. log(1 / .65).
LINK_LOG_HALFWIDTH = 0.43
"""Half-width of a link's figures, and of operations of which nothing was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLaw:
    """Coefficients of `ShapeLaw` of one class of links, at a bandwidth of 1 byte/s."""

    base_seconds: float
    step_seconds: float = 0.0
    crossing_seconds: float = 0.0
    bytes: float
    bytes_over_ranks: float = 0.0
    log_halfwidth: float

    def at(self, bytes_per_second: float, excess_latency_seconds: float = 0.0) -> ShapeLaw:
        """The law of a link of this bandwidth; excess latency is of every step of its own kind."""
        crossing = self.crossing_seconds > 0
        return ShapeLaw(
            base_seconds=self.base_seconds,
            step_seconds=self.step_seconds + (0.0 if crossing else excess_latency_seconds),
            crossing_seconds=self.crossing_seconds + (excess_latency_seconds if crossing else 0.0),
            seconds_per_byte=self.bytes / bytes_per_second,
            seconds_per_byte_over_ranks=self.bytes_over_ranks / bytes_per_second,
        )


# One fit to all_reduce of all these sources: the latency of a step inside a node is common.
NODE = ClassLaw(
    base_seconds=55.0e-6,
    step_seconds=1.14e-6,
    bytes=1.27,
    bytes_over_ranks=0.528,
    log_halfwidth=0.36,
)
NETWORK = ClassLaw(
    base_seconds=82.4e-6,
    step_seconds=NODE.step_seconds,
    crossing_seconds=23.8e-6,
    bytes=1.03,
    log_halfwidth=0.26,
)
# Libraries choose a protocol by message. What the ratios above measured is NCCL's for large ones
# (Simple); for small ones over many nodes LL128 has 4.0 / 14.0 of its latency per crossing and .92
# of its bandwidth (NCCL 2.28, src/graph/tuning.cc: hwLat and ncclTopoTuneModel), and the faster of
# the two is taken.
NETWORK_SMALL = replace(
    NETWORK,
    crossing_seconds=NETWORK.crossing_seconds * 4.0 / 14.0,
    bytes=NETWORK.bytes / 0.92,
)
# all_to_all inside nodes: Galvatron with 2, 4 and 8 ranks, Aceso A100-40 with 2 and 4, GH200 with 4
# (S: what each rank holds). Between nodes nothing is known of it that a network's law would not
# say.
NODE_EXCHANGE = ClassLaw(
    base_seconds=110e-6, bytes=1.39, bytes_over_ranks=0.974, log_halfwidth=0.52
)
# Nodes whose devices have no fabric of their own: Aceso's profiler on RTX 2080 Ti and Titan RTX
# (PCIe 3.0, 15.75 GB/s) with 2, 4 and 8 ranks and RTX 3090 (PCIe 4.0, 31.5 GB/s) with 4 and 8 (two
# of them have a bridge), 1 MiB to 1 GiB: all_reduce, all_to_all, and sends of the first two. One
# kind at a time left out: 0.01 to 0.04 (median) for the first two, which are alike; the nodes of
# RTX 3090 take 1.6 times as long among 4 and 8 times among 8, as cards whose packets go through two
# processors do.
BUS = ClassLaw(
    base_seconds=41.7e-6,
    step_seconds=4.43e-6,
    bytes=2.68,
    bytes_over_ranks=2.39,
    log_halfwidth=2.04,
)
BUS_EXCHANGE = ClassLaw(
    base_seconds=72.2e-6,
    step_seconds=49.7e-6,
    bytes=2.78,
    bytes_over_ranks=1.26,
    log_halfwidth=1.47,
)

# Sends, both sides posting together: between two A100-40 of one node (Aceso's profiler, 11
# sizes). Half-width: sends of A100, GH200 and V100; the last two use a part of the device's links
# for one peer.
NODE_SEND = ClassLaw(base_seconds=69.8e-6, bytes=1.27, log_halfwidth=0.60)
# Of two kinds alone, so the half-width is that of nodes with a fabric.
BUS_SEND = ClassLaw(base_seconds=74.8e-6, bytes=1.59, log_halfwidth=NODE_SEND.log_halfwidth)
NETWORK_SEND = ClassLaw(
    base_seconds=NODE_SEND.base_seconds, bytes=NETWORK.bytes, log_halfwidth=LINK_LOG_HALFWIDTH
)

PCIE_MOST_BYTES_PER_SECOND = 64e9
"""A node's link with less than this has no fabric of its own: 16 lanes of PCIe 5.0 give 63 GB/s."""

# Latencies of links as the figures of such clusters have them (calculon, systems/a100_80g.json).
USUAL_NODE_LATENCY_SECONDS = 10e-6
USUAL_NETWORK_LATENCY_SECONDS = 20e-6


def class_law(operation: str, *, nodes: int, bus: bool) -> ClassLaw:
    """The class that a collective is of; `bus`: of devices without a fabric of their own."""
    if nodes > 1:
        return NETWORK
    if operation == LinkOperation.ALL_TO_ALL:
        return BUS_EXCHANGE if bus else NODE_EXCHANGE
    return BUS if bus else NODE


def _is_bus(link: Link) -> bool:
    """Whether a link inside a node has no more than PCIe gives, and is no part of a mesh."""
    meshed = link.one_peer_bytes_per_second is not None
    return not meshed and link.bandwidth_bytes_per_second <= PCIE_MOST_BYTES_PER_SECOND


def _excess_latency_seconds(link: Link, nodes: int) -> float:
    usual = USUAL_NETWORK_LATENCY_SECONDS if nodes > 1 else USUAL_NODE_LATENCY_SECONDS
    return max(0.0, link.latency_seconds - usual)


def _by_its_own_figures(link: Link) -> bool:
    return link.transport is not Transport.DEVICE_DIRECT or link.measured


def fabric_bytes_per_second(link: Link) -> float:
    """What the hardware of a node's link has; more than the figure where that was measured."""
    return link.bandwidth_bytes_per_second * (NODE.bytes if link.measured else 1.0)


def collective(
    link: Link,
    operation: str,
    group_size: int,
    message_bytes: float,
    notes: tuple[str, ...] = (),
    *,
    nodes: int = 1,
) -> Prediction:
    """Time of a collective among ranks of one node, or in so many nodes, by figures alone.

    In a full mesh a rank uses its links to the others of the group at once.
    """
    if nodes == 1:
        link = link.to_peers(group_size - 1)
    if _by_its_own_figures(link):
        lane = lane_bytes(operation, group_size, nodes, message_bytes)
        steps, share = ring_shape(operation, group_size)
        step = link.latency_seconds + share * lane / link.goodput_bytes_per_second
        seconds, halfwidth = steps * step, LINK_LOG_HALFWIDTH
    else:
        bus = _is_bus(link)
        of_class = class_law(operation, nodes=nodes, bus=bus)
        law = of_class.at(link.goodput_bytes_per_second, _excess_latency_seconds(link, nodes))
        seconds = law.seconds(operation, group_size, message_bytes, nodes)
        if of_class is NETWORK and operation != LinkOperation.ALL_TO_ALL:
            excess = _excess_latency_seconds(link, nodes)
            small = NETWORK_SMALL.at(link.goodput_bytes_per_second, excess)
            seconds = min(seconds, small.seconds(operation, group_size, message_bytes, nodes))
        halfwidth = of_class.log_halfwidth
        exchange = of_class in (NODE_EXCHANGE, BUS_EXCHANGE)
        if operation != LinkOperation.ALL_REDUCE and not exchange and of_class is not BUS:
            halfwidth = LINK_LOG_HALFWIDTH
    return Prediction(
        seconds=seconds, log_halfwidth=halfwidth, source=DATASHEET, extrapolating=notes
    )


def send(link: Link, notes: tuple[str, ...] = (), *, nodes: int = 1) -> SendLaw:
    """Point-to-point law of a link inside a node, or between two nodes, by figures alone.

    The data cross once after the receiver is known to be ready: wire = latency of one step. With
    both sides posting together the receiver's readiness has to cross to the sender first, another
    one-way latency. (gloo over a 10.3 ms round trip: 10.3 ms when posted together, 5.5 to 5.7 ms
    with the receiver early.)
    """
    if nodes == 1:
        link = link.to_peers(1)
    if _by_its_own_figures(link):
        return SendLaw(
            rendezvous_latency_seconds=2.0 * link.latency_seconds,
            wire_latency_seconds=link.latency_seconds,
            seconds_per_byte=1.0 / link.goodput_bytes_per_second,
            log_halfwidth=LINK_LOG_HALFWIDTH,
            source=DATASHEET,
            extrapolating=notes,
        )
    bus, excess = _is_bus(link), _excess_latency_seconds(link, nodes)
    of_class = class_law(LinkOperation.SEND_RECV, nodes=nodes, bus=bus)
    law = of_class.at(link.goodput_bytes_per_second, excess)
    of_sends = NETWORK_SEND if nodes > 1 else BUS_SEND if bus else NODE_SEND
    return SendLaw(
        rendezvous_latency_seconds=of_sends.base_seconds + 2.0 * excess,
        wire_latency_seconds=law.step_seconds + law.crossing_seconds,
        seconds_per_byte=of_sends.bytes / link.goodput_bytes_per_second,
        log_halfwidth=of_sends.log_halfwidth,
        source=DATASHEET,
        extrapolating=notes,
    )
