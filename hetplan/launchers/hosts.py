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
from typing import BinaryIO

from hetplan.cluster.hosts import host_of_device
from hetplan.cluster.spec import Cluster
from hetplan.emulation import running, state
from hetplan.emulation.values import DATA_INTERFACE, EmulatedHost, Emulation
from hetplan.errors import Fault, InputError

THIS_MACHINE = "this machine"
"""Where ranks run that are on no emulated host."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where the ranks of one run are."""

    of_rank: tuple[str, ...]
    """Name of each rank's host."""
    emulation: Emulation | None = None
    """The emulation that has the hosts; None: all ranks are on this machine, and what they send
    stays on its loopback device."""

    @property
    def interface(self) -> str:
        """Network interface that the ranks send over."""
        if self.emulation is not None:
            return DATA_INTERFACE
        return "lo0" if sys.platform == "darwin" else "lo"

    @property
    def meeting_address(self) -> str:
        """Address at which the others find rank 0: on the control network of an emulation."""
        if self.emulation is not None:
            return self.emulation.host(self.of_rank[0]).control_address
        return _LOOPBACK

    def host_of_address(self, address: str) -> str:
        """Name of the host whose ranks send from this address; empty where none does."""
        hosts = () if self.emulation is None else self.emulation.hosts
        return next((host.name for host in hosts if host.data_address == address), "")

    def start(
        self, rank: int, arguments: Sequence[str], *, environment: Mapping[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """Start a program as this rank, in a session of its own; `log` gets what it prints."""
        if self.emulation is not None:
            return running.start(
                self.emulation,
                self.of_rank[rank],
                arguments,
                environment=environment,
                stdout=log.fileno(),
                stderr=subprocess.STDOUT,
            )
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def this_machine_hosts(num_ranks: int) -> Hosts:
    """So many ranks, all on this machine."""
    return Hosts(of_rank=(THIS_MACHINE,) * num_ranks)


def hosts_of_emulation(name: str, cluster: Cluster, devices: Sequence[int]) -> Hosts:
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
    return Hosts(emulation=emulation, of_rank=tuple(names))


def _mismatch(host: EmulatedHost | None, cluster: Cluster, device: int) -> str:
    """What the emulation has otherwise than the plan's cluster; empty where nothing."""
    if host is None:
        return "is missing"
    island = cluster.island_of_device(device)
    kind = island.device.kind
    if (host.device, host.devices) != (kind, island.devices_per_node):
        return f"has {island.devices_per_node} x {kind}, but {host.devices} x {host.device}"
    return ""
