"""What must hold in a cluster file beyond keys and types: names, sizes, kinds, sites, nodes.

Links have a file of their own (`check_links`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetplan.cluster.catalogue import nearest_kinds
from hetplan.cluster.devices import DeviceKind, capped_clock_ratio
from hetplan.cluster.node import Nics, count_names, expand_names, nic_faults
from hetplan.cluster.places import island_paths, kind_figures, placed, quantity, unknown
from hetplan.cluster.power import power_law
from hetplan.cluster.spec import MAX_DEVICES, Cluster, Island, too_many_devices
from hetplan.errors import Fault, InputError
from hetplan.files.nodes import Path
from hetplan.files.reading import Document
from hetplan.units import Dimension, format_bandwidth, format_bytes, format_power


def check_nodes(document: Document) -> Iterator[Fault]:
    """Lists cover a node's devices, NICs divide, nodes that are out exist, names are unique."""
    named: dict[str, Path] = {}
    for _, path in island_paths(document):
        for key in ("device", "devices_per_node", "intra_node"):
            said = isinstance(document.at(*path), dict) and document.at(*path, "node") is None
            # A fabric fills it in, where the fabric itself is right.
            by_fabric = key == "intra_node" and document.at(*path, "fabric") is not None
            if said and document.at(*path, key) is None and not by_fabric:
                other = "node (hetplan doctor --nodes)"
                other = f"fabric or {other}" if key == "intra_node" else other
                message = f"this required key is missing; add it, or {other}"
                yield document.fault((*path, key), message)
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
    rails, rings = document.whole((*at, "rails")), document.at(*at, "rings")
    for fault in nic_faults(per_node, of_device, rails, rings):
        yield placed(document, at, fault)
    divides = not per_node % devices or not devices % per_node
    if not of_device and not divides:
        yield document.fault(
            (*at, "per_node"),
            f"{per_node} NICs and {devices} devices of a node do not divide; say with of_device "
            "which NIC each device uses",
        )
    most = document.whole((*at, "most_per_device"))
    if most is not None and most > 1 and (of_device or most * devices > per_node):
        yield document.fault(
            (*at, "most_per_device"),
            f"{devices} devices with {most} NICs each need {devices * most}, a node has {per_node}"
            if not of_device
            else "of_device gives every device one NIC; leave one of the two out",
        )
    elif (
        all(nic < per_node for nic in of_device)
        and len(of_device) in (0, devices)
        and (of_device or divides)
    ):
        yield from _share(document, path, devices, of_device)


def _share(document: Document, path: Path, devices: int, of_device: list[int]) -> Iterator[Fault]:
    """A bandwidth between nodes that the NICs cannot carry."""
    own = quantity(document, (*path, "inter_node", "bandwidth"), Dimension.BANDWIDTH)
    each = quantity(document, (*path, "nics", "bandwidth"), Dimension.BANDWIDTH)
    if own is None or each is None:
        return
    port = Nics(
        per_node=document.whole((*path, "nics", "per_node")) or 1,
        bandwidth_bytes_per_second=each,
        most_per_device=document.whole((*path, "nics", "most_per_device")) or 1,
        of_device=tuple(of_device),
    ).own_bytes_per_second(devices)
    if own > port * (1 + 1e-9):
        yield document.fault(
            (*path, "inter_node", "bandwidth"),
            f"{format_bandwidth(own)} is more than the NICs of one device, "
            f"{format_bandwidth(port)}; leave it out, or correct nics",
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


def check_islands(document: Document, *, catalogue: Mapping[str, DeviceKind]) -> Iterator[Fault]:
    """Names are unique, device kinds known, memory within the device's."""
    paths = [path for _, path in island_paths(document)]
    yield from _unique(document, [("regions", at, "name") for at in document.entries(("regions",))])
    yield from _unique(document, [(*path, "name") for path in paths])
    yield from _unique(document, [("devices", at, "kind") for at in document.entries(("devices",))])
    yield from _unique(document, [("sites", at, "name") for at in document.entries(("sites",))])
    yield from _size(document, paths)
    known = kind_figures(document, catalogue)
    said: dict[str, str] = {}
    for path in paths:
        yield from _host_launch(document, path)
        device = document.word((*path, "device"))
        if device is None:
            continue
        if device not in known:
            if device not in said:
                said[device] = _unknown_kind(device, known)
            yield document.fault((*path, "device"), said[device])
            continue
        yield from _memory(document, path, device, known[device].memory_bytes)
        yield from _power_cap(document, path, device, known[device].max_power_watts)


def _size(document: Document, paths: list[Path]) -> Iterator[Fault]:
    counts = [
        (document.whole((*path, "nodes")) or 0) * (document.whole((*path, "devices_per_node")) or 0)
        for path in paths
    ]
    if sum(counts) > MAX_DEVICES:
        yield document.fault(("regions",), too_many_devices(sum(counts)))


def _unique(document: Document, paths: list[Path]) -> Iterator[Fault]:
    first: dict[str, Path] = {}
    for path in paths:
        name = document.word(path)
        if name is None:
            continue
        if name in first:
            line = document.line(first[name])
            yield document.fault(path, f"{name!a} is already the name on line {line}; rename one")
        first.setdefault(name, path)


def _unknown_kind(name: str, known: Mapping[str, object]) -> str:
    near = nearest_kinds(name, known)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
    more = "a kind of your own goes under `devices`"
    return f"unknown device kind {name[:60]!a}; {hint}; {more}"


def _memory(document: Document, path: Path, device: str, has: float | None) -> Iterator[Fault]:
    asked = quantity(document, (*path, "memory"), Dimension.MEMORY)
    if has is None and document.at(*path, "memory") is None:
        yield document.fault(
            (*path, "memory"),
            f"required for device kind {device}, whose memory differs from machine to machine; "
            'add what a job may use per device, such as memory: "8 GiB"',
        )
    elif has is not None and asked is not None and asked > has:
        yield document.fault(
            (*path, "memory"),
            f"{format_bytes(asked)} is more than the {format_bytes(has)} of {device}; "
            "give what a job may use, or leave it out",
        )


_LONGEST_LAUNCH_SECONDS = 10e-3


def _host_launch(document: Document, path: Path) -> Iterator[Fault]:
    """A launch takes some time, and no more than a slow host could need."""
    seconds = quantity(document, (*path, "host_launch"), Dimension.TIME)
    if seconds is not None and not 0.0 < seconds <= _LONGEST_LAUNCH_SECONDS:
        yield document.fault(
            (*path, "host_launch"),
            "the host's time for one kernel is above 0 and at most 10 ms, and mostly some "
            "microseconds; correct it, or leave it out",
        )


def _power_cap(document: Document, path: Path, device: str, board: float) -> Iterator[Fault]:
    """A cap above the board's limit caps nothing; without that limit its effect is not known."""
    cap = quantity(document, (*path, "power_cap"), Dimension.POWER)
    if cap is None:
        return
    if not board:
        yield document.fault(
            (*path, "power_cap"),
            f"the limit of {device}'s board is not known, so neither is what the cap costs; give "
            "max_power of the kind under `devices`, or clock_ratio instead of the cap",
        )
    elif cap > board:
        yield document.fault(
            (*path, "power_cap"),
            f"{format_power(cap)} is more than the {format_power(board)} of {device}'s board; "
            "give what the devices are limited to, or leave it out",
        )
    else:
        try:
            capped_clock_ratio(cap / board)
        except InputError as error:
            yield document.fault((*path, "power_cap"), str(error))


def check_sites(document: Document) -> Iterator[Fault]:
    """Regions name known sites, and sites have regions."""
    names = {
        name: at
        for at in document.entries(("sites",))
        if (name := document.word(("sites", at, "name"))) is not None
    }
    regions: dict[str, list[int]] = {name: [] for name in names}
    for region in document.entries(("regions",)):
        site = document.word(("regions", region, "site"))
        if site is not None and site not in names:
            message = f"{unknown(site, names, 'site')}; sites are listed under `sites`"
            yield document.fault(("regions", region, "site"), message)
        elif site is not None:
            regions[site].append(region)
    for name, at in names.items():
        if not regions[name]:
            yield document.fault(
                ("sites", at, "name"), f"no region has `site: {name}`; add that, or remove the site"
            )


def check_limits_of(document: Document, cluster: Cluster) -> Iterator[Fault]:
    """Power limits that feed not even a node of their site with one device in use."""
    for at, site in enumerate(cluster.sites):
        mine = [each for each in cluster.islands if each.region in site.regions]
        least = min((_least_node_watts(cluster, each), each.name) for each in mine)
        if site.power_limit_watts is not None and least[0] > site.power_limit_watts:
            yield document.fault(
                ("sites", at, "power_limit"),
                f"{format_power(site.power_limit_watts)} feeds no node of its regions, the least "
                f"is one of {least[1]} with {format_power(least[0])}; raise it, or correct the "
                "power of the islands",
            )


def _least_node_watts(cluster: Cluster, island: Island) -> float:
    """A node in use draws no less; 0 where its power is not known."""
    law = power_law(cluster, island)
    if law is None:
        return 0.0
    return law.meter_watts(1, 0.0, unused=island.devices_per_node - 1)
