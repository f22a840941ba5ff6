"""What the node of an island is: `node: NAME` (configs/nodes.yaml), or its `fabric`.

    inside a node   what the fabric gives one device (`hetplan.cluster.fabrics`)
    between nodes   the template's NICs; a fabric says nothing of them

What the island says itself stands. Where it says another device, or a figure that differs by more
than `_MOST` from the template's or the fabric's, one of the two is wrong, and the file is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hetplan.cluster.catalogue import own_kinds, words_of
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.fabrics import Fabric, slip
from hetplan.cluster.file_form import IslandForm, NicsForm
from hetplan.cluster.places import island_paths, quantity, unknown
from hetplan.errors import Fault
from hetplan.files.nodes import Path
from hetplan.files.quantities import Bandwidth, Count, FileForm, Name
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.units import Dimension, format_bandwidth

NODES_SCHEMA = "hetplan.nodes/1"
_NETWORK_LATENCY = "5 us"
_MOST = 1.5
"""Figures of one thing differ by rounding and by protocol; pairs, directions and bits by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate(FileForm):
    """One kind of node."""

    node: Name
    device: Name
    devices: Count
    fabric: Fabric
    link: Bandwidth | None = None
    """Of one link of the fabric; left out: as the device's entry in the catalogue has it."""
    nics: NicsForm
    source: str

    def bandwidth_bytes_per_second(self, kind: DeviceKind) -> float:
        """Of one device to the others of its node; 0: the catalogue has none."""
        return self.fabric.bandwidth_bytes_per_second(kind, self.devices, self.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplates(FileForm):
    """The file."""

    nodes: list[NodeTemplate]


@lru_cache(maxsize=1)
def node_templates() -> Mapping[str, NodeTemplate]:
    """The shipped templates by name."""
    document = read_document(shipped_folder("configs") / "nodes.yaml")
    return {each.node: each for each in decode(document, NodeTemplates, schema=NODES_SCHEMA).nodes}


def node_called(name: str) -> NodeTemplate | None:
    """The template of this name, as in `dgx-h100` or `DGX H100`."""
    return node_templates().get("-".join(words_of(name)))


def links_of(form: IslandForm) -> int | None:
    """`Fabric.links` of the island's node; None: the file says no fabric."""
    template = node_called(form.node or "")
    if template is not None:
        return template.fabric.links(template.devices)
    if form.fabric is None or form.devices_per_node is None:
        return None
    return form.fabric.links(form.devices_per_node)


def with_templates(
    document: Document, kinds: Mapping[str, DeviceKind]
) -> tuple[Document, tuple[Fault, ...]]:
    """The cluster file with what its islands' templates and fabrics say, and what is wrong."""
    keys = ("node", "fabric", "link")
    paths = [
        path
        for _, path in island_paths(document)
        if any(document.at(*path, key) is not None for key in keys)
    ]
    if not paths:
        return document, ()
    kinds = {**kinds, **own_kinds(document)}
    filled = replace(document, root=deepcopy(document.root))
    faults: list[Fault] = []
    for path in paths:
        faults += _both(document, path)
        if document.at(*path, "node") is not None:
            faults += _with_template(document, path, filled.at(*path), kinds)
        else:
            faults += _with_fabric(document, path, filled.at(*path), kinds)
    return filled, tuple(faults)


def _both(document: Document, path: Path) -> Iterator[Fault]:
    """Keys that do not go together."""
    if document.at(*path, "node") is not None and document.at(*path, "fabric") is not None:
        message = "a node of the list has its own fabric: leave one of fabric and node out"
        yield document.fault((*path, "fabric"), message)
    if document.at(*path, "link") is not None and document.at(*path, "fabric") is None:
        message = "is one link of a fabric: add fabric, or say intra_node.bandwidth instead"
        yield document.fault((*path, "link"), message)


def _with_template(
    document: Document, path: Path, island: Any, kinds: Mapping[str, DeviceKind]
) -> Iterator[Fault]:
    name = document.at(*path, "node")
    template = node_called(name) if isinstance(name, str) else None
    if template is None:
        message = f"{str(name)[:60]!a}; write a text, the name of a node"
        if isinstance(name, str):
            message = unknown(name, node_templates(), "node")
        yield document.fault((*path, "node"), f"{message} (hetplan doctor --nodes)")
        return
    kind = kinds.get(template.device)
    if kind is None:
        message = f"{name} has {template.device}, which is in none of the device catalogues"
        yield document.fault((*path, "node"), message)
        return
    yield from _contradictions(document, path, template, kind)
    island.setdefault("device", template.device)
    island.setdefault("devices_per_node", template.devices)
    _fill_inside(island, template.fabric, template.bandwidth_bytes_per_second(kind))
    _fill_network(island, template)


def _with_fabric(
    document: Document, path: Path, island: Any, kinds: Mapping[str, DeviceKind]
) -> Iterator[Fault]:
    """What the fabric says of the links inside the node; nothing where other keys are wrong."""
    kind = kinds.get(document.word((*path, "device")) or "")
    devices = document.whole((*path, "devices_per_node"))
    name = document.word((*path, "fabric"))
    fabric = next((each for each in Fabric if each == name), None)
    if kind is None or devices is None or fabric is None:
        return
    link = quantity(document, (*path, "link"), Dimension.BANDWIDTH)
    rate = fabric.bandwidth_bytes_per_second(kind, devices, link)
    wrong = tuple(_wrong_fabric(document, path, fabric, kind, devices))
    yield from wrong
    figure = (*path, "intra_node", "bandwidth")
    if not rate and document.at(*figure) is None:
        yield _unknown_rate(document, path, fabric, kind)
        return
    if not wrong:
        what = f"the fabric, {fabric} of {devices} {kind.kind},"
        mend = "leave it out, or correct fabric or link"
        links = fabric.links(devices)
        yield from _contradiction(document, figure, rate, links, what, mend)
    _fill_inside(island, fabric, rate)


def _wrong_fabric(
    document: Document, path: Path, fabric: Fabric, kind: DeviceKind, devices: int
) -> Iterator[Fault]:
    """A fabric or a link that such devices do not have."""
    maker = kind.vendor.lower()
    if fabric.vendor not in ("", maker):
        other = " (another mesh is `mesh`)" if fabric.to_one_each else ""
        message = f"{fabric} joins devices of {fabric.vendor}, {kind.kind} is {maker}'s{other}"
        yield document.fault((*path, "fabric"), message)
        return
    own, given = kind.scale_up, document.at(*path, "link") is not None
    if not given and own is not None and own.one_peer_bytes_per_second and own.peers:
        count = fabric.links(devices)
        if count > own.peers:
            message = (
                f"{devices} devices need {count} links each, and {kind.kind} has {own.peers} "
                "(catalogue): correct devices_per_node or fabric, or add link"
            )
            yield document.fault((*path, "fabric"), message)
    if not given:
        return
    if not fabric.has_links:
        message = f"a device has all of its links to {fabric}: leave it out, or say intra_node"
        yield document.fault((*path, "link"), f"{message}.bandwidth")
        return
    link = quantity(document, (*path, "link"), Dimension.BANDWIDTH)
    right = fabric.bandwidth_bytes_per_second(kind, devices)
    rate = fabric.bandwidth_bytes_per_second(kind, devices, link)
    if link and right and rate > _MOST * right:
        count = fabric.links(devices)
        one = right / count
        words = slip(link, one, count)
        message = (
            f"{format_bandwidth(link)}{', ' + words if words else ''}; one link of {kind.kind} has "
            f"{format_bandwidth(one)} in one direction (catalogue): correct it, or leave it out"
        )
        yield document.fault((*path, "link"), message)


def _unknown_rate(document: Document, path: Path, fabric: Fabric, kind: DeviceKind) -> Fault:
    keys: Path = ("intra_node", "bandwidth")
    what = "one device has to all others"
    if fabric.has_links:
        keys, what = ("link",), "one link has"
    message = f"the catalogue says nothing of {kind.kind}'s links: add what {what} in one direction"
    return document.fault((*path, *keys), message)


def _fill_inside(island: Any, fabric: Fabric, bytes_per_second: float) -> None:
    _fill_link(island, "intra_node", fabric.latency)
    if bytes_per_second and isinstance(island["intra_node"], dict):
        island["intra_node"].setdefault("bandwidth", f"{bytes_per_second:.17g} B/s")


def _fill_network(island: Any, template: NodeTemplate) -> None:
    if island.get("nodes") != 1:
        whole = isinstance(island.get("inter_node"), dict) and "bandwidth" in island["inter_node"]
        _fill_link(island, "inter_node", _NETWORK_LATENCY)
        if "nics" not in island and not whole and island["devices_per_node"] == template.devices:
            nics = template.nics
            island["nics"] = {
                "per_node": nics.per_node,
                "bandwidth": f"{nics.bandwidth:.17g} B/s",
                **({"rails": nics.rails} if nics.rails else {}),
                **({"most_per_device": nics.most_per_device} if nics.most_per_device else {}),
            }


def _fill_link(island: Any, key: str, latency: str) -> None:
    link = island.setdefault(key, {})
    if isinstance(link, dict) and not {"latency", "round_trip"} & link.keys():
        link["latency"] = latency


def _contradictions(
    document: Document, path: Path, template: NodeTemplate, kind: DeviceKind
) -> Iterator[Fault]:
    """What the island says that no such node has."""
    said = document.at(*path, "device")
    if said is not None and said != template.device:
        yield document.fault(
            (*path, "device"),
            f"{str(said)[:60]!a}, and a {template.node} has {template.device}: leave one of "
            "device and node out",
        )
        return
    devices = document.whole((*path, "devices_per_node"))
    if devices is not None and devices > template.devices:
        yield document.fault(
            (*path, "devices_per_node"),
            f"{devices}; a {template.node} has {template.devices} devices: leave it out",
        )
    what, mend = f"a {template.node}", "leave it out, or leave node out"
    inside = template.bandwidth_bytes_per_second(kind)
    for keys, usual, links in (
        (("intra_node", "bandwidth"), inside, template.fabric.links(template.devices)),
        (("nics", "bandwidth"), template.nics.bandwidth, 1),
    ):
        yield from _contradiction(document, (*path, *keys), usual, links, what, mend)


def _contradiction(
    document: Document, at: Path, usual: float, links: int, what: str, mend: str
) -> Iterator[Fault]:
    """A bandwidth that differs too much from the usual one; what was measured may be less."""
    rate = quantity(document, at, Dimension.BANDWIDTH)
    if not rate or not usual or 1 / _MOST <= rate / usual <= _MOST:
        return
    if rate < usual and document.at(*at[:-1], "measured") is True:
        return
    words = slip(rate, usual, links)
    yield document.fault(
        at,
        f"{format_bandwidth(rate)}{', ' + words if words else ''}; {what} has "
        f"{format_bandwidth(usual)} (one device, one direction, bytes): {mend}",
    )
