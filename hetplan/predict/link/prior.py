"""What does a device-direct link cost that nobody measured? Laws of measured links, carried.

Inside a node (learned on NVLink through NVSwitch or meshes; where the link has no more than PCIe
gives, on PCIe) and between nodes (NICs), in the form of `predict.link.shapes`, with the bandwidth
of the link at hand for bytes:

    per byte = BYTES / bandwidth,   per byte and rank / n = BYTES_OVER_RANKS / bandwidth

Latencies are carried unchanged as far as the figure is one that such links usually have; what it is
above that (a link of many kilometres) is added to every step that crosses it. Host-staged links do
not follow these laws, and links whose own figures were measured (`Link.measured`) need none:
`datasheet` prices both by latency and goodput.

The data: all_reduce inside nodes of A100-80 (vTrain's nccl-tests, 2 to 8 ranks), A100-40 and GH200
(Aceso's profiler, published with Sailor) and A100 (Galvatron), 1 MiB to 1 GiB, one row per
doubling; rings over 2 to 128 nodes of 8 as ratios to a NIC's rate (SimAI), for which 50
GB/s per device is taken (Alibaba HPN, Qian et al., SIGCOMM 2024). Every group of every source
weighs the same. `evaluation.cost.collectives` learns the constants from the published tables,
and a test holds them to what it finds; they are rounded to three digits.
"""

from __future__ import annotations

from hetplan.cluster.spec import Link
from hetplan.predict.link.shapes import ShapeLaw
from hetplan.predict.predictor import DATASHEET, Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation

# One fit to all_reduce of all these sources: the latency of a step inside a node is common.
NODE_BASE_SECONDS = 55.0e-6
STEP_SECONDS = 1.14e-6
NODE_BYTES = 1.27
NODE_BYTES_OVER_RANKS = 0.528
NETWORK_BASE_SECONDS = 82.4e-6
CROSSING_SECONDS = 23.8e-6
NETWORK_BYTES = 1.03

# all_to_all inside nodes: Galvatron with 2, 4 and 8 ranks, Aceso A100-40 with 2 and 4, GH200 with 4
# (S: what each rank holds). Between nodes nothing is known of it that a network's law would not
# say.
EXCHANGE_BASE_SECONDS = 110e-6
EXCHANGE_STEP_SECONDS = 0.0
EXCHANGE_BYTES = 1.39
EXCHANGE_BYTES_OVER_RANKS = 0.974

# Sends between two A100-40 of one node (Aceso's profiler, 11 sizes; both post together).
SEND_BASE_SECONDS = 69.8e-6
SEND_BYTES = 1.27

# Nodes whose devices have no fabric of their own: Aceso's profiler on RTX 2080 Ti and Titan RTX
# (PCIe 3.0, 15.75 GB/s) with 2, 4 and 8 ranks and RTX 3090 (PCIe 4.0, 31.5 GB/s) with 4 and 8 (two
# of them have a bridge), 1 MiB to 1 GiB: all_reduce, all_to_all, and sends of the first two.
BUS_BASE_SECONDS = 41.7e-6
BUS_STEP_SECONDS = 4.43e-6
BUS_BYTES = 2.68
BUS_BYTES_OVER_RANKS = 2.39
BUS_EXCHANGE_BASE_SECONDS = 72.2e-6
BUS_EXCHANGE_STEP_SECONDS = 49.7e-6
BUS_EXCHANGE_BYTES = 2.78
BUS_EXCHANGE_BYTES_OVER_RANKS = 1.26
BUS_SEND_BASE_SECONDS = 74.8e-6
BUS_SEND_BYTES = 1.59
# One kind at a time left out: 0.01 to 0.04 (median) for the first two, which are alike; the nodes
# of RTX 3090 take 1.6 times as long among 4 and 8 times among 8, as cards whose packets go through
# two processors do. Sends: of two kinds alone; as inside nodes with a fabric.
BUS_LOG_HALFWIDTH = 2.04
BUS_EXCHANGE_LOG_HALFWIDTH = 1.47
PCIE_MOST_BYTES_PER_SECOND = 64e9
"""A node's link with less than this has no fabric of its own: 16 lanes of PCIe 5.0 give 63 GB/s."""

# Latencies of links as the figures of such clusters have them (calculon, systems/a100_80g.json).
USUAL_NODE_LATENCY_SECONDS = 10e-6
USUAL_NETWORK_LATENCY_SECONDS = 20e-6

# 90 % (conformal rank) of |log(measured / predicted)| with one source at a time left out of the
# fit (`evaluation.cost.collectives`): all_reduce, all_to_all and sends inside nodes (sends of
# A100, GH200 and V100, the last two of which use a part of the device's links for one peer).
# Between nodes one number of nodes is left out at a time.
NODE_LOG_HALFWIDTH = 0.36
EXCHANGE_LOG_HALFWIDTH = 0.52
SEND_LOG_HALFWIDTH = 0.60
NETWORK_LOG_HALFWIDTH = 0.26
# Operations of which nothing was measured, as far off as a link's figure itself. Measured rate over
# the figure: .65 to .78 on NVLink (A100 ring over 8 devices: 191 to 234 of 300 GB/s), .85 to .9 on
# InfiniBand, about 1 with gloo over Ethernet. log(1 / .65).
OTHERS_LOG_HALFWIDTH = 0.43


def law(link: Link, operation: str, *, nodes: int = 1) -> ShapeLaw:
    """The law of the link's class for this operation, with the link's figures."""
    if nodes > 1:
        return network_law(
            link.goodput_bytes_per_second,
            max(0.0, link.latency_seconds - USUAL_NETWORK_LATENCY_SECONDS),
        )
    excess = max(0.0, link.latency_seconds - USUAL_NODE_LATENCY_SECONDS)
    return node_law(operation, link.goodput_bytes_per_second, excess, bus=_is_bus(link))


def _is_bus(link: Link) -> bool:
    """Of a link inside a node: whether it has no more than PCIe gives."""
    return link.bandwidth_bytes_per_second <= PCIE_MOST_BYTES_PER_SECOND


def fabric_bytes_per_second(link: Link) -> float:
    """What the hardware of a node's link has; more than the figure where that was measured."""
    return link.bandwidth_bytes_per_second * (NODE_BYTES if link.measured else 1.0)


def node_law(
    operation: str,
    bytes_per_second: float,
    excess_latency_seconds: float = 0.0,
    *,
    bus: bool = False,
) -> ShapeLaw:
    """Inside a node, at this rate; `bus`: of devices without a fabric of their own."""
    if bus:
        return _bus_law(operation, bytes_per_second, excess_latency_seconds)
    if operation == LinkOperation.ALL_TO_ALL:
        return ShapeLaw(
            base_seconds=EXCHANGE_BASE_SECONDS,
            step_seconds=EXCHANGE_STEP_SECONDS + excess_latency_seconds,
            crossing_seconds=0.0,
            seconds_per_byte=EXCHANGE_BYTES / bytes_per_second,
            seconds_per_byte_over_ranks=EXCHANGE_BYTES_OVER_RANKS / bytes_per_second,
        )
    return ShapeLaw(
        base_seconds=NODE_BASE_SECONDS,
        step_seconds=STEP_SECONDS + excess_latency_seconds,
        crossing_seconds=0.0,
        seconds_per_byte=NODE_BYTES / bytes_per_second,
        seconds_per_byte_over_ranks=NODE_BYTES_OVER_RANKS / bytes_per_second,
    )


def _bus_law(operation: str, bytes_per_second: float, excess_latency_seconds: float) -> ShapeLaw:
    exchange = operation == LinkOperation.ALL_TO_ALL
    step = BUS_EXCHANGE_STEP_SECONDS if exchange else BUS_STEP_SECONDS
    whole = BUS_EXCHANGE_BYTES if exchange else BUS_BYTES
    over = BUS_EXCHANGE_BYTES_OVER_RANKS if exchange else BUS_BYTES_OVER_RANKS
    return ShapeLaw(
        base_seconds=BUS_EXCHANGE_BASE_SECONDS if exchange else BUS_BASE_SECONDS,
        step_seconds=step + excess_latency_seconds,
        crossing_seconds=0.0,
        seconds_per_byte=whole / bytes_per_second,
        seconds_per_byte_over_ranks=over / bytes_per_second,
    )


def network_law(bytes_per_second: float, excess_latency_seconds: float = 0.0) -> ShapeLaw:
    """Between nodes, at this rate of one device."""
    return ShapeLaw(
        base_seconds=NETWORK_BASE_SECONDS,
        step_seconds=STEP_SECONDS,
        crossing_seconds=CROSSING_SECONDS + excess_latency_seconds,
        seconds_per_byte=NETWORK_BYTES / bytes_per_second,
        seconds_per_byte_over_ranks=0.0,
    )


def collective(
    link: Link,
    operation: str,
    group_size: int,
    message_bytes: float,
    *,
    nodes: int = 1,
    notes: tuple[str, ...] = (),
) -> Prediction:
    """Time of a collective among ranks of one node, or in so many nodes, from figures alone."""
    if nodes > 1:
        measured = operation == LinkOperation.ALL_REDUCE
        halfwidth = NETWORK_LOG_HALFWIDTH if measured else OTHERS_LOG_HALFWIDTH
    elif _is_bus(link):
        exchange = operation == LinkOperation.ALL_TO_ALL
        halfwidth = BUS_EXCHANGE_LOG_HALFWIDTH if exchange else BUS_LOG_HALFWIDTH
    elif operation == LinkOperation.ALL_TO_ALL:
        halfwidth = EXCHANGE_LOG_HALFWIDTH
    else:
        measured = operation == LinkOperation.ALL_REDUCE
        halfwidth = NODE_LOG_HALFWIDTH if measured else OTHERS_LOG_HALFWIDTH
    return Prediction(
        seconds=law(link, operation, nodes=nodes).seconds(
            operation, group_size, message_bytes, nodes
        ),
        log_halfwidth=halfwidth,
        source=DATASHEET,
        extrapolating=notes,
    )


def send(link: Link, *, nodes: int = 1, notes: tuple[str, ...] = ()) -> SendLaw:
    """Point-to-point law of a link inside a node, or between two nodes.

    A receiver that waits leaves the latency of one step; posting together costs a whole call.
    """
    own = law(link, LinkOperation.SEND_RECV, nodes=nodes)
    wire = own.step_seconds + own.crossing_seconds
    usual = USUAL_NETWORK_LATENCY_SECONDS if nodes > 1 else USUAL_NODE_LATENCY_SECONDS
    excess = max(0.0, link.latency_seconds - usual)
    bus = nodes == 1 and _is_bus(link)
    per_byte = NETWORK_BYTES if nodes > 1 else BUS_SEND_BYTES if bus else SEND_BYTES
    base = BUS_SEND_BASE_SECONDS if bus else SEND_BASE_SECONDS
    return SendLaw(
        # Posted together, the receiver's notice crosses before the data.
        rendezvous_latency_seconds=base + 2.0 * excess,
        wire_latency_seconds=wire,
        seconds_per_byte=per_byte / link.goodput_bytes_per_second,
        log_halfwidth=OTHERS_LOG_HALFWIDTH if nodes > 1 else SEND_LOG_HALFWIDTH,
        source=DATASHEET,
        extrapolating=notes,
    )
