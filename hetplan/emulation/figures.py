"""At which rates and delays is a cluster's link played, and what of it is not?

Figures of a cluster file are one device's: a host's interface carries those of all its devices
together, or what its NICs carry where that is less. A long link carries its shared capacity, or
one device's share for every device of its smaller end. Rates are those of the frames on the wire,
as a real port's: TCP payload reaches about 95 % of them at 1,500 bytes per frame.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.links import Link
from hetplan.cluster.spec import Island
from hetplan.units import format_bandwidth, format_seconds

BRIDGED_LATENCY_SECONDS = 2e-4
"""One way, up to which a link is played by a bridge alone: what two namespaces of a busy machine
take by themselves (60 us there and back on an idle one)."""
MACHINE_BYTES_PER_SECOND = 10e9 / 8
"""Above it a rate is said to be more than a machine's kernel carries: 11 Gbit/s were measured
between two namespaces of 2 cores, 5 Gbit/s over their loopback device."""
MIN_BUFFER_BYTES = 4_000_000
MAX_BUFFER_BYTES = 64_000_000
BUFFER_SECONDS = 0.1
"""A router's usual buffer: what its line carries in 100 ms, and never so little that a single
connection with Linux's usual 4 MB of send buffer overflows it; at most 64 MB, for the relay holds
it in memory."""


def nic_bytes_per_second(island: Island) -> float:
    """What a host of the island sends at most, and receives at most."""
    link = island.inter_node
    rate = link.bandwidth_bytes_per_second * island.devices_per_node / link.oversubscription
    if island.nics is not None:
        nics = island.nics.per_node * island.nics.bandwidth_bytes_per_second
        rate = min(rate, nics)
    return rate


def loopback_bytes_per_second(island: Island) -> float | None:
    """Rate of a host's loopback device; None: it has one rank, or the machine is slower anyway."""
    rate = island.intra_node.bandwidth_bytes_per_second * island.devices_per_node
    if island.devices_per_node == 1 or rate > MACHINE_BYTES_PER_SECOND:
        return None
    return rate


def pipe_bytes_per_second(link: Link, left_devices: int, right_devices: int) -> float:
    """What a long link between so many devices carries in one direction."""
    shared = link.shared_bandwidth_bytes_per_second
    if shared is None:
        shared = link.bandwidth_bytes_per_second * min(left_devices, right_devices)
    return shared / link.oversubscription


def buffer_bytes(rate_bytes_per_second: float) -> int:
    """What may wait in front of a long link."""
    wanted = min(BUFFER_SECONDS * rate_bytes_per_second, MAX_BUFFER_BYTES)
    return max(MIN_BUFFER_BYTES, round(wanted))


def is_bridged(link: Link | None, left: Island, right: Island) -> bool:
    """Whether two islands of one region can share a bridge: their link is no narrower than both
    hosts' interfaces, and not long.
    """
    if link is None:
        return True
    if link.latency_seconds > BRIDGED_LATENCY_SECONDS:
        return False
    ports = min(nic_bytes_per_second(left), nic_bytes_per_second(right))
    devices = min(left.devices_per_node, right.devices_per_node)
    own = link.bandwidth_bytes_per_second * devices / link.oversubscription
    shared = link.shared_bandwidth_bytes_per_second
    if shared is not None and shared / link.oversubscription < ports * min(left.nodes, right.nodes):
        return False
    return own >= ports * (1 - 1e-9)


def island_notes(island: Island) -> Iterator[str]:
    """What of an island is played otherwise than its file says."""
    nic = nic_bytes_per_second(island)
    name = f"island {island.name}"
    if nic > MACHINE_BYTES_PER_SECOND:
        yield (
            f"{name}: {format_bandwidth(nic)} per host is more than a machine's kernel carries "
            "between namespaces; its links are as fast as this machine"
        )
    if island.nodes > 1 and island.inter_node.latency_seconds > BRIDGED_LATENCY_SECONDS:
        yield (
            f"{name}: the latency of {format_seconds(island.inter_node.latency_seconds)} between "
            "its nodes is not played, only that of links between islands and regions"
        )
    if island.devices_per_node > 1 and loopback_bytes_per_second(island) is None:
        yield f"{name}: inside a host the link is as fast as this machine's loopback device"
    if island.nodes > 1:
        yield from link_notes(f"{name}, between nodes", island.inter_node)


def link_notes(name: str, link: Link, *, piped: bool = False) -> Iterator[str]:
    """Limits of a link that are not played."""
    left_out = [
        what
        for what, there in (
            ("streams", link.streams is not None),
            ("window", link.window_bytes is not None),
            ("loss", link.loss is not None),
        )
        if there
    ]
    if left_out:
        yield f"{name}: {', '.join(left_out)} of the link: not played"
    shared = link.shared_bandwidth_bytes_per_second
    if piped and shared is not None and link.bandwidth_bytes_per_second < shared:
        yield (
            f"{name}: the shared {format_bandwidth(shared)} are played, one device's share of "
            f"{format_bandwidth(link.bandwidth_bytes_per_second)} is not"
        )
    if piped and shared is not None and shared > MACHINE_BYTES_PER_SECOND / 4:
        yield (
            f"{name}: {format_bandwidth(shared)} is more than the relay may carry on one core; "
            "measure before you rely on it"
        )
