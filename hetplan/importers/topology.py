"""Which NICs the devices of a node use, and what sits behind one PCIe switch.

Only words of nvidia-smi are ranked: the other tools list no NICs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.importers.records import NodeTopology

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
