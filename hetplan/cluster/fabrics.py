"""What joins the devices of a node, and how much of it one device has: `fabric` of an island.

A bandwidth is of one device in one direction; n devices are in the node.

    nvswitch     all links of the device, to any other device
    nvlink       all links of the device; pairs of a hybrid cube have one, two or none, which are
                 not told apart
    mesh         n - 1 links, one to each other device (xgmi-mesh: AMD's, hccs-mesh: Huawei's)
    ring         two links, one to each neighbour; all devices together send both ways around
    pcie-tree    the lanes of the device; devices at one switch share its uplink
                 (`hetplan.cost.network.segments`)

A group of some devices of a mesh has the links between them (`Link.to_peers`). So has one of a ring
up to its two: where its devices are no whole ring, a library reaches less.
"""

from __future__ import annotations

from enum import StrEnum

from hetplan.cluster.devices import DeviceKind

_SAME = 0.05  # of two figures of one thing, which makers round; 1/7 is not taken for 1/8


class Fabric(StrEnum):
    """How the devices of a node are joined."""

    NVSWITCH = "nvswitch"
    NVLINK = "nvlink"
    MESH = "mesh"
    XGMI_MESH = "xgmi-mesh"
    HCCS_MESH = "hccs-mesh"
    RING = "ring"
    PCIE_TREE = "pcie-tree"

    @property
    def has_links(self) -> bool:
        """Whether `link`, the rate of one link, says what a device has."""
        return self not in (Fabric.NVSWITCH, Fabric.NVLINK)

    @property
    def to_one_each(self) -> bool:
        """Whether each link of a device goes to one other device."""
        return self is Fabric.RING or self.value.endswith("mesh")

    @property
    def vendor(self) -> str:
        """Who makes it; empty: several."""
        return {
            Fabric.NVSWITCH: "nvidia",
            Fabric.NVLINK: "nvidia",
            Fabric.XGMI_MESH: "amd",
            Fabric.HCCS_MESH: "huawei",
        }.get(self, "")

    @property
    def latency(self) -> str:
        """Order of magnitude of the latency between two devices."""
        if self is Fabric.PCIE_TREE:
            return "10 us"
        return "5 us" if self.has_links else "3 us"

    def links(self, devices: int) -> int:
        """Links of a device that each go to one other device of so many; 1: all go to any."""
        if not self.to_one_each:
            return 1
        return max(1, min(2, devices - 1) if self is Fabric.RING else devices - 1)

    def bandwidth_bytes_per_second(
        self, kind: DeviceKind, devices: int, link: float | None = None
    ) -> float:
        """Of one device to all others of so many in its node; 0: not known.

        `link`: of one link; None: as the catalogue has it, where only all links together are known
        an equal part of them.
        """
        if self is Fabric.PCIE_TREE:
            host = kind.host.bandwidth_bytes_per_second if kind.host is not None else 0.0
            return link or host
        own = kind.scale_up
        if not self.has_links:
            return own.bandwidth_bytes_per_second if own is not None else 0.0
        count = self.links(devices)
        if link is None and own is not None:
            link = own.one_peer_bytes_per_second or own.bandwidth_bytes_per_second / count
        return count * (link or 0.0)


def slip(rate: float, right: float, links: int) -> str:
    """What a wrong figure of a device with so many links seems to be; empty: nothing known."""
    slips = []
    if links > 1:
        slips = [(1 / links, f"what one of {links} links has"), (links, f"that of {links} links")]
    slips += [
        (2.0, "both directions together"),
        (8.0, "bits taken for bytes"),
        (1 / 8, "an eighth, bytes taken for bits"),
    ]
    return next((words for factor, words in slips if abs(rate / right / factor - 1) < _SAME), "")
