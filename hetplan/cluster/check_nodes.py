"""What must hold inside the nodes of a cluster file: NICs, switches, NUMA nodes, numbers, names.

As in `check` the rules read the raw data and step over what is missing or has the wrong type.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.node_names import count_names, expand_names
from hetplan.cluster.places import island_paths, quantity
from hetplan.cluster.spec import MAX_DEVICES
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.units import Dimension, format_bandwidth


def check_nodes(document: Document) -> Iterator[Fault]:
    """Lists cover a node's devices, NICs divide, nodes that are out exist, names are unique."""
    named: dict[str, Path] = {}
    for _, path in island_paths(document):
        yield from _nodes_out(document, path)
        yield from _names(document, path, named)
        devices = document.whole((*path, "devices_per_node"))
        if devices is None or devices > MAX_DEVICES:
            continue
        for key, what in (("pcie_switches", "PCIe switches"), ("numa_nodes", "NUMA nodes")):
            yield from _spread(document, (*path, key), devices, what)
        yield from _nics(document, path, devices)


def _numbers(document: Document, path: Path) -> list[int] | None:
    """The list at this path if all its entries are whole numbers from 0."""
    value = document.at(*path)
    if not isinstance(value, list):
        return None
    right = all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value)
    return value if right else None


def _spread(document: Document, path: Path, devices: int, what: str) -> Iterator[Fault]:
    count = document.whole(path)
    numbers = _numbers(document, path)
    if count is not None and devices % count:
        yield document.fault(
            path,
            f"{count} {what} do not divide the {devices} devices of a node; list the number of "
            "each device's own, such as [0, 0, 1]",
        )
    if numbers is not None and len(numbers) != devices:
        yield document.fault(path, _not_covered(len(numbers), devices))


def _not_covered(entries: int, devices: int) -> str:
    return (
        f"{entries} entries for {devices} devices; write one number per device of a node, in the "
        "order of the devices"
    )


def _nics(document: Document, path: Path, devices: int) -> Iterator[Fault]:
    at = (*path, "nics")
    per_node = document.whole((*at, "per_node"))
    if per_node is None:
        return
    of_device = _numbers(document, (*at, "of_device")) or []
    if of_device and len(of_device) != devices:
        yield document.fault((*at, "of_device"), _not_covered(len(of_device), devices))
    wrong = [position for position, nic in enumerate(of_device) if nic >= per_node]
    for position in wrong[:1]:
        message = f"there is no NIC {of_device[position]}; a node has 0 to {per_node - 1}"
        yield document.fault((*at, "of_device", position), message)
    divides = not per_node % devices or not devices % per_node
    if not of_device and not divides:
        yield document.fault(
            (*at, "per_node"),
            f"{per_node} NICs and {devices} devices of a node do not divide; say with of_device "
            "which NIC each device uses",
        )
    rails = document.whole((*at, "rails"))
    if rails is not None and per_node % rails:
        yield document.fault(
            (*at, "rails"), f"{rails} rails do not divide the {per_node} NICs of a node"
        )
    rings = document.at(*at, "rings")
    if rails is not None and rings in (RingNics.FIRST_DEVICE.value, RingNics.ONE.value):
        yield document.fault(
            (*at, "rings"),
            f"{rings} with {rails} rails; a ring stays on the rail of its devices: leave one of "
            "the two out",
        )
    most = document.whole((*at, "most_per_device"))
    if most is not None and most > 1 and (of_device or most * devices > per_node):
        yield document.fault(
            (*at, "most_per_device"),
            f"{devices} devices with {most} NICs each need {devices * most}, a node has {per_node}"
            if not of_device
            else "of_device gives every device one NIC; leave one of the two out",
        )
    elif not wrong and len(of_device) in (0, devices) and (of_device or divides):
        yield from _share(document, path, devices, of_device)


def _share(document: Document, path: Path, devices: int, of_device: list[int]) -> Iterator[Fault]:
    """A bandwidth between nodes that the NICs cannot carry."""
    own = quantity(document, (*path, "inter_node", "bandwidth"), Dimension.BANDWIDTH)
    each = quantity(document, (*path, "nics", "bandwidth"), Dimension.BANDWIDTH)
    if own is None or each is None:
        return
    share = Nics(
        per_node=document.whole((*path, "nics", "per_node")) or 1,
        bandwidth_bytes_per_second=each,
        most_per_device=document.whole((*path, "nics", "most_per_device")) or 1,
        of_device=tuple(of_device),
    ).share_bytes_per_second(devices)
    if own > share * (1 + 1e-9):  # a share such as a third has no exact text
        yield document.fault(
            (*path, "inter_node", "bandwidth"),
            f"{format_bandwidth(own)} is more than one device's share of the NICs, "
            f"{format_bandwidth(share)}; leave it out, or correct nics",
        )


def _nodes_out(document: Document, path: Path) -> Iterator[Fault]:
    nodes = document.whole((*path, "nodes"))
    listed = document.at(*path, "nodes_out")
    if nodes is None or not isinstance(listed, list):
        return
    out: set[int] = set()
    for at, number in enumerate(listed):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            continue
        place = (*path, "nodes_out", at)
        if number >= nodes:
            last = nodes - 1
            yield document.fault(place, f"there is no node {number}; the island has 0 to {last}")
        elif number in out:
            yield document.fault(place, f"node {number} is listed twice; remove one")
        out.add(number)
    if len({number for number in out if number < nodes}) == nodes:
        yield document.fault(
            (*path, "nodes_out"), "every node is out; leave the island out instead"
        )


def _names(document: Document, path: Path, named: dict[str, Path]) -> Iterator[Fault]:
    """Names are as many as nodes, and no other node has them."""
    entries = document.at(*path, "node_names")
    nodes = document.whole((*path, "nodes"))
    if not isinstance(entries, list) or not entries:
        return
    count = 0
    for at, entry in enumerate(entries):
        if not isinstance(entry, str):
            return  # a fault of the field's type
        try:
            count += count_names(entry)
        except InputError as error:
            yield document.fault((*path, "node_names", at), str(error))
            return
    if nodes is None or nodes > MAX_DEVICES:
        return
    if count != nodes:
        message = f"stands for {count} names, the island has {nodes} nodes; name every node"
        yield document.fault((*path, "node_names"), message)
        return
    for at, entry in enumerate(entries):
        place = (*path, "node_names", at)
        for name in expand_names((entry,)):
            if name in named:
                line = document.line(named[name])
                yield document.fault(place, f"node {name!a} is already named on line {line}")
                break
            named[name] = place
