"""Nodes as they are sold: what `node: NAME` of an island stands for (`configs/nodes.yaml`).

    inside a node   nvswitch, mesh, nvlink: all links of the device's entry in the catalogue
                    pcie: its lanes to the host
    between nodes   the template's NICs

What the island says itself stands. Where it says another device, or a figure that differs by more
than `_MOST` from the template's, one of the two is wrong, and the file is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.file_form import NicsForm
from hetplan.cluster.places import island_paths, quantity, unknown
from hetplan.errors import Fault
from hetplan.files.nodes import Path
from hetplan.files.quantities import Bandwidth, Count, FileForm, Name
from hetplan.files.reading import Document, decode, read_document
from hetplan.files.shipped import shipped_folder
from hetplan.units import Dimension, format_bandwidth

NODES_SCHEMA = "hetplan.nodes/1"
_LATENCIES = {"nvswitch": "3 us", "nvlink": "3 us", "mesh": "5 us", "ring": "5 us", "pcie": "10 us"}
_NETWORK_LATENCY = "5 us"
_MOST = 1.5
"""Figures of one thing differ by rounding and by protocol; pairs, directions and bits by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate(FileForm):
    """One kind of node."""

    node: Name
    device: Name
    devices: Count
    fabric: Literal["nvswitch", "nvlink", "mesh", "ring", "pcie"]
    nics: NicsForm
    bandwidth: Bandwidth | None = None
    """Of one device to the others of its node; left out: what the fabric says of the device."""
    source: str

    def bandwidth_bytes_per_second(self, kind: DeviceKind) -> float:
        """Of one device to the others of its node; 0: the catalogue has none."""
        if self.bandwidth is not None:
            return self.bandwidth
        if self.fabric == "pcie" or kind.scale_up is None:
            return kind.host.bandwidth_bytes_per_second if kind.host is not None else 0.0
        return kind.scale_up.bandwidth_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplates(FileForm):
    """The file."""

    nodes: list[NodeTemplate]


@lru_cache(maxsize=1)
def node_templates() -> Mapping[str, NodeTemplate]:
    """The shipped templates by name."""
    document = read_document(shipped_folder("configs") / "nodes.yaml")
    return {each.node: each for each in decode(document, NodeTemplates, schema=NODES_SCHEMA).nodes}


def with_templates(
    document: Document, kinds: Mapping[str, DeviceKind]
) -> tuple[Document, tuple[Fault, ...]]:
    """The cluster file with its islands' templates filled in, and what is wrong with them."""
    paths = [path for _, path in island_paths(document) if document.at(*path, "node") is not None]
    if not paths:
        return document, ()
    filled = replace(document, root=deepcopy(document.root))
    faults: list[Fault] = []
    for path in paths:
        name = document.at(*path, "node")
        template = node_templates().get(name) if isinstance(name, str) else None
        if template is None:
            message = unknown(str(name), node_templates(), "node")
            faults.append(document.fault((*path, "node"), f"{message} (hetplan doctor --nodes)"))
            continue
        kind = kinds.get(template.device)
        if kind is None:
            message = f"{name} has {template.device}, which is in none of the device catalogues"
            faults.append(document.fault((*path, "node"), message))
            continue
        faults += _contradictions(document, path, template, kind)
        _fill(filled.at(*path), template, kind)
    return filled, tuple(faults)


def _fill(island: Any, template: NodeTemplate, kind: DeviceKind) -> None:
    island.setdefault("device", template.device)
    island.setdefault("devices_per_node", template.devices)
    rate = f"{template.bandwidth_bytes_per_second(kind):.17g} B/s"
    _fill_link(island, "intra_node", _LATENCIES[template.fabric])
    if isinstance(island["intra_node"], dict):
        island["intra_node"].setdefault("bandwidth", rate)
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
    figures = (
        (("intra_node", "bandwidth"), template.bandwidth_bytes_per_second(kind)),
        (("nics", "bandwidth"), template.nics.bandwidth),
    )
    for keys, usual in figures:
        rate = quantity(document, (*path, *keys), Dimension.BANDWIDTH)
        if rate and usual and not 1 / _MOST <= rate / usual <= _MOST:
            yield document.fault(
                (*path, *keys),
                f"{format_bandwidth(rate)}; a {template.node} has {format_bandwidth(usual)} "
                "(one device, one direction, bytes): leave it out, or leave node out",
            )
