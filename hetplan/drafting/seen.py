"""What lists of hosts and drivers' topologies say of the nodes that were said in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from hetplan.cluster.node import Nics
from hetplan.drafting.text import comment, host_ranges, listable, scalar
from hetplan.drafting.words import NODES, NodesWords, wrong
from hetplan.errors import Fault, FaultList, InputError
from hetplan.files.reading import read_text
from hetplan.importers.records import Host, Imported, NodeTopology
from hetplan.importers.table import Gives, import_text
from hetplan.importers.topology import nic_layout, pcie_switches

if TYPE_CHECKING:
    from hetplan.drafting.cluster import DraftIsland

HOSTS, TOPOLOGY = "--hosts", "--topology"


@dataclass(slots=True)
class Seen:
    """Hosts that no island has yet, and topologies."""

    hosts: list[Host] = field(default_factory=list)
    topologies: dict[str, NodeTopology] = field(default_factory=dict)
    """By what the option says: `FILE`, or `KIND=FILE`."""
    used: set[str] = field(default_factory=set)
    """Topologies that an island has."""

    @classmethod
    def read(cls, hosts: Path | None, topologies: Sequence[str]) -> Seen:
        """The files; one InputError with the faults of all."""
        found, faults = cls(), FaultList()
        listed = None if hosts is None else faults.of(_read, HOSTS, hosts, (Gives.HOSTS,))
        found.hosts += () if listed is None else listed.hosts
        for text in topologies:
            file = Path(_name_and_file(text)[1])
            read = faults.of(_read, TOPOLOGY, file, (Gives.TOPOLOGY,))
            if read is not None and read.topology is not None:
                found.topologies[text] = read.topology
        faults.stop()
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
            of = f" of type {words.what}" if typed else ""
            known = "" if fitting else f" (there are {types}: call the kind so)" * typed
            raise wrong(NODES, words.text, f"{HOSTS} lists {len(fitting)} hosts for it{of}{known}")
        taken = fitting[: words.nodes]
        for host in taken:
            if host.slots not in (None, devices):
                message = f"host {host.name} has {host.slots} slots, the nodes {devices} devices"
                raise wrong(NODES, words.text, message)
            self.hosts.remove(host)
        return tuple(taken)

    def topologies_of(self, islands: Sequence[DraftIsland]) -> list[NodeTopology | None]:
        """The topology of each island; an InputError where several may be meant.

        One with the island's name comes before one with its kind, and that before one without.
        """
        nearest = [self._nearest_to(island) for island in islands]
        faults: list[Fault] = []
        for text, topology in self.topologies.items():
            kinds = {
                island.kind.kind: island.words.what
                for island, texts in zip(islands, nearest, strict=True)
                if text in texts
            }
            if len(kinds) > 1:
                right = " or ".join(quote(f"{kind}={text}") for kind in kinds.values())
                message = f"{_devices(topology)} fit several kinds: write KIND=FILE, {right}"
                faults.append(Fault(file=text, message=message))
        if faults:
            raise InputError(*faults)
        for island, texts in zip(islands, nearest, strict=True):
            if len(texts) > 1:
                _, file = _name_and_file(texts[-1])
                message = (
                    f"{' and '.join(texts)} fit it; give one of them, or write ISLAND=FILE, as in "
                    f"{quote(f'{island.name}={file}')}"
                )
                raise wrong(NODES, island.words.text, message)
        self.used.update(chain.from_iterable(nearest))
        return [self.topologies[texts[0]] if texts else None for texts in nearest]

    def _nearest_to(self, island: DraftIsland) -> list[str]:
        """What the option says of the topologies that are most clearly this island's."""
        found = {
            text: rank
            for text, topology in self.topologies.items()
            if _is_alike(topology, island)
            and (rank := _nearness(_name_and_file(text)[0], island)) is not None
        }
        return [text for text, rank in found.items() if rank == min(found.values())]

    def left_over(self, islands: Sequence[DraftIsland]) -> Iterable[Fault]:
        """Hosts and topologies that none of all islands has."""
        if self.hosts:
            names = ", ".join(host.name for host in self.hosts[:3])
            yield Fault(field=HOSTS, message=f"{len(self.hosts)} hosts are of no island: {names}")
        for text, topology in self.topologies.items():
            if text in self.used:
                continue
            name, _ = _name_and_file(text)
            called = [each for each in islands if _nearness(name, each) is not None]
            if not called:
                known = ", ".join(dict.fromkeys(each.words.what for each in islands))
                message = f"no nodes are called {name}; there are {known}"
            elif any(_is_alike(topology, each) for each in called):
                message = "each island that it fits has another topology"
            elif name:
                one = called[0]
                message = (
                    f"{_devices(topology)}; nodes of {name} have {one.devices} of {one.kind.vendor}"
                )
            else:
                message = f"{_devices(topology)} fit no island"
            yield Fault(file=text, message=message)


def _name_and_file(text: str) -> tuple[str, str]:
    """What `--topology` says; no name in a mere FILE, also one as in `./a=b.txt`."""
    name, is_named, file = text.partition("=")
    return (name, file) if is_named and name and "/" not in name else ("", text)


def _is_alike(topology: NodeTopology, island: DraftIsland) -> bool:
    """Whether it may be of such nodes: of this vendor, with as many devices."""
    shape = (island.kind.vendor, island.devices)
    return (topology.vendor, len(topology.devices)) == shape


def _nearness(name: str, island: DraftIsland) -> int | None:
    """0: the island's own name; 1: its kind's; 2: no name; None: another's."""
    if not name:
        return 2
    if name.lower() == island.name.lower():
        return 0
    return 1 if name.lower() in (island.words.what.lower(), island.kind.kind) else None


def _devices(topology: NodeTopology) -> str:
    return f"{len(topology.devices)} devices of {topology.vendor}"


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
