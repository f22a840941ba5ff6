"""Names that a vendor's libraries read in the environment of a rank, one block per vendor.

Every vendor's collective library has its own names for the network interface, the RDMA devices and
the devices that a process sees. Below are the sources that were read; other names follow CUDA's or
ROCm's (assumed). Nothing was run on devices other than NVIDIA's.

nvidia         NCCL user guide, Environment Variables; CUDA C++ Programming Guide. NCCL_ALGO: before
               2.24 of sums alone; since then of every operation that no prefix names, and
               Tree, which only sums have, ends the others with an error
amd            RCCL environment variables (rocm.docs.amd.com), the names of NCCL; torchtitan's
               scripts: HIP_VISIBLE_DEVICES
huawei         hiascend.com: HCCL_SOCKET_IFNAME, ASCEND_RT_VISIBLE_DEVICES (ascending order only)
metax          developer.metax-tech.com, MCCL environment variables: MCCL_IB_HCA,
               MACA_VISIBLE_DEVICES
cambricon      FlagScale's Cambricon patches: MLU_VISIBLE_DEVICES
moore-threads  torchada (Moore Threads, PyPI): MUSA_VISIBLE_DEVICES
intel          oneAPI: ZE_AFFINITY_MASK; Gaudi software: HABANA_VISIBLE_MODULES
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """Names in the environment that a vendor's software reads; an empty one is not known."""

    vendor: str
    """As in the device catalogue."""
    backend: str
    """Its name for torch.distributed."""
    visible: str = ""
    """Devices that a process sees, comma-separated."""
    interface: str = ""
    """Network interface of bootstrap and socket traffic."""
    exact: str = "="
    """Before an interface's name so that it is not read as a prefix of several."""
    fabric: str = ""
    """RDMA devices."""
    algorithm: str = ""
    """Algorithm of collectives, in NCCL's words."""
    ascending_only: bool = False
    """Visible devices may only be listed in ascending order."""


def _like_nccl(vendor: str, visible: str) -> Vendor:
    """A vendor whose library has NCCL's names and is torch's nccl backend."""
    return Vendor(
        vendor=vendor,
        backend="nccl",
        visible=visible,
        interface="NCCL_SOCKET_IFNAME",
        fabric="NCCL_IB_HCA",
        algorithm="NCCL_ALGO",
    )


VENDORS: tuple[Vendor, ...] = (
    _like_nccl("nvidia", "CUDA_VISIBLE_DEVICES"),
    _like_nccl("amd", "HIP_VISIBLE_DEVICES"),
    # DTK is made from ROCm; CoreX runs CUDA's programs under CUDA's names.
    _like_nccl("hygon", "HIP_VISIBLE_DEVICES"),
    _like_nccl("iluvatar", "CUDA_VISIBLE_DEVICES"),
    Vendor(
        vendor="huawei",
        backend="hccl",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        interface="HCCL_SOCKET_IFNAME",
        # RDMA ports are those of the NPUs (hccn.conf): nothing to choose.
        ascending_only=True,
    ),
    Vendor(
        vendor="metax",
        backend="nccl",
        visible="MACA_VISIBLE_DEVICES",
        interface="MCCL_SOCKET_IFNAME",
        fabric="MCCL_IB_HCA",
    ),
    Vendor(
        vendor="moore-threads",
        backend="mccl",
        visible="MUSA_VISIBLE_DEVICES",
        interface="MCCL_SOCKET_IFNAME",
        fabric="MCCL_IB_HCA",
    ),
    Vendor(
        vendor="cambricon",
        backend="cncl",
        visible="MLU_VISIBLE_DEVICES",
        interface="CNCL_SOCKET_IFNAME",
    ),
    Vendor(
        vendor="enflame",
        backend="eccl",
        visible="TOPS_VISIBLE_DEVICES",
    ),
    Vendor(vendor="biren", backend="succl"),
    Vendor(
        vendor="intel",
        backend="xccl",
        visible="ZE_AFFINITY_MASK",
        interface="FI_TCP_IFACE",
        exact="",
    ),
    Vendor(vendor="google", backend="xla"),
    Vendor(vendor="aws", backend="xla"),
    Vendor(vendor="generic", backend="gloo"),
)
"""By vendor, as the catalogue names them."""

_GAUDI = Vendor(
    vendor="intel",
    backend="hccl",
    visible="HABANA_VISIBLE_MODULES",
    interface="HCCL_SOCKET_IFNAME",
    exact="",
)


def vendor_of(vendor: str, device_kind: str = "") -> Vendor:
    """What is known of a vendor's software; of one that is not known, nothing but gloo."""
    if vendor == "intel" and "gaudi" in device_kind:
        return _GAUDI
    found = next((each for each in VENDORS if each.vendor == vendor), None)
    return found or Vendor(vendor=vendor, backend="")
