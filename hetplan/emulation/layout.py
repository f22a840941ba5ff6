"""Which hosts, networks and long links does a cluster file stand for?

Pure: nothing is made here, and nothing is asked of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hetplan.cluster.hosts import node_name
from hetplan.cluster.links import Link
from hetplan.cluster.spec import Cluster
from hetplan.emulation.figures import (
    buffer_bytes,
    is_bridged,
    island_notes,
    link_notes,
    loopback_bytes_per_second,
    nic_bytes_per_second,
    pipe_bytes_per_second,
)
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

MAX_HOSTS = 200
"""Hosts, and islands, of an emulation: one byte of an address each."""


def lay_out(cluster: Cluster, *, name: str, network: int, file: str = "") -> Emulation:
    """The emulation of a cluster under this name, with addresses 10.`network`.x.x.

    An InputError that names `file` where the cluster cannot be emulated: too many hosts, a host
    named like the control network.
    """
    key = key_of(check_name(name))
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
    found: list[tuple[str, tuple[str, ...]]] = []
    for region in cluster.regions:
        islands = [island for island in cluster.islands if island.region == region]
        bridged = all(
            is_bridged(cluster.link_between(one.name, two.name), one, two)
            for one, two in combinations(islands, 2)
        )
        if bridged:
            found.append((region, tuple(island.name for island in islands)))
        else:
            found += [(f"{region}/{island.name}", (island.name,)) for island in islands]
    return found


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
