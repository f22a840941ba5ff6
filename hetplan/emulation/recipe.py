"""The lines for `ip` and `tc` that make an emulation, and the settings inside its hosts.

Pure text, made of numbers and derived names. Every link is made inside a namespace of the
emulation, so the machine's own namespace never has an interface of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emulation.layout import MIN_BUFFER_BYTES
from hetplan.emulation.values import (
    CONTROL_HOST,
    CONTROL_INTERFACE,
    CONTROL_SUFFIX,
    DATA_INTERFACE,
    HERE,
    EmulatedHost,
    Emulation,
)

BURST_BYTES = 131_072
"""What tbf lets through at once. It must hold a TCP super-packet of 64 KiB with headers, or the
kernel cuts it up; below two of them 2 Gbit/s were not reached."""
QUEUE_SECONDS = 0.05
"""What a port queues: 50 ms of its rate, at least as a long link's buffer (see figures)."""
_AGEING = 8_640_000  # hundredths of a second: a bridge forgets a quiet host after a day
_CONTROL_BRIDGE = "brctl"


def namespace_lines(emulation: Emulation) -> tuple[str, ...]:
    """For ip, in the machine's namespace: nothing but the new namespaces."""
    return tuple(f"netns add {name}" for name in emulation.namespaces)


def fabric_lines(emulation: Emulation) -> tuple[str, ...]:
    """For ip, in the fabric: bridges, and a pair of cables to every host."""
    return tuple(_fabric(emulation))


def _fabric(emulation: Emulation) -> Iterator[str]:
    yield "link set lo up"
    bridges = [segment.bridge for segment in emulation.segments]
    for bridge in (*bridges, _CONTROL_BRIDGE):
        yield (
            f"link add {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0 "
            f"ageing_time {_AGEING}"
        )
        yield f"link set {bridge} up"
    yield f"address add {emulation.control_address}/24 dev {_CONTROL_BRIDGE}"
    for host in emulation.hosts:
        bridge = bridges[host.segment]
        yield (
            f"link add d{host.number} type veth peer name {DATA_INTERFACE} address {host.mac} "
            f"netns {host.namespace}"
        )
        yield f"link set d{host.number} master {bridge} up"
        yield (
            f"link add c{host.number} type veth peer name {CONTROL_INTERFACE} "
            f"netns {host.namespace}"
        )
        yield f"link set c{host.number} master {_CONTROL_BRIDGE} up"


def tap_lines(emulation: Emulation) -> tuple[str, ...]:
    """For ip, in the fabric, once the relay has made the TAPs: each into its bridge."""
    if not emulation.pipes:
        return ()
    return tuple(
        f"link set {segment.tap} txqueuelen 4000 master {segment.bridge} up"
        for segment in emulation.segments
    )


def host_lines(emulation: Emulation, host: EmulatedHost) -> tuple[str, ...]:
    """For ip, in a host: addresses, and whom it reaches where, without a default route."""
    return (
        "link set lo up",
        f"address add {host.data_address}/24 dev {DATA_INTERFACE}",
        f"link set {DATA_INTERFACE} up",
        f"address add {host.control_address}/24 dev {CONTROL_INTERFACE}",
        f"link set {CONTROL_INTERFACE} up",
        # Fixed, so that no lost or late ARP answer ever stands between two hosts.
        *(
            f"neighbour replace {other.data_address} lladdr {other.mac} dev {DATA_INTERFACE} "
            "nud permanent"
            for other in emulation.hosts
            if other.number != host.number
        ),
    )


def host_queue_lines(host: EmulatedHost) -> tuple[str, ...]:
    """For tc, in a host: what it sends, and what its ranks say to each other."""
    lines = [_tbf(DATA_INTERFACE, host.nic_bytes_per_second)]
    if host.loopback_bytes_per_second is not None:
        lines.append(_tbf("lo", host.loopback_bytes_per_second))
    return tuple(lines)


def fabric_queue_lines(emulation: Emulation) -> tuple[str, ...]:
    """For tc, in the fabric: what each host receives."""
    return tuple(_tbf(f"d{host.number}", host.nic_bytes_per_second) for host in emulation.hosts)


def _tbf(interface: str, bytes_per_second: float) -> str:
    limit = max(MIN_BUFFER_BYTES, round(QUEUE_SECONDS * bytes_per_second))
    rate = max(1, round(bytes_per_second * 8))
    # tc keeps the limit in 32 bits.
    return (
        f"qdisc add dev {interface} root tbf rate {rate}bit burst {BURST_BYTES} "
        f"limit {min(limit, 2**31)}"
    )


def settings(emulation: Emulation) -> tuple[tuple[str, str], ...]:
    """(file below /proc/sys/net, text) of every host: they vanish with its namespace."""
    longest = max((pipe.rate_bytes_per_second * pipe.delay_seconds for pipe in emulation.pipes),
                  default=0.0)  # fmt: skip
    # Four times what is under way in a round trip, at least Linux's usual 4 MB.
    window = max(MIN_BUFFER_BYTES, min(round(8 * longest), 2**30))
    return (
        # No IPv6: its own messages would be among the measured ones.
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        # A host is no router, and answers for an address only on the interface that has it.
        ("ipv4/ip_forward", "0"),
        ("ipv4/conf/all/arp_ignore", "1"),
        ("ipv4/conf/all/arp_announce", "2"),
        ("ipv4/conf/all/rp_filter", "1"),
        # Available everywhere; a rate-probing one would need minutes to settle.
        ("ipv4/tcp_congestion_control", "reno"),
        # Connections that pause and new ones behave as the first did.
        ("ipv4/tcp_slow_start_after_idle", "0"),
        ("ipv4/tcp_no_metrics_save", "1"),
        ("ipv4/tcp_rmem", f"4096 131072 {window}"),
        ("ipv4/tcp_wmem", f"4096 65536 {window}"),
        ("ipv4/ping_group_range", "0 2147483647"),
    )


def fabric_settings() -> tuple[tuple[str, str], ...]:
    """The same for the fabric, which bridges and never routes."""
    return (
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/ip_forward", "0"),
    )


def hosts_text(emulation: Emulation) -> str:
    """As /etc/hosts: names stand for shaped addresses, `NAME-control` for the unshaped ones."""
    lines = ["127.0.0.1 localhost", f"{emulation.control_address} {CONTROL_HOST}"]
    for host in emulation.hosts:
        lines.append(f"{host.data_address} {host.name}")
        lines.append(f"{host.control_address} {host.name}{CONTROL_SUFFIX}")
    return "\n".join(lines) + "\n"


def places(emulation: Emulation) -> dict[str, dict[str, object]]:
    """Namespace and environment variables of every place where a command can run."""
    fabric = (CONTROL_HOST, emulation.fabric)
    hosts = ((host.name, host.namespace) for host in emulation.hosts)
    return {
        place: {"namespace": namespace, "variables": variables(emulation, place)}
        for place, namespace in ((HERE, ""), fabric, *hosts)
    }


def variables(emulation: Emulation, host: str) -> dict[str, str]:
    """Environment variables that tell a command where it is."""
    first = emulation.hosts[0]
    common = {
        "HETPLAN_EMULATION": emulation.name,
        "HETPLAN_HOSTS": str(len(emulation.hosts)),
        # The unshaped address of the first host: where ranks can meet.
        "HETPLAN_RENDEZVOUS_ADDRESS": first.control_address,
    }
    if host == HERE:
        return common
    common["HETPLAN_HOST"] = host
    if host == CONTROL_HOST:
        return {**common, "HETPLAN_CONTROL_ADDRESS": emulation.control_address}
    own = emulation.host(host)
    return {
        **common,
        "HETPLAN_HOST_NUMBER": str(own.number - 1),
        "HETPLAN_HOST_ADDRESS": own.data_address,
        "HETPLAN_CONTROL_ADDRESS": own.control_address,
        "HETPLAN_DEVICE_KIND": own.device,
        "HETPLAN_DEVICES": str(own.devices),
        "HETPLAN_FIRST_DEVICE": str(own.first_device),
    }


def relay_config(emulation: Emulation) -> dict[str, object]:
    """What the relay reads."""
    numbers = [number for pipe in emulation.pipes for pair in pipe.islands for number in pair]
    segment_of = [0] * (1 + max([*numbers, *(host.island_number for host in emulation.hosts)]))
    for host in emulation.hosts:
        segment_of[host.island_number] = host.segment
    return {
        "taps": [segment.tap for segment in emulation.segments],
        "segment_of_island": segment_of,
        "pipes": [
            {
                "islands": [list(pair) for pair in pipe.islands],
                "rate_bytes_per_second": pipe.rate_bytes_per_second,
                "delay_seconds": pipe.delay_seconds,
                "buffer_bytes": pipe.buffer_bytes,
            }
            for pipe in emulation.pipes
        ],
    }
