"""Which library do a device's collectives go through? Devices of one library can make a group.

The names are hetplan's own: two vendors call theirs MCCL, two HCCL, and their devices cannot talk
to each other. What a library reads in the environment is in `hetplan.schedulers.vendors`.
"""

from __future__ import annotations

from hetplan.cluster.spec import Cluster, Island

_LIBRARIES = {
    "nvidia": "nccl",
    "amd": "rccl",
    # DTK is made from ROCm.
    "hygon": "rccl-dtk",
    "iluvatar": "ixccl",
    "huawei": "hccl",
    "metax": "mccl-metax",
    "moore-threads": "mccl",
    "cambricon": "cncl",
    "enflame": "eccl",
    "biren": "succl",
    "intel": "xccl",
    "google": "xla",
    "aws": "neuron",
    "generic": "gloo",
}
"""By vendor, as the device catalogue names them."""

AS_NCCL = frozenset({"nccl", "rccl", "rccl-dtk", "ixccl", "mccl-metax"})
"""Libraries that torch runs as its nccl backend, which stock Megatron-LM wants."""


def library_of(vendor: str, device_kind: str) -> str:
    """The library of a vendor's devices; of an unknown vendor its own."""
    if vendor == "intel" and "gaudi" in device_kind:
        return "hccl-gaudi"
    return _LIBRARIES.get(vendor, f"{vendor}'s own")


def island_library(island: Island) -> str:
    """The library of an island's devices."""
    return library_of(island.device.vendor, island.device.kind)


def libraries_of(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Islands with usable nodes by library: their positions, in the cluster's order."""
    found: dict[str, list[int]] = {}
    for at, island in enumerate(cluster.islands):
        if island.usable_nodes:
            found.setdefault(island_library(island), []).append(at)
    return {library: tuple(islands) for library, islands in found.items()}
