"""A cluster file from `4x8 h100 @A` and `A B 10Gbit 30ms`.

Nodes are those of a node template where one has this kind and as many devices. Otherwise the fabric
is the catalogue's, and the NICs are those of a template of the same vendor and architecture. What
nobody said has a comment that begins with `assumed:`. A list of hosts gives the nodes their names,
a driver's topology their fabric, NUMA nodes, switches and who uses which NIC. Nothing is made up: a
figure that neither of these, the catalogue nor a template has is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetplan.cluster.catalogue import load_catalogue, words_of
from hetplan.cluster.devices import CPU_KIND, DeviceKind
from hetplan.cluster.fabrics import Fabric
from hetplan.cluster.file_form import CLUSTER_SCHEMA
from hetplan.cluster.libraries import library_of
from hetplan.cluster.names import meant_kind
from hetplan.cluster.node import Nics
from hetplan.cluster.spec import MAX_DEVICES, too_many_devices
from hetplan.cluster.templates import NodeTemplate, node_called, node_templates
from hetplan.drafting.seen import TOPOLOGY, Seen, host_lines, place_lines, seen_nics
from hetplan.drafting.text import comment, scalar
from hetplan.drafting.words import (
    BETWEEN,
    NODES,
    NODES_EXAMPLE,
    BetweenWords,
    NodesWords,
    between_words,
    nodes_words,
    wrong,
)
from hetplan.errors import Fault, FaultList, InputError
from hetplan.files.quantities import value_of
from hetplan.importers.records import Host, NodeTopology
from hetplan.importers.topology import device_bandwidth
from hetplan.units import format_bandwidth, format_rate, format_seconds
from hetplan.version import __version__

_NETWORK_LATENCY = "5 us"  # as of node templates (hetplan/cluster/templates.py)
_STAGED_LATENCY = "30 us"  # two copies through host memory beside it: an order of magnitude
_MAX_ISLANDS = 100  # 4,950 pairs
_MAX_OTHERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftIsland:
    """An island before its text."""

    name: str
    words: NodesWords
    kind: DeviceKind
    others: tuple[str, ...]
    """Kinds that its name would fit too."""
    devices: int
    template: NodeTemplate | None
    """None: no node of the list is this one."""
    nics: Nics | None = None
    """None: not known, of one node."""
    nics_source: str = ""
    """Whose they are; empty: they were said."""
    hosts: tuple[Host, ...] = ()
    """Empty: their names are not known."""
    topology: NodeTopology | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterText:
    """A cluster file and what nobody said of it."""

    text: str
    assumed: tuple[str, ...]


def draft_cluster_text(
    nodes: Sequence[str], between: Sequence[str], seen: Seen | None = None
) -> ClusterText:
    """The cluster file; one InputError with every fault of the nodes, or of the links."""
    islands = _islands(nodes, seen or Seen())
    links = _Links(islands, tuple(between_words(text) for text in between))
    where = {island.words.region: None for island in islands}
    sizes = ", ".join(
        f"{each.words.nodes} x {each.devices} {each.kind.kind} ({each.words.region})"
        for each in islands
    )
    lines = [
        *comment(f"{sizes}. Drafted by hetplan {__version__}: correct what differs.", 0),
        "# `assumed:` marks what nobody said. Every key: configs/clusters/mixed-768.yaml.",
        f"schema: {CLUSTER_SCHEMA}",
        f"name: {scalar('-'.join(each.name for each in islands)[:100].rstrip('.-_'))}",
        "regions:",
    ]
    assumed: list[str] = []
    for region in where:
        lines += [f"  - name: {scalar(region)}", "    islands:"]
        for island in islands:
            if island.words.region == region:
                lines += _island_lines(island, assumed)
    lines += links.lines(assumed)
    return ClusterText(text="\n".join(lines) + "\n", assumed=tuple(assumed))


# Islands


def _islands(nodes: Sequence[str], seen: Seen) -> tuple[DraftIsland, ...]:
    if not nodes:
        raise InputError(f'{NODES}: say the nodes of each kind, as in "{NODES_EXAMPLE}"')
    if len(nodes) > _MAX_ISLANDS:
        raise InputError(f"{NODES}: {len(nodes)} islands; write a cluster file for over 100")
    faults = FaultList()
    catalogue = load_catalogue()
    taken: set[str] = set()
    said = [faults.of(_island, text, catalogue, taken) for text in nodes]
    islands = [island for island in said if island is not None]
    total = sum(each.words.nodes * each.devices for each in islands)
    if total > MAX_DEVICES:
        faults.add(NODES, too_many_devices(total))
    topologies = faults.of(seen.topologies_of, islands)
    if topologies is None:
        raise InputError(*faults.found)
    found = [
        faults.of(_with_network, island, topology, seen)
        for island, topology in zip(islands, topologies, strict=True)
    ]
    if not faults.found:
        faults.found += seen.left_over(islands)
    faults.stop()
    return tuple(island for island in found if island is not None)


def _island(text: str, catalogue: Sequence[DeviceKind], taken: set[str]) -> DraftIsland:
    """What the words say of its devices."""
    words = nodes_words(text)
    named = node_called(words.what)
    try:
        meant = meant_kind(named.device if named else words.what, catalogue)
    except InputError as error:
        raise wrong(NODES, words.text, str(error)) from error
    kind = next(each for each in catalogue if each.kind == meant.kind)
    alike = [each for each in node_templates().values() if each.device == kind.kind]
    same = (each for each in alike if words.devices in (None, each.devices))
    template = named or next(same, None)
    devices = words.devices or (template.devices if template else 0)
    if not devices:
        raise wrong(NODES, words.text, f"how many devices has a node? write {words.nodes}x8 ...")
    if named and devices > named.devices:
        raise wrong(NODES, words.text, f"a {named.node} has {named.devices} devices")
    return DraftIsland(
        name=_name(words, kind, taken),
        words=words,
        kind=kind,
        others=meant.others,
        devices=devices,
        template=template,
    )


def _with_network(island: DraftIsland, topology: NodeTopology | None, seen: Seen) -> DraftIsland:
    """The island with its NICs, hosts and topology."""
    words, kind, template = island.words, island.kind, island.template
    nics, source = _nics(words, kind, island.devices, template, topology)
    if words.nodes > 1 and nics is None:
        message = (
            f"which network cards has a node of {kind.kind}? Add them, as in "
            f'"{words.nodes}x{island.devices} {words.what} 8x200Gbit"'
        )
        raise wrong(NODES, words.text, message)
    if words.nic_bytes_per_second or topology or (template and template.devices != island.devices):
        template = None
    return replace(
        island,
        template=template,
        nics=nics,
        nics_source=source,
        hosts=seen.hosts_of(words, island.devices),
        topology=topology,
    )


def _name(words: NodesWords, kind: DeviceKind, taken: set[str]) -> str:
    """The words of the kind as they were said, without the vendor, and unlike all others."""
    said = [word for word in words_of(words.what) if word != kind.vendor]
    base = "-".join(said)[:40] or kind.kind
    names = [base, f"{base}-{words.region}"[:90], *(f"{base}-{at}" for at in range(2, 200))]
    name = next(each for each in names if each not in taken)
    taken.add(name)
    return name


def _nics(
    words: NodesWords,
    kind: DeviceKind,
    devices: int,
    template: NodeTemplate | None,
    topology: NodeTopology | None,
) -> tuple[Nics | None, str]:
    """As they were said, as the topology shows them, or of this template, or of one with devices
    like these; and whose.
    """
    like = template or next(_alike(kind), None)
    rate = words.nic_bytes_per_second or (like.nics.bandwidth if like is not None else 0.0)
    shown = seen_nics(topology, rate) if topology is not None and rate else None
    if shown is not None and words.nics_per_node not in (None, shown.per_node):
        differs = f"its {TOPOLOGY} has {shown.per_node} NICs that devices use, not "
        message = f"{differs}{words.nics_per_node}; correct the number, or leave it out"
        raise wrong(NODES, words.text, message)
    if shown is not None:
        if like is None or words.nic_bytes_per_second:
            return shown, ""
        return shown, f"cards as of a {like.node}"
    if words.nic_bytes_per_second:
        count, rate, source = words.nics_per_node or 1, words.nic_bytes_per_second, ""
        if count % devices and devices % count:
            message = f"{count} NICs and {devices} devices of a node do not divide"
            raise wrong(NODES, words.text, message)
    elif like is None:
        return None, ""
    elif like.devices == devices:
        nics = like.nics
        return value_of(Nics, nics, bandwidth_bytes_per_second=nics.bandwidth), f"as a {like.node}"
    else:
        part = like.nics.per_node * devices / like.devices
        fits = part == int(part) and not (part % devices and devices % part)
        count, rate = int(part) if fits else 1, like.nics.bandwidth
        source = f"a device's part of a {like.node}'s"
    most = max(1, count // devices)
    return Nics(per_node=count, bandwidth_bytes_per_second=rate, most_per_device=most), source


def _cards(nics: Nics) -> str:
    """`8 NICs of 400 Gbit/s`."""
    cards = "1 NIC" if nics.per_node == 1 else f"{nics.per_node} NICs"
    return f"{cards} of {rate_text(nics.bandwidth_bytes_per_second)}"


def _nics_text(nics: Nics) -> str:
    """As the file has them."""
    rate = rate_text(nics.bandwidth_bytes_per_second)
    rails = f", rails: {nics.rails}" if nics.rails else ""
    most = f", most_per_device: {nics.most_per_device}" if nics.most_per_device > 1 else ""
    own = f", of_device: [{', '.join(map(str, nics.of_device))}]" if nics.of_device else ""
    return f"{{per_node: {nics.per_node}, bandwidth: {rate}{rails}{most}{own}}}"


def _alike(kind: DeviceKind) -> Iterator[NodeTemplate]:
    """Templates of this kind, and of devices of its architecture with a vendor's own links too."""
    kinds = {each.kind: each for each in load_catalogue()}
    for template in node_templates().values():
        other = kinds[template.device]
        linked = other.scale_up is not None and kind.scale_up is not None
        same = bool(kind.architecture) and other.architecture == kind.architecture
        if other.kind == kind.kind or (linked and same):
            yield template


@dataclass(frozen=True, slots=True)
class _Inside:
    """What joins the devices of a node: its keys in the file, and in words."""

    lines: tuple[str, ...]
    words: str
    assumed: bool = True
    """False: a topology shows it."""


def _island_lines(island: DraftIsland, assumed: list[str]) -> list[str]:
    """The island's part of the file; what is assumed is added to `assumed`."""
    words, kind, template, nics = island.words, island.kind, island.template, island.nics
    hosts = island.name if words.nodes == 1 else f"{island.name}-[0-{words.nodes - 1}]"
    lines = [
        f"      - name: {scalar(island.name)}",
        f"        nodes: {words.nodes}",
    ]
    if island.hosts:
        lines += host_lines(island.hosts)
    else:
        lines += comment(f'node_names: ["{hosts}"] # their hosts, for hetplan emit', 8)
    others = f" (not {', '.join(island.others[:_MAX_OTHERS])})" if island.others else ""
    cards = _cards(nics) if nics is not None else ""
    if template is not None:
        rate = format_bandwidth(template.bandwidth_bytes_per_second(kind))
        sold = node_called(words.what) is template
        what = f"{template.fabric} of {rate} a device, {cards}"
        lines += comment(
            f"{'' if sold else 'assumed: '}{template.devices} x {kind.kind}{others}, {what}", 8
        )
        if not sold:
            assumed.append(f"{island.name}: {kind.kind}, nodes as {template.node}")
        return [*lines, f"        node: {template.node}"]
    inside = _inside(island)
    guessed = [inside.words] if inside.assumed else []
    if others:
        lines += comment(f"assumed: not {', '.join(island.others[:_MAX_OTHERS])}", 8)
    lines += [
        f"        device: {kind.kind}",
        f"        devices_per_node: {island.devices}",
        *comment(f"{'assumed: ' if inside.assumed else ''}{inside.words}", 8),
        *inside.lines,
        *(place_lines(island.topology) if island.topology is not None else ()),
    ]
    if words.nodes > 1 and nics is not None:
        if island.nics_source:
            guessed.append(f"{cards} {island.nics_source}")
            lines += comment(f"assumed: {island.nics_source}", 8)
        lines += [
            f"        nics: {_nics_text(nics)}",
            f"        inter_node: {{latency: {_NETWORK_LATENCY}}} # assumed: order of magnitude",
        ]
    if guessed or others:
        assumed.append(f"{island.name}: {', '.join([kind.kind, *guessed])}")
    return lines


def _inside(island: DraftIsland) -> _Inside:
    """What joins the devices of a node, by its topology or the catalogue."""
    kind, devices, own = island.kind, island.devices, island.kind.scale_up
    shown = None if island.topology is None else device_bandwidth(island.topology, kind)
    if shown is not None and shown.fabric is None:
        return replace(_in_figures(shown.bytes_per_second, shown.source), assumed=False)
    if shown is not None:
        lines = [f"        fabric: {shown.fabric}"]
        if shown.link is not None:
            lines.append(f"        link: {format_bandwidth(shown.link)}")
        return _Inside(tuple(lines), shown.source, assumed=False)
    pairs = own is not None and own.peers == 1 and devices > 2  # a bridge joins two cards
    if own is not None and own.peers > 1 and devices - 1 > own.peers:
        message = f"{kind.kind} has links to {own.peers} others of its node (catalogue)"
        raise wrong(NODES, island.words.text, f"{message}: write nodes of {own.peers + 1}")
    fabric, like = None, None if pairs else next(_alike(kind), None)
    if like is not None:
        fabric = like.fabric
    elif own is not None and not pairs:
        if kind.vendor != "nvidia":
            return _in_figures(own.bandwidth_bytes_per_second, f"{own.name} by the catalogue")
        fabric = Fabric.NVLINK if own.peers == 1 else Fabric.NVSWITCH
    elif kind.host is not None:
        fabric = Fabric.PCIE_TREE
    link = like.link if like is not None and like.device == kind.kind else None
    rate = 0.0 if fabric is None else fabric.bandwidth_bytes_per_second(kind, devices, link)
    if fabric is None or not rate:
        if devices == 1 and island.nics is not None:
            return _in_figures(island.nics.own_bytes_per_second(1), "joins nothing: one device")
        message = (
            f"the catalogue says nothing of {kind.kind}'s links: write `scale_up` into a device "
            "kind of yours (docs/device-kinds.md), or the cluster file by hand"
        )
        raise wrong(NODES, island.words.text, message)
    lines = [f"        fabric: {fabric}"]
    if link is not None:
        lines.append(f"        link: {format_bandwidth(link)}")
    return _Inside(tuple(lines), f"{fabric} of {format_bandwidth(rate)} a device")


def _in_figures(bytes_per_second: float, source: str) -> _Inside:
    """A link inside the node without a fabric's name."""
    rate = format_bandwidth(bytes_per_second)
    line = f"        intra_node: {{bandwidth: {rate}, latency: {_NETWORK_LATENCY}}}"
    return _Inside((line,), f"{source}, {rate} a device")


def rate_text(bytes_per_second: float) -> str:
    """As networks are sold, in bits: `10 Gbit/s`."""
    return format_rate(bytes_per_second * 8, "bit/s")


# Links between islands


class _Links:
    """Which link every pair of islands has; an InputError where one lacks."""

    def __init__(self, islands: tuple[DraftIsland, ...], between: Sequence[BetweenWords]) -> None:
        self.islands = islands
        self.regions = list(dict.fromkeys(each.words.region for each in islands))
        self.of_regions: dict[tuple[str, str], BetweenWords] = {}
        self.of_islands: dict[tuple[str, str], BetweenWords] = {}
        self.rest: BetweenWords | None = None
        for words in between:
            self._add(words)

    def _add(self, words: BetweenWords) -> None:
        if len(self.islands) < 2:
            raise wrong(BETWEEN, words.text, "there is one island, and nothing to lie between")
        if words.ends is None:
            if self.rest is not None:
                raise wrong(BETWEEN, words.text, "two links without names: name their ends")
            self.rest = words
            return
        islands = [each.name for each in self.islands]
        for names, links in ((self.regions, self.of_regions), (islands, self.of_islands)):
            ends = tuple(sorted(_same(end, names) for end in words.ends))
            if all(ends):
                pair = (ends[0], ends[1])
                if ends[0] == ends[1]:
                    raise wrong(BETWEEN, words.text, "name two regions, or two islands of one")
                if pair in links:
                    raise wrong(BETWEEN, words.text, "there is a link between these two already")
                links[pair] = words
                return
        known = ", ".join([*self.regions, *islands])
        raise wrong(BETWEEN, words.text, f"name two regions or two islands of: {known}")

    def lines(self, assumed: list[str]) -> list[str]:
        """The file's links."""
        listed: dict[tuple[str, str], tuple[str, ...]] = {}
        near: dict[tuple[str, str], tuple[str, ...]] = {}
        missing: list[tuple[str, str]] = []
        for one, two in combinations(self.islands, 2):
            pair, regions = _pair(one.name, two.name), _pair(one.words.region, two.words.region)
            if pair in self.of_islands:
                listed[pair] = _figures_of(self.of_islands[pair], assumed)
            elif regions[0] == regions[1] and (self.rest is None or len(self.regions) > 1):
                near[one.name, two.name] = _near(one, two, assumed)
            elif regions not in self.of_regions and self.rest is None:
                missing.append(regions)
        if missing:
            raise InputError(*map(_missing, dict.fromkeys(missing)))
        alike = len(set(near.values())) == 1
        regional = {
            pair: _figures_of(words, assumed) for pair, words in sorted(self.of_regions.items())
        }
        default: list[str] = []
        if alike:
            default += ["  within_region:", *next(iter(near.values()))]
        if self.rest is not None:
            key = "within_region" if len(self.regions) == 1 else "across_regions"
            default += [f"  {key}:", *_figures_of(self.rest, assumed)]
        return [
            *_entries("links", listed | ({} if alike else near)),
            *_entries("region_links", regional),
            *(["links_default:", *default] if default else []),
        ]


def _missing(regions: tuple[str, str]) -> Fault:
    one, two = regions
    message = f'no link between {one} and {two}: add one, as in "{one} {two} 10Gbit 30ms"'
    return Fault(field=BETWEEN, message=message)


def _entries(key: str, links: dict[tuple[str, str], tuple[str, ...]]) -> list[str]:
    if not links:
        return []
    lines = [f"{key}:"]
    for ends, figures in links.items():
        lines += [f"  - between: [{', '.join(map(scalar, ends))}]", *figures]
    return lines


def _same(name: str, names: Sequence[str]) -> str:
    """The name as it is written; empty where there is none."""
    return next((each for each in names if each.lower() == name.lower()), "")


def _pair(one: str, two: str) -> tuple[str, str]:
    return (one, two) if one <= two else (two, one)


def _figures_of(words: BetweenWords, assumed: list[str]) -> tuple[str, ...]:
    """The keys of a link that was said."""
    rate, time = rate_text(words.bytes_per_second), format_seconds(words.round_trip_seconds)
    shared = "" if words.each else "shared by all that send, "
    ends = " and ".join(words.ends) if words.ends else "any two"
    assumed.append(f"between {ends}: {rate} {shared}{time} there and back")
    if not words.each:
        shared = " # assumed: shared by all that send, else bandwidth_per_device"
    return (
        f"    bandwidth_{'per_device' if words.each else 'shared'}: {rate}{shared}",
        f"    round_trip: {time} # assumed: as ping shows it; `latency` is one way",
        "    # One TCP stream carries window / round trip; where that limits it, as in",
        "    # streams: 16",
        "    # window: 64 MiB",
    )


def _near(one: DraftIsland, two: DraftIsland, assumed: list[str]) -> tuple[str, ...]:
    """The link of two islands in one place: what their own NICs have."""
    ports = [
        each.nics.own_bytes_per_second(each.devices) for each in (one, two) if each.nics is not None
    ]
    if len(ports) < 2:
        lacks = one if one.nics is None else two
        message = (
            f'which network has it? Add "10Gbit", or {BETWEEN} "{one.name} {two.name} 10Gbit 1ms"'
        )
        raise wrong(NODES, lacks.words.text, message)
    libraries = {library_of(each.kind.vendor, each.kind.kind) for each in (one, two)}
    direct = len(libraries) == 1 and CPU_KIND not in (one.kind.kind, two.kind.kind)
    rate = rate_text(min(ports))
    way = "by their library" if direct else "through host memory"
    assumed.append(f"between {one.name} and {two.name}: {rate} a device, {way}")
    return (
        f"    # assumed: as a device's part of its node's NICs, {way}",
        f"    bandwidth_per_device: {rate}",
        f"    latency: {_NETWORK_LATENCY if direct else _STAGED_LATENCY}",
        f"    transport: {'device-direct' if direct else 'host-staged'}",
    )
