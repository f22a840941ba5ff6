"""The cluster of a measured run: devices from the catalogue, links from what the row notes.

Inside a node: the devices' own fabric, or PCIe where they have none, at the datasheet's rate; where
unit data were measured on links of the kind those replace it. Between nodes: the NICs that the row
notes, shared by the devices of a node. Where it notes none, or not how many, they are those of the
vendor's own system of the kind, which the row's notes say; a kind without such a system is not
predicted on several nodes.

Tables name devices in their own ways (`A100-80GB-SXM (multi: ...)`, `GH-96`, `RTX-3090`): names are
those of the catalogue, labels of the tables (`KINDS`), or what a driver calls the kind.

Notes on networks are free text: `8x HDR-200Gb IB per node`, `3.2 Tb/s EFA`, `50 GB/s per GPU`. A
rate above one NIC's is a node's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.accuracy.rows import RunRow
from evaluation.accuracy.unit_data import KINDS
from evaluation.accuracy.unit_links import node_link, nodes_link
from hetplan.cluster.catalogue import kind_called, load_catalogue, nearest_kinds
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.cluster.templates import NodeTemplate, node_templates
from hetplan.errors import InputError
from hetplan.predict.kinds.operators import same_chip

GIGABIT = 1e9 / 8
_FASTEST_NIC = 800 * GIGABIT  # NVIDIA ConnectX-8: one port of 800 Gbit/s
_RATE = re.compile(
    r"(?:(\d+)\s*x\s*[^\d;,]*)?(\d+(?:\.\d+)?)\s*([GT])([bB])"
    r"(?:it)?(?:/s|ps|E\b)?\+?\s*(?:per|/)?\s*(node|GPU)?"
)
_PARTS = re.compile(r"[,;]| and ")
_NOT_COMPUTE = re.compile(r"storage|management|\bfor NS\b", re.IGNORECASE)
_MODELS = re.compile(r"ConnectX-\d|BlueField[- ]?\d|\bBF\d|\bCX-?\d|ROCE\d", re.IGNORECASE)
"""Names of NICs, whose digits are no counts."""
_NAMES = (("XDR", 800), ("NDR", 400), ("HDR", 200), ("EDR", 100), ("FDR", 56))
"""Names of InfiniBand's speeds, Gbit/s of four lanes (InfiniBand Trade Association's roadmap)."""


NotedRate = tuple[float, int | None, str]
"""Bytes per second, how many a node has, where that is said, and of what: `node`, `gpu` or not said
(empty).
"""


def noted_rate(note: str) -> NotedRate | None:
    """The first rate of a note; None where it has none. `b` are bits and `B` bytes.

    Networks of storage and management, which no collective uses, do not count.
    """
    parts = [part for part in _PARTS.split(note) if not _NOT_COMPUTE.search(part)]
    note = "; ".join(_MODELS.sub("", part) for part in parts)
    found = _RATE.search(note)
    if found:
        unit = (1e9 if found[3] == "G" else 1e12) * (1.0 if found[4] == "B" else 1 / 8)
        rate, count = float(found[2]) * unit, int(found[1]) if found[1] else None
        if rate > 0 and count != 0:
            return rate, count, (found[5] or "").lower()
    for name, gigabits in _NAMES:
        if re.search(rf"\b{name}\b", note):
            return gigabits * GIGABIT, None, ""
    return None


def usual_node(kind: DeviceKind) -> NodeTemplate | None:
    """The node that devices of this chip are sold in, the kind's own first; None: all sorts."""
    templates = [each for each in node_templates().values() if "estimated" not in each.source]
    known = {each.kind: each for each in load_catalogue()}
    own = [each for each in templates if each.device == kind.kind]
    like = [each for each in templates if same_chip(known[each.device], kind)]
    return next(iter((*own, *like)), None)


def kind_names(text: str) -> tuple[str, ...]:
    """The devices of a row: `RTX-3090+Titan-RTX` are two."""
    return tuple(part.strip() for part in text.split(" (")[0].split("+") if part.strip())


def device_kind_of(name: str, kinds: Sequence[DeviceKind]) -> DeviceKind:
    """The kind that a table means; an InputError where the catalogue has none."""
    known = {kind.kind: kind for kind in kinds}
    found = dict(KINDS).get(name, name)
    if found not in known:
        found = kind_called(name, kinds)
    if not found:
        near = nearest_kinds(name, known)
        like = f"; nearest: {', '.join(near)}" if near else ""
        raise InputError(f"{name!a} is no kind of the catalogue{like}")
    return known[found]


NVLINK_LATENCY_SECONDS = 10e-6  # calculon, systems/a100_80g.json, network of a node
NIC_LATENCY_SECONDS = 20e-6  # calculon, systems/a100_80g.json, InfiniBand
HDR_BYTES_PER_SECOND = 200 * GIGABIT  # NVIDIA DGX A100 datasheet: ConnectX-6, HDR InfiniBand
_MAX_NVLINK_DOMAIN = 72  # NVIDIA GB200 NVL72: one NVLink fabric of 72 GPUs

ONE_NIC = "all ranks of a node leave by one NIC: read off this cluster's runs"
SHARED_RINGS = "rings of strided groups share one NIC: read off this cluster's runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """The NICs of a node, and where the figures are from."""

    nics: int
    bandwidth_bytes_per_second: float
    source: str
    inside_bytes_per_second: float = 0.0
    """Of one device to the others of its node, where that differs by system; 0: as its kind has."""
    rings: RingNics | None = None
    """Which NICs rings of strided groups use, where that is known of this cluster."""
    inferred: str = ""
    """What of it was read off the cluster's own runs; empty: nothing."""


CLARIDEN = NodeNetwork(
    # A node has four, one per device. The published times of the reduction alone (grad_reduce_s)
    # are on average 2.7 times what four would take, and 0.7 of what one takes: the ranks of a node
    # are taken to leave by one.
    nics=1,
    bandwidth_bytes_per_second=200 * GIGABIT,
    inferred=ONE_NIC,
    # Six NVLink 4 links of 25 GB/s and direction between any two of the four.
    inside_bytes_per_second=3 * 150e9,
    source="CSCS, Alps: nodes of 4 GH200, one Slingshot 11 port of 200 Gbit/s each",
)
"""Of a cluster that notes only name."""
MIT_RTX = NodeNetwork(
    nics=1,
    bandwidth_bytes_per_second=0.116e9,
    source="eth-easl/sailor, network_coeffs_all_homo.json, inter, RTX-3090: most bytes/s",
)
"""The same."""
_SHARES_RINGS = "vtrain config"
"""In the note of a cluster whose runs show which NICs rings of strided groups use.

vTrain's runs reduce gradients over strided groups four times slower than the NICs of a node allow,
unless tensor parallelism fills the node. Nothing but those runs says so of this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOf:
    """Nodes of one kind that a run used."""

    kind: DeviceKind
    nodes: int
    devices_per_node: int


def cluster_of(row: RunRow, measured_links: Sequence[str]) -> Cluster:
    """The cluster of a row whose devices are of one kind; an InputError says what is missing."""
    names = kind_names(row.gpu)
    if len(names) != 1:
        raise InputError(
            f"gpu is {row.gpu!a}; which of the kinds runs what is said by a plan of "
            "sailor/validation, which is not there"
            if names
            else "the row does not say gpu"
        )
    kind = device_kind_of(names[0], load_catalogue())
    if not row.gpus:
        raise InputError("the row does not say gpus")
    per_node = min(row.gpus_per_node or row.gpus, row.gpus)
    if "NVL72" in row.intra_bw_note:
        per_node = _nvlink_domain(row.gpus, per_node)
    if row.gpus % per_node:
        raise InputError(f"{row.gpus} devices are no whole nodes of {per_node}")
    nodes = NodesOf(kind=kind, nodes=row.gpus // per_node, devices_per_node=per_node)
    return cluster_of_nodes(row, (nodes,), measured_links)


def cluster_notes(row: RunRow, cluster: Cluster) -> tuple[str, ...]:
    """What about the network was told by the runs themselves."""
    if all(island.nodes == 1 for island in cluster.islands):
        return ()
    network = network_of(row, needed=False)
    return (network.inferred,) if network is not None and network.inferred else ()


def _nvlink_domain(devices: int, per_node: int) -> int:
    """Devices that one NVLink fabric joins, as a node: as many nodes as fit and divide the run."""
    nodes = devices // per_node
    most = min(nodes, _MAX_NVLINK_DOMAIN // per_node)
    fit = (each for each in range(1, most + 1) if nodes % each == 0)
    return max(fit, default=1) * per_node


def cluster_of_nodes(
    row: RunRow, parts: Sequence[NodesOf], measured_links: Sequence[str]
) -> Cluster:
    """A cluster of one island per kind, all on the network that the row notes."""
    several = len(parts) > 1 or any(part.nodes > 1 for part in parts)
    network = network_of(row, needed=several)
    islands = tuple(_island(row, part, network, measured_links) for part in parts)
    links = tuple(
        IslandLink(between=(left.name, right.name), link=_joined(left, right))
        for at, left in enumerate(islands)
        for right in islands[at + 1 :]
    )
    return Cluster(name="measured", islands=islands, links=links)


def _joined(left: Island, right: Island) -> Link:
    """What joins two islands on one network: nothing but the NICs of the slower one limits it."""
    slower = min(left, right, key=lambda each: each.inter_node.bandwidth_bytes_per_second)
    link = slower.inter_node
    if slower.nics is None:
        return link
    all_nics = slower.nodes * slower.nics.per_node * slower.nics.bandwidth_bytes_per_second
    return replace(
        link, bandwidth_bytes_per_second=all_nics, shared_bandwidth_bytes_per_second=all_nics
    )


def network_of(row: RunRow, *, needed: bool = True) -> NodeNetwork | None:
    """What the row notes of the network between its nodes, or what the row's kind usually has.

    Where it is neither: an InputError if the network is `needed`, else None.
    """
    note, per_node = row.inter_bw_note, row.gpus_per_node or 1
    rate = noted_rate(note)
    for word, network in (("clariden", CLARIDEN), ("mit rtx", MIT_RTX)):
        if rate is None and word in note.lower():
            return network
    bandwidth, count, of = rate or (0.0, None, "")
    if count or of or bandwidth > _FASTEST_NIC:
        nics = count or per_node
        whole = bandwidth * (per_node if of == "gpu" else count or 1)
        if of == "node" and not count and "A100" in row.gpu:
            # Nodes of A100 have HDR NICs; of others the figure is taken as one NIC per device.
            nics = max(1, round(whole / HDR_BYTES_PER_SECOND))
        rings = RingNics.ONE if _SHARES_RINGS in note.lower() else None
        return NodeNetwork(
            nics=nics,
            bandwidth_bytes_per_second=whole / nics,
            source=note,
            rings=rings,
            inferred=SHARED_RINGS if rings else "",
        )
    names, usual = kind_names(row.gpu), None
    if len(names) == 1:
        usual = usual_node(device_kind_of(names[0], load_catalogue()))
    if rate is None and usual is None:
        if needed:
            raise InputError(
                f"inter_bw_note is {note!a}: the network between the nodes is not known"
            )
        return None
    devices_per_nic, rate_of_one, source = per_node, 0.0, "one in a node"
    if usual is not None:
        rate_of_one, source = usual.nics.bandwidth, f"{usual.node}: {usual.source}"
        devices_per_nic = usual.devices // min(usual.devices, usual.nics.per_node)
    said = "nothing" if rate is None else "no number of NICs"
    return NodeNetwork(
        nics=max(1, per_node // devices_per_nic),
        bandwidth_bytes_per_second=bandwidth or rate_of_one,
        source=note or source,
        inferred=f"the row says {said} of the network between its nodes; assumed: {source}",
    )


def _island(
    row: RunRow, part: NodesOf, network: NodeNetwork | None, measured_links: Sequence[str]
) -> Island:
    kind = part.kind
    inside = _inside(part, network, measured_links)
    nics = None
    between = inside
    if network is not None:
        # A note counts the NICs of a node, or one per device (which a whole fabric has, too).
        whole = part.devices_per_node if network.nics == row.gpus_per_node else network.nics
        nics = Nics(
            per_node=whole,
            bandwidth_bytes_per_second=network.bandwidth_bytes_per_second,
            rings=network.rings,
        )
        between = Link(
            bandwidth_bytes_per_second=nics.own_bytes_per_second(part.devices_per_node),
            latency_seconds=NIC_LATENCY_SECONDS,
            transport=Transport.DEVICE_DIRECT,
            samples=_measured(nodes_link(kind.kind), measured_links),
        )
    return Island(
        name=kind.kind,
        region="here",
        device=kind,
        nodes=part.nodes,
        devices_per_node=part.devices_per_node,
        intra_node=inside,
        inter_node=between,
        memory_bytes=kind.memory_bytes,
        nics=nics,
    )


def _inside(part: NodesOf, network: NodeNetwork | None, measured_links: Sequence[str]) -> Link:
    kind = part.kind
    # A bridge between two devices does not join the other devices of a node.
    joined = kind.scale_up is not None and (kind.scale_up.peers or 8) >= part.devices_per_node - 1
    if network is not None and network.inside_bytes_per_second:
        bandwidth = network.inside_bytes_per_second
    elif kind.scale_up is not None and (joined or kind.host is None):
        bandwidth = kind.scale_up.bandwidth_bytes_per_second
    elif kind.host is not None:
        bandwidth = kind.host.bandwidth_bytes_per_second
    elif part.devices_per_node == 1:
        # Nobody else is in the node; any rate above 0 will do.
        bandwidth = HDR_BYTES_PER_SECOND if network is None else network.bandwidth_bytes_per_second
    elif kind.kind.startswith("nvidia-gh200") and part.devices_per_node <= 4:
        bandwidth = 3 * 150e9  # NVIDIA, quad GH200 node: six NVLink 4 links to each of the others
    else:
        raise InputError(f"{kind.kind} has neither a fabric nor a host interface in the catalogue")
    return Link(
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=NVLINK_LATENCY_SECONDS,
        transport=Transport.DEVICE_DIRECT,
        samples=_measured(node_link(kind.kind), measured_links),
    )


def _measured(name: str, measured_links: Sequence[str]) -> str | None:
    return name if name in measured_links else None
