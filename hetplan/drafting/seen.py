"""What lists of hosts and drivers' topologies say of the nodes that were said in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.node import Nics
from hetplan.drafting.text import comment, host_ranges, listable, scalar
from hetplan.drafting.words import NODES, NodesWords, wrong
from hetplan.errors import Fault, InputError
from hetplan.files.reading import read_text
from hetplan.importers.records import Host, Imported, NodeTopology
from hetplan.importers.table import Gives, import_text
from hetplan.importers.topology import nic_layout, pcie_switches

HOSTS, TOPOLOGY = "--hosts", "--topology"


@dataclass(slots=True)
class Seen:
    """Hosts that no island has yet, and topologies."""

    hosts: list[Host] = field(default_factory=list)
    topologies: dict[str, NodeTopology] = field(default_factory=dict)
    """By file."""
    used: set[str] = field(default_factory=set)
    """Topologies that an island has."""

    @classmethod
    def read(cls, hosts: Path | None, topologies: Sequence[Path]) -> Seen:
        """The files; one InputError with the faults of all."""
        found = cls()
        faults: list[Fault] = []
        for option, path, gives in (
            *((HOSTS, path, Gives.HOSTS) for path in (hosts,) if path is not None),
            *((TOPOLOGY, path, Gives.TOPOLOGY) for path in topologies),
        ):
            try:
                read = _read(option, path, (gives,))
            except InputError as error:
                faults += error.faults
                continue
            found.hosts += read.hosts
            if read.topology is not None:
                found.topologies[str(path)] = read.topology
        if faults:
            raise InputError(*faults)
        return found

    def hosts_of(self, words: NodesWords, devices: int) -> tuple[Host, ...]:
        """As many hosts as the island has nodes: of its type where the list has types."""
        if not self.hosts:
            return ()
        typed = any(host.device for host in self.hosts)
        fitting = [
            host
            for host in self.hosts
            if not typed or (host.device or "").lower() == words.what.lower()
        ]
        if len(fitting) < words.nodes:
            types = ", ".join(dict.fromkeys(host.device or "(none)" for host in self.hosts))
            of = f" of type {words.what} (there are {types}: call the kind so)" if typed else ""
            raise wrong(NODES, words.text, f"{HOSTS} lists {len(fitting)} hosts for it{of}")
        taken = fitting[: words.nodes]
        for host in taken:
            if host.slots not in (None, devices):
                message = f"host {host.name} has {host.slots} slots, the nodes {devices} devices"
                raise wrong(NODES, words.text, message)
            self.hosts.remove(host)
        return tuple(taken)

    def topology_of(self, words: NodesWords, kind: DeviceKind, devices: int) -> NodeTopology | None:
        """The topology of nodes with so many devices of this vendor."""
        fitting = {
            file: topology
            for file, topology in self.topologies.items()
            if topology.vendor == kind.vendor and len(topology.devices) == devices
        }
        if len(fitting) > 1:
            raise wrong(NODES, words.text, f"{' and '.join(fitting)} fit it; give one of them")
        self.used |= fitting.keys()
        return next(iter(fitting.values()), None)

    def left_over(self) -> Iterable[Fault]:
        """Hosts and topologies that no island has."""
        if self.hosts:
            names = ", ".join(host.name for host in self.hosts[:3])
            yield Fault(field=HOSTS, message=f"{len(self.hosts)} hosts are of no island: {names}")
        for file, topology in self.topologies.items():
            if file not in self.used:
                message = f"{len(topology.devices)} devices of {topology.vendor} fit no island"
                yield Fault(file=file, message=message)


def _read(option: str, path: Path, gives: Iterable[Gives]) -> Imported:
    try:
        return import_text(read_text(path), str(path), gives=gives)
    except InputError as error:
        faults = (replace(each, message=f"{each.message} ({option})") for each in error.faults)
        raise InputError(*faults) from error


def host_lines(hosts: Sequence[Host]) -> list[str]:
    """`node_names` of the island, or a comment where they cannot be that."""
    names = [host.name for host in hosts]
    if not all(map(listable, names)):
        return comment(f"Their names cannot be node_names: {' '.join(names[:4])}", 8)
    return ["        node_names:", *(f"          - {scalar(e)}" for e in host_ranges(names))]


def place_lines(topology: NodeTopology) -> list[str]:
    """NUMA nodes and PCIe switches, where the topology says them for every device."""
    lines: list[str] = []
    numa = [device.numa_node for device in topology.devices]
    if all(node is not None for node in numa):
        lines.append(f"        numa_nodes: [{', '.join(map(str, numa))}]")
    own: dict[str, int] = {}
    for number, switch in enumerate(pcie_switches(topology)):
        own |= dict.fromkeys(switch.devices, number)
    if len(own) == len(topology.devices):
        numbers = ", ".join(str(own[device.name]) for device in topology.devices)
        lines.append(f"        pcie_switches: [{numbers}]")
    return lines


def seen_nics(topology: NodeTopology, bytes_per_second: float) -> Nics | None:
    """The NICs that the devices use, of this rate each; None where the topology has none."""
    layout = nic_layout(topology)
    if layout is None:
        return None
    return Nics(
        per_node=len(layout.nics),
        bandwidth_bytes_per_second=bytes_per_second,
        most_per_device=layout.most_per_device,
        of_device=layout.of_device,
    )
