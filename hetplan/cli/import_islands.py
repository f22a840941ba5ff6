"""Which islands a draft has: their device kinds, nodes and devices, from options and files."""

from __future__ import annotations

from pathlib import Path

from hetplan.cli.import_draft import DraftRequest
from hetplan.cli.import_links import Links
from hetplan.cli.import_parts import Faults, IslandParts, guess, one_each, quantity
from hetplan.cluster.catalogue import load_catalogue, nearest_kinds
from hetplan.cluster.devices import DeviceKind
from hetplan.errors import Fault, InputError
from hetplan.importers.draft import ClusterDraft, IslandDraft
from hetplan.importers.records import Host, Imported, NodeTopology
from hetplan.units import Dimension

_TOPOLOGIES = ("nvidia-topo", "rocm-topo", "npu-topo")
DEFAULT_REGION = "here"
_HOST_LISTS = ("hostfile", "slurm-nodes")


def read_draft(request: DraftRequest, target: Path, imported: Imported, file: str) -> ClusterDraft:
    """What the options and files describe; one InputError with every fault of them."""
    if imported.kind not in (*_TOPOLOGIES, *_HOST_LISTS):
        known = ", ".join((*_TOPOLOGIES, *_HOST_LISTS))
        raise InputError(
            f"a cluster file is drafted from one of {known}; {imported.kind} says nothing of nodes"
        )
    islands = _islands(request, imported, file)
    names = tuple(each.name for each in islands)
    faults = Faults()
    links = Links(request=request, names=names, faults=faults)
    memory = faults.of(one_each, "memory", request.memory, names) or {}
    for text in memory.values():
        faults.of(quantity, "memory", text, Dimension.MEMORY)
    regions = faults.of(one_each, "region", request.region, names) or {}
    drafts = []
    for each in islands:
        inter, nics = links.inter(each)
        drafts.append(
            IslandDraft(
                name=each.name,
                region=regions.get(each.name, DEFAULT_REGION),
                device=each.device,
                nodes=each.nodes,
                devices_per_node=each.devices_per_node,
                intra_node=links.intra(each),
                inter_node=inter,
                memory=memory.get(each.name),
                hosts=each.hosts,
                topology=each.topology,
                nics=nics,
            )
        )
    across = links.across(islands)
    faults.stop()
    return ClusterDraft(name=request.name or target.stem, islands=tuple(drafts), across=across)


def _islands(request: DraftRequest, imported: Imported, file: str) -> tuple[IslandParts, ...]:
    faults = Faults()
    hosts: tuple[Host, ...] = imported.hosts
    if request.hosts is not None and hosts:
        raise InputError("the hosts are listed twice: in FILE and by --hosts; leave --hosts out")
    if request.hosts is not None:
        listed = str(request.hosts)
        found = faults.of(guess, "hosts", listed, _HOST_LISTS)
        hosts = found.hosts if found is not None else ()
    kinds = faults.of(_device_kinds, request, hosts) or {}
    faults.stop()
    names = tuple(kinds)
    topologies = faults.of(one_each, "topology", request.topology, names) or {}
    read = {
        name: faults.of(guess, "topology", path, _TOPOLOGIES) for name, path in topologies.items()
    }
    islands = []
    for name, (device, group) in kinds.items():
        own = read.get(name)
        topology = own.topology if own is not None else None
        if topology is None and imported.topology is not None:
            topology = _fitting(imported.topology, device, group, alone=len(kinds) == 1)
        made = faults.of(_island, request, file, name, device, group, topology)
        if made is not None:
            islands.append(made)
    faults.stop()
    return tuple(islands)


def _fitting(
    topology: NodeTopology, device: DeviceKind, hosts: tuple[Host, ...], *, alone: bool
) -> NodeTopology | None:
    """The topology, where it can be that of a node of this island."""
    slots = {host.slots for host in hosts} - {None}
    fits = topology.vendor == device.vendor and slots <= {len(topology.devices)}
    return topology if alone or fits else None


def _device_kinds(
    request: DraftRequest, hosts: tuple[Host, ...]
) -> dict[str, tuple[DeviceKind, tuple[Host, ...]]]:
    """Per island, in the order of the options: its device kind and its hosts."""
    types = list(dict.fromkeys(host.device or "" for host in hosts))
    if not request.types:
        if request.device is None:
            other = f", or --type {types[0]}=KIND for every type of the hosts" if any(types) else ""
            if types == [""]:
                other = "; hosts of several kinds need type=NAME behind each, and --type NAME=KIND"
            raise InputError(f"which device is it? give --device KIND{other}")
        if len(types) > 1:
            shown = ", ".join(each or "(none)" for each in types)
            raise InputError(f"the hosts have the types {shown}; give --type TYPE=KIND for each")
        device = _known_kind("device", request.device)
        return {request.island or device.kind: (device, hosts)}
    if request.island is not None:
        raise InputError("--island names the only island; with --type each is called by its type")
    if not hosts:
        raise InputError("--type is for hosts with a type; give the list of hosts with --hosts")
    kinds: dict[str, tuple[DeviceKind, tuple[Host, ...]]] = {}
    for value in request.types:
        name, equals, kind = value.partition("=")
        if not equals or name not in types or name in kinds:
            shown = ", ".join(each or "(none)" for each in types)
            message = f"found {value[:60]!a}; write TYPE=KIND once for each type: {shown}"
            raise InputError(Fault(field="--type", message=message))
        group = tuple(host for host in hosts if host.device == name)
        kinds[name] = (_known_kind("type", kind), group)
    missing = [each or "(none)" for each in types if each not in kinds]
    if missing:
        raise InputError(
            f"hosts have the types {', '.join(missing)} too; give --type TYPE=KIND for each, or "
            "take these hosts out of the list"
        )
    return kinds


def _known_kind(option: str, name: str) -> DeviceKind:
    catalogue = {kind.kind: kind for kind in load_catalogue()}
    if name in catalogue:
        return catalogue[name]
    near = nearest_kinds(name, catalogue)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(catalogue))}"
    message = f"unknown device kind {name[:60]!a}; {hint}"
    raise InputError(Fault(field=f"--{option}", message=message))


def _island(
    request: DraftRequest,
    file: str,
    name: str,
    device: DeviceKind,
    hosts: tuple[Host, ...],
    topology: NodeTopology | None,
) -> IslandParts:
    if topology is not None and topology.vendor != device.vendor:
        message = f"the topology is of {topology.vendor}, {device.kind} is of {device.vendor}"
        raise InputError(Fault(file=file, message=f"{message}; give another --device"))
    counts: dict[str, int] = {}
    slots = sorted({host.slots for host in hosts if host.slots is not None})
    if len(slots) > 1:
        shown = " and ".join(str(each) for each in slots)
        raise InputError(
            f"island {name}: its hosts have {shown} slots, and every node of an island has the "
            "same; give the odd ones a type of their own (`type=`, --type)"
        )
    if slots:
        counts["slots of the hosts"] = slots[0]
    if topology is not None:
        counts["devices of the topology"] = len(topology.devices)
    if request.devices_per_node is not None:
        counts["--devices-per-node"] = request.devices_per_node
    if not counts:
        raise InputError(f"island {name}: nobody said how many devices a node has; give "
                         "--devices-per-node N")  # fmt: skip
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        shown = ", ".join(f"{count} {what}" for what, count in counts.items())
        raise InputError(f"island {name}: {shown}; they must be one number, at least 1")
    return IslandParts(
        name=name,
        device=device,
        nodes=_nodes(request, name, hosts),
        devices_per_node=next(iter(counts.values())),
        hosts=tuple(host.name for host in hosts),
        topology=topology,
    )


def _nodes(request: DraftRequest, name: str, hosts: tuple[Host, ...]) -> int:
    if request.nodes is None and not hosts:
        raise InputError(
            f"island {name}: nobody said how many nodes like this one there are; give --nodes N, "
            "or a list of hosts with --hosts FILE"
        )
    if request.nodes is not None and request.nodes < 1:
        raise InputError(Fault(field="--nodes", message=f"{request.nodes}; there is at least one"))
    if hosts and request.nodes not in (None, len(hosts)):
        raise InputError(
            f"island {name}: {len(hosts)} hosts are listed, --nodes says {request.nodes}; leave "
            "--nodes out"
        )
    return len(hosts) or request.nodes or 1
