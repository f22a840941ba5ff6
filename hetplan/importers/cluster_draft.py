"""From topologies, lists of hosts and measured paths to the islands and links of a cluster.

What no file and no option says is never filled in: the error names the option that says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.names import known_kind
from hetplan.errors import Fault, FaultList, InputError
from hetplan.files.reading import read_text
from hetplan.importers.draft import ClusterDraft, IslandDraft, NicsDraft
from hetplan.importers.link_figures import (
    Figure,
    LinkFigures,
    best_bandwidth,
    from_samples,
    from_topology,
    least_latency,
    nic_layout,
)
from hetplan.importers.records import Host, Imported, NodeTopology
from hetplan.importers.table import Gives, import_text, importer_called
from hetplan.profiling.samples import LinkSample
from hetplan.units import Dimension, parse_quantity

DEFAULT_REGION = "here"
_NODES = re.compile(r"([1-9]\d{0,6})?(?:x([1-9]\d{0,6}))?", re.ASCII)
_NICS = re.compile(r"(?:([1-9]\d{0,5})(?: *x *(?=.)|$))?(.*)", re.ASCII)
_SHARED = re.compile(r"(.*\S)\s+shared", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What the user says of a cluster; a text `ISLAND=VALUE` is of one island, others of all."""

    name: str
    devices: tuple[str, ...]
    """Device kinds: one, one as NAME=KIND, or TYPE=KIND for every type of the hosts."""
    hosts: Path | None = None
    """Hostfile or Slurm node list."""
    nodes: str | None = None
    """`16` nodes, `16x8` with their devices, or `x8` devices where the hosts are listed."""
    topologies: tuple[str, ...] = ()
    """Files of a driver's topology of a node."""
    memory: tuple[str, ...] = ()
    """Memory of one device that a job may use."""
    regions: tuple[str, ...] = ()
    intra: tuple[str, ...] = ()
    """Inside a node: a bandwidth, a latency or the name of link samples."""
    inter: tuple[str, ...] = ()
    """Between nodes: the same, or a file of perftest or iperf3."""
    nics: tuple[str, ...] = ()
    """Network cards of a node: `8 x 200 Gbit/s`, or one of the two."""
    across: tuple[str, ...] = ()
    """Between islands: as `inter`; `3 GB/s shared` is what all devices that send share."""
    samples: Callable[[], Sequence[LinkSample]] = tuple
    """The link samples of the profile store, read where a name needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Island:
    """An island before its links."""

    name: str
    device: DeviceKind
    nodes: int
    devices_per_node: int
    hosts: tuple[str, ...]
    topology: NodeTopology | None


@dataclass(slots=True)
class _LinkValues:
    """The values of one link's option, told apart."""

    given: LinkFigures = field(default_factory=LinkFigures)
    samples: tuple[str, Sequence[LinkSample]] | None = None
    files: list[tuple[str, Imported]] = field(default_factory=list)
    """(name, records) of files of perftest and iperf3."""


def draft_cluster(request: DraftRequest) -> ClusterDraft:
    """The cluster that the request describes; one InputError with every fault."""
    faults = FaultList()
    islands = _islands(request, faults)
    names = [island.name for island in islands]
    memory = _one_each("--memory", request.memory, names, faults)
    for text in memory.values():
        faults.of(_quantity, "--memory", text, Dimension.MEMORY)
    regions = _one_each("--region", request.regions, names, faults)
    intra = _by_island("--intra", request.intra, names, faults)
    inter = _by_island("--inter", request.inter, names, faults)
    nics = _one_each("--nics", request.nics, names, faults)
    drafts = []
    for island in islands:
        inside = _link_values(request, "--intra", intra.get(island.name, ()), faults)
        between = _link_values(request, "--inter", inter.get(island.name, ()), faults)
        drafts.append(
            IslandDraft(
                name=island.name,
                region=regions.get(island.name, DEFAULT_REGION),
                device=island.device,
                nodes=island.nodes,
                devices_per_node=island.devices_per_node,
                intra_node=_intra_figures(island, inside),
                inter_node=_inter_figures(island, between),
                memory=memory.get(island.name),
                hosts=island.hosts,
                topology=island.topology,
                nics=faults.of(_nics, island, nics.get(island.name), between),
            )
        )
    across = _across_figures(request, len(islands), faults)
    faults.stop()
    return ClusterDraft(name=request.name, islands=tuple(drafts), across=across)


def _by_island(
    option: str, values: Iterable[str], names: Sequence[str], faults: FaultList
) -> dict[str, list[str]]:
    """Values per island; one without `ISLAND=` is of every island that has none of its own."""
    own: dict[str, list[str]] = {}
    common: list[str] = []
    for value in values:
        island, equals, rest = value.partition("=")
        if not equals:
            common.append(value)
        elif island in names:
            own.setdefault(island, []).append(rest)
        else:
            known = ", ".join(names)
            faults.add(option, f"no island is called {island[:60]!a}; the islands are {known}")
    return {name: own.get(name) or common for name in names if own.get(name) or common}


def _one_each(
    option: str, values: Iterable[str], names: Sequence[str], faults: FaultList
) -> dict[str, str]:
    """As `_by_island`, where an island can have one value."""
    texts = _by_island(option, values, names, faults)
    for name, each in texts.items():
        if len(each) > 1:
            faults.add(option, f"{name} has {len(each)} of them; give one")
    return {name: each[0] for name, each in texts.items()}


def _quantity(option: str, text: str, dimension: Dimension) -> float:
    try:
        return parse_quantity(text, dimension)
    except InputError as error:
        raise InputError(Fault(field=option, message=str(error))) from error


def _read(option: str, path: str, gives: Iterable[Gives]) -> Imported:
    try:
        return import_text(read_text(Path(path)), path, gives=gives)
    except InputError as error:
        faults = (replace(each, message=f"{each.message} ({option})") for each in error.faults)
        raise InputError(*faults) from error


# Islands: device kinds, nodes and devices.


def _islands(request: DraftRequest, faults: FaultList) -> tuple[_Island, ...]:
    hosts: tuple[Host, ...] = ()
    if request.hosts is not None:
        listed = faults.of(_read, "--hosts", str(request.hosts), (Gives.HOSTS,))
        hosts = listed.hosts if listed is not None else ()
    kinds = faults.of(_device_kinds, request, hosts) or {}
    faults.stop()
    files = _by_island("--topology", request.topologies, tuple(kinds), faults)
    islands = []
    for name, (device, group) in kinds.items():
        topology = faults.of(_topology, name, device, group, files.get(name, []))
        island = faults.of(_island, request.nodes, name, device, group, topology)
        if island is not None:
            islands.append(island)
    faults.stop()
    return tuple(islands)


def _device_kinds(
    request: DraftRequest, hosts: tuple[Host, ...]
) -> dict[str, tuple[DeviceKind, tuple[Host, ...]]]:
    """Per island, in the order of the options: its device kind and its hosts."""
    types = list(dict.fromkeys(host.device or "" for host in hosts))
    shown = ", ".join(each or "(none)" for each in types)
    if not request.devices:
        more = f", or --device TYPE=KIND for every type of the hosts: {shown}" if any(types) else ""
        raise InputError(f"which device is it? give --device KIND{more}")
    kinds: dict[str, tuple[DeviceKind, tuple[Host, ...]]] = {}
    for value in request.devices:
        name, equals, kind = value.rpartition("=")
        device = _known_kind(kind)
        if len(request.devices) == 1 and len(types) < 2:
            return {name if equals else device.kind: (device, hosts)}
        if not equals or name not in types or name in kinds:
            message = (
                f"found {value[:60]!a}; write TYPE=KIND once for each type of the hosts: "
                f"{shown or 'no hosts are listed; give --hosts FILE'}"
            )
            raise InputError(Fault(field="--device", message=message))
        kinds[name] = (device, tuple(host for host in hosts if host.device == name))
    missing = [each or "(none)" for each in types if each not in kinds]
    if missing:
        raise InputError(
            f"hosts have the types {', '.join(missing)} too; give --device TYPE=KIND for each, or "
            "take these hosts out of the list"
        )
    return kinds


def _known_kind(name: str) -> DeviceKind:
    try:
        return known_kind(name)
    except InputError as error:
        raise InputError(Fault(field="--device", message=str(error))) from error


def _topology(
    name: str, device: DeviceKind, hosts: tuple[Host, ...], files: Sequence[str]
) -> NodeTopology | None:
    """The topology of the island's nodes: of the file that fits them."""
    read = [(path, _read("--topology", path, (Gives.TOPOLOGY,)).topology) for path in files]
    topologies = [(path, topology) for path, topology in read if topology is not None]
    slots = {host.slots for host in hosts} - {None}
    fitting = [
        topology
        for _, topology in topologies
        if topology.vendor == device.vendor and slots <= {len(topology.devices)}
    ]
    if topologies and not fitting:
        path, topology = topologies[0]
        message = (
            f"{len(topology.devices)} devices of {topology.vendor}; island {name} has "
            f"{device.kind} of {device.vendor}"
        )
        if slots:
            message += f" and hosts with {' or '.join(map(str, slots))} slots"
        raise InputError(Fault(file=path, message=message))
    if len(fitting) > 1:
        message = f"{len(fitting)} of them fit island {name}; write {name}=FILE"
        raise InputError(Fault(field="--topology", message=message))
    return fitting[0] if fitting else None


def _island(
    text: str | None,
    name: str,
    device: DeviceKind,
    hosts: tuple[Host, ...],
    topology: NodeTopology | None,
) -> _Island:
    found = _NODES.fullmatch(text or "")
    if found is None:
        message = f"found {text!a:.60}; write 16 nodes of 8 devices as 16x8, 16 or x8"
        raise InputError(Fault(field="--nodes", message=message))
    nodes, devices = (int(part) if part else None for part in found.groups())
    counts: dict[str, int] = {}
    slots = sorted({host.slots for host in hosts if host.slots is not None})
    if len(slots) > 1:
        shown = " and ".join(map(str, slots))
        raise InputError(
            f"island {name}: its hosts have {shown} slots, and every node of an island has the "
            "same; give the odd ones a type of their own (`type=` in the hostfile)"
        )
    if slots:
        counts["slots of the hosts"] = slots[0]
    if topology is not None:
        counts["devices of the topology"] = len(topology.devices)
    if devices is not None:
        counts["devices by --nodes"] = devices
    if not counts:
        raise InputError(f"island {name}: how many devices has a node? write --nodes x8")
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        shown = ", ".join(f"{count} {what}" for what, count in counts.items())
        raise InputError(f"island {name}: {shown}; they must be one number, at least 1")
    if nodes is None and not hosts:
        raise InputError(
            f"island {name}: how many nodes are there? give --nodes N, or a list with --hosts FILE"
        )
    if hosts and nodes not in (None, len(hosts)):
        raise InputError(f"island {name}: {len(hosts)} hosts are listed, --nodes says {nodes}")
    return _Island(
        name=name,
        device=device,
        nodes=len(hosts) or nodes or 1,
        devices_per_node=next(iter(counts.values())),
        hosts=tuple(host.name for host in hosts),
        topology=topology,
    )


# Links. A value counts more than measured samples, samples more than a file, and that more than
# the catalogue's figures over a topology.


def _link_values(
    request: DraftRequest, option: str, texts: Iterable[str], faults: FaultList
) -> _LinkValues:
    values = _LinkValues()
    for text in texts:
        shared = _SHARED.fullmatch(text) if option == "--across" else None
        plain = shared.group(1) if shared else text
        figures = _given_figures(option, plain, shared=shared is not None)
        if figures is not None:
            values.given = values.given.over(figures)
        elif Path(text).is_file() and option != "--intra":
            imported = faults.of(_read, option, text, (Gives.LINKS,))
            if imported is not None:
                values.files.append((Path(text).name, imported))
        elif re.match(r"[\d.]", text):
            faults.of(_quantity, option, plain, Dimension.BANDWIDTH)
        else:
            values.samples = faults.of(_stored, request, option, text)
    return values


def _given_figures(option: str, text: str, *, shared: bool) -> LinkFigures | None:
    """The bandwidth or latency that the text is; None where it is neither."""
    for name, dimension in (("bandwidth", Dimension.BANDWIDTH), ("latency", Dimension.TIME)):
        try:
            figure = Figure(value=parse_quantity(text, dimension), source=f"given ({option})")
        except InputError:
            continue
        if name == "latency":
            return LinkFigures(latency=figure)
        return LinkFigures(shared=figure) if shared else LinkFigures(bandwidth=figure)
    return None


def _stored(request: DraftRequest, option: str, name: str) -> tuple[str, Sequence[LinkSample]]:
    """Samples of the link of this name."""
    by_link: dict[str, list[LinkSample]] = {}
    for sample in request.samples():
        by_link.setdefault(sample.link, []).append(sample)
    if name in by_link:
        return name, by_link[name]
    have = ", ".join(sorted(by_link)[:20]) or "none"
    message = (
        f"{name[:60]!a} is no quantity, no file and no link of the store's samples (it has: "
        f"{have}); add samples with `hetplan import samples FILE --link NAME`"
    )
    raise InputError(Fault(field=option, message=message))


def _sampled(values: _LinkValues, devices_per_node: int | None = None) -> LinkFigures:
    """The figures that were given, and those of samples where none were."""
    if values.samples is None:
        return values.given
    name, samples = values.samples
    return values.given.over(from_samples(samples, name, devices_per_node=devices_per_node))


def _intra_figures(island: _Island, values: _LinkValues) -> LinkFigures:
    figures = _sampled(values)
    if island.topology is None:
        return figures
    pair = from_topology(island.topology, island.device)
    if values.given.bandwidth is None:
        figures = figures.of_one_pair(pair.bandwidth)
    return figures.over(pair)


def _inter_figures(island: _Island, values: _LinkValues) -> LinkFigures:
    figures = _sampled(values, island.devices_per_node)
    for source, imported in values.files:
        bandwidth = None
        if not importer_called(imported.kind).of_one_card:
            # It crosses whatever the hosts have between them, whoever sends.
            share = island.devices_per_node
            bandwidth = best_bandwidth(imported.paths, source=source, share=share)
        latency = least_latency(imported.paths, source=source)
        figures = figures.over(LinkFigures(bandwidth=bandwidth, latency=latency))
    return figures


def _nics(island: _Island, text: str | None, values: _LinkValues) -> NicsDraft | None:
    """The NICs of a node, where the bandwidth of one is known: given, or measured."""
    found = _NICS.fullmatch(text or "")
    count = int(found.group(1)) if found and found.group(1) else None
    rate = found.group(2) if found else ""
    card = None
    if rate:
        value = _quantity("--nics", rate, Dimension.BANDWIDTH)
        card = Figure(value=value, source="given (--nics)")
    for source, imported in values.files:
        if importer_called(imported.kind).of_one_card:
            card = card or best_bandwidth(imported.paths, source=source)
    layout = nic_layout(island.topology) if island.topology is not None else None
    if card is None:
        if count is not None:
            message = 'the bandwidth of one card is needed too, as in "8 x 200 Gbit/s"'
            raise InputError(Fault(field="--nics", message=message))
        return None
    if count is None and layout is None:
        message = f'{island.name}: how many cards has a node? write "8 x 200 Gbit/s", or 8'
        raise InputError(Fault(field="--nics", message=message))
    fits = layout is not None and count in (None, len(layout.nics))
    return NicsDraft(
        per_node=count or (len(layout.nics) if layout is not None else 1),
        bandwidth=card,
        layout=layout if fits else None,
    )


def _across_figures(request: DraftRequest, islands: int, faults: FaultList) -> LinkFigures:
    """Between islands; empty where there is one."""
    if islands < 2:
        if request.across:
            faults.add("--across", "there is one island, so nothing lies between islands")
        return LinkFigures()
    values = _link_values(request, "--across", request.across, faults)
    figures = _sampled(values)
    for source, imported in values.files:
        figures = figures.over(
            LinkFigures(
                shared=best_bandwidth(imported.paths, source=source),
                latency=least_latency(imported.paths, source=source),
            )
        )
    return figures
