"""What a node's matrix of paths says for a cluster file.

With the device catalogue it says the fabric of a node, or what its slowest pair has; which NICs the
devices use; and what sits behind one PCIe switch. Only words of nvidia-smi are ranked there: the
other tools list no NICs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.fabrics import Fabric
from hetplan.importers.records import NodeTopology, TopologyPath
from hetplan.units import format_bandwidth

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
class DeviceBandwidth:
    """What one device of a node sends, and where that comes from."""

    bytes_per_second: float
    source: str
    fabric: Fabric | None = None
    """What joins the devices, where the bandwidth follows from it."""
    link: float | None = None
    """Of one link of the fabric, where the catalogue does not say it."""


def device_bandwidth(topology: NodeTopology, device: DeviceKind) -> DeviceBandwidth | None:
    """Bandwidth of one device of the node, from the catalogue's figures; None where it has none.

    With the fabric where the paths show one; else of the slowest pair: over PCIe the device's own
    interface, over the vendor's links the device's figure, or the pair's NVLinks.
    """
    devices = {each.name for each in topology.devices}
    pairs = [path for path in topology.paths if set(path.between) <= devices]
    if not pairs:
        return None
    found = _fabric(topology, device, pairs)
    if found is not None:
        return found
    slow = [path.path for path in pairs if not _FABRIC.fullmatch(path.path)]
    if not slow:
        return _from_links(device, [path.path for path in pairs])
    if device.host is None:
        return None
    value = device.host.bandwidth_bytes_per_second
    fabric = Fabric.PCIE_TREE if set(slow) <= set(_PCIE) else None
    source = (
        f"PCIe {device.host.pcie_generation} x{device.host.lanes} of the device, "
        f"{format_bandwidth(value)}; {len(slow)} of {len(pairs)} pairs are "
        f"{'/'.join(dict.fromkeys(slow))}"
    )
    return DeviceBandwidth(bytes_per_second=value, source=source, fabric=fabric)


def _fabric(
    topology: NodeTopology, device: DeviceKind, pairs: Sequence[TopologyPath]
) -> DeviceBandwidth | None:
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
    return DeviceBandwidth(bytes_per_second=value, source=source, fabric=fabric, link=link)


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


def _from_links(device: DeviceKind, words: Sequence[str]) -> DeviceBandwidth | None:
    """Of the slowest pair over the vendor's links."""
    own = device.scale_up
    if own is None:
        return None
    value, rate = own.bandwidth_bytes_per_second, _nvlink_rate(device)
    fewest = min(_nvlinks(word) for word in words)
    if fewest and rate is not None:
        value = min(value, fewest * rate)
    source = f"catalogue: {own.name}; pairs are {'/'.join(dict.fromkeys(words))}"
    return DeviceBandwidth(bytes_per_second=value, source=source)


def _nvlinks(word: str) -> int:
    found = _NVLINKS.fullmatch(word)
    return int(found.group(1)) if found else 0


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
