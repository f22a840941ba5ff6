"""The hosts, networks and long links of a cluster file, with their rates and delays.

Pure: nothing is made here, and the machine is not looked at.

Figures of a cluster file are one device's: a host's interface carries those of all its devices
together, or what its NICs carry where that is less. A long link carries its shared capacity, or
one device's share for every device of its smaller end. Rates are those of the frames on the wire,
as a real port's: TCP payload reaches about 95 % of them at 1,500 bytes per frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hetplan.cluster.hosts import node_name
from hetplan.cluster.links import Link
from hetplan.cluster.spec import Cluster, Island
from hetplan.emulation.values import (
    CONTROL_HOST,
    CONTROL_SUFFIX,
    EmulatedHost,
    Emulation,
    Pipe,
    Segment,
    check_name,
    host_namespace,
    key_of,
)
from hetplan.errors import Fault, InputError
from hetplan.units import format_bandwidth, format_seconds

MAX_HOSTS = 200
"""Hosts, and islands, of an emulation: one byte of an address each."""


def lay_out(cluster: Cluster, *, name: str, file: str = "") -> Emulation:
    """The emulation of a cluster under this name.

    An InputError that names `file` where the cluster cannot be emulated: too many hosts, a host
    named like the control network.
    """
    key = key_of(check_name(name))
    # Nothing inside reaches the machine or another emulation, so any 10.n.x.x will do.
    network = int(key, 16) % 256
    segments = _segments(cluster)
    names = [name for name, _ in segments]
    segment_of = {island: at for at, (_, islands) in enumerate(segments) for island in islands}
    hosts = _hosts(cluster, key, network, segment_of, file)
    pipes = tuple(_pipes(cluster, segment_of))
    return Emulation(
        name=name,
        key=key,
        cluster=cluster.name,
        network=network,
        hosts=hosts,
        segments=tuple(
            Segment(name=each, bridge=f"br{at}", tap=f"tap{at}") for at, each in enumerate(names)
        ),
        pipes=tuple(pipe for pipe, _ in pipes),
        notes=tuple(dict.fromkeys(_notes(cluster, pipes))),
    )


def _segments(cluster: Cluster) -> list[tuple[str, tuple[str, ...]]]:
    """(name, islands) of every network: a region, or each island of one with slower links."""
    segments: list[tuple[str, tuple[str, ...]]] = []
    for region in cluster.regions:
        islands = [island for island in cluster.islands if island.region == region]
        bridged = all(
            is_bridged(cluster.link_between(one.name, two.name), one, two)
            for one, two in combinations(islands, 2)
        )
        if bridged:
            segments.append((region, tuple(island.name for island in islands)))
        else:
            segments += [(f"{region}/{island.name}", (island.name,)) for island in islands]
    return segments


def _hosts(
    cluster: Cluster, key: str, network: int, segment_of: dict[str, int], file: str
) -> tuple[EmulatedHost, ...]:
    count = sum(len(island.usable_nodes) for island in cluster.islands)
    if max(count, len(cluster.islands)) > MAX_HOSTS:
        message = (
            f"the cluster has {count:,} hosts in {len(cluster.islands)} islands; at most "
            f"{MAX_HOSTS} are emulated: write a smaller cluster file with the same kinds and links"
        )
        raise InputError(Fault(file=file, message=message))
    hosts: list[EmulatedHost] = []
    for island_number, island in enumerate(cluster.islands):
        for node in island.usable_nodes:
            number = len(hosts) + 1
            host = EmulatedHost(
                number=number,
                name=node_name(island, node),
                region=island.region,
                island=island.name,
                device=island.device.kind,
                devices=island.devices_per_node,
                first_device=cluster.first_device(island.name) + node * island.devices_per_node,
                segment=segment_of[island.name],
                island_number=island_number,
                namespace=host_namespace(key, number),
                data_address=f"10.{network}.0.{number}",
                control_address=f"10.{network}.1.{number}",
                # Locally administered; "hp", the island that the relay looks up, the host.
                mac=f"02:68:70:{island_number:02x}:00:{number:02x}",
                nic_bytes_per_second=nic_bytes_per_second(island),
                loopback_bytes_per_second=loopback_bytes_per_second(island),
            )
            hosts.append(host)
    _check_names([host.name for host in hosts], file)
    return tuple(hosts)


def _check_names(names: list[str], file: str) -> None:
    seen: set[str] = set()
    for name in names:
        # Linux's limit of a host name (uname: 64 bytes).
        if len(name) > 64 - len(CONTROL_SUFFIX):
            message = f"host name {name[:70]} is longer than {64 - len(CONTROL_SUFFIX)} characters"
        elif name == CONTROL_HOST or name.endswith(CONTROL_SUFFIX) or name == "localhost":
            message = f"a host cannot be named {name} here, that is a name of the emulation's own"
        elif name in seen:
            message = f"two hosts would be named {name}"
        else:
            seen.add(name)
            continue
        raise InputError(Fault(file=file, message=f"{message}; give it another in node_names"))


def _pipes(cluster: Cluster, segment_of: dict[str, int]) -> Iterator[tuple[Pipe, Link]]:
    """Every link that the relay plays: one per pair of islands that has its own link, one per pair
    of regions for the rest.
    """
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for left, right in combinations(range(len(cluster.islands)), 2):
        one, two = cluster.islands[left], cluster.islands[right]
        if segment_of[one.name] == segment_of[two.name]:
            continue
        own = cluster.lists_link(one.name, two.name) or one.region == two.region
        ends = (one.name, two.name) if own else (one.region, two.region)
        # The same two regions in either order are one link.
        if not own and (ends[1], ends[0]) in pairs:
            ends = (ends[1], ends[0])
        pairs.setdefault(ends, []).append((left, right))
    for between, islands in pairs.items():
        one, two = (cluster.islands[number] for number in islands[0])
        link = cluster.link_between(one.name, two.name)
        first = {left for left, _ in islands}
        rate = pipe_bytes_per_second(
            link,
            sum(cluster.islands[number].num_usable_devices for number in first),
            sum(
                cluster.islands[number].num_usable_devices
                for number in {right for _, right in islands}
            ),
        )
        pipe = Pipe(
            between=between,
            islands=tuple(islands),
            rate_bytes_per_second=rate,
            delay_seconds=link.latency_seconds,
            buffer_bytes=buffer_bytes(rate),
        )
        yield pipe, link


def _notes(cluster: Cluster, pipes: tuple[tuple[Pipe, Link], ...]) -> Iterator[str]:
    for island in cluster.islands:
        yield from island_notes(island)
    for pipe, link in pipes:
        yield from link_notes(f"{pipe.between[0]} to {pipe.between[1]}", link, piped=True)


BRIDGED_LATENCY_SECONDS = 2e-4
"""One way, up to which a link is played by a bridge alone: what two namespaces of a busy machine
take by themselves (60 us there and back on an idle one)."""
MACHINE_BYTES_PER_SECOND = 10e9 / 8
"""`up` notes rates above it as more than a machine's kernel carries: 11 Gbit/s were measured
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
