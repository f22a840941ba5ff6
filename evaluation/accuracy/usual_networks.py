"""What does a row's note of its network say, and which network has a node whose note says nothing?

Notes are free text: `8x HDR-200Gb IB per node`, `3.2 Tb/s EFA`, `50 GB/s per GPU`, `NDR`. A rate of
more than one NIC's is a node's; one that does not say of what is one NIC's, and how many a node has
follows from the kind of device: systems are sold with one figure. Kinds that stand in all sorts of
servers (cards in a slot) have no usual network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIGABIT = 1e9 / 8
_FASTEST_NIC = 800 * GIGABIT  # NVIDIA ConnectX-8: one port of 800 Gbit/s
_RATE = re.compile(
    r"(?:(\d+)\s*x\s*[^\d;,]*)?(\d+(?:\.\d+)?)\s*([GT])([bB])"
    r"(?:it)?(?:/s|ps|E\b)?\+?\s*(?:per|/)?\s*(node|GPU)?"
)
_NAMES = (("XDR", 800), ("NDR", 400), ("HDR", 200), ("EDR", 100), ("FDR", 56))
"""Names of InfiniBand's speeds, Gbit/s of four lanes (InfiniBand Trade Association's roadmap)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedRate:
    """A rate as a note has it."""

    bytes_per_second: float
    count: int | None = None
    """How many of it a node has, where that is said."""
    of: str = ""
    """`node`, `gpu`, or nothing where that is not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualNetwork:
    """NICs of the system that a kind of device is sold in."""

    devices_per_nic: int
    bytes_per_second: float
    source: str


def noted_rate(note: str) -> NotedRate | None:
    """The first rate of a note; None where it has none. `b` are bits and `B` bytes."""
    found = _RATE.search(note)
    if found:
        unit = (1e9 if found[3] == "G" else 1e12) * (1.0 if found[4] == "B" else 1 / 8)
        rate, count = float(found[2]) * unit, int(found[1]) if found[1] else None
        if rate > 0 and count != 0:
            return NotedRate(bytes_per_second=rate, count=count, of=(found[5] or "").lower())
    for name, gigabits in _NAMES:
        if re.search(rf"\b{name}\b", note):
            return NotedRate(bytes_per_second=gigabits * GIGABIT)
    return None


def one_nic(rate: NotedRate) -> bool:
    """Whether one NIC can be so fast."""
    return rate.bytes_per_second <= _FASTEST_NIC


def usual_network(kind: str) -> UsualNetwork | None:
    """Of a kind of the catalogue; None where it stands in all sorts of servers."""
    for beginnings, found in _USUAL:
        if kind.startswith(beginnings):
            return found
    return None


_DGX_A100 = "NVIDIA DGX A100 datasheet: 8 HDR InfiniBand ports for 8 GPUs"
_DGX_H100 = "NVIDIA DGX H100 and H200 datasheets: 8 NDR InfiniBand ports for 8 GPUs"
_DGX_B200 = "NVIDIA DGX B200 and GB200 datasheets: a ConnectX-7 of 400 Gbit/s per GPU"
_USUAL = (
    (
        ("nvidia-v100-16gb-sxm", "nvidia-v100-32gb-sxm"),
        UsualNetwork(
            devices_per_nic=2,
            bytes_per_second=100 * GIGABIT,
            source="NVIDIA DGX-1 datasheet: 4 EDR InfiniBand ports for 8 V100",
        ),
    ),
    (
        ("nvidia-a100-40gb-sxm", "nvidia-a100-80gb-sxm", "nvidia-a800-80gb-sxm"),
        UsualNetwork(devices_per_nic=1, bytes_per_second=200 * GIGABIT, source=_DGX_A100),
    ),
    (
        (
            "nvidia-h100-80gb-sxm",
            "nvidia-h800-80gb-sxm",
            "nvidia-h20-96gb-sxm",
            "nvidia-h200-141gb-sxm",
        ),
        UsualNetwork(devices_per_nic=1, bytes_per_second=400 * GIGABIT, source=_DGX_H100),
    ),
    (
        ("nvidia-b200-", "nvidia-gb200-"),
        UsualNetwork(devices_per_nic=1, bytes_per_second=400 * GIGABIT, source=_DGX_B200),
    ),
    (
        ("amd-mi300x",),
        UsualNetwork(
            devices_per_nic=1,
            bytes_per_second=400 * GIGABIT,
            source="AMD Instinct MI300X cluster reference guide: a 400 Gbit/s NIC per GPU",
        ),
    ),
)
"""(beginnings of kinds, what the vendor's own system of them has)."""
