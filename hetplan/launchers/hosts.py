"""The hosts of a run: on which one each rank starts, and how.

All on this machine; or, on an emulation that is up (`hetplan emulate up`), each on the host that
holds its device. Hosts of an emulation share this machine's files, so that a run has one folder;
ranks meet over the control network, and everything that they send each other crosses the shaped
one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from hetplan.cluster.hosts import host_of_device
from hetplan.cluster.spec import Cluster
from hetplan.emulation import running, state
from hetplan.emulation.values import DATA_INTERFACE, EmulatedHost, Emulation
from hetplan.errors import Fault, InputError

THIS_MACHINE = "this machine"
"""Where ranks run that are on no emulated host."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine:
    """All ranks on this machine; what they send stays on its loopback device."""

    of_rank: tuple[str, ...]
    """Name of each rank's host."""

    @property
    def interface(self) -> str:
        """Network interface that the ranks send over."""
        return "lo0" if sys.platform == "darwin" else "lo"

    @property
    def meeting_address(self) -> str:
        """Address at which rank 0 is found by the others."""
        return _LOOPBACK

    def host_of_address(self, address: str) -> str:
        """Name of the host whose ranks send from this address; empty where none does."""
        return ""

    def start(
        self, rank: int, arguments: Sequence[str], *, environment: Mapping[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """Start a program as this rank, in a session of its own; `log` gets what it prints."""
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedHosts:
    """Each rank on a host of an emulation."""

    emulation: Emulation
    of_rank: tuple[str, ...]

    @property
    def interface(self) -> str:
        """The shaped interface."""
        return DATA_INTERFACE

    @property
    def meeting_address(self) -> str:
        """Of rank 0's host on the control network."""
        return self.emulation.host(self.of_rank[0]).control_address

    def host_of_address(self, address: str) -> str:
        """By the addresses of the shaped network."""
        names = (host.name for host in self.emulation.hosts if host.data_address == address)
        return next(names, "")

    def start(
        self, rank: int, arguments: Sequence[str], *, environment: Mapping[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """As `ThisMachine.start`, on the rank's host."""
        return running.start(
            self.emulation,
            self.of_rank[rank],
            arguments,
            environment=environment,
            stdout=log.fileno(),
            stderr=subprocess.STDOUT,
        )


Hosts: TypeAlias = ThisMachine | EmulatedHosts
"""Where the ranks of one run are."""


def this_machine_hosts(num_ranks: int) -> ThisMachine:
    """So many ranks, all here."""
    return ThisMachine(of_rank=(THIS_MACHINE,) * num_ranks)


def hosts_of_emulation(name: str, cluster: Cluster, devices: Sequence[int]) -> EmulatedHosts:
    """Where ranks on these devices of a cluster are started, on the emulation of this name.

    Hosts are found by the names of the cluster's nodes, so a part of the emulated cluster will do
    too. An InputError where there is no such emulation, it is not up, or it is of another cluster.
    """
    emulation = state.read_up(name)
    if emulation.cluster != cluster.name:
        raise InputError(
            Fault(
                field="--emulation",
                message=f"{name} is up with cluster {emulation.cluster}, the plan is for "
                f"{cluster.name}; bring the plan's cluster up (hetplan emulate up) or plan for "
                "the one that is up",
            )
        )
    by_name = {host.name: host for host in emulation.hosts}
    names, faults = [], dict[str, Fault]()
    for device in devices:
        host = host_of_device(cluster, device)
        names.append(host)
        message = _mismatch(by_name.get(host), cluster, device)
        if message:
            faults[host] = Fault(
                field="--emulation",
                message=f"host {host} of the plan's cluster {message} in emulation {name}; take it "
                "down and up again with the cluster file that the plan was made for",
            )
    if faults:
        raise InputError(*faults.values())
    return EmulatedHosts(emulation=emulation, of_rank=tuple(names))


def _mismatch(host: EmulatedHost | None, cluster: Cluster, device: int) -> str:
    """What the emulation has otherwise than the plan's cluster; empty where nothing."""
    if host is None:
        return "is missing"
    island = cluster.island_of_device(device)
    kind = island.device.kind
    if (host.device, host.devices) != (kind, island.devices_per_node):
        return f"has {island.devices_per_node} x {kind}, but {host.devices} x {host.device}"
    return ""
