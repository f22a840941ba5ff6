"""What link samples, measured paths and a node's matrix of paths say for a cluster file.

A link of hetplan is what ONE device can count on in ONE direction while the others send too. Its
two figures are taken out of link samples, by

    time = steps * (latency + bytes of a step / bandwidth)

solved for them, and the file says that they are `measured`, so that an estimate takes them by the
same formula; or out of a node's matrix of paths and the device catalogue, which say its fabric, or
figures of the path between two hosts: the hardware's, of which collectives reach a part. What none
says stays None.

The matrix also says which NICs the devices use and what sits behind one PCIe switch. Only words of
nvidia-smi are ranked there: the other tools list no NICs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.fabrics import Fabric
from hetplan.importers.records import NodeTopology, PathFigures, TopologyPath
from hetplan.profiling.samples import LinkOperation, LinkSample
from hetplan.units import format_bandwidth, format_bytes

_NVLINKS = re.compile(r"NV(\d{1,3})", re.ASCII)
_GENERATION = re.compile(r"NVLink (\d)")
# One link in one direction: 6 links are 300 GB/s both ways of a V100, 12 are 600 of an A100, 18 are
# 900 of an H100 and 1800 of a B200 (their datasheets).
_NVLINK_BYTES_PER_SECOND = {"2": 25e9, "3": 25e9, "4": 25e9, "5": 50e9}
_FABRIC = re.compile(r"NV\d{1,3}|NVL|XGMI|HCCS|HCCS_SW|SIO|UB", re.ASCII)
_MESHES = {"XGMI": Fabric.XGMI_MESH, "HCCS": Fabric.HCCS_MESH}
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "PCIE")
_SAME = 0.05  # of sums of links, which makers round


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a link and where it comes from."""

    value: float
    """Base units."""
    source: str
    measured: bool = False
    """By collectives or sends of the library that trains (`Link.measured`)."""
    fabric: Fabric | None = None
    """What joins the devices of the node, of a bandwidth inside it that follows from this, or that
    was measured where each link goes to one other device."""
    link: float | None = None
    """Of one link of the fabric, where the catalogue does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What is known of a link; None where nobody said it."""

    bandwidth: Figure | None = None
    latency: Figure | None = None
    shared: Figure | None = None
    """Capacity that all devices which send share; only between islands."""
    samples: str | None = None
    """Name of link samples in the profile store."""

    @property
    def measured(self) -> bool:
        """Whether the file says so, whoever said the latency: the bandwidth is the larger slip."""
        return self.bandwidth is not None and self.bandwidth.measured

    def over(self, other: LinkFigures) -> LinkFigures:
        """These figures, and the other's where these have none."""
        return LinkFigures(
            bandwidth=self.bandwidth or other.bandwidth,
            latency=self.latency or other.latency,
            shared=self.shared or other.shared,
            samples=self.samples or other.samples,
        )

    def of_one_pair(self, pair: Figure | None) -> LinkFigures:
        """The measured bandwidth with the fabric that says what pairs have of it; where none says
        it, at most that of a pair.

        In a mesh a ring uses all links at once. A send, or a collective among fewer devices than
        were measured, has its pairs' links only.
        """
        if pair is None or self.bandwidth is None:
            return self
        if pair.fabric is not None and pair.fabric.to_one_each:
            figure = replace(self.bandwidth, fabric=pair.fabric, link=pair.link)
            return replace(self, bandwidth=figure)
        if self.bandwidth.value <= pair.value:
            return self
        reached = format_bandwidth(self.bandwidth.value)
        source = f"{pair.source}; {self.bandwidth.source} reached {reached} over several links"
        return replace(self, bandwidth=Figure(value=pair.value, source=source))


def _steps(sample: LinkSample) -> float:
    """Latencies in the sample's time, by the formula that estimates use with measured figures.

    Two of a send where both sides post together: the receiver's notice crosses first.
    """
    ranks = sample.group_size
    return {
        LinkOperation.SEND_RECV: 2.0,
        LinkOperation.SEND_RECV_LATE: 1.0,
        LinkOperation.ALL_REDUCE: 2.0 * (ranks - 1),
        LinkOperation.BROADCAST: float((ranks - 1).bit_length()),
    }.get(LinkOperation(sample.operation), float(ranks - 1))


def _bytes_sent(sample: LinkSample) -> float:
    """Bytes that one rank sends, one after the other: a ring's for collectives."""
    ranks = sample.group_size
    return sample.message_bytes * {
        LinkOperation.SEND_RECV: 1.0,
        LinkOperation.SEND_RECV_LATE: 1.0,
        LinkOperation.ALL_REDUCE: 2.0 * (ranks - 1) / ranks,
        LinkOperation.BROADCAST: float((ranks - 1).bit_length()),
    }.get(LinkOperation(sample.operation), (ranks - 1) / ranks)


# Where many ranks send at the same time stands first: it shows what sharing leaves.
_BANDWIDTH_ORDER = (
    LinkOperation.ALL_GATHER,
    LinkOperation.REDUCE_SCATTER,
    LinkOperation.ALL_REDUCE,
    LinkOperation.ALL_TO_ALL,
    LinkOperation.SEND_RECV,
    LinkOperation.SEND_RECV_LATE,
    LinkOperation.BROADCAST,
)
# A single message shows the latency itself, a collective only through its algorithm.
_LATENCY_ORDER = (
    LinkOperation.SEND_RECV_LATE,
    LinkOperation.SEND_RECV,
    LinkOperation.REDUCE_SCATTER,
    LinkOperation.ALL_GATHER,
    LinkOperation.ALL_REDUCE,
    LinkOperation.ALL_TO_ALL,
    LinkOperation.BROADCAST,
)


# A ring enters and leaves a node once on every card, so all devices of the node carry one ring.
_RINGS = (LinkOperation.ALL_GATHER, LinkOperation.REDUCE_SCATTER, LinkOperation.ALL_REDUCE)


def from_samples(
    samples: Sequence[LinkSample], name: str, *, devices_per_node: int | None = None
) -> LinkFigures:
    """Bandwidth of the largest message and latency of the smallest, among the most ranks.

    Where a size was measured more than once, its median counts. Between nodes (with
    `devices_per_node`), what rings of more ranks than a node has devices reach is what all devices
    of a node send together; one device's share of it counts.
    """
    usable = [each for each in samples if each.median_seconds > 0 and each.message_bytes > 0]
    large = _rows(usable, _BANDWIDTH_ORDER, max)
    small = _rows(usable, _LATENCY_ORDER, min)
    bandwidth = latency = None
    if large:
        seconds = statistics.median(each.median_seconds for each in large)
        source = f"{_words(large[0])} of samples {name}"
        share = 1
        if devices_per_node and large[0].group_size > devices_per_node > 1:
            share = devices_per_node if large[0].operation in _RINGS else 1
        if share > 1:
            rate = format_bandwidth(_bytes_sent(large[0]) / seconds)
            source += f": {rate} of a node, shared by its {share} devices"
        value = _bytes_sent(large[0]) / seconds / share
        bandwidth = Figure(value=value, source=source, measured=True)
    if small:
        seconds = statistics.median(each.median_seconds for each in small)
        steps = _steps(small[0])
        over = f" over its {steps:g} steps" if steps != 1 else ""
        source = f"{_words(small[0])}{over}"
        latency = Figure(value=seconds / steps, source=source)
    return LinkFigures(bandwidth=bandwidth, latency=latency, samples=name)


def _words(sample: LinkSample) -> str:
    size = format_bytes(sample.message_bytes)
    return f"{sample.operation} of {size} among {sample.group_size}"


def _rows(
    samples: Sequence[LinkSample],
    order: Sequence[LinkOperation],
    extreme: Callable[[list[int]], int],
) -> list[LinkSample]:
    """The first operation's rows with the most ranks and the most or fewest bytes."""
    for operation in order:
        rows = [each for each in samples if each.operation == operation and each.group_size > 1]
        if rows:
            ranks = max(each.group_size for each in rows)
            rows = [each for each in rows if each.group_size == ranks]
            size = extreme([each.message_bytes for each in rows])
            return [each for each in rows if each.message_bytes == size]
    return []


def from_topology(topology: NodeTopology, device: DeviceKind) -> LinkFigures:
    """Bandwidth of one device of the node, from the catalogue's figures; no latency.

    With the fabric where the paths show one; else of the slowest pair: over PCIe the device's own
    interface, over the vendor's links the device's figure, or the pair's NVLinks.
    """
    devices = {each.name for each in topology.devices}
    pairs = [path for path in topology.paths if set(path.between) <= devices]
    if not pairs:
        return LinkFigures()
    found = _fabric(topology, device, pairs)
    if found is not None:
        return LinkFigures(bandwidth=found)
    slow = [path.path for path in pairs if not _FABRIC.fullmatch(path.path)]
    if not slow:
        return _from_links(device, [path.path for path in pairs])
    if device.host is None:
        return LinkFigures()
    value = device.host.bandwidth_bytes_per_second
    fabric = Fabric.PCIE_TREE if set(slow) <= set(_PCIE) else None
    source = (
        f"PCIe {device.host.pcie_generation} x{device.host.lanes} of the device, "
        f"{format_bandwidth(value)}; {len(slow)} of {len(pairs)} pairs are "
        f"{'/'.join(dict.fromkeys(slow))}"
    )
    return LinkFigures(bandwidth=Figure(value=value, source=source, fabric=fabric))


def _fabric(
    topology: NodeTopology, device: DeviceKind, pairs: Sequence[TopologyPath]
) -> Figure | None:
    """What one device has by the vendor's links of this node; None where they are no fabric."""
    own, words = device.scale_up, {path.path for path in pairs}
    if own is None:
        return None
    count = len(topology.devices)
    fabric, link = None, None
    if len(words) == 1 and own.one_peer_bytes_per_second and own.peers >= count - 1:
        direct = all(path.hops in (None, 1) for path in pairs)
        fabric = _MESHES.get(words.pop()) if direct else None
    elif (rate := _nvlink_rate(device)) is not None:
        fabric, link = _of_nvlinks(topology, pairs, rate, own.bandwidth_bytes_per_second)
    if fabric is None:
        return None
    value = fabric.bandwidth_bytes_per_second(device, count, link)
    links = fabric.links(count)
    each = f"{links} links of {format_bandwidth(value / links)} = " if links > 1 else ""
    shown = "/".join(dict.fromkeys(path.path for path in pairs))
    source = f"pairs are {shown}; {own.name}: {each}{format_bandwidth(value)} of a device"
    return Figure(value=value, source=source, fabric=fabric, link=link)


def _of_nvlinks(
    topology: NodeTopology, pairs: Sequence[TopologyPath], rate: float, whole: float
) -> tuple[Fabric | None, float | None]:
    """The fabric of NVLinks of this rate, and one link of it where the catalogue lacks that.

    Behind a switch every pair has all of a device's links. Where pairs share them out equally they
    are a mesh; where a device's pairs have all of them, unequally, a hybrid cube.
    """
    counts = [_nvlinks(path.path) for path in pairs]
    if len(set(counts)) == 1 and counts[0]:
        link = counts[0] * rate
        if link >= whole * (1 - _SAME):
            return Fabric.NVSWITCH, None
        if link * (len(topology.devices) - 1) <= whole * (1 + _SAME):
            return Fabric.MESH, link
    sums = dict.fromkeys((each.name for each in topology.devices), 0)
    for path, links in zip(pairs, counts, strict=True):
        for end in path.between:
            sums[end] += links
    if all(abs(links * rate / whole - 1) < _SAME for links in sums.values()):
        return Fabric.NVLINK, None
    return None, None


def _nvlink_rate(device: DeviceKind) -> float | None:
    """Of one NVLink of the device in one direction; None: it has none, or which is not known."""
    generation = _GENERATION.search(device.scale_up.name) if device.scale_up is not None else None
    return _NVLINK_BYTES_PER_SECOND.get(generation.group(1)) if generation else None


def _from_links(device: DeviceKind, words: Sequence[str]) -> LinkFigures:
    """Of the slowest pair over the vendor's links."""
    own = device.scale_up
    if own is None:
        return LinkFigures()
    value, rate = own.bandwidth_bytes_per_second, _nvlink_rate(device)
    fewest = min(_nvlinks(word) for word in words)
    if fewest and rate is not None:
        value = min(value, fewest * rate)
    source = f"catalogue: {own.name}; pairs are {'/'.join(dict.fromkeys(words))}"
    return LinkFigures(bandwidth=Figure(value=value, source=source))


def _nvlinks(word: str) -> int:
    found = _NVLINKS.fullmatch(word)
    return int(found.group(1)) if found else 0


def best_bandwidth(paths: Sequence[PathFigures], *, source: str, share: int = 1) -> Figure | None:
    """The best bandwidth that was measured between two hosts, over `share` devices.

    Slower rows of the same output are smaller messages, or fewer streams.
    """
    rates = [(path.bandwidth_bytes_per_second or 0.0, path) for path in paths]
    best, path = max(rates, key=lambda rate: rate[0], default=(0.0, None))
    if path is None or best <= 0.0:
        return None
    text = f"{path.measured} {format_bandwidth(best)} in {source}"
    if share > 1:
        text += f", shared by {share} devices"
    return Figure(value=best / share, source=text)


def least_latency(paths: Sequence[PathFigures], *, source: str) -> Figure | None:
    """The least one-way latency that was measured between two hosts."""
    times = [(_one_way(path), path) for path in paths]
    known = [(seconds, path) for seconds, path in times if seconds is not None]
    if not known:
        return None
    seconds, path = min(known, key=lambda entry: entry[0])
    half = "" if path.latency_seconds else ", half of the round trip"
    return Figure(value=seconds, source=f"{path.measured} in {source}{half}")


def _one_way(path: PathFigures) -> float | None:
    if path.latency_seconds:
        return path.latency_seconds
    return 0.5 * path.round_trip_seconds if path.round_trip_seconds else None


# ---- NICs and PCIe switches of a node


# From nearest to farthest, as the tool's legend describes them.
_DISTANCE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, "SOC": 4}
_BEHIND_ONE_SWITCH = ("PIX", "PXB")


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNics:
    """The NICs that no other NIC is nearer than, of one device."""

    device: str
    nics: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NicLayout:
    """NICs that the devices of a node use, and who uses which."""

    nics: tuple[str, ...]
    """Their names; a NIC's number is its place here."""
    of_device: tuple[int, ...]
    """Number of each device's NIC; empty where each has `most_per_device` of its own, in order."""
    most_per_device: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieSwitch:
    """Devices and NICs that reach each other without the host bridge of a CPU."""

    devices: tuple[str, ...]
    nics: tuple[str, ...]


def nearest_nics(topology: NodeTopology) -> tuple[NearestNics, ...]:
    """Per device, in its order; empty where the node has no NIC."""
    nics = {nic.name for nic in topology.nics}
    paths: dict[str, list[tuple[str, str]]] = {device.name: [] for device in topology.devices}
    for path in topology.paths:
        for here, there in (path.between, path.between[::-1]):
            if here in paths and there in nics and path.path in _DISTANCE:
                paths[here].append((path.path, there))
    places = []
    for device, found in paths.items():
        if not found:
            return ()
        best = min((word for word, _ in found), key=lambda word: _DISTANCE[word])
        near = tuple(nic for word, nic in found if _DISTANCE[word] == _DISTANCE[best])
        places.append(NearestNics(device=device, nics=near, path=best))
    return tuple(places)


def nic_layout(topology: NodeTopology) -> NicLayout | None:
    """The nearest NIC of every device, the least used of several; None where the node has none.

    Where every device has several that are nearest to it alone, it uses all of them. A NIC that
    is nearest to no device (of storage, of the host's own network) is left out.
    """
    places = nearest_nics(topology)
    if not places:
        return None
    names = [nic for place in places for nic in place.nics]
    each = {len(place.nics) for place in places}
    if len(set(names)) == len(names) and len(each) == 1:
        return NicLayout(nics=tuple(names), of_device=(), most_per_device=each.pop())
    users = dict.fromkeys((nic.name for nic in topology.nics), 0)
    chosen = []
    for place in places:
        nic = min(place.nics, key=users.__getitem__)  # min takes the first of equals
        users[nic] += 1
        chosen.append(nic)
    used = [nic for nic, count in users.items() if count]
    return NicLayout(nics=tuple(used), of_device=tuple(used.index(nic) for nic in chosen))


def pcie_switches(topology: NodeTopology) -> tuple[PcieSwitch, ...]:
    """Groups of two or more that PIX or PXB join, by their first device; NICs alone are none."""
    names = [device.name for device in topology.devices] + [nic.name for nic in topology.nics]
    order = {name: at for at, name in enumerate(names)}
    group = {name: name for name in names}

    def root(name: str) -> str:
        while group[name] != name:
            group[name] = group[group[name]]
            name = group[name]
        return name

    for path in topology.paths:
        if path.path in _BEHIND_ONE_SWITCH:
            low, high = sorted(
                (root(path.between[0]), root(path.between[1])), key=order.__getitem__
            )
            group[high] = low
    devices = {each.name for each in topology.devices}
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(root(name), []).append(name)
    return tuple(
        PcieSwitch(
            devices=tuple(name for name in found if name in devices),
            nics=tuple(name for name in found if name not in devices),
        )
        for found in members.values()
        if len(found) > 1 and any(name in devices for name in found)
    )
