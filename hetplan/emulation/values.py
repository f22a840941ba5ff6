"""The parts of an emulated cluster: hosts, networks of hosts, long links between them.

A `segment` is a network whose hosts reach each other through a bridge in the kernel: a region, or
an island of a region whose islands have slower links between them. A `pipe` is a link between
islands of different segments, which frames cross through the relay (`hetplan.emulation.relay`).

Everything is in namespaces of its own, whose names come from a hash of the emulation's name; the
machine's own namespace gets no interface, address, route or setting.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from hetplan.errors import InputError

SCHEMA = "hetplan.emulation/1"
DATA_INTERFACE, CONTROL_INTERFACE = "eth0", "ctl0"
"""A host's shaped and unshaped interface."""
CONTROL_HOST = "control"
"""The namespace of bridges and relay, as a place to run a command: it is on the control network
only."""
HERE = "."
"""The machine, in the place of a host: no host can be named so."""
CONTROL_SUFFIX = "-control"
"""A host's name with this is its address on the control network."""
NAMESPACE_PREFIX = "hetplan-"
"""Every namespace of every emulation begins with this."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


def check_name(name: str) -> str:
    """The name, if an emulation can have it; an InputError otherwise."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"an emulation cannot be named {name[:70]!a}; use at most 63 letters, digits, dots, "
            "underscores and hyphens, the first a letter or digit"
        )
    return name


def key_of(name: str) -> str:
    """Eight characters of the emulation's name, for names of namespaces."""
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def fabric_namespace(key: str) -> str:
    """The namespace that holds bridges, TAPs and the relay."""
    return f"{NAMESPACE_PREFIX}{key}-fabric"


def host_namespace(key: str, number: int) -> str:
    """The namespace of the host of this number, from 1."""
    return f"{NAMESPACE_PREFIX}{key}-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedHost:
    """One host: a network namespace with two interfaces."""

    number: int
    """From 1; the last number of its addresses."""
    name: str
    """Node name of the cluster file, or island and node number."""
    region: str
    island: str
    device: str
    """Device kind."""
    devices: int
    """Ranks that it is meant to run."""
    first_device: int
    """Number of its first device in the cluster."""
    segment: int
    """Position in `Emulation.segments`."""
    island_number: int
    """Position of its island in the cluster file."""
    namespace: str
    data_address: str
    control_address: str
    mac: str
    """Of its shaped interface; its fourth byte is the island's number, which the relay reads."""
    nic_bytes_per_second: float
    """Rate of its shaped interface, each way, headers of the frames included."""
    loopback_bytes_per_second: float | None
    """Rate of its loopback device, which its ranks talk over; None: left as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Hosts that reach each other without the relay."""

    name: str
    """Of the region, or region/island."""
    bridge: str
    tap: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """A long link, the same both ways, each way for itself; all hosts of its ends share it."""

    between: tuple[str, str]
    """Names of two regions, or of two islands."""
    islands: tuple[tuple[int, int], ...]
    """Pairs of island numbers whose frames take it."""
    rate_bytes_per_second: float
    """Headers of the frames included."""
    delay_seconds: float
    """One way."""
    buffer_bytes: int
    """What waits for the link; a frame that finds it full is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """One emulated cluster, as it is written beside what is made of it."""

    name: str
    key: str
    cluster: str
    """Name in the cluster file."""
    network: int
    """n of its addresses 10.n.0.x (shaped) and 10.n.1.x (control)."""
    hosts: tuple[EmulatedHost, ...]
    segments: tuple[Segment, ...]
    pipes: tuple[Pipe, ...]
    notes: tuple[str, ...] = ()
    """What of the cluster file is not emulated."""

    @property
    def fabric(self) -> str:
        """Namespace of bridges, TAPs and relay."""
        return fabric_namespace(self.key)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Every namespace, the fabric's first."""
        return (self.fabric, *(host.namespace for host in self.hosts))

    @property
    def control_address(self) -> str:
        """Of the fabric's namespace, on the control network."""
        return f"10.{self.network}.1.254"

    def host(self, name: str) -> EmulatedHost:
        """The host of this name; an InputError that lists them otherwise."""
        for host in self.hosts:
            if host.name == name:
                return host
        have = ", ".join(host.name for host in self.hosts[:20])
        more = f" and {len(self.hosts) - 20} more" if len(self.hosts) > 20 else ""
        raise InputError(f"emulation {self.name} has no host {name}; it has {have}{more}")
