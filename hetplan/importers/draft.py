"""The text of a cluster file, from what importers read and its user said.

Every figure carries a comment that says where it comes from, so that whoever reads the file can
tell measured from datasheet. Texts out of other tools' files reach it only as quoted scalars or as
comments of printable characters on one line: no input can add a key.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.file_form import CLUSTER_SCHEMA
from hetplan.cluster.load import load_cluster
from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault, InputError, printable
from hetplan.files.reading import document_of
from hetplan.importers.link_figures import (
    Figure,
    LinkFigures,
    NicLayout,
    nearest_nics,
    pcie_switches,
)
from hetplan.importers.records import NodeTopology
from hetplan.units import NAME_PATTERN, format_bandwidth, format_seconds
from hetplan.version import __version__

_WIDTH = 98
# Words that YAML reads as something else than text; numbers are no plain word here.
_NOT_PLAIN = re.compile(r"(?:null|true|false|yes|no|on|off|y|n|nan|inf)", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._-]*", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,9})([^\d]*)", re.ASCII | re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_MAX_ENTRY = 180  # a cluster file takes entries of up to 200 characters


@dataclass(frozen=True, slots=True, kw_only=True)
class NicsDraft:
    """The NICs of a node that its devices share."""

    per_node: int
    bandwidth: Figure
    """Of one."""
    layout: NicLayout | None = None
    """Who uses which; None: spread evenly."""

    def own_bytes_per_second(self, devices: int) -> float:
        """What one device sends at most, as the cluster file means it."""
        layout = self.layout
        return Nics(
            per_node=self.per_node,
            bandwidth_bytes_per_second=self.bandwidth.value,
            most_per_device=layout.most_per_device if layout else 1,
            of_device=layout.of_device if layout else (),
        ).own_bytes_per_second(devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandDraft:
    """One island of the file."""

    name: str
    region: str
    device: DeviceKind
    nodes: int
    devices_per_node: int
    intra_node: LinkFigures
    inter_node: LinkFigures
    memory: str | None = None
    """Of one device that a job may use, as in `80 GiB`; None: all that the catalogue says."""
    hosts: tuple[str, ...] = ()
    """Names of its nodes in their order, where a list of hosts was given."""
    topology: NodeTopology | None = None
    nics: NicsDraft | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDraft:
    """A cluster."""

    name: str
    islands: tuple[IslandDraft, ...]
    across: LinkFigures
    """Between any two of the islands."""


def read_draft(draft: ClusterDraft) -> tuple[str, Cluster]:
    """The cluster file, and the cluster that it describes: an unreadable draft is an InputError."""
    text = draft_text(draft)
    try:
        return text, load_cluster(document_of("draft.yaml", text.encode()))
    except InputError as error:
        raise InputError(*map(_draft_fault, error.faults)) from error


def _draft_fault(fault: Fault) -> Fault:
    option = " (--memory)" if fault.field.endswith(".memory") else ""
    return Fault(message=f"the draft is no cluster yet: {fault.message}{option}")


def draft_text(draft: ClusterDraft) -> str:
    """The cluster file; an InputError names every option that is still needed."""
    faults = [*_name_faults(draft), *_missing(draft)]
    if faults:
        raise InputError(*faults)
    lines = [
        f"# Drafted by hetplan {__version__} (hetplan import cluster-draft): read and correct it.",
        "# Figures of a link inside an island are what ONE device can count on in ONE direction",
        "# while the others send too. Keys: docs/inputs.md and configs/clusters/mixed-768.yaml.",
        f"schema: {CLUSTER_SCHEMA}",
        f"name: {scalar(draft.name)}",
        "regions:",
    ]
    for region in _regions(draft):
        lines += [f"  - name: {scalar(region)}", "    islands:"]
        for island in draft.islands:
            if island.region == region:
                lines += _island(island)
    if len(draft.islands) > 1:
        between = "within_region" if len(_regions(draft)) == 1 else "across_regions"
        lines += ["links_default:", f"  {between}:", *_across(draft.across, 4)]
    return "\n".join(lines) + "\n"


def _regions(draft: ClusterDraft) -> list[str]:
    return list(dict.fromkeys(island.region for island in draft.islands))


def scalar(text: str) -> str:
    """The text as a YAML scalar that is read back as this text."""
    if _PLAIN.fullmatch(text) and not _NOT_PLAIN.fullmatch(text):
        return text
    escaped = "".join(
        each if each.isascii() and each.isprintable() and each not in '"\\' else _escape(each)
        for each in text
    )
    return f'"{escaped}"'


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def comment(text: str, indent: int) -> list[str]:
    """Comment lines of this text; characters that do not print are shown by their codes."""
    plain = printable(text)
    margin = " " * indent + "# "
    return textwrap.wrap(
        plain, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def _name_faults(draft: ClusterDraft) -> Iterator[Fault]:
    names = [("--name", draft.name)]
    names += [("--region", region) for region in _regions(draft)]
    names += [("--island", island.name) for island in draft.islands]
    if 1 < len(_regions(draft)) < len(draft.islands):
        yield Fault(
            message="some islands share a region and some do not, and a draft has one link for all "
            "pairs; give every island a --region of its own, or all the same"
        )
    for option, name in names:
        if not re.fullmatch(NAME_PATTERN, name) or len(name) > 100:
            yield Fault(
                message=f"{name[:60]!a} cannot be a name in a cluster file (letters, digits, '.', "
                f"'_' and '-'); give another with {option}"
            )


def _missing(draft: ClusterDraft) -> Iterator[Fault]:
    """Figures that nobody gave, with the options that give them."""
    single = len(draft.islands) == 1
    for island in draft.islands:
        where = "" if single else f"{island.name}="
        if island.devices_per_node > 1 or island.nodes == 1:
            place = f"{island.name}, inside a node"
            if island.intra_node.bandwidth is None:
                more = "" if island.topology else f", or its topology with --topology {where}FILE"
                yield _unknown(place, "bandwidth", f'--intra "{where}300 GB/s"', more)
            if island.intra_node.latency is None:
                yield _unknown(place, "latency", f'--intra "{where}3 us"')
        if island.nodes > 1:
            place = f"{island.name}, between nodes"
            more = f", or --inter {where}FILE of perftest"
            if island.inter_node.bandwidth is None and island.nics is None:
                nics = f' or the cards with --nics "{where}8 x 200 Gbit/s"'
                yield _unknown(place, "bandwidth", f'--inter "{where}25 GB/s"', nics + more)
            if island.inter_node.latency is None:
                yield _unknown(place, "latency", f'--inter "{where}5 us"', more)
    if single:
        return
    more = ", or --across FILE of iperf3"
    if draft.across.bandwidth is None and draft.across.shared is None:
        yield _unknown(
            "between islands", "bandwidth", '--across "1 GB/s" (or "1 GB/s shared")', more
        )
    if draft.across.latency is None:
        yield _unknown("between islands", "latency", '--across "1 ms"', more)


def _unknown(place: str, figure: str, example: str, more: str = "") -> Fault:
    """The fault that a figure is not known, and every option that gives it."""
    option = example.split()[0]
    message = (
        f"{place}: the {figure} is not known; give {example}{more}, or {option} NAME of link "
        "samples in the store"
    )
    return Fault(message=message)


def _island(island: IslandDraft) -> list[str]:
    lines = [
        f"      - name: {scalar(island.name)}",
        f"        device: {scalar(island.device.kind)}",
        f"        nodes: {island.nodes}",
        *_hosts(island.hosts),
        f"        devices_per_node: {island.devices_per_node}",
    ]
    lines += _fabric(island)
    if island.memory is not None:
        lines.append(f"        memory: {scalar(island.memory)}")
    if island.topology is not None:
        lines += _places(island.topology)
    if island.nics is not None:
        lines += _nics(island.nics, island.devices_per_node)
    elif island.topology is not None:
        lines += _nearest(island.topology)
    intra, inter = island.intra_node, island.inter_node
    if island.devices_per_node == 1 and island.nodes > 1:
        lines += comment("One device per node: this link joins nothing.", 8)
        if inter.bandwidth is None and island.nics is not None:
            port = island.nics.own_bytes_per_second(1)
            intra = replace(inter, bandwidth=Figure(value=port, source="its NICs"))
        else:
            intra = inter
    lines += ["        intra_node:", *_link(intra, 10)]
    if island.nodes > 1:
        lines += ["        inter_node:", *_link(inter_node(island), 10)]
    return lines


def _fabric(island: IslandDraft) -> list[str]:
    """What joins the devices of a node, where a topology showed it."""
    figure = island.intra_node.bandwidth
    if figure is None or figure.fabric is None:
        return []
    lines = [] if figure.measured else comment(figure.source, 8)
    lines.append(f"        fabric: {figure.fabric}")
    if figure.link is not None:
        lines.append(f"        link: {format_bandwidth(figure.link)}")
    return lines


def inter_node(island: IslandDraft) -> LinkFigures:
    """The link between nodes as the file has it: no bandwidth that the NICs could not carry."""
    link, nics = island.inter_node, island.nics
    if nics is None or link.bandwidth is None:
        return link
    # Four digits are written: what is nearer than that to a device's NICs is theirs.
    port = nics.own_bytes_per_second(island.devices_per_node) * (1 - 1e-3)
    return replace(link, bandwidth=None) if link.bandwidth.value >= port else link


def _hosts(names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    if not all(listable(name) for name in names):
        shown = [*names[:3], f"... ({len(names)} names)"] if len(names) > 4 else [*names]
        return comment(f"Their names cannot be node_names: {' '.join(shown)}", 8)
    return ["        node_names:", *(f"          - {scalar(e)}" for e in host_ranges(names))]


def _places(topology: NodeTopology) -> list[str]:
    """NUMA nodes and PCIe switches, where the topology says them for every device."""
    lines: list[str] = []
    numa = [device.numa_node for device in topology.devices]
    if all(node is not None for node in numa):
        lines.append(f"        numa_nodes: [{', '.join(str(node) for node in numa)}]")
    own: dict[str, int] = {}
    for number, switch in enumerate(pcie_switches(topology)):
        own |= dict.fromkeys(switch.devices, number)
    if len(own) == len(topology.devices):
        numbers = ", ".join(str(own[device.name]) for device in topology.devices)
        lines.append(f"        pcie_switches: [{numbers}]")
    return lines


def _nearest(topology: NodeTopology) -> list[str]:
    """NICs per device as comments, where the file has no `nics` to say it."""
    near: dict[tuple[str, str], list[str]] = {}
    for place in nearest_nics(topology):
        near.setdefault((", ".join(place.nics), place.path), []).append(place.device)
    lines: list[str] = []
    for (nics, path), devices in near.items():
        lines += comment(f"Nearest to {', '.join(devices)}: {nics} ({path})", 8)
    return lines


def _nics(nics: NicsDraft, devices: int) -> list[str]:
    layout = nics.layout
    lines = ["        nics:"]
    if layout is not None:
        lines += comment(f"NICs 0 to {len(layout.nics) - 1}: {', '.join(layout.nics)}", 10)
    lines.append(f"          per_node: {nics.per_node}")
    lines += comment(nics.bandwidth.source, 10)
    lines.append(f"          bandwidth: {format_bandwidth(nics.bandwidth.value)}")
    if layout is not None and layout.most_per_device > 1:
        lines.append(f"          most_per_device: {layout.most_per_device}")
    if layout is not None and layout.of_device:
        numbers = ", ".join(str(number) for number in layout.of_device)
        lines.append(f"          of_device: [{numbers}]")
    elif layout is None and nics.per_node > devices and nics.per_node % devices == 0:
        lines.append(f"          most_per_device: {nics.per_node // devices}")
    return lines


def _link(link: LinkFigures, indent: int) -> list[str]:
    """The keys of a link inside an island; a fabric says its bandwidth, unless it was measured."""
    margin = " " * indent
    lines = []
    if link.bandwidth is not None and (link.bandwidth.fabric is None or link.measured):
        lines += comment(link.bandwidth.source, indent)
        lines.append(f"{margin}bandwidth: {format_bandwidth(link.bandwidth.value)}")
    lines += _latency_and_samples(link, indent)
    if link.measured:
        lines += comment("What transfers reached, not what the hardware has.", indent)
        lines.append(f"{margin}measured: true")
    return lines


def _across(link: LinkFigures, indent: int) -> list[str]:
    """The keys of a link between islands, whose bandwidth says whose it is."""
    margin = " " * indent
    lines = []
    for figure, key in (
        (link.bandwidth, "bandwidth_per_device"),
        (link.shared, "bandwidth_shared"),
    ):
        if figure is not None:
            lines += comment(figure.source, indent)
            lines.append(f"{margin}{key}: {format_bandwidth(figure.value)}")
    return lines + _latency_and_samples(link, indent)


def _latency_and_samples(link: LinkFigures, indent: int) -> list[str]:
    margin = " " * indent
    lines = []
    if link.latency is not None:
        lines += comment(link.latency.source, indent)
        lines.append(f"{margin}latency: {format_seconds(link.latency.value)}")
    if link.samples is not None:
        lines += comment("Measured times of these replace both where they apply.", indent)
        lines.append(f"{margin}samples: {scalar(link.samples)}")
    return lines


def listable(name: str) -> bool:
    """Whether a cluster file can name a node so (an IPv6 address it cannot)."""
    return len(name) <= _MAX_ENTRY and _WORD.fullmatch(name) is not None


def host_ranges(names: Sequence[str]) -> tuple[str, ...]:
    """Entries that stand for exactly these names in this order; every name is `listable`."""
    # Per entry: what stands before and after the number, the first number's digits, the last.
    runs: list[tuple[str, str, str, int]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        before, digits, after = match.groups() if match else (name, "", "")
        if runs and digits and runs[-1][:2] == (before, after):
            *_, first, last = runs[-1]
            if digits == f"{last + 1:0{len(first)}d}":
                runs[-1] = (before, after, first, last + 1)
                continue
        runs.append((before, after, digits, int(digits or 0)))
    return tuple(
        f"{before}{first}{after}"
        if not first or int(first) == last
        else f"{before}[{first}-{last:0{len(first)}d}]{after}"
        for before, after, first, last in runs
    )
