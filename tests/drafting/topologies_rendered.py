"""Topologies of any node, and nvidia-smi's output for them: the inverse of its importer."""

from __future__ import annotations

from itertools import combinations

from hypothesis import strategies as st

from hetplan.importers.records import (
    NodeTopology,
    TopologyDevice,
    TopologyNic,
    TopologyPath,
)

NVIDIA_WORDS = ("NV1", "NV4", "NV12", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS")


@st.composite
def _topologies(draw: st.DrawFn) -> NodeTopology:
    devices = tuple(
        TopologyDevice(index=at, name=f"GPU{at}", numa_node=draw(st.none() | st.integers(0, 7)))
        for at in range(draw(st.integers(1, 16)))
    )
    cards = tuple(TopologyNic(name=f"mlx5_{at}") for at in range(draw(st.integers(0, 6))))
    names = [device.name for device in devices] + [card.name for card in cards]
    paths = tuple(
        TopologyPath(between=pair, path=draw(st.sampled_from(NVIDIA_WORDS)))
        for pair in combinations(names, 2)
    )
    return NodeTopology(vendor="nvidia", devices=devices, nics=cards, paths=paths)


nvidia_topologies = _topologies()


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
