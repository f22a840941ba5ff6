"""Topologies of any node, and the three tools' outputs for them: the inverse of their importers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations

from hypothesis import strategies as st

from hetplan.importers.records import (
    NodeTopology,
    TopologyDevice,
    TopologyNic,
    TopologyPath,
)

NVIDIA_WORDS = ("NV1", "NV4", "NV12", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS")
NPU_WORDS = ("HCCS", "HCCS_SW", "SIO", "UB", "PIX", "PXB", "PHB", "SYS", "NA")


@st.composite
def _topologies(
    draw: st.DrawFn,
    vendor: str,
    name: Callable[[int], str],
    words: tuple[str, ...],
    *,
    numa: bool,
    nics: bool,
    hops: bool,
) -> NodeTopology:
    count = draw(st.integers(1, 16))
    devices = tuple(
        TopologyDevice(
            index=at,
            name=name(at),
            numa_node=draw(st.none() | st.integers(0, 7)) if numa else None,
        )
        for at in range(count)
    )
    cards = tuple(
        TopologyNic(name=f"mlx5_{at}") for at in range(draw(st.integers(0, 6)) if nics else 0)
    )
    names = [device.name for device in devices] + [card.name for card in cards]
    numbers = st.none() | st.integers(0, 100)
    paths = tuple(
        TopologyPath(
            between=pair,
            path=draw(st.sampled_from(words)),
            hops=draw(numbers) if hops else None,
            weight=draw(numbers) if hops else None,
        )
        for pair in combinations(names, 2)
    )
    return NodeTopology(vendor=vendor, devices=devices, nics=cards, paths=paths)


nvidia_topologies = _topologies(
    "nvidia", lambda at: f"GPU{at}", NVIDIA_WORDS, numa=True, nics=True, hops=False
)
npu_topologies = _topologies(
    "huawei", lambda at: f"NPU{at}", NPU_WORDS, numa=False, nics=False, hops=False
)
rocm_topologies = _topologies(
    "amd", lambda at: f"card{at}", ("XGMI", "PCIE", "XXXX"), numa=True, nics=False, hops=True
)


def _word(topology: NodeTopology, left: str, right: str) -> str:
    if left == right:
        return " X "
    return next(path.path for path in topology.paths if set(path.between) == {left, right})


def render_nvidia(topology: NodeTopology, *, separator: str, escapes: bool, legend: bool) -> str:
    """As nvidia-smi topo -m; without a legend the columns have the cards' own names."""
    names = [device.name for device in topology.devices] + [nic.name for nic in topology.nics]
    shown = {nic.name: f"NIC{at}" if legend else nic.name for at, nic in enumerate(topology.nics)}
    numa = {device.name: device.numa_node for device in topology.devices}
    columns = [shown.get(name, name) for name in names]
    head = separator.join(["", *columns, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{head}\x1b[0m" if escapes else head]
    for name, column in zip(names, columns, strict=True):
        cells = [column, *(_word(topology, name, other) for other in names)]
        if name in numa:
            node = numa[name]
            cells += ["0-15,32-47", "N/A" if node is None else str(node), "N/A"]
        lines.append(separator.join(cells))
    lines += ["", "Legend:", "", "  X    = Self", "  NV#  = bonded NVLinks", ""]
    if legend and topology.nics:
        lines += ["NIC Legend:", "", *(f"  {shown[nic.name]}: {nic.name}" for nic in topology.nics)]
    return "\n".join(lines) + "\n"


def render_npu(topology: NodeTopology) -> str:
    """As npu-smi info -t topo."""
    names = [device.name for device in topology.devices]
    lines = ["\t   " + "".join(name.ljust(11) for name in names) + "CPU Affinity"]
    for name in names:
        cells = [name, *(_word(topology, name, other).strip() for other in names)]
        lines.append("".join(cell.ljust(11) for cell in cells) + "0-23")
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", ""])


def render_rocm(topology: NodeTopology, before: str) -> str:
    """As rocm-smi --showtopo --json, below other output."""
    cards: dict[str, dict[str, str]] = {}
    for device in topology.devices:
        node = "-1" if device.numa_node is None else str(device.numa_node)
        cards[device.name] = {"(Topology) Numa Node": node, "(Topology) Numa Affinity": node}
    system = {}
    for path in topology.paths:
        ends = " and ".join(name.removeprefix("card") for name in path.between)
        system[f"(Topology) Weight between DRM devices {ends}"] = str(path.weight)
        system[f"(Topology) Hops between DRM devices {ends}"] = str(path.hops)
        system[f"(Topology) Link type between DRM devices {ends}"] = path.path
    return before + json.dumps(cards | ({"system": system} if system else {})) + "\n"
